"""Trajectories that left another one in its middle, as records of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from etude.records import Relation, Segment, Trajectory, TrajectoryId, VersionSpan


@dataclass(frozen=True, slots=True)
class ForkPoint:
    """A place in a trajectory: before one of its messages."""

    turn: int
    """Messages before it, of all contexts."""
    segment_id: str
    offset: int
    """Tokens of the segment before it."""


def renamed(trajectory: Trajectory, identity: TrajectoryId, facts: Mapping[str, Any]) -> Trajectory:
    """The trajectory under another id, its segments too, and with more `facts`."""
    before = str(trajectory.id)

    def name(segment_id: str) -> str:
        return str(identity) + segment_id.removeprefix(before)

    segments = tuple(
        replace(
            segment,
            id=name(segment.id),
            trajectory_id=str(identity),
            parent=None if segment.parent is None else (name(segment.parent[0]), segment.parent[1]),
        )
        for segment in trajectory.segments
    )
    turns = tuple(replace(one, segment_id=name(one.segment_id)) for one in trajectory.turns)
    return replace(
        trajectory, id=identity, segments=segments, turns=turns, facts={**trajectory.facts, **facts}
    )


def branch_of(
    trajectory: Trajectory, point: ForkPoint, identity: TrajectoryId, facts: Mapping[str, Any]
) -> Trajectory:
    """What came after the point, as a trajectory of its own that left the forked one there.

    `trajectory`: the forked one, or one that was told the same up to the point under the same id. Its first
    segment repeats the forked one's tokens up to the point as context: none of them is sampled, so none is
    trained. Segments and turns of earlier contexts are left out. Routes are kept: they cover every position.
    """
    first = next(n for n, segment in enumerate(trajectory.segments) if segment.id == point.segment_id)
    later = trajectory.segments[first:]
    ids = {segment.id for segment in later}
    kept = replace(
        trajectory, segments=later, turns=tuple(turn for turn in trajectory.turns if turn.segment_id in ids)
    )
    branch = renamed(kept, identity, facts)
    left = replace(
        context_until(branch.segments[0], point.offset),
        relation=Relation.FORK,
        parent=(point.segment_id, point.offset),
    )
    branch = replace(branch, segments=(left, *branch.segments[1:]))
    return replace(branch, facts={**branch.facts, "sampled_tokens": branch.num_sampled_tokens})


def context_until(segment: Segment, offset: int) -> Segment:
    """The segment with its tokens before `offset` turned into context: who sampled them is not told here."""
    sampled = segment.sampled.copy()
    sampled[:offset] = False
    return replace(
        segment,
        sampled=sampled,
        logprobs=np.where(sampled, segment.logprobs, np.float32(0.0)).astype(np.float32),
        version_spans=_from(segment.version_spans, offset),
        kv_oldest_spans=_from(segment.kv_oldest_spans, offset),
    )


def _from(spans: tuple[VersionSpan, ...], offset: int) -> tuple[VersionSpan, ...]:
    return tuple(replace(one, start=max(one.start, offset)) for one in spans if one.end > offset)
