"""Implementation of Ranks with torch.distributed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from etude.errors import ConfigError
from etude.model import LanguageModel
from etude.model.huggingface.part_reader import PartReader
from etude.training.checkpoints.shards import ModelShards, gather_objects, run_on_all_ranks
from etude.training.parallel.collectives import sum_in_order
from etude.training.parallel.layout import Layout
from etude.training.parallel.mesh import Mesh
from etude.training.parallel.places import Places, local_part
from etude.training.parallel.ranks import Share, shares_of
from etude.training.parallel.sharding import (
    MeshLayout,
    copy_placed,
    fill_model,
    place_model,
    release,
    sum_gradients,
)
from etude.training.parallel.wrapped import plain_ops


class RankPeers:
    """Implements the publisher's Peers over a process group of its own: its messages are sent by another
    thread than those of training."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank = group.rank()

    def exchange(self, value: Any) -> list[Any]:
        """See Peers. Raises RankError if a rank is lost."""
        return gather_objects(value, self._group)


ModelT = TypeVar("ModelT", bound=nn.Module)


class MeshRanks:
    """One rank of a mesh. Implements Ranks for models that `place` has sharded."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self.rank = mesh.data_rank
        self.world_size = mesh.num_data_ranks
        self.is_main = mesh.rank == 0
        self.peers = RankPeers(mesh.publishing)
        """All ranks, for publishing weights."""

    def place(self, model: LanguageModel) -> None:
        """Shards a model over the ranks, in place, with rank 0's weights, or with those of the directory
        `model.unread`, of which each rank reads its own part, in the model's type. If one rank cannot read
        it, all raise its CheckpointError. See `place_model`."""
        directory, dtype = model.unread, model.embedding.dtype
        if directory is None:
            place_model(model, self._mesh)
            return

        def read() -> None:
            with PartReader(directory, dtype) as reader:
                fill_model(model, self._mesh, reader.read)

        run_on_all_ranks(self._mesh.saving, read)
        model.unread = None

    def share(self, plan: Sequence[Sequence[Sequence[int]]]) -> list[Share]:
        return shares_of(plan, self.rank)

    def all_reduce_(self, tensor: Tensor) -> Tensor:
        sum_in_order(tensor, self._mesh.group("replicate", "fsdp", "expert"))
        return tensor

    def layout(self, model: nn.Module) -> Layout:
        return MeshLayout(model, self._mesh)

    def reduce_gradients(self, model: nn.Module) -> None:
        sum_gradients(model, self._mesh)

    @torch.no_grad()
    def whole_model(self, model: ModelT) -> ModelT:
        """See Ranks. The copy is in host memory."""
        assert isinstance(model, LanguageModel)
        release(model)
        places = Places(model, self._mesh)
        with torch.device("meta"):
            whole = LanguageModel(model.config, model.vocab_size)
        weights: dict[str, Tensor] = {n: b.to("cpu", copy=True) for n, b in model.named_buffers()}
        for name, parameter in model.named_parameters():
            gathered = places.whole(name, local_part(parameter.data))
            if self.is_main:
                kept = gathered.to("cpu", copy=True)
                weights[name] = nn.Parameter(kept, requires_grad=parameter.requires_grad)
        for name, tensor in weights.items():
            module, _, last = name.rpartition(".")
            setattr(whole.get_submodule(module), last, tensor)
        whole.ops = plain_ops(model.ops)
        return cast(ModelT, whole)

    @torch.no_grad()
    def parts(self, model: nn.Module) -> Mapping[str, Tensor]:
        """See Ranks. Of a part that several ranks hold, one of them publishes it, in turn."""
        release(model)
        places = Places(model, self._mesh)
        parts: dict[str, Tensor] = {}
        for number, (name, parameter) in enumerate(model.named_parameters()):
            copies, own = places.copies(name)
            if number % copies == own:
                rows = places.rows(name, local_part(parameter.data))
                if len(rows):
                    parts[places.run(name, parameter).stored_name] = rows
        return parts

    @torch.no_grad()
    def stored(self, model: nn.Module) -> ModelShards:
        assert isinstance(model, LanguageModel)
        release(model)
        places = Places(model, self._mesh)
        shards = {
            name: places.shard(name, local_part(p.data), places.shape(name, p))
            for name, p in model.named_parameters()
        }
        return ModelShards(model.config, model.vocab_size, shards, self._mesh.saving)

    @torch.no_grad()
    def load_weights(self, model: nn.Module, weights: Mapping[str, Tensor]) -> None:
        release(model)
        places = Places(model, self._mesh)
        for name, parameter in model.named_parameters():
            local_part(parameter.data).copy_(places.part(name, weights[name]))

    def frozen_copy(self, model: ModelT) -> ModelT:
        assert isinstance(model, LanguageModel)
        return cast(ModelT, copy_placed(model, self._mesh))


def check_spreadable(model: nn.Module) -> None:
    """Raises ConfigError for a model that several ranks cannot train together."""
    if not isinstance(model, LanguageModel):
        raise ConfigError(
            "several ranks can train only an architecture that Étude implements",
            field="parallel.ranks",
            received=type(model).__name__,
            fix="train other architectures in one process",
        )
