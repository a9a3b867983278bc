"""The price of length: what a session spent, and a concave function of it.

The price of one more token falls with their number (Cursor, Composer): the model is quick where a task is
easy, and may work long where it is hard.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from etude.config import LengthConfig
from etude.records import Segment, Trajectory
from etude.tokens.grammar import CallFinished, CallStarted, ReasoningDelta, TextDelta
from etude.tokens.renderer import Renderer
from etude.tokens.stream import MessageStream

_UNIT = 1000.0


@dataclass(frozen=True, slots=True)
class Effort:
    """What a session spent. Tokens are those that were sampled, but for `output_tokens`."""

    thinking_tokens: int = 0
    call_tokens: int = 0
    message_tokens: int = 0
    output_tokens: int = 0
    """Tokens of tool results and later words of the user, framing included."""
    first_calls: int = 0
    """Turns with a call: their first calls."""
    parallel_calls: int = 0
    """Further calls of the same turns."""
    turns: int = 0

    def weighted(self, config: LengthConfig) -> float:
        """The weighted sum, in thousands."""
        return (
            config.thinking_token * self.thinking_tokens
            + config.call_token * self.call_tokens
            + config.message_token * self.message_tokens
            + config.output_token * self.output_tokens
            + config.call * (self.first_calls + config.parallel_share * self.parallel_calls)
            + config.turn * self.turns
        ) / _UNIT


def concave_price(x: float, k: float, q: float) -> float:
    """C(x) = ((1 + k x)^(1 - q) - 1) / (k (1 - q)), and log(1 + k x) / k where q = 1, for x >= 0.

    C(0) = 0, C'(0) = 1, and the slope falls as (1 + k x)^-q. Exact also near q = 1.
    """
    log = math.log1p(k * x)
    power = (1.0 - q) * log
    # expm1 keeps the digits that cancel where q is near 1, and its limit there is the logarithm.
    return (log if power == 0 else log * math.expm1(power) / power) / k


def measure_effort(trajectory: Trajectory, renderer: Renderer) -> Effort:
    """Counts what a trajectory spent: all segments, each token once."""
    counts = np.zeros(3, dtype=np.int64)
    output = 0
    for segment in trajectory.segments:
        output += _num_observed(segment)
        for start, end in _sampled_runs(segment):
            counts += _split_message(segment.tokens[start:end].tolist(), renderer)
    calls = [sum(call.error is None for call in turn.calls) for turn in trajectory.turns]
    first = sum(count > 0 for count in calls)
    thinking, in_calls, words = counts.tolist()
    return Effort(thinking, in_calls, words, output, first, sum(calls) - first, len(trajectory.turns))


def _num_observed(segment: Segment) -> int:
    """Tokens that were given after the first sampled one."""
    sampled = segment.sampled
    if not sampled.any():
        return 0
    return int((~sampled[int(sampled.argmax()) :]).sum())


def _sampled_runs(segment: Segment) -> Iterable[tuple[int, int]]:
    """[start, end) of each unbroken run of sampled tokens: a message each."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], segment.sampled, [False]]).astype(np.int8)))
    return zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)


def _split_message(tokens: Sequence[int], renderer: Renderer) -> np.ndarray:
    """[thinking, calls, words]: each token of one message in one of them.

    A token belongs to what the parser makes of it; one of which nothing comes yet (half a character, a tag)
    to what the next tokens turn out to be, and at the end to what was before.
    """
    stream = MessageStream(renderer)
    counts = np.zeros(3, dtype=np.int64)
    kind, waiting, in_call = 2, 0, False
    for token in tokens:
        waiting += 1
        for event in stream.feed([token]):
            if isinstance(event, CallStarted):
                in_call = True
            kind = _kind_of(event, kind, in_call)
            counts[kind] += waiting
            waiting = 0
            if isinstance(event, CallFinished):
                in_call = False
    counts[kind] += waiting
    return counts


def _kind_of(event: object, before: int, in_call: bool) -> int:
    if isinstance(event, ReasoningDelta):
        return 0
    if in_call:
        return 1
    return 2 if isinstance(event, TextDelta) else before
