"""Weights that pass from the trainer's process to the engines' through a directory that all of them see."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from etude.errors import CheckpointError, StoreError, WeightUpdateError
from etude.inference.vllm.snapshots import read_tensors
from etude.kit.durable import DRAFTS, whole_directory
from etude.kit.leftovers import sweep
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
        manifest = WeightManifest(described.version, described.tensors, _SCHEME + str(final))
        try:
            if not self._lies_there(manifest, final):
                self.root.mkdir(parents=True, exist_ok=True)
                sweep(self.root, DRAFTS)
                with whole_directory(final, sync=False) as draft:
                    save_file(held, draft / "model.safetensors")
            self._forget_old(final)
        except (OSError, SafetensorError) as error:  # safetensors tells of a full disk in words of its own
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
        """Deletes all but the newest versions."""
        found = [path for path in self.root.iterdir() if path != newest and not path.name.startswith(".")]
        found.sort(key=lambda path: path.stat().st_mtime_ns)
        for path in found[: max(0, len(found) + 1 - self._keep)]:
            shutil.rmtree(path, ignore_errors=True)
