"""Weights that pass from the trainer's process to the engines' through a directory that all of them see."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from etude.errors import CheckpointError, WeightUpdateError
from etude.inference.vllm.snapshots import SnapshotDirectory, read_tensors
from etude.records import PolicyVersion, WeightManifest
from etude.weights import check_tensors


class DirectoryWeights:
    """Keeps the last few versions, a directory each, whole or not there. Implements WeightPublisher.

    Nothing is synced to disk: what a machine loses when it goes down, the trainer publishes again.
    """

    def __init__(self, root: Path, keep: int = 4) -> None:
        """`keep`: see SnapshotDirectory."""
        self.root = root.resolve()
        self._published = SnapshotDirectory(root, keep, field="cluster.weights_directory")

    def publish(self, version: PolicyVersion, tensors: Mapping[str, Tensor]) -> WeightManifest:
        """See WeightPublisher. The same weights published again are left as they lie, if they are whole."""
        held = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        return self._published.publish(version, lambda draft: save_file(held, draft / "model.safetensors"))

    def fetch(self, manifest: WeightManifest) -> Mapping[str, Tensor]:
        """The checked tensors of a manifest. Raises WeightUpdateError."""
        try:
            tensors = read_tensors(Path(manifest.url.removeprefix("file://")))
        except CheckpointError as error:
            raise WeightUpdateError(
                f"these weights cannot be read: {error.message}",
                field="url",
                received=manifest.url,
                fix="let all machines see cluster.weights_directory, or publish the current version again",
            ) from error
        check_tensors(manifest, tensors)
        return tensors
