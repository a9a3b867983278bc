"""Distributions of simulated sessions: number of turns, lengths of messages, tool times, outcomes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random

from etude.records import Task

_P99 = 2.3263478740408408
"""The 99th percentile of the standard normal distribution."""
_NUM_LEVELS = 3


def lognormal_sigma(p99_over_median: float) -> float:
    """Sigma of the lognormal distribution with this ratio of 99th percentile to median."""
    return math.log(p99_over_median) / _P99


@dataclass(frozen=True, slots=True)
class SessionShape:
    """One session, drawn before it begins. One entry per turn; the last turn calls no tool."""

    message_tokens: tuple[int, ...]
    tool_s: tuple[float, ...]
    grade_s: float
    passes: bool


@dataclass(frozen=True, slots=True)
class SessionShapes:
    """Distributions of sessions. Every draw is a function of (seed, task number, index in the group)."""

    seed: int = 0
    turns_median: float = 8.0
    """Median for tasks of the middle level; each level has 1.5 times as many turns as the one below."""
    turns_p99_over_median: float = 3.0
    message_tokens_median: float = 96.0
    message_tokens_p99_over_median: float = 4.0
    tool_median_s: float = 2.0
    tool_p99_over_median: float = 10.0
    unsolvable_share: float = 0.15
    """Share of tasks that no session solves; as many are solved by all. The other pass rates are uniform."""
    most_turns: int = 40

    def task(self, number: int) -> Task:
        """The task with this number; usable as a TaskSource."""
        level = 1 + Random(f"level {self.seed} {number}").randrange(_NUM_LEVELS)
        return Task(f"task-{number}", "Mend it.", {}, metadata={"level": level})

    def draw(self, task: Task, number: int, index: int) -> SessionShape:
        """Draws the session with this index in the task's group."""
        source = Random(f"session {self.seed} {number} {index}")
        level = int(task.metadata["level"])
        turns = self.turns_median * 1.5 ** (level - 2) * _spread(source, self.turns_p99_over_median)
        num_turns = min(self.most_turns, max(1, round(turns)))
        lengths = (
            self.message_tokens_median * _spread(source, self.message_tokens_p99_over_median)
            for _ in range(num_turns)
        )
        tools = (self.tool_median_s * _spread(source, self.tool_p99_over_median) for _ in range(num_turns))
        return SessionShape(
            tuple(max(1, round(length)) for length in lengths),
            tuple(tools)[:-1],
            self.tool_median_s * _spread(source, self.tool_p99_over_median),
            source.random() < self._pass_rate(number),
        )

    def _pass_rate(self, number: int) -> float:
        place = Random(f"pass rate {self.seed} {number}").random()
        sure = self.unsolvable_share
        return min(1.0, max(0.0, (place - sure) / (1 - 2 * sure)))


def _spread(source: Random, p99_over_median: float) -> float:
    """A lognormal draw with median 1."""
    return math.exp(source.gauss(0.0, lognormal_sigma(p99_over_median)))
