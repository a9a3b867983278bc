"""Publishes weights as snapshots that vLLM loads, written by the trainer or by the receiving machine."""

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
"""Prefix of temporary directories, one per process."""


class ModelSnapshots:
    """Implements WeightPublisher over a SnapshotDirectory, for one architecture.

    Adapters are published separately from their base where vLLM can serve them so; else they are merged into
    it in float32 and rounded once. Each snapshot carries a probe scored with the published tensors
    themselves, so that a server can be checked without loading them again.
    """

    def __init__(
        self, directory: SnapshotDirectory, model: AnyModel, adapter: AdapterConfig | None = None
    ) -> None:
        """`model`: gives the architecture and number formats of what is published; its weights are neither
        kept nor changed. `adapter`: configuration of adapters that may be published separately."""
        self._directory, self._adapter = directory, adapter
        self._adapters: Adapters | None = None
        # A copy in which every parameter is a new object on the same memory: published tensors replace
        # their data, and tied parameters stay tied.
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
                "the tensors are not the model's parameters",
                field="tensors",
                received=sorted(places.keys() ^ names)[:4],
                fix="publish the model that the run began with",
            )
        is_separate = self._is_separate(pairs)
        for name, place in places.items():
            whole, is_summed = tensors[name].detach(), name in pairs and not is_separate
            place.data = (sum_of(whole, pairs[name]) if is_summed else whole).to(place.dtype)
        adapters = self._apply(pairs) if is_separate else None

        def write(directory: Path) -> None:
            save_any_model(shell, directory)
            if adapters is not None:
                dtype = next(shell.parameters()).dtype
                save_peft(adapters, shell, directory / ADAPTER, dtype=dtype)

        with torch.no_grad():
            return self._directory.publish(version, write, Probe.of(shell))

    def _is_separate(self, pairs: Mapping[str, Pair]) -> bool:
        """Whether vLLM gets these factors as adapters: only for models without experts, in linear modules
        that support adapters in vLLM and have been tested."""
        if not pairs or self._adapter is None or self._adapter.rank > ADAPTER_RANKS[-1]:
            return False
        shell, factors = self._shell, ((name, left, right) for name, (left, right) in pairs.items())
        is_served = isinstance(shell, LanguageModel) and shell.num_experts == 0
        return is_served and are_plain(factors, shell)

    def _apply(self, pairs: Mapping[str, Pair]) -> Adapters:
        """The shell's adapters, with these factors."""
        if self._adapters is None:
            assert self._adapter is not None
            # Published factors are scaled already.
            config = self._adapter.model_copy(update={"alpha": float(self._adapter.rank)})
            self._adapters = Adapters(self._shell, config)
        for name, left, right in self._adapters.factors():
            # In the format of the base, to which vLLM rounds them.
            dtype = self._shell.get_parameter(name).dtype
            left.copy_(pairs[name][0].to(dtype))
            right.copy_(pairs[name][1].to(dtype))
        return self._adapters


class FetchedSnapshots:
    """Versions of a weight store, written as snapshots on this machine."""

    def __init__(
        self,
        fetch: Callable[[WeightManifest], Mapping[str, Tensor]],
        make: Callable[[Path], ModelSnapshots],
    ) -> None:
        """`fetch`: returns a manifest's checked tensors. `make`: creates their writer for a directory."""
        self._fetch, self._make = fetch, make
        self._snapshots: ModelSnapshots | None = None
        self._stack = contextlib.ExitStack()

    def open(self, manifest: WeightManifest) -> Snapshot:
        """Fetches, writes and opens a version: one call at a time. Raises WeightUpdateError, StoreError."""
        if self._snapshots is None:
            root = Path(tempfile.gettempdir())
            sweep(root, _PREFIX)
            self._snapshots = self._make(self._stack.enter_context(ScratchDirectory(root, _PREFIX)))
        written = self._snapshots.publish(manifest.version, self._fetch(manifest))
        snapshot = open_snapshot(written)
        return replace(snapshot, manifest=replace(written, version=manifest.version))

    def close(self) -> None:
        """Removes all snapshots."""
        self._stack.close()
