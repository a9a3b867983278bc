"""Lending of replicas between pools, such as from users to rollouts at night: by schedule, or by load (the
mean predicted remaining work of a ready replica's requests, in sampled tokens).

A lent replica finishes its requests in flight and takes new ones of its new pool only. No replica is lent by
load within `hold_s` of the last move, and no pool keeps fewer than `keep` replicas; a loaded pool gets its
own back at once. Replicas that were lent or recalled by hand are not moved.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from etude.config.routing import LendingConfig, LendingWindowConfig
from etude.inference.router.types import Replica

DAY_S = 86_400.0


@dataclass(frozen=True, slots=True)
class Move:
    """A decision that a replica works for another pool from now on."""

    replica: str
    pool: str


class Lender:
    """Decides which replicas move; the caller carries the moves out (`Router.lend`)."""

    def __init__(self, config: LendingConfig | None = None) -> None:
        self._config = config or LendingConfig()
        self._moved_s = -self._config.hold_s
        """Time of the last move by load, or at which a window's lender was last loaded."""

    def moves(
        self,
        replicas: Iterable[Replica],
        now_s: float,
        day_s: float,
        loads: Mapping[str, float] | None = None,
    ) -> list[Move]:
        """The moves that are due. `day_s`: second of the day, UTC; `now_s`: of any monotonic clock. `loads`:
        outstanding tokens per replica of pools whose requests do not pass through the router."""
        every = sorted(replicas, key=lambda r: (r.work, r.name))
        if self._config.windows:
            return self._by_schedule(every, now_s, day_s, loads or {})
        found = self._one_by_load(every, now_s - self._moved_s >= self._config.hold_s, loads or {})
        if found:
            self._moved_s = now_s
        return found

    def _by_schedule(
        self, replicas: Sequence[Replica], now_s: float, day_s: float, loads: Mapping[str, float]
    ) -> list[Move]:
        """Moves that bring the numbers of lent replicas to those of the open windows."""
        due: dict[tuple[str, str], int] = {}
        for window in self._config.windows:
            key = (window.lender, window.borrower)
            if window.busy_tokens and _load(replicas, window.lender, loads) > window.busy_tokens:
                self._moved_s = now_s
            held = window.busy_tokens > 0 and now_s - self._moved_s < self._config.hold_s
            due[key] = due.get(key, 0) + (window.count if _is_open(window, day_s) and not held else 0)
        found: list[Move] = []
        for (lender, borrower), count in due.items():
            lent, at_home = _by_holder(replicas, lender, borrower)
            free = [r for r in lent if not r.by_hand]
            found += [Move(r.name, lender) for r in free[: max(0, len(lent) - count)]]
            wanted = min(count - len(lent), len(at_home) - self._config.keep)
            free = [r for r in at_home if not r.by_hand]
            found += [Move(r.name, borrower) for r in free[: max(0, wanted)]]
        return found

    def _one_by_load(
        self, replicas: Sequence[Replica], may_lend: bool, loads: Mapping[str, float]
    ) -> list[Move]:
        for rule in self._config.by_load:
            lent, at_home = _by_holder(replicas, rule.lender, rule.borrower)
            lender, borrower = (_load(replicas, pool, loads) for pool in (rule.lender, rule.borrower))
            free = [r for r in lent if not r.by_hand]
            if free and (lender > rule.busy_tokens or (may_lend and borrower < rule.idle_tokens)):
                return [Move(free[0].name, rule.lender)]
            free = [r for r in at_home if not r.by_hand]
            able = may_lend and len(lent) < rule.most and len(at_home) > self._config.keep
            if free and able and borrower > rule.busy_tokens and lender < rule.idle_tokens:
                return [Move(free[0].name, rule.borrower)]
        return []


def _is_open(window: LendingWindowConfig, day_s: float) -> bool:
    """Whether the window is open; it spans midnight if it begins after its end."""
    if window.start_s <= window.end_s:
        return window.start_s <= day_s < window.end_s
    return day_s >= window.start_s or day_s < window.end_s


def _by_holder(
    replicas: Sequence[Replica], lender: str, borrower: str
) -> tuple[list[Replica], list[Replica]]:
    """The lender's replicas that work for the borrower, and those that work for itself."""
    own = [r for r in replicas if r.home == lender]
    return [r for r in own if r.pool == borrower], [r for r in own if r.pool == lender]


def _load(replicas: Sequence[Replica], pool: str, loads: Mapping[str, float]) -> float:
    """A pool's load: as given in `loads`, else the mean work of its ready replicas, or 0 without any."""
    if pool in loads:
        return loads[pool]
    works = [r.work for r in replicas if r.pool == pool and r.ready]
    return sum(works) / len(works) if works else 0.0
