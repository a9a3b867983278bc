"""Commits: records that publish versions in a store. A version without a commit does not exist."""

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
    """One published version: a delta from its base, a full snapshot, or both."""

    sequence: int
    """Number in the store; it determines the commit's name, so that two writers cannot both commit."""
    version: PolicyVersion
    base: PolicyVersion | None
    """The version that the delta applies to; None without a delta."""
    delta: tuple[StoredFile, ...]
    full: tuple[StoredFile, ...]
    """Empty for versions without a full snapshot."""

    @property
    def files(self) -> tuple[StoredFile, ...]:
        """All update files."""
        return self.delta + self.full


def commit_name(sequence: int) -> str:
    """Name of a commit in its store; names sort like sequence numbers."""
    return f"{COMMITS}/{sequence:012d}.json"


def sequence_of(name: str) -> int | None:
    """The reverse of `commit_name`; None for other names."""
    head, _, number = name.rpartition("/")
    stem = number.removesuffix(".json")
    return int(stem) if head == COMMITS and stem.isdigit() and number.endswith(".json") else None


def pack_commit(commit: Commit) -> bytes:
    """Encodes a commit as JSON with a checksum."""
    content = json.dumps(asdict(commit), sort_keys=True)
    return json.dumps({"commit": content, "digest": blake3(content.encode()).hexdigest()}).encode()


def unpack_commit(data: bytes) -> Commit:
    """The reverse of `pack_commit`. Raises WeightUpdateError for damage."""
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
    """The chain of deltas from the version with digest `held` to `target`; None if there is none."""
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
    """The last commit before `commit` of the weights that its delta applies to."""
    if commit.base is None:
        return None
    digest = commit.base.digest
    before = [
        own for own in commits.values() if own.sequence < commit.sequence and own.version.digest == digest
    ]
    return max(before, key=lambda own: own.sequence, default=None)
