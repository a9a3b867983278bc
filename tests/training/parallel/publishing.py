"""Functions that tests run on every rank to publish weights together."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import nn

from etude.errors import RankError
from etude.model import LanguageModel
from etude.records import PolicyVersion
from etude.training.parallel.mesh_ranks import MeshRanks
from etude.weights import StoreWeights, Subscriber, WeightStore
from etude.weights.folders import DirectoryFolder
from etude.weights.writer import WriterOptions
from tests.training.parallel.bodies import model_of

_OPTIONS = WriterOptions(lease_s=0.5)
_EXIT_CODE = 7


def _moved(step: int) -> LanguageModel:
    """The model some small steps on."""
    model = model_of(0)
    generator = torch.Generator().manual_seed(step)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 1e-3 * step)
    return model


def _named(model: nn.Module) -> dict[str, torch.Tensor]:
    return dict(model.named_parameters())


def published(ranks: MeshRanks, directory: str, num_versions: int) -> tuple[list[str], int, list[int]]:
    """Digests of the versions, how many of their tensors the first rank read back as other bits than the
    gathered model's, and the bytes of each rank's own parts."""
    model = model_of(0)
    ranks.place(model)
    digests: list[str] = []
    wrong = 0
    with StoreWeights(WeightStore.open(directory), _OPTIONS, peers=ranks.peers) as publisher:
        subscriber = Subscriber(WeightStore.open(directory))
        for step in range(num_versions):
            ranks.load_weights(model, _named(_moved(step)))
            parts = ranks.parts(model)
            manifest = publisher.publish(PolicyVersion("run", step), parts)
            digests.append(manifest.version.digest)
            gathered = _named(ranks.whole_model(model))
            if ranks.is_main:
                found = subscriber.fetch(manifest)
                assert found.keys() == gathered.keys()
                wrong += sum(not torch.equal(found[name], gathered[name]) for name in gathered)
        own = sum(tensor.nbytes for tensor in parts.values())
        if ranks.is_main:
            assert subscriber.counters.deltas == num_versions - 1
    return digests, wrong, ranks.peers.exchange(own)


class _DeadlyFolder(DirectoryFolder):
    """Ends its process when the second version's files are written."""

    def write(self, name: str, data: bytes) -> None:
        """See Folder.write: half of it, and no more."""
        if name.startswith("files/000000000002"):
            super().write(name, data[: len(data) // 2])
            os._exit(_EXIT_CODE)
        super().write(name, data)


def last_rank_dies(ranks: MeshRanks, directory: str) -> None:
    """The last rank ends in the middle of the second publication; the others must notice."""
    model = model_of(0)
    ranks.place(model)
    dies = ranks.peers.rank == ranks.world_size - 1
    folder = (_DeadlyFolder if dies else DirectoryFolder)(Path(directory))
    publisher = StoreWeights(WeightStore(folder), _OPTIONS, peers=ranks.peers)
    for step in range(2):
        ranks.load_weights(model, _named(_moved(step)))
        publisher.publish(PolicyVersion("run", step), ranks.parts(model))
        try:
            publisher.flush()
        except RankError:
            assert step == 1
            os._exit(0)
    os._exit(1)
