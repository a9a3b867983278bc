"""Forks of a session: choice of the turn, sandboxes of the siblings, and their trajectories.

    session ---- turn 0 -- turn 1 -- turn 2 -- turn 3 (its end)     the forked one; not graded yet
                             \\-- turn 2' ...                         siblings: the same tokens, copies of the
                              \\- turn 2'' ...                        sandbox, noise of their own

A fork that is not possible is refused with a reason, which is counted: the session itself is graded as usual.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import numpy as np

from etude.config import ForkTurn
from etude.environment.forking import fidelity_of
from etude.environment.history import causes_of
from etude.environment.sessions import EnvironmentSession
from etude.errors import AgentError, InfrastructureError
from etude.kit.tasks import finish_all
from etude.records import GroupOrigin, Relation, Segment, Trajectory, TrajectoryId, VersionSpan
from etude.sandbox.errors import LiveProcessesError, Unsupported


class ForkRefusal(StrEnum):
    """Why a session was not forked. Metrics count them as `forks_refused_<reason>`."""

    TOO_SHORT = "too_short"
    """It has no message after its first."""
    NO_EDIT = "no_edit"
    """No message after its first changed a file."""
    LIVE_PROCESSES = "live_processes"
    """Background commands lived, and the sandbox's forks copy files alone."""
    DIFFERENT = "different"
    """Replayed calls had other results: the state could not be reproduced."""
    UNSUPPORTED = "unsupported"
    """Sandboxes of this backend cannot be copied."""
    SANDBOX_ENDED = "sandbox_ended"
    """The agent had ended its sandbox."""
    INFRASTRUCTURE = "infrastructure"
    """Not a single copy could be made."""


@dataclass(frozen=True, slots=True)
class SiblingSpec:
    """One session of a fork group, before it begins."""

    identity: TrajectoryId
    rng_key: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ForkPlan:
    """How one session is to be forked."""

    turn: ForkTurn
    siblings: tuple[SiblingSpec, ...]
    rng_key: tuple[int, ...]
    """Key of the choice of a random turn."""


@dataclass(frozen=True, slots=True)
class ForkedEpisode:
    """A session and the siblings that branched off at one of its turns."""

    trajectory: Trajectory
    """The whole session."""
    siblings: tuple[Trajectory, ...] = ()
    """Empty without a fork."""
    origin: GroupOrigin | None = None
    refused: ForkRefusal | None = None


@dataclass(frozen=True, slots=True)
class ForkedSessions:
    """Sessions for the siblings, in the state before one of the forked session's messages."""

    turn: int
    """Number of messages before it, of all contexts."""
    origin: GroupOrigin
    sessions: tuple[EnvironmentSession | InfrastructureError, ...]
    """One for each sibling, or the error that prevented it."""

    @property
    def made(self) -> list[EnvironmentSession]:
        """Those without an error."""
        return [session for session in self.sessions if isinstance(session, EnvironmentSession)]


def choose_turn(trajectory: Trajectory, turn: ForkTurn, rng_key: Sequence[int]) -> int | ForkRefusal:
    """The number of the message that the siblings sample anew. A function of its arguments."""
    numbers = [n for n, one in enumerate(trajectory.turns) if n > 0 and one.end > one.start]
    if not numbers:
        return ForkRefusal.TOO_SHORT
    match turn:
        case "random":
            return numbers[int(np.random.default_rng(rng_key).integers(len(numbers)))]
        case "entropy":
            # max keeps the first of equals.
            return max(numbers, key=lambda number: _surprise(trajectory, number))
        case "first_edit":
            edits = [number for number in numbers if _is_edit(trajectory, number)]
            if not edits or any(_is_edit(trajectory, n) for n in range(numbers[0])):
                return ForkRefusal.NO_EDIT
            return edits[0]


async def fork_at_turn(
    env_session: EnvironmentSession, trajectory: Trajectory, turn: int, count: int
) -> ForkedSessions | ForkRefusal:
    """Copies of the session as it was before message `turn`, or why there are none. The caller closes them.

    The session must not be submitted yet.
    """
    at, done = trajectory.turns[turn], sum(bool(message.calls) for message in trajectory.turns[:turn])
    passed = env_session.snapshots.until(done)
    snapshot = passed[-1].snapshot if passed else ""
    try:
        fidelity = await fidelity_of(env_session)
        sessions = await env_session.fork(count, done)
    except LiveProcessesError:
        return ForkRefusal.LIVE_PROCESSES
    except Unsupported:
        return ForkRefusal.UNSUPPORTED
    except AgentError:
        return ForkRefusal.SANDBOX_ENDED
    except InfrastructureError:
        return ForkRefusal.INFRASTRUCTURE
    forked = ForkedSessions(turn, GroupOrigin(at.segment_id, at.start, snapshot, fidelity), tuple(sessions))
    if not forked.made:
        return ForkRefusal.INFRASTRUCTURE
    if any(not causes_of(difference) for session in forked.made for difference in session.differences):
        await finish_all(session.close() for session in forked.made)
        return ForkRefusal.DIFFERENT
    return forked


def _surprise(trajectory: Trajectory, number: int) -> float:
    """Mean negative log-probability of a message's tokens."""
    turn = trajectory.turns[number]
    segment = next(segment for segment in trajectory.segments if segment.id == turn.segment_id)
    return -float(segment.logprobs[turn.start : turn.end].mean(dtype=np.float64))


def _is_edit(trajectory: Trajectory, number: int) -> bool:
    results = trajectory.turns[number].results
    return any(result.facts.get("kind") == "edit" and result.facts["changed"] for result in results)


def renamed(trajectory: Trajectory, identity: TrajectoryId, facts: Mapping[str, Any]) -> Trajectory:
    """The trajectory and its segments under another id, with more `facts`."""
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
    turns = tuple(replace(turn, segment_id=name(turn.segment_id)) for turn in trajectory.turns)
    return replace(
        trajectory, id=identity, segments=segments, turns=turns, facts={**trajectory.facts, **facts}
    )


def branch_of(
    trajectory: Trajectory, origin: GroupOrigin, identity: TrajectoryId, facts: Mapping[str, Any]
) -> Trajectory:
    """The part after the origin, as a separate trajectory that branched off the forked one there.

    `trajectory`: the forked one, or one that had the same inputs up to there under the same id. The result's
    first segment repeats the tokens up to there as context: they are not marked as sampled, so they are not
    trained on. Segments and turns of earlier contexts are left out. Routes are kept: they cover every
    position.
    """
    first = next(n for n, segment in enumerate(trajectory.segments) if segment.id == origin.segment_id)
    later = trajectory.segments[first:]
    ids = {segment.id for segment in later}
    kept = replace(
        trajectory, segments=later, turns=tuple(turn for turn in trajectory.turns if turn.segment_id in ids)
    )
    branch = renamed(kept, identity, facts)
    left = replace(
        context_until(branch.segments[0], origin.offset),
        relation=Relation.FORK,
        parent=(origin.segment_id, origin.offset),
    )
    branch = replace(branch, segments=(left, *branch.segments[1:]))
    return replace(branch, facts={**branch.facts, "sampled_tokens": branch.num_sampled_tokens})


def context_until(segment: Segment, offset: int) -> Segment:
    """The segment with its tokens before `offset` as context, without their policy versions."""
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
    return tuple(replace(span, start=max(span.start, offset)) for span in spans if span.end > offset)
