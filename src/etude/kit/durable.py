"""Atomic, durable writes: a file or folder appears whole or not at all, whenever a process is killed.

    file      a temporary file in the same folder -> fsync -> renamed over the older file, if any
    folder    a draft in the same folder, removed with its process -> fsync -> renamed

A folder that exists already is kept, refused, or replaced in two renames (`replace_directory`).
`leftovers.sweep(parent, DRAFTS)` removes the drafts of processes that were killed before they finished.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import secrets
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, BinaryIO

from etude.kit.leftovers import ScratchDirectory

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Error numbers of a full disk: no space left, user quota exceeded, file too large."""
DRAFTS = ".etude-draft-"
"""Prefix of the scratch folders in which other folders are built or removed."""
_NAME_BYTES = 200
"""Most bytes of a file's name that its temporary file's name repeats: names have 255 bytes at most."""


@contextlib.contextmanager
def whole_file(path: Path, mode: int | None = None, sync: bool = True) -> Iterator[BinaryIO]:
    """A new file that becomes `path` when the block ends, and vanishes if that fails.

    `mode`: its permissions from the beginning; those of any new file unless they are given. A link at `path`
    is replaced, not followed. Several threads and processes may write one path; the last one counts.
    """
    name = os.fsdecode(os.fsencode(path.name)[:_NAME_BYTES])
    temporary = path.with_name(f".{name}.{secrets.token_hex(8)}.tmp")
    try:
        descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        with os.fdopen(descriptor, "w+b") as file:
            if mode is not None:
                os.fchmod(file.fileno(), mode)
            yield file
            if sync:
                sync_file(file)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if sync:
        sync_path(path.parent)


def write_bytes(path: Path, data: bytes, mode: int | None = None) -> None:
    """Replaces `path` with `data`. See `whole_file`."""
    with whole_file(path, mode) as file:
        file.write(data)


def write_text(path: Path, text: str) -> None:
    """Replaces `path` with `text` in UTF-8."""
    write_bytes(path, text.encode("utf-8"))


def write_json(path: Path, value: Any) -> None:
    """Replaces `path` with `value` as indented JSON.

    Raises ValueError for NaN and infinities, which JSON has no words for; the file then stays as it was.
    """
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def read_record(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if it is missing or damaged. For caches, which can be rebuilt."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


@contextlib.contextmanager
def warn_if_full(what: str) -> Iterator[None]:
    """Turns a full disk within the block into a warning: for data that the next write contains again."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        warnings.warn(f"{what} not written: {error.strerror}", stacklevel=4)


def move(source: Path, target: Path) -> None:
    """Renames a file or folder within its file system, durably. Replaces a file or empty folder."""
    source.replace(target)
    for folder in {source.parent, target.parent}:
        sync_path(folder)


@contextlib.contextmanager
def whole_directory(
    target: Path, keep: Callable[[], bool] | None = None, sync: bool = True
) -> Iterator[Path]:
    """An empty folder that becomes `target` when the block ends, and vanishes if that fails.

    `keep`: see `publish_directory`. `sync`: whether what the block put into it is made durable first.
    """
    with ScratchDirectory(target.parent, DRAFTS) as scratch:
        draft = scratch / target.name
        draft.mkdir()
        yield draft
        if sync:
            sync_tree(draft)
        publish_directory(draft, target, keep, sync)


def publish_directory(
    draft: Path, target: Path, keep: Callable[[], bool] | None = None, sync: bool = True
) -> None:
    """Renames a finished folder to its final name.

    If the target exists (another process was faster, or it is damaged), it stays if `keep` returns True, else
    it is removed first. Without `keep` raises OSError.
    """
    while True:
        try:
            draft.rename(target)
            break
        except OSError:
            if keep is None or not target.exists():
                raise
        if keep():
            return
        with contextlib.suppress(FileNotFoundError):  # another process has removed it
            remove_directory(target)
    if sync:
        sync_path(target.parent)


def remove_directory(path: Path) -> None:
    """Removes a folder, renaming it first so that no reader finds half of it. Raises OSError on failure."""
    with ScratchDirectory(path.parent, DRAFTS) as scratch:
        path.rename(scratch / path.name)


def replace_directory(draft: Path, target: Path, retire: Callable[[Path], object] = shutil.rmtree) -> None:
    """Renames a finished folder over an existing one, which is renamed aside and passed to `retire`.

    Killed at any point, the older or the newer folder is there whole; `recover_directory` undoes a rename of
    the older one alone. Raises OSError, also of `retire`, which the next call then repeats.
    """
    old = retired_path(target)
    while True:
        if target.exists():
            if old.exists():  # a process was killed before it retired that
                retire(old)
            target.rename(old)
        try:
            draft.rename(target)
            break
        except OSError:
            if not target.exists():  # else a reader took this for killed, and put the older one back
                raise
    sync_path(target.parent)
    if old.exists():
        retire(old)


def recover_directory(target: Path) -> None:
    """Puts the older folder back if `replace_directory` was killed between its two renames."""
    old = retired_path(target)
    if old.exists() and not target.exists():
        try:
            old.rename(target)
        except OSError:
            if not target.exists():  # else it was not killed, or another reader was quicker
                raise


def retired_path(target: Path) -> Path:
    """The path of the older folder while `target` is replaced, until it is retired."""
    return target.with_name(f".{target.name}.old")


def make_directory(path: Path) -> None:
    """Makes a folder and its missing parents, and syncs their directory entries, so that files that are
    written into it later are not lost with its name."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        sync_path(folder.parent)


def sync_file(file: IO[bytes]) -> None:
    """Flushes and fsyncs an open file."""
    file.flush()
    os.fsync(file.fileno())


def sync_path(path: Path) -> None:
    """Fsyncs a file's contents, or a folder's entries."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_file_system(path: Path) -> None:
    """Syncs the whole file system in one call, as for a layer of a hundred thousand files."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(descriptor) != 0:
            raise OSError(ctypes.get_errno(), "the file system cannot be synced")
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Fsyncs a folder and everything in it, except symbolic links."""
    for path in [*folder.rglob("*"), folder]:
        if not path.is_symlink():
            sync_path(path)
