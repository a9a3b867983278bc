"""Replicas lent between pools, such as from users to rollouts at night: by schedule, or by load.

A lent replica finishes what it has begun and takes new requests of its new pool only. Nothing is lent by load
within `hold_s` of the last move, and no pool is lent out below `keep` replicas; who is loaded gets its own
back at once. What was lent or recalled by hand is left alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from etude.errors import ConfigError
from etude.inference.router.types import Replica

DAY_S = 86_400.0


@dataclass(frozen=True, slots=True)
class LendingWindow:
    """Every day from `start_s` to `end_s` (seconds of the day, UTC; over midnight if start > end)."""

    lender: str
    borrower: str
    count: int
    start_s: float
    end_s: float
    busy_tokens: float = math.inf
    """Above this load the lender gets all of them back, whatever the time, until it has been below for
    `hold_s`."""

    def __post_init__(self) -> None:
        if self.busy_tokens <= 0:
            raise ConfigError("must be positive", field="busy_tokens", received=self.busy_tokens)
        if not (0.0 <= self.start_s < DAY_S and 0.0 <= self.end_s < DAY_S) or self.count < 1:
            raise ConfigError(
                "count must be at least 1, times seconds of a day",
                field="LendingWindow",
                received=(self.count, self.start_s, self.end_s),
            )

    def open(self, day_s: float) -> bool:
        """Whether it is that time."""
        if self.start_s <= self.end_s:
            return self.start_s <= day_s < self.end_s
        return day_s >= self.start_s or day_s < self.end_s


@dataclass(frozen=True, slots=True)
class LendingByLoad:
    """Lends one replica at a time while the borrower is loaded and the lender is not.

    Load is the mean predicted rest of the requests in flight on a ready replica, in sampled tokens.
    """

    lender: str
    borrower: str
    busy_tokens: float
    """Loaded: above this."""
    idle_tokens: float
    """Not loaded: below this. Must be less than `busy_tokens`, else replicas would swing to and fro."""
    most: int = 1
    """Replicas that may be lent at once."""

    def __post_init__(self) -> None:
        if not 0.0 <= self.idle_tokens < self.busy_tokens:
            raise ConfigError("must be less than busy_tokens", field="idle_tokens", received=self.idle_tokens)
        if self.most < 1:
            raise ConfigError("must be at least 1", field="most", received=self.most)


@dataclass(frozen=True, slots=True)
class Move:
    """A replica that is to work for another pool from now on."""

    replica: str
    pool: str


class Lender:
    """Decides which replicas move. Pure: `moves` says it, the caller does it (`Router.lend`)."""

    def __init__(
        self,
        windows: Sequence[LendingWindow] = (),
        by_load: Sequence[LendingByLoad] = (),
        keep: int = 1,
        hold_s: float = 60.0,
    ) -> None:
        """`keep`: replicas that a pool has left at least. `hold_s`: from one move by load to the next.

        Raises ConfigError for windows and loads together, which would undo each other.
        """
        if windows and by_load:
            raise ConfigError("lend by schedule or by load, not both", field="by_load", fix="leave one out")
        self._windows = tuple(windows)
        self._by_load = tuple(by_load)
        self._keep = keep
        self._hold_s = hold_s
        self._moved_s = -hold_s
        """When the last move by load was, or a window's lender was last loaded."""

    def moves(
        self,
        replicas: Iterable[Replica],
        now_s: float,
        day_s: float,
        loads: Mapping[str, float] | None = None,
    ) -> list[Move]:
        """What should move now. `day_s`: second of the day, UTC; `now_s`: of any clock that only grows.
        `loads`: outstanding tokens a replica of pools whose requests do not pass here."""
        every = sorted(replicas, key=lambda r: (r.work, r.name))
        if self._windows:
            return self._by_schedule(every, now_s, day_s, loads or {})
        found = self._one_by_load(every, now_s - self._moved_s >= self._hold_s, loads or {})
        if found:
            self._moved_s = now_s
        return found

    def _by_schedule(
        self, replicas: Sequence[Replica], now_s: float, day_s: float, loads: Mapping[str, float]
    ) -> list[Move]:
        """Brings the numbers lent to what the open windows say."""
        due: dict[tuple[str, str], int] = {}
        for window in self._windows:
            key = (window.lender, window.borrower)
            if _load(replicas, window.lender, loads) > window.busy_tokens:
                self._moved_s = now_s
            held = window.busy_tokens < math.inf and now_s - self._moved_s < self._hold_s
            due[key] = due.get(key, 0) + (window.count if window.open(day_s) and not held else 0)
        found: list[Move] = []
        for (lender, borrower), count in due.items():
            lent, at_home = _standing(replicas, lender, borrower)
            free = [r for r in lent if not r.by_hand]
            found += [Move(r.name, lender) for r in free[: max(0, len(lent) - count)]]
            wanted = min(count - len(lent), len(at_home) - self._keep)
            free = [r for r in at_home if not r.by_hand]
            found += [Move(r.name, borrower) for r in free[: max(0, wanted)]]
        return found

    def _one_by_load(
        self, replicas: Sequence[Replica], may_lend: bool, loads: Mapping[str, float]
    ) -> list[Move]:
        for rule in self._by_load:
            lent, at_home = _standing(replicas, rule.lender, rule.borrower)
            lender, borrower = (_load(replicas, pool, loads) for pool in (rule.lender, rule.borrower))
            free = [r for r in lent if not r.by_hand]
            if free and (lender > rule.busy_tokens or (may_lend and borrower < rule.idle_tokens)):
                return [Move(free[0].name, rule.lender)]
            free = [r for r in at_home if not r.by_hand]
            able = may_lend and len(lent) < rule.most and len(at_home) > self._keep
            if free and able and borrower > rule.busy_tokens and lender < rule.idle_tokens:
                return [Move(free[0].name, rule.borrower)]
        return []


def _standing(replicas: Sequence[Replica], lender: str, borrower: str) -> tuple[list[Replica], list[Replica]]:
    """The lender's replicas that the borrower has, and those that it has itself."""
    own = [r for r in replicas if r.home == lender]
    return [r for r in own if r.pool == borrower], [r for r in own if r.pool == lender]


def _load(replicas: Sequence[Replica], pool: str, loads: Mapping[str, float]) -> float:
    """As it was told, else the mean work of a pool's ready replicas; 0 for a pool that has none."""
    if pool in loads:
        return loads[pool]
    works = [r.work for r in replicas if r.pool == pool and r.ready]
    return sum(works) / len(works) if works else 0.0
