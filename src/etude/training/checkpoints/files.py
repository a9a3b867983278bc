"""Directories that are created atomically and hold a hash of each of their files.

    fill .NAME.partial -> hash every file (digests.json) -> fsync
        -> NAME becomes .NAME.old -> .NAME.partial becomes NAME -> fsync -> .NAME.old is retired

Whenever the process is killed, either the older checkpoint or the newer one is complete; `recover_directory`
finishes the one case in which it is still named .NAME.old.
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
    """A file does not exist."""
    DAMAGED = "damaged"
    """A file's content is not what was written."""


@dataclass(frozen=True, slots=True)
class FileFlaw:
    """A file of a checkpoint that cannot be used, and why."""

    file: Path
    flaw: Flaw

    def error(self) -> CheckpointError:
        """The exception that a reader raises for this flaw."""
        if self.flaw is Flaw.UNFINISHED:
            return CheckpointError(
                "is not a complete checkpoint",
                field="checkpoint",
                received=str(self.file),
                fix="name a complete checkpoint",
            )
        message = "is damaged" if self.flaw is Flaw.DAMAGED else "is damaged: a file is missing"
        return CheckpointError(
            message, field="checkpoint", received=str(self.file), fix="resume from an older checkpoint"
        )


def write_whole(
    directory: Path, fill: Callable[[Path], None], retire: Callable[[Path], object] = shutil.rmtree
) -> None:
    """Creates `directory` atomically with the files that `fill` writes into an empty directory.

    An older checkpoint of that name is renamed and passed to `retire`. If anything fails, the older one
    stays. Raises ResourceError where the disk is full, and whatever `fill` raises.
    """
    try:
        with translate_full_disk(directory):
            fill(begin(directory))
            seal(partial_of(directory))
            commit(directory, retire)
    except BaseException:
        shutil.rmtree(partial_of(directory), ignore_errors=True)
        raise


def begin(directory: Path) -> Path:
    """Creates the empty directory that is to become `directory`; removes the remains of a killed save."""
    partial = partial_of(directory)
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)
    return partial


def seal(directory: Path, known: Mapping[str, str] | None = None) -> None:
    """Writes the hash of every file to `digests.json`, and syncs the directory to disk.

    `known`: hashes of files that other ranks have written, hashed and synced.
    """
    known = known or {}
    files = {path.relative_to(directory).as_posix(): path for path in directory.rglob("*") if path.is_file()}
    digests = {name: known.get(name) or digest_of(path) for name, path in sorted(files.items())}
    (directory / DIGESTS).write_text(json.dumps(digests, indent=2) + "\n", encoding="utf-8")
    sync_tree(directory)


def commit(directory: Path, retire: Callable[[Path], object] = shutil.rmtree) -> None:
    """Renames a sealed directory to its final name; the directory it replaces is renamed and passed to
    `retire`. Where the disk is too full to retire that, it stays for the next save to retire.
    """
    partial = partial_of(directory)
    try:
        replace_directory(partial, directory, retire)
    except OSError as error:
        if partial.exists() or not is_full_disk(error):
            raise


def partial_of(directory: Path) -> Path:
    """The path of `directory` while it is being written; a killed process leaves it behind."""
    return directory.with_name(f".{directory.name}.partial")


def find_flaws(directory: Path, part: int = 0, num_parts: int = 1) -> list[FileFlaw]:
    """All missing and damaged files of a checkpoint, which is read completely; empty if it is intact.

    With `num_parts`, only every `num_parts`-th file is checked, starting with number `part`.
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
    """The hash of each file by its path in the directory; None if `digests.json` is damaged."""
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
    """Whether the cause of `error` is a full disk: an OSError in its chain, or a library's message."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.errno in FULL:
            return True
        if any(f"os error {number}" in str(seen) for number in FULL):  # safetensors
            return True
        seen = seen.__cause__ or seen.__context__
    return False


@contextmanager
def translate_full_disk(directory: Path) -> Iterator[None]:
    """Turns errors caused by a full disk, also those that libraries raise, into ResourceError."""
    try:
        yield
    except Exception as error:
        if not is_full_disk(error):
            raise
        raise ResourceError(
            "the disk is full: this checkpoint was not written, older ones are unchanged",
            field="checkpoint",
            received=str(directory),
            fix="free some space, or keep fewer (checkpoint.keep_last, checkpoint.keep_every_steps)",
        ) from error


def digest_of(path: Path) -> str:
    """BLAKE3 of a file. Raises OSError with its name, which blake3's own errors lack."""
    with path.open("rb"):
        return blake3().update_mmap(path).hexdigest()
