"""An event queue in virtual time."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

Action = Callable[[], None]


class VirtualClock:
    """Runs events in order of time, and those of one instant in the order of scheduling."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._heap: list[tuple[float, int, Action]] = []
        self._numbers = itertools.count()

    def at(self, time_s: float, action: Action) -> None:
        """Schedules `action` for `time_s`, or for now if that has passed."""
        heapq.heappush(self._heap, (max(time_s, self.now_s), next(self._numbers), action))

    def after(self, delay_s: float, action: Action) -> None:
        """Schedules `action` for `delay_s` from now."""
        self.at(self.now_s + delay_s, action)

    def run(self, until: Callable[[], bool]) -> None:
        """Runs events until none is left or `until()` holds."""
        while self._heap and not until():
            self.now_s, _, action = heapq.heappop(self._heap)
            action()
