"""A store of durable snapshots, one directory each, which appear whole or not at all.

    <root>/<id>/manifest.json     what it is, of which machine, and size and BLAKE3 digest of each file
    <root>/<id>/<files>           the backend's: memory, disk, layers, and `template`
    <root>/.etude-draft-<any>/<id>/   a draft or a temporary snapshot: removed with its process

A snapshot is written to a draft, synced, and renamed last, so a crash leaves none or all of it. Opening one
checks every byte. Its origin (backend and version, processor, kernel) is recorded, and a mismatch is refused
if memory is part of it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import platform
import re
import secrets
import shutil
import tarfile
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from blake3 import blake3

from etude.kit.durable import DRAFTS, publish_directory, remove_directory, sync_tree, whole_file
from etude.kit.leftovers import ScratchDirectory, sweep
from etude.sandbox.errors import SnapshotError, SnapshotMissingError, SnapshotRefusedError
from etude.sandbox.inside.frames import pack
from etude.sandbox.refusals import foreign_snapshot
from etude.sandbox.template import Template, encode_template, unpack_templates
from etude.sandbox.types import NO_NETWORK, Network, Resources, SnapshotInfo, SnapshotKind

FORMAT = 1
MANIFEST, TEMPLATE = "manifest.json", "template"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_FIELDS = {"resources", "network", "metadata", "backend_version", "machine", "extra", "files"}
_PIECE_BYTES = 8 << 20


def this_machine() -> dict[str, str]:
    """The properties of this machine that a snapshot of memory depends on."""
    model = ""
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    return {"arch": platform.machine(), "cpu": model, "kernel": platform.release()}


@dataclass(frozen=True)
class Spec:
    """The requested properties of a sandbox."""

    template: Template
    resources: Resources = field(default_factory=Resources)
    network: Network = NO_NETWORK
    metadata: Mapping[str, str] = field(default_factory=dict)
    parent: str | None = None
    """The sandbox or snapshot it continues."""


@dataclass(frozen=True)
class Snapshot:
    """An opened snapshot, all files of which were checked."""

    info: SnapshotInfo
    directory: Path
    spec: Spec
    """The spec of a sandbox that continues it."""
    backend_version: str
    machine: Mapping[str, str]
    extra: Mapping[str, Any]
    """Data of the backend itself."""

    def file(self, name: str) -> Path:
        """Path of one of its files. Raises SnapshotError if there is no such file."""
        path = self.directory / name
        if not path.exists():
            raise _error(self.info.id, f"has no file {name!r}", "use the version that made it")
        return path

    def check_origin(self, backend: str, backend_version: str, memory: bool) -> None:
        """Raises SnapshotError if another backend made it or, with `memory`, another version or machine."""
        if self.info.backend != backend:
            raise _error(self.info.id, *foreign_snapshot(self.info.backend, backend), SnapshotRefusedError)
        if not memory:
            return
        ours = {**this_machine(), "version": backend_version}
        for key, value in {**self.machine, "version": self.backend_version}.items():
            if ours.get(key) != value:
                made, here = f"was made with {key} {value!r}", f"use the same {key}, not {ours.get(key)!r}"
                raise _error(self.info.id, made, here, SnapshotRefusedError)


@dataclass
class SnapshotDraft:
    """An unpublished snapshot: write files into `directory`, then publish."""

    id: str
    directory: Path
    scratch: ScratchDirectory
    """Holds `directory` until it is published; removed with this process."""
    extra: dict[str, Any] = field(default_factory=dict)


class SnapshotStore:
    """The snapshots below one directory. Several processes may share it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._temporary: dict[str, SnapshotDraft] = {}
        """By id: complete temporary snapshots, which are never published."""

    def draft(self, sandbox_id: str) -> SnapshotDraft:
        """Begins a snapshot, which is invisible until `publish`. Raises SnapshotError."""
        snapshot = f"snap-{int(time.time() * 1e3):x}-{secrets.token_hex(4)}"
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            self.sweep()
            scratch = ScratchDirectory(self.root, DRAFTS)
            directory = scratch.path / snapshot
            directory.mkdir(mode=0o700)
        except OSError as error:
            raise _error(snapshot, f"could not be started: {error}", "choose another directory") from error
        return SnapshotDraft(snapshot, directory, scratch)

    async def publish(
        self,
        draft: SnapshotDraft,
        *,
        kind: SnapshotKind,
        name: str | None,
        backend: str,
        backend_version: str,
        sandbox_id: str,
        spec: Spec,
        temporary: bool = False,
    ) -> SnapshotInfo:
        """Digests and syncs every file, then makes the snapshot appear. Raises SnapshotError.

        `temporary`: it is removed with this process, not listed, and also temporary where it is imported.
        """
        manifest: dict[str, Any] = {
            "format": FORMAT,
            "id": draft.id,
            "name": name,
            "kind": kind,
            "backend": backend,
            "backend_version": backend_version,
            "machine": this_machine(),
            "sandbox_id": sandbox_id,
            "template": spec.template.name,
            "created_s": time.time(),
            "resources": dataclasses.asdict(spec.resources),
            "network": list(spec.network.allow),
            "metadata": dict(spec.metadata),
            "extra": draft.extra,
            "temporary": temporary,
        }
        try:
            await asyncio.to_thread(self._write, draft, manifest, pack(*encode_template(spec.template)))
            if temporary:
                self._temporary[draft.id] = draft
            else:
                publish_directory(draft.directory, self.root / draft.id)
        except OSError as error:
            raise _error(draft.id, f"could not be written: {error}", "free disk space") from error
        finally:
            if draft.id not in self._temporary:
                self.discard(draft)
        return _info(manifest)

    def _write(self, draft: SnapshotDraft, manifest: dict[str, Any], template: bytes) -> None:
        """Completes a draft: template, digests, manifest; all of it synced."""
        (draft.directory / TEMPLATE).write_bytes(template)
        manifest["files"] = _digest_files(draft.directory)
        manifest["digest"] = _manifest_digest(manifest)
        path = draft.directory / MANIFEST
        path.write_text(json.dumps(manifest, indent=1, sort_keys=True), encoding="utf-8")
        sync_tree(draft.directory)

    def discard(self, draft: SnapshotDraft) -> None:
        """Removes an unpublished draft. Idempotent."""
        draft.scratch.close()

    async def open(self, snapshot: str) -> Snapshot:
        """Reads and checks a snapshot. Raises SnapshotError if it is missing, damaged or unreadable."""
        directory = self._directory(snapshot)
        manifest = _read_manifest(directory, snapshot)
        try:
            await asyncio.to_thread(_check_files, directory, manifest)
            template = (directory / TEMPLATE).read_bytes()
        except OSError as error:
            raise _error(snapshot, f"cannot be read: {error}", "check the rights of its files") from error
        return Snapshot(
            info=_info(manifest),
            directory=directory,
            spec=Spec(
                unpack_templates(template, snapshot, 1)[0],
                Resources(**manifest["resources"]),
                Network(tuple(manifest["network"])),
                manifest["metadata"],
                parent=snapshot,
            ),
            backend_version=manifest["backend_version"],
            machine=manifest["machine"],
            extra=manifest["extra"],
        )

    def list(self, backend: str) -> list[SnapshotInfo]:
        """Snapshots of one backend, oldest first, and those without a readable manifest.

        Checks only manifests and sizes: a flipped bit is found when the snapshot is opened.
        """
        found: list[SnapshotInfo] = []
        for entry in sorted(self.root.glob("snap-*")) if self.root.is_dir() else []:
            if not entry.is_dir():
                continue
            try:
                info = _list_entry(entry)
            except FileNotFoundError:
                # It was deleted meanwhile.
                continue
            if info.backend in (backend, ""):
                found.append(info)
        return sorted(found, key=lambda info: (info.created_s, info.id))

    def is_in_transit(self, snapshot: str) -> bool:
        """Whether a snapshot is an imported temporary one, as in a migration."""
        draft = self._temporary.get(snapshot)
        return draft is not None and draft.id != snapshot

    def delete(self, snapshot: str) -> None:
        """Deletes a snapshot. Raises SnapshotError if it does not exist."""
        directory = self._directory(snapshot)
        if snapshot in self._temporary:
            self.discard(self._temporary.pop(snapshot))
            return
        try:
            remove_directory(directory)
        except FileNotFoundError as error:
            raise _error(
                snapshot, "does not exist", "nothing to do: it was deleted meanwhile", SnapshotMissingError
            ) from error

    async def export(self, snapshot: str, target: Path) -> None:
        """Writes a snapshot as an uncompressed tar file. Raises SnapshotError."""
        directory = self._directory(snapshot)
        try:
            await asyncio.to_thread(pack_files, sorted(directory.iterdir()), target)
        except OSError as error:
            raise _error(snapshot, f"cannot be exported: {error}", "choose another file") from error

    async def import_(self, source: Path, backend: str) -> SnapshotInfo:
        """Imports a snapshot that `export` wrote for `backend`; a temporary one stays temporary.

        Raises SnapshotError, and then leaves no files.
        """
        draft = self.draft("import")
        stays = False
        try:
            manifest = await asyncio.to_thread(_unpack_export, source, draft.directory)
            info = _info(manifest)
            if info.backend != backend:
                raise _error(info.id, *foreign_snapshot(info.backend, backend), SnapshotRefusedError)
            if manifest.get("temporary"):
                stays = self._temporary.setdefault(info.id, draft) is draft
            elif not (self.root / info.id).exists():
                await asyncio.to_thread(sync_tree, draft.directory)
                # Another import of the same snapshot may finish first.
                publish_directory(draft.directory, self.root / info.id, keep=lambda: True)
            return info
        finally:
            if not stays:
                self.discard(draft)

    def _directory(self, snapshot: str) -> Path:
        if snapshot in self._temporary:
            return self._temporary[snapshot].directory
        if not _NAME.fullmatch(snapshot) or not (self.root / snapshot).is_dir():
            raise _error(
                snapshot, "does not exist", "list the snapshots to see which do", SnapshotMissingError
            )
        return self.root / snapshot

    def sweep(self) -> None:
        """Removes drafts and temporary snapshots of dead processes."""
        sweep(self.root, DRAFTS)


def _unpack_export(source: Path, directory: Path) -> dict[str, Any]:
    """Unpacks and checks an exported snapshot; its manifest. Raises SnapshotRefusedError."""
    try:
        unpack_files(source, directory)
        manifest = _read_manifest(directory, source.name)
        _check_files(directory, manifest)
    except SnapshotError as error:
        raise SnapshotRefusedError(
            error.message, field=error.field, received=error.received, fix=error.fix
        ) from error
    return manifest


def _digest_files(directory: Path) -> dict[str, dict[str, Any]]:
    files: dict[str, dict[str, Any]] = {}
    for path in sorted(directory.iterdir()):
        files[path.name] = {"bytes": path.stat().st_size, "digest": _digest(path)}
    return files


def _digest(path: Path) -> str:
    state = blake3()
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            state.update(piece)
    return state.hexdigest()


def _check_sizes(directory: Path, manifest: Mapping[str, Any]) -> None:
    snapshot = str(manifest["id"])
    present = {path.name for path in directory.iterdir()} - {MANIFEST}
    if missing := set(manifest["files"]) - present:
        raise _error(snapshot, f"lacks {sorted(missing)}", "create it again")
    if foreign := present - set(manifest["files"]):
        raise _error(snapshot, f"holds {sorted(foreign)}, which do not belong to it", "create it again")
    for name, row in manifest["files"].items():
        size = (directory / name).stat().st_size
        if size != row["bytes"]:
            raise _error(snapshot, f"is torn: {name} has {size} bytes of {row['bytes']}", "create it again")


def _check_files(directory: Path, manifest: Mapping[str, Any]) -> None:
    """Raises SnapshotError unless sizes and digests of all files match the manifest."""
    _check_sizes(directory, manifest)
    for name, row in manifest["files"].items():
        if _digest(directory / name) != row["digest"]:
            raise _error(manifest["id"], f"is damaged: the digest of {name} differs", "create it again")


def _manifest_digest(manifest: Mapping[str, Any]) -> str:
    """BLAKE3 hex digest of a manifest without its digest field."""
    rest = {key: value for key, value in manifest.items() if key != "digest"}
    return blake3(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def _read_manifest(directory: Path, snapshot: str) -> dict[str, Any]:
    try:
        manifest = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
        if manifest["format"] != FORMAT:
            raise _error(snapshot, f"has format {manifest['format']!r}", f"export it in format {FORMAT}")
        if manifest["digest"] != _manifest_digest(manifest):
            raise ValueError("its digest differs")
        _info(manifest)
        missing = _FIELDS - set(manifest)
        if missing or not all(_NAME.fullmatch(name) for name in (manifest["id"], *manifest["files"])):
            raise ValueError(f"fields {sorted(missing)}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _error(snapshot, f"has no readable manifest: {error}", "create it again") from error
    return cast("dict[str, Any]", manifest)


def _info(manifest: Mapping[str, Any]) -> SnapshotInfo:
    return SnapshotInfo(
        id=manifest["id"],
        kind=manifest["kind"],
        backend=manifest["backend"],
        sandbox_id=manifest["sandbox_id"],
        template=manifest["template"],
        created_s=manifest["created_s"],
        size_bytes=sum(row["bytes"] for row in manifest["files"].values()),
        name=manifest["name"],
    )


def _list_entry(directory: Path) -> SnapshotInfo:
    """The list's entry of a snapshot, damaged or not. Raises FileNotFoundError if it was deleted."""
    info: SnapshotInfo | None = None
    try:
        manifest = _read_manifest(directory, directory.name)
        info = _info(manifest)
        _check_sizes(directory, manifest)
        return info
    except SnapshotError as error:
        if info is None:
            size = sum(path.stat().st_size for path in directory.iterdir())
            info = SnapshotInfo(directory.name, "filesystem", "", "", "", directory.stat().st_mtime, size)
        return dataclasses.replace(info, damaged=error.message)


def pack_files(files: Iterable[Path], target: Path) -> None:
    """Writes regular files into an uncompressed tar file, atomically. Raises OSError."""
    with whole_file(target, sync=False) as file, tarfile.open(fileobj=file, mode="w") as archive:
        for path in files:
            archive.add(path, arcname=path.name, recursive=False)


def unpack_files(source: Path, directory: Path) -> None:
    """Reverses `pack_files`. Raises SnapshotError for members other than regular files with plain names."""
    try:
        with tarfile.open(source, "r:") as archive:
            for member in archive:
                if not member.isreg() or member.issparse() or not _NAME.fullmatch(member.name):
                    raise _error(source.name, f"holds {member.name!r}", "name an exported snapshot")
                file = archive.extractfile(member)
                assert file is not None, "a regular member has contents"
                with (directory / member.name).open("wb") as target:
                    shutil.copyfileobj(file, target, _PIECE_BYTES)
    except (OSError, tarfile.TarError, EOFError) as error:
        raise _error(source.name, f"cannot be read: {error}", "export it again") from error


def _error(snapshot: str, message: str, fix: str, kind: type[SnapshotError] = SnapshotError) -> SnapshotError:
    return kind(f"the snapshot {message}", field="snapshot", received=snapshot, fix=fix)
