"""Snapshots: weights for vLLM as directories in Hugging Face's format, with a probe.

The probe is a fixed sequence with the log-probabilities of the publisher's own model. A server that loads the
weights computes them again: neither a success status nor a version number proves which weights are in use.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from etude.errors import CheckpointError, StoreError, WeightUpdateError
from etude.inference.vllm.probes import Probe
from etude.inference.weights import check_finite
from etude.kit.durable import DRAFTS, publish_directory
from etude.kit.leftovers import ScratchDirectory, sweep
from etude.model.peft import PEFT_PREFIX
from etude.records import PolicyVersion, WeightManifest
from etude.weights import check_tensors, describe_tensors

ADAPTER = "adapter"
"""Subdirectory of a snapshot with adapters, if any, in the format of the peft library."""
_RECORD = "etude.json"
_SCHEME = "file://"


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """A checked snapshot directory."""

    directory: Path
    manifest: WeightManifest
    probe: Probe

    @property
    def version(self) -> PolicyVersion:
        """The policy version of the weights."""
        return self.manifest.version


class SnapshotDirectory:
    """Publishes versions as directories below a root, and keeps the last few.

    A version's directory appears under its name only when it is complete.
    """

    def __init__(
        self, root: Path, keep: int = 4, beside: Sequence[Path] = (), field: str = "snapshots"
    ) -> None:
        """`keep`: versions to keep; at least 3: one in service, one staged and one to roll back to. `beside`:
        files that are copied into each, such as tokenizer.json. `field`: the setting of `root`, for
        errors."""
        self._root = root.resolve()
        self._keep = max(keep, 3)
        self._beside = tuple(beside)
        self._field = field

    def publish(
        self, version: PolicyVersion, write: Callable[[Path], None], probe: Probe | None = None
    ) -> WeightManifest:
        """Writes a version with `write(directory)`; the returned manifest's version has the weights' digest.
        An intact directory of the same weights is not replaced, since it may be in use.

        Raises StoreError if it cannot be written; no partial directory is left.
        """
        try:
            self._root.mkdir(parents=True, exist_ok=True)
            sweep(self._root, DRAFTS)
            with ScratchDirectory(self._root, DRAFTS) as scratch:
                draft = scratch / "snapshot"
                draft.mkdir()
                write(draft)
                for path in self._beside:
                    shutil.copy2(path, draft / path.name)
                described = describe_tensors(version, read_tensors(draft), "")
                name = f"{version.lineage}-{version.step:08d}-{described.version.digest[:16]}"
                final = self._root / name
                manifest = WeightManifest(described.version, described.tensors, _SCHEME + str(final))
                if _is_whole(manifest, final):
                    os.utime(final)  # it is the newest again
                else:
                    record = {"probe": None if probe is None else probe.to_lists()}
                    (draft / _RECORD).write_text(json.dumps(record) + "\n", encoding="utf-8")
                    publish_directory(draft, final, keep=lambda: False, sync=False)
        except (OSError, SafetensorError) as error:  # safetensors reports a full disk as its own error
            raise StoreError(
                f"a snapshot cannot be written: {error}",
                field=self._field,
                received=str(self._root),
                fix="free some space, or name another directory",
            ) from error
        self._remove_old(final)
        return manifest

    def _remove_old(self, newest: Path) -> None:
        found = [path for path in self._root.iterdir() if not path.name.startswith(".")]
        found.sort(key=lambda path: (path == newest, path.stat().st_mtime_ns))
        for path in found[: -self._keep]:
            shutil.rmtree(path, ignore_errors=True)


def open_snapshot(manifest: WeightManifest) -> Snapshot:
    """Opens the directory that a manifest names, and checks every byte. Reads all of it: call it in a thread.

    Raises WeightUpdateError if it is missing, differs from the manifest, or has values that are not finite.
    """
    if not manifest.url.startswith(_SCHEME) or manifest.base is not None:
        raise WeightUpdateError(
            "vLLM needs full snapshots in directories",
            field="url",
            received=manifest.url,
            fix="publish with SnapshotDirectory",
        )
    directory = Path(manifest.url.removeprefix(_SCHEME))
    try:
        tensors = read_tensors(directory)
        record = json.loads((directory / _RECORD).read_text(encoding="utf-8"))
        probe = Probe.from_lists(**record["probe"])
    except (OSError, ValueError, KeyError, TypeError, CheckpointError) as error:
        raise WeightUpdateError(
            f"the snapshot cannot be read: {error}",
            field="url",
            received=manifest.url,
            fix="publish the current version again",
        ) from error
    check_tensors(manifest, tensors)
    for name, tensor in tensors.items():
        check_finite(name, tensor)
    return Snapshot(directory, manifest, probe)


def _is_whole(manifest: WeightManifest, directory: Path) -> bool:
    """Whether a published directory exists and is intact, for example after a crash."""
    try:
        check_tensors(manifest, read_tensors(directory))
        json.loads((directory / _RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError, CheckpointError, WeightUpdateError):
        return False
    return True


def check_same_shapes(served: WeightManifest, staged: WeightManifest) -> None:
    """Raises WeightUpdateError unless both have the same tensors, and adapters the same base: otherwise vLLM
    would silently keep old ones."""
    has_adapter = any(entry.name.startswith(PEFT_PREFIX) for entry in staged.tensors)

    def described(manifest: WeightManifest) -> dict[str, Any]:
        return {
            entry.name: (entry.shape, has_adapter and not entry.name.startswith(PEFT_PREFIX) and entry.digest)
            for entry in manifest.tensors
        }

    before, after = described(served), described(staged)
    if before != after:
        differing = sorted(
            name for name in before.keys() | after.keys() if before.get(name) != after.get(name)
        )
        raise WeightUpdateError(
            f"the tensors differ from those of {served.version}, which is in service",
            field="tensors",
            received=differing[:4],
            fix="start another replica for another model",
        )


def read_tensors(directory: Path) -> dict[str, Tensor]:
    """Reads all tensors of a directory's safetensors files and of its adapters. Raises CheckpointError."""
    tensors: dict[str, Tensor] = {}
    paths = [*sorted(directory.glob("*.safetensors")), *sorted(directory.glob(f"{ADAPTER}/*.safetensors"))]
    if not paths:
        raise CheckpointError("there are no safetensors files", field="directory", received=str(directory))
    for path in paths:
        try:
            with safe_open(path, framework="pt") as file:
                tensors.update({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"cannot be read: {error}", field=path.name, received=str(path), fix="publish it again"
            ) from error
    return tensors
