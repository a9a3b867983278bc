"""The trajectory log: appends are durable and atomic, and no trajectory is stored twice.

A directory of Parquet parts, `part-<number>-<digest>.parquet`. A part is written under a temporary name,
fsynced, renamed, and the directory fsynced; only then does `append` return. The digest (xxh3-128 of the file)
in its name is checked at every read, so that a truncated or damaged part is found, not trained on.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import xxhash

from etude.errors import StoreError
from etude.kit.durable import make_directory, write_bytes
from etude.records import Group, Status, Trajectory, TrajectoryId
from etude.store.parts import IndexRow, decode_index, decode_part, encode_part, stored_id

PART_NAME = re.compile(r"part-(\d{8})-([0-9a-f]{32})\.parquet")
_MISSING = "part-{number:08d}.missing"
"""Name of an empty file that a user creates to read the log without that part."""

T = TypeVar("T")


class TrajectoryLog:
    """Appends groups of trajectories and reads them back. One process writes; any number read.

    A reader sees the parts that existed when it first listed them, and those that `append` of the same object
    added.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._parts: list[Path] | None = None
        self._stored: set[TrajectoryId] | None = None

    def append(self, groups: Sequence[Group]) -> int:
        """Stores the groups' trajectories durably; returns how many were new.

        Trajectories already stored are left out: a resumed run makes the same ids again. A group all of
        whose members are stored is left out whole. Raises StoreError on a full disk, an id twice in
        `groups`, or facts that are not plain JSON.
        """
        fresh = self._without_stored(groups)
        if not fresh:
            return 0
        data = encode_part(fresh)
        parts = self._list_parts()
        number = 1 + (_part_number(parts[-1]) if parts else -1)
        path = self._directory / f"part-{number:08d}-{_digest(data)}.parquet"
        try:
            make_directory(self._directory)
            write_bytes(path, data)
        except OSError as error:
            raise StoreError(
                f"could not be written: {error.strerror}",
                field=path.name,
                fix="check the disk's free space and permissions",
            ) from error
        parts.append(path)
        identities = [member.id for group in fresh for member in group.members]
        self._stored_ids().update(stored_id(identity) for identity in identities)
        return len(identities)

    def contains(self, identity: TrajectoryId) -> bool:
        """Whether a trajectory of this id is stored. The first call reads every part's index."""
        return stored_id(identity) in self._stored_ids()

    def __len__(self) -> int:
        """Number of stored trajectories."""
        return len(self._stored_ids())

    def read(
        self,
        *,
        min_step: int | None = None,
        max_step: int | None = None,
        statuses: Collection[Status] | None = None,
        tasks: Collection[str] | None = None,
    ) -> Iterator[Group]:
        """Yields groups in the order of their storage, with the members that match.

        `min_step` and `max_step` (inclusive) bound the step of the oldest policy version, and leave out
        trajectories without sampled tokens; `tasks` are task ids. A group whose members are in several parts
        is yielded once per part. Raises StoreError, naming the part, on damage.
        """
        filtered = not (min_step is None and max_step is None and statuses is None and tasks is None)

        def wanted(row: IndexRow) -> bool:
            if (min_step is not None or max_step is not None) and row.oldest_step is None:
                return False
            step = row.oldest_step or 0
            return (
                (min_step is None or step >= min_step)
                and (max_step is None or step <= max_step)
                and (statuses is None or row.status in statuses)
                and (tasks is None or row.task in tasks)
            )

        for path in list(self._list_parts()):
            yield from _load(path, lambda data: decode_part(data, wanted if filtered else None))

    def part_names(self) -> list[str]:
        """Names of the parts in the order of storage, including those that another process has added since.

        A part never changes, and new ones come last: its name and an index in it are a position in the log.
        """
        self._parts = None
        return [path.name for path in self._list_parts()]

    def read_part(self, name: str) -> list[Group]:
        """The groups of one part. Raises StoreError if it is missing or damaged."""
        return _load(self._directory / name, decode_part)

    def summaries(self) -> Iterator[IndexRow]:
        """Yields one line per stored trajectory, in order. Raises StoreError on damage."""
        for path in list(self._list_parts()):
            yield from _load(path, decode_index)

    def find(self, identity: TrajectoryId) -> Trajectory | None:
        """The stored trajectory of this id, or None. Raises StoreError on damage."""
        form = stored_id(identity)

        def wanted(row: IndexRow) -> bool:
            return row.id == form

        for path in list(self._list_parts()):
            if any(wanted(row) for row in _load(path, decode_index)):
                return _load(path, lambda data: decode_part(data, wanted))[0].members[0]
        return None

    def _without_stored(self, groups: Sequence[Group]) -> list[Group]:
        """The groups without the members that are stored; empty groups stay."""
        seen: set[TrajectoryId] = set()
        fresh: list[Group] = []
        for group in groups:
            members = tuple(member for member in group.members if not self.contains(member.id))
            for member in members:
                if member.id in seen:
                    raise StoreError("comes twice in one append", field="id", received=str(member.id))
                seen.add(member.id)
            if members or not group.members:
                fresh.append(replace(group, members=members))
        return fresh

    def _stored_ids(self) -> set[TrajectoryId]:
        if self._stored is None:
            parts = self._list_parts()
            self._stored = {row.id for path in parts for row in _load(path, decode_index)}
        return self._stored

    def _list_parts(self) -> list[Path]:
        if self._parts is None:
            parts = self._find_parts()
            if self._missing(parts):  # the writer may have added parts during the listing
                parts = self._find_parts()
            for number in self._missing(parts):
                name = _MISSING.format(number=number)
                raise StoreError(
                    "a part of the trajectory log is missing",
                    field=f"part-{number:08d}",
                    received=str(self._directory),
                    fix=f"restore it from a backup, or create a file {name} to continue without it",
                )
            self._parts = parts
        return self._parts

    def _find_parts(self) -> list[Path]:
        found = self._directory.glob("part-*.parquet") if self._directory.is_dir() else ()
        return sorted(path for path in found if PART_NAME.fullmatch(path.name))

    def _missing(self, parts: Sequence[Path]) -> list[int]:
        """Numbers before the last part's without a part, except those marked as missing by a user."""
        present = {_part_number(path) for path in parts}
        gaps = set(range(max(present, default=0))) - present
        return sorted(
            number for number in gaps if not (self._directory / _MISSING.format(number=number)).exists()
        )


def find_log(path: Path) -> Path | None:
    """The trajectory log at `path`, or in it as in a run directory; None if there is none."""
    places = (path, path / "trajectories")
    parts = ((place, file.name) for place in places for file in place.glob("part-*.parquet"))
    return next((place for place, name in parts if PART_NAME.fullmatch(name)), None)


def _load(path: Path, decode: Callable[[bytes], T]) -> T:
    """Reads, checks and decodes a part. Raises StoreError."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise StoreError(f"could not be read: {error.strerror}", field=path.name) from error
    found = PART_NAME.fullmatch(path.name)
    if found is None or _digest(data) != found[2]:
        raise _damaged(path, "its digest is not the one in its name")
    try:
        return decode(data)
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise _damaged(path, str(error)) from error


def _damaged(path: Path, reason: str) -> StoreError:
    found = PART_NAME.fullmatch(path.name)
    name = _MISSING.format(number=int(found[1])) if found else f"{path.name}.missing"
    return StoreError(
        f"this part of the trajectory log is damaged: {reason}",
        field=path.name,
        received=str(path),
        fix=f"restore it from a backup, or rename it to {name} to continue without its trajectories",
    )


def _digest(data: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(data)


def _part_number(path: Path) -> int:
    found = PART_NAME.fullmatch(path.name)
    assert found is not None, path
    return int(found[1])
