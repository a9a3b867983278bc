"""Where each part's time went: what it did, or what it waited for."""

from __future__ import annotations

from collections.abc import Callable, Mapping

WORK = frozenset({"train", "publish"})
"""What the trainer's weights are moved by, or moved for. The rest is waiting, looking and saving."""


class Utilisation:
    """Seconds of the trainer by state, and of other parts by what they tell."""

    def __init__(self, clock: Callable[[], float], parts: Callable[[], Mapping[str, float]]) -> None:
        """`clock`: seconds. `parts`: what other parts have spent so far, by name."""
        self._total: dict[str, float] = {}
        self._clock = clock
        self._parts = parts
        self._state = ""
        self._since_s = clock()
        self._taken: dict[str, float] = {}
        self._parts_taken: dict[str, float] = dict(parts())

    @property
    def state(self) -> str:
        """What the trainer is at; empty before the first `enter`."""
        return self._state

    def enter(self, state: str) -> None:
        """From now on the trainer is in this state: `wait` (for rollouts), `train`, `publish`, `parity` or
        `save`."""
        now_s = self._clock()
        if self._state:
            self._total[self._state] = self._total.get(self._state, 0.0) + now_s - self._since_s
        self._state, self._since_s = state, now_s

    @property
    def total(self) -> dict[str, float]:
        """Seconds of the trainer so far, by state."""
        self.enter(self._state)
        return dict(self._total)

    def take(self) -> dict[str, float]:
        """Seconds since the last call: `trainer_<state>_s`, and `<name>` of other parts."""
        total, parts = self.total, dict(self._parts())
        figures = {f"trainer_{s}_s": v - self._taken.get(s, 0.0) for s, v in total.items()}
        figures |= {name: value - self._parts_taken.get(name, 0.0) for name, value in parts.items()}
        self._taken, self._parts_taken = total, parts
        return figures

    @property
    def busy_share(self) -> float:
        """The part of its time in which the trainer trained or published."""
        total = self.total
        whole = sum(total.values())
        return sum(v for state, v in total.items() if state in WORK) / whole if whole else 0.0
