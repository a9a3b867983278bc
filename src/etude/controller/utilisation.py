"""Utilisation of the parts: seconds that each spent working and waiting, by state."""

from __future__ import annotations

from collections.abc import Callable, Mapping

WORK = frozenset({"train", "publish"})
"""States that count as the trainer's work. The others are waiting, parity checks and saving."""


class Utilisation:
    """Seconds of the trainer by state, and of other parts as they report them."""

    def __init__(self, clock: Callable[[], float], parts: Callable[[], Mapping[str, float]]) -> None:
        """`clock`: in seconds. `parts`: seconds that other parts have spent so far, by name."""
        self._total: dict[str, float] = {}
        self._clock = clock
        self._parts = parts
        self.state = ""
        """The trainer's current state; empty before the first `enter`."""
        self._since_s = clock()
        self._reported = dict(parts())

    def enter(self, state: str) -> None:
        """Changes the trainer's state: `wait` (for rollouts), `train`, `publish`, `parity` or `save`."""
        now_s = self._clock()
        if self.state:
            self._total[self.state] = self._total.get(self.state, 0.0) + now_s - self._since_s
        self.state, self._since_s = state, now_s

    @property
    def total(self) -> dict[str, float]:
        """Seconds of the trainer so far, by state."""
        self.enter(self.state)
        return dict(self._total)

    def pop_seconds(self) -> dict[str, float]:
        """Seconds since the last call: `trainer_<state>_s`, and `<name>` of other parts."""
        now = {f"trainer_{state}_s": seconds for state, seconds in self.total.items()} | dict(self._parts())
        figures = {name: value - self._reported.get(name, 0.0) for name, value in now.items()}
        self._reported = now
        return figures

    @property
    def busy_share(self) -> float:
        """Share of its time in which the trainer trained or published."""
        total = self.total
        whole = sum(total.values())
        return sum(v for state, v in total.items() if state in WORK) / whole if whole else 0.0
