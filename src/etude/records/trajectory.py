"""Segments of tokens, the trajectories that consist of them, and the groups that compare trajectories."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from etude.records.policy import BlobRef, PolicyVersion
from etude.records.reward import RewardBreakdown
from etude.records.sampling import SamplingParams
from etude.records.turn import Turn


class Relation(StrEnum):
    """How a segment was derived from its parent."""

    ROOT = "root"
    SUMMARY = "summary"
    FORK = "fork"
    REWRITE = "rewrite"
    SUBAGENT = "subagent"


class Status(StrEnum):
    """How a trajectory ended."""

    DONE = "done"
    """The agent finished."""
    LIMIT = "limit"
    """It ran into a limit of turns, tokens or wall time."""
    AGENT_ERROR = "agent_error"
    """It broke its own sandbox or session: a real outcome."""
    INFRASTRUCTURE = "infrastructure"
    """We failed: never a reward."""


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Tokens [start, end) belong to policy version `version`."""

    start: int
    end: int
    version: PolicyVersion


@dataclass(frozen=True, slots=True)
class TurnSpan:
    """Tokens [start, end) are one message by `role`."""

    start: int
    end: int
    role: str
    """system, user, assistant or tool."""


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """One token sequence exactly as the engine saw it: nothing in it is ever re-tokenised.

    `T` is the number of tokens. Observations, prompts and padding have `sampled` False and loss mask 0.
    """

    id: str
    trajectory_id: str
    tokens: NDArray[np.int32]
    """[T] token ids."""
    sampled: NDArray[np.bool_]
    """[T] True where the policy chose the token."""
    logprobs: NDArray[np.float32]
    """[T] log-probability under the *processed* distribution sampled from; 0 where not sampled."""
    version_spans: tuple[VersionSpan, ...]
    """Policy version of each sampled token."""
    kv_oldest_spans: tuple[VersionSpan, ...]
    """Oldest version whose keys and values each sampled token attended to."""
    turn_spans: tuple[TurnSpan, ...]
    sampling: SamplingParams
    tokenizer_digest: str
    template_digest: str
    routes: BlobRef | None = None
    """Experts [T, layers, top_k] of every position, order kept; None for dense models."""
    support: BlobRef | None = None
    """Tokens kept by truncated sampling; None where nothing was truncated."""
    agent_id: str = "main"
    parent: tuple[str, int] | None = None
    """(segment id, token offset) at which this segment branched off its parent."""
    relation: Relation = Relation.ROOT

    def __post_init__(self) -> None:
        length = len(self.tokens)
        for name in ("sampled", "logprobs"):
            entries = len(getattr(self, name))
            if entries != length:
                raise ValueError(
                    f"Segment.{name}: must have {length} entries like tokens, received {entries}"
                )
        if self.routes is not None and self.routes.shape[0] != length:
            raise ValueError(f"Segment.routes: must cover {length} tokens, received {self.routes.shape[0]}")
        covered = np.zeros(length, dtype=np.bool_)
        for span in self.version_spans:
            covered[span.start : span.end] = True
        if bool((self.sampled & ~covered).any()):
            raise ValueError("Segment.version_spans: every sampled token must carry a policy version")

    @property
    def num_sampled_tokens(self) -> int:
        return int(self.sampled.sum())


@dataclass(frozen=True, slots=True, order=True)
class TrajectoryId:
    """Permanent name of one rollout: a resumed run makes the same ids."""

    run: str
    task: str
    epoch: int
    group: int
    index: int

    def __str__(self) -> str:
        return f"{self.run}/{self.task}/e{self.epoch}/g{self.group}/{self.index}"


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """One session from the task's instruction to its grade: a tree of segments."""

    id: TrajectoryId
    segments: tuple[Segment, ...]
    turns: tuple[Turn, ...]
    status: Status
    cause: str = ""
    """Which limit, which error; empty for a plain finish."""
    reward: RewardBreakdown | None = None
    """None until graded, and always None if the infrastructure failed."""
    attempt: int = 0
    """How often it was restarted after infrastructure failures."""
    harness_digest: str = ""
    image_digest: str = ""
    snapshots: tuple[str, ...] = ()
    timings: Mapping[str, float] = field(default_factory=dict[str, float])
    """Seconds by stage: sandbox, sample, tools, grade."""
    tenant: str = "local"
    consent: str = "synthetic"
    """Why the tokens may be trained on: synthetic, granted, ..."""
    cluster: str = "local"
    facts: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Measurements for monitors; plain JSON values."""

    @property
    def oldest_version(self) -> PolicyVersion | None:
        """The oldest policy version that sampled any token: staleness is bounded from here."""
        versions = [span.version for segment in self.segments for span in segment.version_spans]
        return min(versions, key=lambda version: version.step) if versions else None

    @property
    def num_sampled_tokens(self) -> int:
        return sum(segment.num_sampled_tokens for segment in self.segments)


@dataclass(frozen=True, slots=True)
class GroupOrigin:
    """The state that the members of a fork group share."""

    segment_id: str
    offset: int
    snapshot: str
    """Snapshot from which the sandboxes were made; empty: they were made by replaying the calls."""
    fidelity: str = ""
    """What a copy of the sandbox contains: `full` (also processes and memory) or `filesystem`."""


@dataclass(frozen=True, slots=True)
class Group:
    """Trajectories that started from one state and whose rewards are compared with each other."""

    id: str
    kind: str
    """`task` (from the task's start) or `fork` (from the middle of a session)."""
    expected: int
    """How many members were begun."""
    members: tuple[Trajectory, ...]
    origin: GroupOrigin | None = None
    price_weight: float = 1.0
    """Weight of the price of solved sessions (`rl.reward.price`) when the group was collected."""

    @property
    def complete(self) -> bool:
        return len(self.members) == self.expected
