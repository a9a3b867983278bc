"""Files and folders that are there whole or not at all, whatever is killed when; and what the disk holds.

    file      a temporary one beside it -> fsync -> takes the name, and the place of an older file
    folder    a draft beside it, which goes with its process -> fsync -> takes the name

A folder that is there already is kept, refused, or replaced by way of another name (`replace_directory`).
Where another process was killed before it finished, `leftovers.sweep(parent, DRAFTS)` clears up.
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
"""How a full disk shows: none free, none of this user's, none in this file."""
DRAFTS = ".etude-draft-"
"""Begins the names of folders in which others are made or removed."""
_NAME_BYTES = 200
"""Of a file's name, in that of its temporary file: names have 255 bytes at most."""


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
    """The JSON object in a file, empty where there is none that is whole: of what can be made again."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


@contextlib.contextmanager
def warn_if_full(what: str) -> Iterator[None]:
    """In the block a full disk is a warning: for what the next write holds again."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        warnings.warn(f"{what} not written: {error.strerror}", stacklevel=4)


def move(source: Path, target: Path) -> None:
    """Gives a file or folder another name on its file system, durably. A file or empty folder of that name is
    replaced."""
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
    """Gives a finished folder its name.

    Where one of that name is there (another process was faster, or it is damaged) `keep` says whether it
    stays; otherwise it makes room. Without `keep` that is an OSError.
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
    """Removes a folder. Its name is gone at once: nobody finds half of it. Raises OSError if it cannot be."""
    with ScratchDirectory(path.parent, DRAFTS) as scratch:
        path.rename(scratch / path.name)


def replace_directory(draft: Path, target: Path, retire: Callable[[Path], object] = shutil.rmtree) -> None:
    """Gives a finished folder the name of one that is in use; that goes to `retire`, under another name.

    Killed anywhere, the older one or the newer one is there, whole; `recover_directory` finishes the one case
    in which it lies under its other name. Raises OSError, also of `retire`, which the next call then repeats.
    """
    old = old_of(target)
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
    old = old_of(target)
    if old.exists() and not target.exists():
        try:
            old.rename(target)
        except OSError:
            if not target.exists():  # else it was not killed, or another reader was quicker
                raise


def old_of(target: Path) -> Path:
    """Where the older folder is while `target` is replaced, until it is retired."""
    return target.with_name(f".{target.name}.old")


def make_directory(path: Path) -> None:
    """Makes a folder, and those above it that are missing, durably: what is written into it later is not lost
    with its name."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        sync_path(folder.parent)


def sync_file(file: IO[bytes]) -> None:
    """Waits until the disk holds what was written to an open file."""
    file.flush()
    os.fsync(file.fileno())


def sync_path(path: Path) -> None:
    """Waits until the disk holds a file's contents, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_file_system(path: Path) -> None:
    """Waits until the disk holds everything that was written: a layer may have a hundred thousand files."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(descriptor) != 0:
            raise OSError(ctypes.get_errno(), "the file system cannot be synced")
    finally:
        os.close(descriptor)


def sync_tree(folder: Path) -> None:
    """Waits until the disk holds a folder with all that is in it. Links are left out."""
    for path in [*folder.rglob("*"), folder]:
        if not path.is_symlink():
            sync_path(path)
