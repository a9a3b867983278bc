"""Alarms when the agent's behaviour drifts from its recent baseline.

    rl rows --> MonitoredSink --> DriftMonitor --> `alarm` rows, and a line for people
                     |
                     +--> the underlying sink, unchanged

A reward can rise while the agent learns to skip reading, to write out comments or to leave its to-dos open:
the figures of `summarize_behaviour` show it, and nobody watches forty curves at night. A pass rate can rise
because failing sessions are voided: the figures of `summarize_voided` show that.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from etude.config import MonitorConfig
from etude.observe.metrics import MetricRow, MetricSink
from etude.observe.observer import Observer
from etude.observe.voided import compare_voided_shares

WATCHED_KIND = "rl"
ALARM_KIND = "alarm"

Direction = Literal["up", "down", "both"]

WATCHED: Mapping[str, Direction] = {
    "edits_per_turn": "both",
    "calls_per_turn": "both",
    "parallel_share": "down",
    "reads_before_edits": "down",
    "questions": "both",
    "terminal_share": "both",
    "comment_share": "both",
    "malformed": "up",
    "open_todos": "up",
    "finish_share": "down",
    "sampled_tokens": "up",
}
"""Figures of `summarize_behaviour`, and the direction of change that raises an alarm."""

_ROUNDING = 1e-12
_LEAST_MEAN = 0.02
"""Lower bound of baselines in relative changes: a share that rises from 0 changes by no finite factor."""


@dataclass(frozen=True, slots=True)
class Alarm:
    """One figure that has drifted from its baseline or left its bounds."""

    name: str
    step: int
    recent: float
    """Mean over the last steps."""
    baseline: float
    """Mean over the steps before; NaN for a bound."""
    reason: str

    def __str__(self) -> str:
        return f"step {self.step}: {self.name} is {self.recent:.3g}: {self.reason}"


class DriftMonitor:
    """Compares recent steps with those before. An alarm is raised once, until it has cleared."""

    def __init__(self, config: MonitorConfig) -> None:
        self._config = config
        self._history: dict[int, Mapping[str, float]] = {}
        self._active: set[str] = set()

    def observe(self, step: int, values: Mapping[str, float | str]) -> list[Alarm]:
        """Adds the figures of one step, in place of this and later ones if repeated; returns new alarms."""
        for later in [known for known in self._history if known >= step]:
            del self._history[later]
        self._history[step] = {name: value for name in values if (value := _number(values[name])) is not None}
        oldest = len(self._history) - self._config.baseline_steps - self._config.recent_steps
        for known in sorted(self._history)[: max(0, oldest)]:
            del self._history[known]
        found = [alarm for name in self._names() if (alarm := self._judge(name, step)) is not None]
        found += self._judge_voided(step)
        fresh = [alarm for alarm in found if alarm.name not in self._active]
        self._active = {alarm.name for alarm in found}
        return fresh

    def _judge_voided(self, step: int) -> list[Alarm]:
        """An alarm if sessions whose tests fail are voided more often than others, over all kept steps."""
        shares = compare_voided_shares(self._history.values())
        if shares is None:
            return []
        reason = f"of sessions whose visible tests fail; where they pass it is {shares[1]:.3g}"
        return [Alarm("voided_share", step, shares[0], shares[1], reason)]

    def _names(self) -> list[str]:
        return [*WATCHED, *(name for name in self._config.bounds if name not in WATCHED)]

    def _judge(self, name: str, step: int) -> Alarm | None:
        config = self._config
        steps = sorted(self._history)
        recent = self._series(name, steps[-config.recent_steps :])
        if len(recent) < config.recent_steps:
            return None
        now = statistics.fmean(recent)
        if name in config.bounds:
            low, high = config.bounds[name]
            if not low <= now <= high:
                return Alarm(name, step, now, math.nan, f"outside of [{low:g}, {high:g}]")
        before = self._series(name, steps[: -config.recent_steps])
        if name not in WATCHED or len(before) < config.baseline_steps:
            return None
        mean = statistics.fmean(before)
        if not _is_wrong_way(now - mean, WATCHED[name]) or not self._is_drift(now - mean, mean, before):
            return None
        return Alarm(name, step, now, mean, f"it was {mean:.3g} over the {len(before)} steps before")

    def _is_drift(self, change: float, mean: float, before: Sequence[float]) -> bool:
        size = abs(change)
        error = statistics.stdev(before) * math.sqrt(1 / self._config.recent_steps + 1 / len(before))
        least = self._config.min_change * max(abs(mean), _LEAST_MEAN)
        return size > _ROUNDING and size >= least and size > self._config.deviations * error

    def _series(self, name: str, steps: Sequence[int]) -> list[float]:
        return [self._history[step][name] for step in steps if name in self._history[step]]


class MonitoredSink:
    """A metric sink that monitors RL rows and writes alarm rows after those whose figures drift."""

    def __init__(
        self,
        sink: MetricSink,
        config: MonitorConfig,
        observer: Observer,
        history: Iterable[MetricRow] = (),
    ) -> None:
        """`history`: rows from before the run was resumed; they raise no alarms now."""
        self._sink = sink
        self._monitor = DriftMonitor(config) if config.enabled else None
        self._observer = observer
        for row in history:
            if row["kind"] == WATCHED_KIND and self._monitor is not None:
                self._monitor.observe(int(row["step"]), row)

    def write(self, kind: str, step: int, values: Mapping[str, float | str]) -> None:
        """Writes the row, and after an RL row the alarms that it raises."""
        self._sink.write(kind, step, values)
        if kind != WATCHED_KIND or self._monitor is None:
            return
        for alarm in self._monitor.observe(step, values):
            figures = {"recent": alarm.recent, "baseline": alarm.baseline}
            self._sink.write(ALARM_KIND, step, {"name": alarm.name, **figures, "reason": alarm.reason})
            self._observer.say(f"alarm: {alarm}")

    def close(self) -> None:
        """Closes the sink."""
        self._sink.close()


def _is_wrong_way(change: float, direction: Direction) -> bool:
    return direction == "both" or (change > 0) == (direction == "up")


def _number(value: float | str) -> float | None:
    """None for text, NaN and infinities."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
