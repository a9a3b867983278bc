"""Directories that exist only when they are whole, and that say of every file what it must hold.

    fill .NAME.partial -> hash every file (digests.json) -> fsync
        -> NAME becomes .NAME.old -> .NAME.partial becomes NAME -> fsync -> .NAME.old is retired

Killed anywhere, the older checkpoint or the newer one is there, whole; `recover_directory` finishes the one
case in which it lies under its other name.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from blake3 import blake3

from etude.errors import CheckpointError, ResourceError
from etude.kit.durable import FULL, replace_directory, sync_tree

DIGESTS = "digests.json"


class Flaw(StrEnum):
    """Why a checkpoint cannot be used."""

    UNFINISHED = "unfinished"
    """It was being written when the process ended, or it is no checkpoint."""
    MISSING = "missing"
    """A file is not there."""
    DAMAGED = "damaged"
    """A file does not hold what was written."""


@dataclass(frozen=True, slots=True)
class FileFlaw:
    """What is wrong with which file."""

    file: Path
    flaw: Flaw

    def error(self) -> CheckpointError:
        """What a reader raises."""
        if self.flaw is Flaw.UNFINISHED:
            return CheckpointError(
                "no checkpoint here",
                field="checkpoint",
                received=str(self.file),
                fix="name a whole checkpoint",
            )
        message = "is damaged" if self.flaw is Flaw.DAMAGED else "is damaged: a file is missing"
        return CheckpointError(
            message, field="checkpoint", received=str(self.file), fix="resume from an older checkpoint"
        )


def write_whole(
    directory: Path, fill: Callable[[Path], None], retire: Callable[[Path], object] = shutil.rmtree
) -> None:
    """Makes `directory` of what `fill` puts into the empty one that it is given.

    An older checkpoint of that name is replaced and handed to `retire`, under another name. Whatever fails,
    the older one stays. Raises ResourceError where the disk is full, and whatever `fill` raises.
    """
    try:
        with full_disk_named(directory):
            fill(begin(directory))
            seal(partial_of(directory))
            commit(directory, retire)
    except BaseException:
        shutil.rmtree(partial_of(directory), ignore_errors=True)
        raise


def begin(directory: Path) -> Path:
    """Makes the empty directory that is to become `directory`, without what a killed save left there."""
    partial = partial_of(directory)
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    return partial


def seal(directory: Path, known: Mapping[str, str] | None = None) -> None:
    """Writes down every file's hash, and makes all of it durable.

    `known`: hashes of files that others have written, hashed and made durable.
    """
    known = known or {}
    files = {path.relative_to(directory).as_posix(): path for path in directory.rglob("*") if path.is_file()}
    digests = {name: known.get(name) or digest_of(path) for name, path in sorted(files.items())}
    (directory / DIGESTS).write_text(json.dumps(digests, indent=2) + "\n", encoding="utf-8")
    sync_tree(directory)


def commit(directory: Path, retire: Callable[[Path], object] = shutil.rmtree) -> None:
    """Gives a sealed directory its name; what had it before goes to `retire`, under another name.

    Where the disk is too full to retire it, it stays under that name for the next save to retire.
    """
    partial = partial_of(directory)
    try:
        replace_directory(partial, directory, retire)
    except OSError as error:
        if partial.exists() or not is_full_disk(error):
            raise


def partial_of(directory: Path) -> Path:
    """Where `directory` is while it is being written; left behind by a process that was killed."""
    return directory.with_name(f".{directory.name}.partial")


def find_flaws(directory: Path, part: int = 0, num_parts: int = 1) -> list[FileFlaw]:
    """Everything that is wrong with a checkpoint; reads all of it. Empty: it is whole.

    With `num_parts` only every so many-th file is looked at, from number `part` on.
    """
    path = directory / DIGESTS
    if not path.is_file():
        return [FileFlaw(directory, Flaw.UNFINISHED)]
    digests = read_digests(directory)
    if digests is None:
        return [FileFlaw(path, Flaw.DAMAGED)]
    flaws: list[FileFlaw] = []
    for name, digest in list(digests.items())[part::num_parts]:
        file = directory / name
        if not file.is_file():
            flaws.append(FileFlaw(file, Flaw.MISSING))
        elif digest_of(file) != digest:
            flaws.append(FileFlaw(file, Flaw.DAMAGED))
    return flaws


def read_digests(directory: Path) -> dict[str, str] | None:
    """The hash of each file, by its path in the directory; None if that list is damaged."""
    try:
        digests = json.loads((directory / DIGESTS).read_text(encoding="utf-8"))
    except ValueError:
        return None
    return digests if isinstance(digests, dict) else None


def check_whole(directory: Path, part: int = 0, num_parts: int = 1) -> None:
    """Raises CheckpointError if `find_flaws` finds anything."""
    for flaw in find_flaws(directory, part, num_parts):
        raise flaw.error()


def is_full_disk(error: BaseException) -> bool:
    """Whether this is how a full disk shows: an OSError, perhaps beneath another, or a library's words."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno in FULL:
            return True
        if any(f"os error {number}" in str(seen) for number in FULL):  # safetensors
            return True
        seen = seen.__cause__ or seen.__context__
    return False


@contextmanager
def full_disk_named(directory: Path) -> Iterator[None]:
    """Raises ResourceError for a full disk, whatever a library makes of it."""
    try:
        yield
    except Exception as error:
        if not is_full_disk(error):
            raise
        raise ResourceError(
            "the disk is full: this checkpoint was not written, older ones are as they were",
            field="checkpoint",
            received=str(directory),
            fix="free some space, or keep fewer: checkpoint.keep_last, checkpoint.keep_every_steps",
        ) from error


def digest_of(path: Path) -> str:
    """BLAKE3 of a file. Raises OSError with its name, which blake3's own errors lack."""
    with path.open("rb"):
        return blake3().update_mmap(path).hexdigest()
