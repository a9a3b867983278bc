"""Replicas lent between pools, such as from users to rollouts at night: by schedule, or by load.

A lent replica finishes what it has begun and takes new requests of its new pool only. Nothing is moved twice
within `hold_s`, and no pool is lent out below `keep` replicas.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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

    def __post_init__(self) -> None:
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

    def moves(self, replicas: Iterable[Replica], now_s: float, day_s: float) -> list[Move]:
        """What should move now. `day_s`: second of the day, UTC; `now_s`: of any clock that only grows."""
        every = sorted(replicas, key=lambda r: (r.work, r.name))
        if self._windows:
            return self._by_schedule(every, day_s)
        if self._by_load and now_s - self._moved_s >= self._hold_s:
            found = self._one_by_load(every)
            if found:
                self._moved_s = now_s
            return found
        return []

    def _by_schedule(self, replicas: Sequence[Replica], day_s: float) -> list[Move]:
        """Brings the numbers lent to what the open windows say."""
        due: dict[tuple[str, str], int] = {}
        for window in self._windows:
            key = (window.lender, window.borrower)
            due[key] = due.get(key, 0) + (window.count if window.open(day_s) else 0)
        found: list[Move] = []
        for (lender, borrower), count in due.items():
            lent = [r for r in replicas if r.home == lender and r.pool == borrower]
            found += [Move(r.name, lender) for r in lent[: max(0, len(lent) - count)]]
            at_home = [r for r in replicas if r.home == lender and r.pool == lender]
            wanted = min(count - len(lent), len(at_home) - self._keep)
            taken = {move.replica for move in found}
            found += [Move(r.name, borrower) for r in at_home[: max(0, wanted)] if r.name not in taken]
        return found

    def _one_by_load(self, replicas: Sequence[Replica]) -> list[Move]:
        for rule in self._by_load:
            lent = [r for r in replicas if r.home == rule.lender and r.pool == rule.borrower]
            at_home = [r for r in replicas if r.home == rule.lender and r.pool == rule.lender]
            lender, borrower = _load(replicas, rule.lender), _load(replicas, rule.borrower)
            if lent and (lender > rule.busy_tokens or borrower < rule.idle_tokens):
                return [Move(lent[0].name, rule.lender)]
            may_lend = len(lent) < rule.most and len(at_home) > self._keep
            if may_lend and borrower > rule.busy_tokens and lender < rule.idle_tokens:
                return [Move(at_home[0].name, rule.borrower)]
        return []


def _load(replicas: Sequence[Replica], pool: str) -> float:
    """Mean work of a pool's ready replicas; 0 for a pool that has none."""
    works = [r.work for r in replicas if r.pool == pool and r.ready]
    return sum(works) / len(works) if works else 0.0
