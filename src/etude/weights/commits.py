"""Commits: the records that make versions of a store exist. A version without one was never published."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from blake3 import blake3

from etude.errors import WeightUpdateError
from etude.records import PolicyVersion

COMMITS = "commits"


@dataclass(frozen=True, slots=True)
class StoredFile:
    """One update file."""

    name: str
    size_bytes: int
    digest: str
    """BLAKE3 of its bytes."""


@dataclass(frozen=True, slots=True)
class Commit:
    """One published version: how to come to it from its base, or from nothing, or both."""

    sequence: int
    """Position in the store; also its name, so that two writers cannot both commit."""
    version: PolicyVersion
    base: PolicyVersion | None
    """What the delta applies to; None where there is no delta."""
    delta: tuple[StoredFile, ...]
    full: tuple[StoredFile, ...]
    """Empty between two full snapshots."""

    @property
    def files(self) -> tuple[StoredFile, ...]:
        """All of them."""
        return self.delta + self.full


def commit_name(sequence: int) -> str:
    """Where a commit lies in its store; names sort like sequence numbers."""
    return f"{COMMITS}/{sequence:012d}.json"


def sequence_of(name: str) -> int | None:
    """The reverse; None for what is no commit's name."""
    head, _, number = name.rpartition("/")
    stem = number.removesuffix(".json")
    return int(stem) if head == COMMITS and stem.isdigit() and number.endswith(".json") else None


def pack_commit(commit: Commit) -> bytes:
    """JSON that carries its own hash."""
    content = json.dumps(asdict(commit), sort_keys=True)
    return json.dumps({"commit": content, "digest": blake3(content.encode()).hexdigest()}).encode()


def unpack_commit(data: bytes) -> Commit:
    """The reverse. Raises WeightUpdateError for damage."""
    try:
        outer = json.loads(data)
        if blake3(outer["commit"].encode()).hexdigest() != outer["digest"]:
            raise ValueError("another hash")
        values: dict[str, Any] = json.loads(outer["commit"])
        base = values["base"]
        return Commit(
            values["sequence"],
            PolicyVersion(**values["version"]),
            None if base is None else PolicyVersion(**base),
            tuple(StoredFile(**file) for file in values["delta"]),
            tuple(StoredFile(**file) for file in values["full"]),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightUpdateError(
            f"a commit of the weight store is damaged: {error}", field="commit", fix="publish again"
        ) from error


def find_chain(commits: Mapping[int, Commit], target: Commit, held: str) -> list[Commit] | None:
    """Deltas that lead from the version with digest `held` to `target`; None if there is no such chain."""
    chain = [target]
    while chain[-1].base is not None:
        if chain[-1].base.digest == held:
            return chain[::-1]
        before = _base_of(commits, chain[-1])
        if before is None:
            break
        chain.append(before)
    return None


def find_snapshot_chain(commits: Mapping[int, Commit], target: Commit) -> list[Commit] | None:
    """The nearest full snapshot at or before `target`, and the deltas from it; None if there is none."""
    chain = [target]
    while not chain[-1].full:
        before = _base_of(commits, chain[-1])
        if before is None:
            return None
        chain.append(before)
    return chain[::-1]


def _base_of(commits: Mapping[int, Commit], commit: Commit) -> Commit | None:
    """The last version before `commit` with the weights that its delta applies to."""
    if commit.base is None:
        return None
    digest = commit.base.digest
    before = [
        own for own in commits.values() if own.sequence < commit.sequence and own.version.digest == digest
    ]
    return max(before, key=lambda own: own.sequence, default=None)
