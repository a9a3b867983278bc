"""The time that a stage and a whole run have left, from recent steps and from the run's forecast."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence

_WINDOW_S = 30.0
"""Window of recent steps: a stage's first steps are slow, and a machine's speed may change."""
_LEAST_REPORTS = 4
_TRUSTED_AFTER_S = 60.0
"""When a stage's own speed counts for later stages as much as that of the stages before it."""


class TimeLeft:
    """Estimates the time left from a run's reports. Times are in seconds of `clock`. Implements Observer."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._expected: dict[str, float] = {}
        self._slowness = self._slowness_before = 1.0
        """Duration of recent steps, divided by their forecast; the same when the stage began."""
        self._name = ""
        self._total_steps = self._step = 0
        self._begun_s = 0.0
        self._reports: deque[tuple[float, int]] = deque()
        """(when, step) of recent reports."""

    def expect_stages(self, stages: Sequence[tuple[str, float]]) -> None:
        self._expected = dict(stages)

    def begin(self, name: str, total_steps: int) -> None:
        """A stage begins, or is resumed at the step of its first report."""
        self._name, self._total_steps, self._step = name, total_steps, 0
        self._begun_s, self._slowness_before = self._clock(), self._slowness
        self._reports.clear()

    def advance(self, step: int) -> None:
        """Records that `step` steps of the stage are done."""
        now_s, self._step = self._clock(), step
        self._reports.append((now_s, step))
        while len(self._reports) > _LEAST_REPORTS and now_s - self._reports[1][0] > _WINDOW_S:
            self._reports.popleft()
        if self.steps_per_s and self._expected.get(self._name):
            own = self._total_steps / self.steps_per_s / self._expected[self._name]
            share = (now_s - self._begun_s) / (now_s - self._begun_s + _TRUSTED_AFTER_S)
            self._slowness = share * own + (1 - share) * self._slowness_before

    @property
    def steps_per_s(self) -> float:
        """Rate between recent reports; 0 with fewer than two."""
        if len(self._reports) < 2:
            return 0.0
        (first_s, first), (last_s, last) = self._reports[0], self._reports[-1]
        return (last - first) / max(last_s - first_s, 1e-9)

    @property
    def stage_s(self) -> float | None:
        """Time left of this stage: by recent steps, or by the forecast until there are any."""
        if self._total_steps and self.steps_per_s:
            since_s = self._clock() - self._reports[-1][0]
            return max(0.0, (self._total_steps - self._step) / self.steps_per_s - since_s)
        if self._name not in self._expected:
            return None
        expected_s = self._slowness * self._expected[self._name]
        if self._reports:
            return expected_s * (1 - self._step / max(self._total_steps, 1))
        return max(0.0, expected_s - (self._clock() - self._begun_s))

    @property
    def run_s(self) -> float | None:
        """Time left of the run: later stages are assumed to exceed their forecast as much as this one."""
        stage_s = self.stage_s
        if stage_s is None or self._name not in self._expected:
            return None
        names = list(self._expected)
        later_s = sum(self._expected[name] for name in names[names.index(self._name) + 1 :])
        return stage_s + self._slowness * later_s

    def words(self) -> str:
        """`40 s left, 12 min of the run`; empty without an estimate."""
        stage_s, run_s = self.stage_s, self.run_s
        if stage_s is None:
            return ""
        return f"{duration(stage_s)} left" + (f", {duration(run_s)} of the run" if run_s is not None else "")


def duration(seconds: float) -> str:
    """`40 s`, `12 min`, `3.5 h`: with the precision of an estimate."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
