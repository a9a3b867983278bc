"""Weights handed over within one process."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from etude.errors import WeightUpdateError
from etude.records import ADAPTER_PREFIX, PolicyVersion, WeightManifest
from etude.weights.manifest import check_tensors, describe_tensors

KEPT_VERSIONS = 2
"""The one in service, and the next."""


class MemoryWeights:
    """Keeps the last few published versions in host memory.

    Publishing copies, so the trainer may go on changing its own tensors at once. The base of an adapter,
    which does not change, is copied once.
    """

    def __init__(self, keep: int = KEPT_VERSIONS) -> None:
        """`keep`: how many versions can be fetched; older ones are forgotten."""
        self._keep = keep
        self._snapshots: dict[str, dict[str, Tensor]] = {}
        self._base: dict[str, Tensor] = {}

    def publish(self, version: PolicyVersion, tensors: Mapping[str, Tensor]) -> WeightManifest:
        """Copies `tensors` and names them; the returned manifest's version carries their digest."""
        held = self._base if version.adapter is not None else {}
        snapshot = {
            name: held[name] if name in held else tensor.detach().to("cpu", copy=True)
            for name, tensor in tensors.items()
        }
        if version.adapter is not None:
            self._base = {n: tensor for n, tensor in snapshot.items() if not n.startswith(ADAPTER_PREFIX)}
        url = f"memory:weights/{version.lineage}/{version.step}"
        manifest = describe_tensors(version, snapshot, url)
        self._snapshots.pop(url, None)
        self._snapshots[url] = snapshot
        while len(self._snapshots) > self._keep:
            del self._snapshots[next(iter(self._snapshots))]
        return manifest

    def fetch(self, manifest: WeightManifest) -> Mapping[str, Tensor]:
        """The checked tensors of a manifest: read, never write them. Raises WeightUpdateError."""
        snapshot = self._snapshots.get(manifest.url)
        if snapshot is None:
            raise WeightUpdateError(
                "these weights are no longer held",
                field="url",
                received=manifest.url,
                fix="publish the current version and stage that",
            )
        check_tensors(manifest, snapshot)
        return snapshot
