"""Agent sessions as load: several turns, a growing prefix, heavy-tailed lengths.

A turn is its input (the prompt or an observation), the model's output, and the tool time after it. Everything
is drawn from the seed in advance, so every peer gets the same work.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from etude.errors import ConfigError

_Z99 = 2.3263478740408408
"""99th percentile of the standard normal distribution."""


@dataclass(frozen=True, slots=True)
class LoadTurn:
    """One request of a session."""

    input_tokens: int
    """New input: the prompt, or an observation."""
    output_tokens: int
    """Tokens to sample."""
    tool_s: float = 0.0
    """Pause between the answer and the next turn."""


@dataclass(frozen=True, slots=True)
class LoadSession:
    """A session to play. Recorded inputs are sent as they are; otherwise inputs are generated."""

    id: str
    turns: tuple[LoadTurn, ...]
    inputs: tuple[NDArray[np.int32], ...] | None = None
    """[turns] token ids of each input, for recorded sessions."""
    outputs: tuple[NDArray[np.int32], ...] | None = None
    """[turns] token ids of each answer, for recorded sessions."""

    def recorded_prompt(self, turn: int) -> NDArray[np.int32]:
        """All recorded tokens before an answer. Raises ConfigError for a synthetic session."""
        if self.inputs is None or self.outputs is None:
            raise ConfigError(
                "made-up sessions have no token ids", field="api", received="tokens", fix="play recorded ones"
            )
        parts = [part for pair in zip(self.inputs, self.outputs, strict=True) for part in pair]
        return np.concatenate(parts[: 2 * turn + 1])

    @property
    def output_tokens(self) -> int:
        return sum(turn.output_tokens for turn in self.turns)


@dataclass(frozen=True, slots=True)
class LogNormal:
    """A log-normal distribution by its median and 99th percentile; if these are equal, a constant."""

    median: float
    p99: float

    def __post_init__(self) -> None:
        if not 0.0 <= self.median <= self.p99 or (self.median == 0.0 and self.p99 > 0.0):
            raise ConfigError(
                "must be 0 < median <= p99, or both 0", field="lognormal", received=(self.median, self.p99)
            )

    def draw(self, generator: np.random.Generator) -> float:
        """Draws one value."""
        normal = float(generator.standard_normal())
        if self.median == self.p99:
            return self.median
        return self.median * math.exp(normal * math.log(self.p99 / self.median) / _Z99)


@dataclass(frozen=True, slots=True)
class WorkloadShape:
    """Distributions of synthetic sessions. The defaults are the workload of the engine's benchmarks."""

    num_sessions: int = 32
    turns: LogNormal = LogNormal(6.0, 6.0)
    prompt_tokens: tuple[int, int] = (200, 800)
    """Uniform with both ends included, as for observations."""
    output_tokens: LogNormal = LogNormal(40.0, 400.0)
    observation_tokens: tuple[int, int] = (20, 200)
    tool_s: LogNormal = LogNormal(0.0, 0.0)
    max_turns: int = 200
    max_output_tokens: int = 2000
    """Longer draws are cut, as a client's `max_tokens` would."""

    def __post_init__(self) -> None:
        for name, (low, high) in (
            ("prompt_tokens", self.prompt_tokens),
            ("observation_tokens", self.observation_tokens),
        ):
            if not 1 <= low <= high:
                raise ConfigError("must be 1 <= low <= high", field=name, received=(low, high))
        for name, length in (("turns", self.turns), ("output_tokens", self.output_tokens)):
            if length.median < 1.0:
                raise ConfigError("the median must be at least 1", field=name, received=length.median)
        for name in ("num_sessions", "max_turns", "max_output_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError("must be at least 1", field=name, received=getattr(self, name))


def synthetic_sessions(shape: WorkloadShape, seed: int = 0) -> list[LoadSession]:
    """Sessions of this shape and seed; a shorter workload is a prefix of a longer one."""
    return [_session(shape, seed, number) for number in range(shape.num_sessions)]


def _session(shape: WorkloadShape, seed: int, number: int) -> LoadSession:
    generator = np.random.default_rng((seed, number))
    num_turns = _between(shape.turns.draw(generator), shape.max_turns)
    turns: list[LoadTurn] = []
    for turn in range(num_turns):
        low, high = shape.prompt_tokens if turn == 0 else shape.observation_tokens
        turns.append(
            LoadTurn(
                input_tokens=int(generator.integers(low, high + 1)),
                output_tokens=_between(shape.output_tokens.draw(generator), shape.max_output_tokens),
                tool_s=shape.tool_s.draw(generator),
            )
        )
    return LoadSession(f"s{seed}-{number}", tuple(turns))


def shorten(session: LoadSession, tokens: int) -> LoadSession:
    """The session, with all turns shortened in proportion if they have more than `tokens` in all."""
    total = sum(turn.input_tokens + turn.output_tokens for turn in session.turns)
    if total <= tokens:
        return session
    turns = tuple(
        replace(
            turn,
            input_tokens=max(1, turn.input_tokens * tokens // total),
            output_tokens=max(1, turn.output_tokens * tokens // total),
        )
        for turn in session.turns
    )
    return replace(session, turns=turns)


def _between(value: float, highest: int) -> int:
    return min(max(1, round(value)), highest)
