"""Transfers weights from the trainer's process to the engines' through a shared directory."""

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
    """Keeps the last few versions, each in a directory that appears atomically. Implements WeightPublisher.

    Nothing is synced to disk: versions lost with a machine are published again by the trainer.
    """

    def __init__(self, root: Path, keep: int = 4) -> None:
        """`keep`: see SnapshotDirectory."""
        self.root = root.resolve()
        self._published = SnapshotDirectory(root, keep, field="cluster.weights_directory")

    def publish(self, version: PolicyVersion, tensors: Mapping[str, Tensor]) -> WeightManifest:
        """See WeightPublisher. Weights that are published already, and complete, are not written again."""
        copies = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        return self._published.publish(version, lambda draft: save_file(copies, draft / "model.safetensors"))

    def fetch(self, manifest: WeightManifest) -> Mapping[str, Tensor]:
        """The checked tensors of a manifest. Raises WeightUpdateError."""
        try:
            tensors = read_tensors(Path(manifest.url.removeprefix("file://")))
        except CheckpointError as error:
            raise WeightUpdateError(
                f"these weights cannot be read: {error.message}",
                field="url",
                received=manifest.url,
                fix="make cluster.weights_directory visible to all machines, or publish this version again",
            ) from error
        check_tensors(manifest, tensors)
        return tensors
