"""The trainer's weights as snapshots that vLLM reads, written by the trainer or where they arrive."""

from __future__ import annotations

import contextlib
import copy
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from etude.config import AdapterConfig
from etude.errors import WeightUpdateError
from etude.inference.vllm.probes import Probe
from etude.inference.vllm.servers import ADAPTER_RANKS
from etude.inference.vllm.snapshots import ADAPTER, Snapshot, SnapshotDirectory, open_snapshot
from etude.kit.leftovers import ScratchDirectory, sweep
from etude.model import LanguageModel
from etude.model.adapted_ops import Pair
from etude.model.loading import AnyModel, save_any_model
from etude.model.lora import Adapters, pairs_of, sum_of
from etude.model.peft import are_plain, save_peft
from etude.records import ADAPTER_PREFIX, PolicyVersion, WeightManifest

_PREFIX = "etude-vllm-weights-"
"""Of temporary directories, each of one process."""


class ModelSnapshots:
    """Implements WeightPublisher over a SnapshotDirectory, for one architecture.

    Adapters stay beside their base where vLLM serves them so; else they are summed with it in float32 and
    rounded once. Each snapshot carries a probe that the published tensors themselves were scored with, so
    nobody has to load them again to know what they should compute.
    """

    def __init__(
        self, directory: SnapshotDirectory, model: AnyModel, adapter: AdapterConfig | None = None
    ) -> None:
        """`model`: of which tensors will be published, in its number formats; its weights are not kept, nor
        changed. `adapter`: of the adapters that will be published and are not to be summed with it."""
        self._directory, self._adapter = directory, adapter
        self._adapters: Adapters | None = None
        # A copy in which every parameter is a fresh object on the same memory: what is published is put in
        # its place, and parameters that are one in two places stay one.
        known: dict[int, object] = {id(buffer): buffer for buffer in model.buffers()}
        known |= {id(own): nn.Parameter(own.detach(), requires_grad=False) for own in model.parameters()}
        self._shell = copy.deepcopy(model, known)

    def publish(self, version: PolicyVersion, tensors: Mapping[str, Tensor]) -> WeightManifest:
        """See WeightPublisher.publish. Raises WeightUpdateError for another model's tensors."""
        shell, places = self._shell, dict(self._shell.named_parameters())
        names = {name for name in tensors if not name.startswith(ADAPTER_PREFIX)}
        pairs = pairs_of(tensors)
        if places.keys() != names or not pairs.keys() <= names:
            raise WeightUpdateError(
                "other tensors than the model's parameters",
                field="tensors",
                received=sorted(places.keys() ^ names)[:4],
                fix="publish the model that the run began with",
            )
        is_beside = self._is_beside(pairs)
        for name, place in places.items():
            whole, is_summed = tensors[name].detach(), name in pairs and not is_beside
            place.data = (sum_of(whole, pairs[name]) if is_summed else whole).to(place.dtype)
        adapters = self._apply(pairs) if is_beside else None

        def write(directory: Path) -> None:
            save_any_model(shell, directory)
            if adapters is not None:
                dtype = next(shell.parameters()).dtype
                save_peft(adapters, shell, directory / ADAPTER, dtype=dtype)

        with torch.no_grad():
            return self._directory.publish(version, write, Probe.of(shell))

    def _is_beside(self, pairs: Mapping[str, Pair]) -> bool:
        """Whether vLLM gets these factors beside their base: of models without experts, in linear modules of
        its architectures that take adapters and have been tried."""
        if not pairs or self._adapter is None or self._adapter.rank > ADAPTER_RANKS[-1]:
            return False
        shell, factors = self._shell, ((name, left, right) for name, (left, right) in pairs.items())
        is_served = isinstance(shell, LanguageModel) and shell.num_experts == 0
        return is_served and are_plain(factors, shell)

    def _apply(self, pairs: Mapping[str, Pair]) -> Adapters:
        """The shell's adapters, with these factors."""
        if self._adapters is None:
            assert self._adapter is not None
            # What is published is scaled already.
            config = self._adapter.model_copy(update={"alpha": float(self._adapter.rank)})
            self._adapters = Adapters(self._shell, config)
        for name, left, right in self._adapters.factors():
            # In the format of the base, to which vLLM rounds them.
            dtype = self._shell.get_parameter(name).dtype
            left.copy_(pairs[name][0].to(dtype))
            right.copy_(pairs[name][1].to(dtype))
        return self._adapters


class FetchedSnapshots:
    """What a weight store holds, as snapshots on this machine. They have the store's versions."""

    def __init__(
        self,
        fetch: Callable[[WeightManifest], Mapping[str, Tensor]],
        make: Callable[[Path], ModelSnapshots],
    ) -> None:
        """`fetch`: the checked tensors of a manifest. `make`: who writes them below a directory."""
        self._fetch, self._make = fetch, make
        self._snapshots: ModelSnapshots | None = None
        self._stack = contextlib.ExitStack()

    def open(self, manifest: WeightManifest) -> Snapshot:
        """Fetches, writes and reads again: one call at a time. Raises WeightUpdateError, StoreError."""
        if self._snapshots is None:
            root = Path(tempfile.gettempdir())
            sweep(root, _PREFIX)
            self._snapshots = self._make(self._stack.enter_context(ScratchDirectory(root, _PREFIX)))
        written = self._snapshots.publish(manifest.version, self._fetch(manifest))
        snapshot = open_snapshot(written)
        return replace(snapshot, manifest=replace(written, version=manifest.version))

    def close(self) -> None:
        """Removes all of them."""
        self._stack.close()
