"""Compares two trajectories: finds the first message that differs, and what differs in it.

Durations of calls, policy versions and log-probabilities are not compared: two sessions are equal if the
agent saw and wrote the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np
from numpy.typing import NDArray

from etude.records import Segment, ToolCall, ToolResult, Trajectory, Turn

Tokens = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first message in which two sessions differ."""

    turn: int
    """Its number, from 1."""
    aspects: tuple[str, ...]
    """What differs: `context`, `tokens`, `text`, `calls`, `results`; `missing` if one session has ended."""
    call: int | None
    """The first call, from 0, that differs or whose result differs."""
    token: int | None
    """The first position of the context, from 0, at which the tokens differ."""
    left: Turn | None
    right: Turn | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result of comparing two trajectories."""

    common_turns: int
    """Number of equal messages from the beginning."""
    divergence: Divergence | None
    outcome: Mapping[str, tuple[object, object]]
    """Differences in how they ended, by name: status, cause, reward."""

    @property
    def equal(self) -> bool:
        """Whether nothing differs."""
        return self.divergence is None and not self.outcome


def compare(left: Trajectory, right: Trajectory) -> Comparison:
    """Compares two trajectories message by message, up to the first that differs, and their outcomes."""
    segments = [{segment.id: (at, segment) for at, segment in enumerate(t.segments)} for t in (left, right)]
    divergence: Divergence | None = None
    for number, (one, other) in enumerate(zip_longest(left.turns, right.turns), 1):
        divergence = _divergence(number, one, other, segments[0], segments[1])
        if divergence is not None:
            break
    common = len(left.turns) if divergence is None else divergence.turn - 1
    return Comparison(common, divergence, _outcome(left, right))


_Segments = Mapping[str, tuple[int, Segment]]


def _divergence(
    number: int, left: Turn | None, right: Turn | None, left_segments: _Segments, right_segments: _Segments
) -> Divergence | None:
    if left is None or right is None:
        return Divergence(number, ("missing",), None, None, left, right)
    one, other = left_segments.get(left.segment_id), right_segments.get(right.segment_id)
    token = _first_difference(_context(one, left), _context(other, right))
    call = _first_call(left, right)
    differs = {
        "context": (one[0] if one else None) != (other[0] if other else None),
        "tokens": token is not None,
        "text": left.text != right.text,
        "calls": [_call(call) for call in left.calls] != [_call(call) for call in right.calls],
        "results": [_answer(result) for result in left.results] != [_answer(r) for r in right.results],
    }
    aspects = tuple(name for name, does in differs.items() if does)
    return Divergence(number, aspects, call, token, left, right) if aspects else None


def _context(found: tuple[int, Segment] | None, turn: Turn) -> Tokens:
    """The tokens of the context up to the end of the message."""
    return found[1].tokens[: turn.end] if found else np.zeros(0, dtype=np.int32)


def _first_difference(left: Tokens, right: Tokens) -> int | None:
    length = min(len(left), len(right))
    different = np.flatnonzero(left[:length] != right[:length])
    if len(different):
        return int(different[0])
    return None if len(left) == len(right) else length


def _first_call(left: Turn, right: Turn) -> int | None:
    pairs = [
        [(_call(call), _answer(result)) for call, result in zip_longest(turn.calls, turn.results)]
        for turn in (left, right)
    ]
    return next((at for at, (one, other) in enumerate(zip_longest(*pairs)) if one != other), None)


def _call(call: ToolCall | None) -> object:
    return None if call is None else (call.name, dict(call.arguments), call.error)


def _answer(result: ToolResult | None) -> object:
    return None if result is None else (result.output, result.error, result.finished)


def _outcome(left: Trajectory, right: Trajectory) -> dict[str, tuple[object, object]]:
    rewards = [trajectory.reward.total if trajectory.reward else None for trajectory in (left, right)]
    pairs: dict[str, tuple[object, object]] = {
        "status": (str(left.status), str(right.status)),
        "cause": (left.cause, right.cause),
        "reward": (rewards[0], rewards[1]),
    }
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
