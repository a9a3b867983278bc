"""Weights published and fetched within one process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from etude.errors import WeightUpdateError
from etude.records import ADAPTER_PREFIX, PolicyVersion, TensorEntry, WeightManifest
from etude.weights.manifest import check_tensors, describe_tensor, digest_entries

KEPT_VERSIONS = 2
"""The version in service, and the next one."""


class MemoryWeights:
    """Keeps the last few published versions in host memory.

    Publishing copies, so the trainer may change its own tensors at once. The base of an adapter,
    which does not change, is copied and hashed once.
    """

    def __init__(self, keep: int = KEPT_VERSIONS) -> None:
        """`keep`: number of versions that can be fetched; older ones are dropped."""
        self._keep = keep
        self._snapshots: dict[str, dict[str, Tensor]] = {}
        self._base: dict[str, tuple[Tensor, TensorEntry]] = {}

    def publish(self, version: PolicyVersion, tensors: Mapping[str, Tensor]) -> WeightManifest:
        """Copies `tensors`; the returned manifest's version carries their digest."""
        held = self._base if version.adapter is not None else {}
        found: dict[str, tuple[Tensor, TensorEntry]] = {}
        for name, tensor in sorted(tensors.items()):
            if name in held:
                found[name] = held[name]
            else:
                copied = tensor.detach().to("cpu", copy=True)
                found[name] = (copied, describe_tensor(name, copied))
        if version.adapter is not None:
            self._base = {name: pair for name, pair in found.items() if not name.startswith(ADAPTER_PREFIX)}
        url = f"memory:weights/{version.lineage}/{version.step}"
        entries = tuple(entry for _, entry in found.values())
        manifest = WeightManifest(replace(version, digest=digest_entries(entries)), entries, url)
        self._snapshots.pop(url, None)
        self._snapshots[url] = {name: tensor for name, (tensor, _) in found.items()}
        while len(self._snapshots) > self._keep:
            del self._snapshots[next(iter(self._snapshots))]
        return manifest

    def fetch(self, manifest: WeightManifest) -> Mapping[str, Tensor]:
        """The checked tensors of a manifest, which must not be modified. Raises WeightUpdateError."""
        snapshot = self._snapshots.get(manifest.url)
        if snapshot is None:
            raise WeightUpdateError(
                "these weights are no longer in memory",
                field="url",
                received=manifest.url,
                fix="publish the current version and stage that",
            )
        check_tensors(manifest, snapshot)
        return snapshot
