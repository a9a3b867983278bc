"""Weights that pass from the trainer's process to the engines' through a directory that all of them see."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from etude.errors import CheckpointError, StoreError, WeightUpdateError
from etude.inference.vllm.snapshots import read_tensors
from etude.records import PolicyVersion, WeightManifest
from etude.weights import check_tensors, describe_tensors

_SCHEME = "file://"


class DirectoryWeights:
    """Keeps the last few versions, a directory each, whole or not there. Implements WeightPublisher.

    Nothing is synced to disk: what a machine loses when it goes down, the trainer publishes again.
    """

    def __init__(self, root: Path, keep: int = 4) -> None:
        """`keep`: versions that stay; one is served, one staged, and a reader may be late."""
        self.root = root.resolve()
        self._keep = max(keep, 2)

    def publish(self, version: PolicyVersion, tensors: Mapping[str, Tensor]) -> WeightManifest:
        """See WeightPublisher. The same weights published again are left as they lie, if they are whole."""
        held = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        described = describe_tensors(version, held, "")
        name = f"{version.lineage}-{version.step:08d}-{described.version.digest[:16]}"
        final = self.root / name
        partial = self.root / f".{name}.{os.getpid()}.partial"
        manifest = WeightManifest(described.version, described.tensors, _SCHEME + str(final))
        try:
            if not self._lies_there(manifest, final):
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir(parents=True)
                save_file(held, partial / "model.safetensors")
                partial.rename(final)
            self._forget_old(final)
        except (OSError, SafetensorError) as error:  # safetensors tells of a full disk in words of its own
            shutil.rmtree(partial, ignore_errors=True)
            raise StoreError(
                f"weights cannot be written: {error}",
                field="cluster.weights_directory",
                received=str(self.root),
                fix="free some space, or name another directory",
            ) from error
        return manifest

    def _lies_there(self, manifest: WeightManifest, final: Path) -> bool:
        """Whether a version was published before; what a machine that went down left torn is deleted."""
        if not final.exists():
            return False
        try:
            self.fetch(manifest)
        except WeightUpdateError:
            shutil.rmtree(final)
            return False
        return True

    def fetch(self, manifest: WeightManifest) -> Mapping[str, Tensor]:
        """The checked tensors of a manifest. Raises WeightUpdateError."""
        directory = Path(manifest.url.removeprefix(_SCHEME))
        try:
            tensors = read_tensors(directory)
        except CheckpointError as error:
            raise WeightUpdateError(
                f"these weights cannot be read: {error.message}",
                field="url",
                received=manifest.url,
                fix="let all machines see cluster.weights_directory, or publish the current version again",
            ) from error
        check_tensors(manifest, tensors)
        return tensors

    def _forget_old(self, newest: Path) -> None:
        """Deletes all but the newest versions, and what a writer that was killed has left half-done."""
        found = [path for path in self.root.iterdir() if path != newest]
        whole = [path for path in found if not path.name.startswith(".")]
        whole.sort(key=lambda path: path.stat().st_mtime_ns)
        stale = [path for path in found if path.name.startswith(".")]
        for path in [*stale, *whole[: max(0, len(whole) + 1 - self._keep)]]:
            shutil.rmtree(path, ignore_errors=True)
