"""Which training run has which replica on loan: the books. No I/O here, `server/loans.py` does what is due.

A run that wants replicas checks in every few seconds, and so stays known. Of the replicas that work for its
pool, whether they belong there or are lent to it (`pools.py`), it gets up to the number that it wants. It
loses one as soon as the replica works for another pool, or it wants fewer, or it has fallen silent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field, field_validator

from etude.config.base import Section
from etude.config.routing import Name
from etude.inference.router.types import Replica

_RETRY_S = 5.0
_LEASE_S = (0.1, 3600.0)
Number = Annotated[float, Field(ge=0, le=1e15)]


class Borrower(Section, strict=True):
    """A run that wants replicas, as it says itself when it checks in."""

    pool: Name
    wanted: int = Field(default=0, ge=0)
    """Replicas, at most."""
    lease_s: Number = 15.0
    """It is forgotten when it has been silent for so long, within bounds."""
    load_tokens: Number = 0.0
    """Outstanding on each of its engines: what it samples does not pass here."""
    refused: list[str] = Field(default_factory=list[str])
    """Replicas that are of no use to it."""
    over: list[str] = Field(default_factory=list[str])
    """Loans that it no longer has: the replica, or the run, has ended them."""

    @field_validator("lease_s")
    @classmethod
    def _bounded(cls, lease_s: float) -> float:
        least, most = _LEASE_S
        return min(max(lease_s, least), most)


@dataclass(slots=True, eq=False)
class Lent:
    """One replica that a run has, is about to get, or must give back."""

    replica: str
    borrower: str
    id: str = ""
    token: str = ""
    """Opens the replica to the run; empty while the replica is only asked."""
    is_ending: bool = False

    @property
    def is_granted(self) -> bool:
        """The replica has taken the loan, and is not called home."""
        return bool(self.token) and not self.is_ending


class Borrowing:
    """The books. Times are seconds of any one clock that only grows."""

    def __init__(self) -> None:
        self.borrowers: dict[str, Borrower] = {}
        """By name."""
        self.lent: dict[str, Lent] = {}
        """By replica."""
        self._heard_s: dict[str, float] = {}
        """When each of them checked in last."""
        self._not_before_s: dict[str, float] = {}

    def check_in(self, name: str, borrower: Borrower, now_s: float) -> None:
        """A run is there, and says what it wants from now on."""
        self.borrowers[name], self._heard_s[name] = borrower, now_s

    def leave(self, name: str) -> bool:
        """A run wants nothing more; False if it is not known."""
        self._heard_s.pop(name, None)
        return self.borrowers.pop(name, None) is not None

    def expire(self, now_s: float) -> list[str]:
        """Forgets the runs that have fallen silent; returns their names."""
        gone = [name for name, one in self.borrowers.items() if self._heard_s[name] + one.lease_s < now_s]
        for name in gone:
            self.leave(name)
        return gone

    def granted(self, borrower: str) -> list[Lent]:
        """What a run may use now."""
        return [one for one in self.lent.values() if one.borrower == borrower and one.is_granted]

    def loads(self) -> dict[str, float]:
        """Outstanding tokens a replica, by pool, as the runs say: the most loaded of a pool counts."""
        found: dict[str, float] = {}
        for one in self.borrowers.values():
            found[one.pool] = max(found.get(one.pool, 0.0), one.load_tokens)
        return found

    # ---- what is due ----------------------------------------------------------------------------

    def to_end(self, replicas: Mapping[str, Replica]) -> list[Lent]:
        """Loans that must end now; they are noted as ending."""
        kept: dict[str, int] = {}
        found: list[Lent] = []
        for one in self.lent.values():
            if one.is_ending:
                continue
            borrower, replica = self.borrowers.get(one.borrower), replicas.get(one.replica)
            if borrower is not None and replica is not None and replica.pool == borrower.pool:
                is_used = one.replica not in borrower.refused and one.id not in borrower.over
                if is_used and kept.get(one.borrower, 0) < borrower.wanted:
                    kept[one.borrower] = kept.get(one.borrower, 0) + 1
                    continue
            if one.is_granted:
                found.append(one)
        for one in found:
            one.is_ending = True
        return found

    def to_lend(self, replicas: Mapping[str, Replica], now_s: float) -> list[Lent]:
        """Loans that may begin now; they are noted as asked."""
        found: list[Lent] = []
        for name, borrower in self.borrowers.items():
            free = borrower.wanted - sum(one.borrower == name for one in self.lent.values())
            for replica in replicas.values():
                able = replica.ready and replica.pool == borrower.pool and replica.name not in self.lent
                late = self._not_before_s.get(replica.name, now_s) <= now_s
                if free > 0 and able and late and replica.name not in borrower.refused:
                    found.append(Lent(replica.name, name))
                    self.lent[replica.name] = found[-1]
                    free -= 1
        return found

    def failed(self, one: Lent, now_s: float) -> None:
        """The replica did not take it; it is asked again after a while."""
        self._not_before_s[one.replica] = now_s + _RETRY_S
        self.ended(one)

    def ended(self, one: Lent) -> None:
        """The loan is over."""
        if self.lent.get(one.replica) is one:
            del self.lent[one.replica]
