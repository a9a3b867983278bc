"""Bookkeeping of replicas on loan to training runs. No I/O here: `server/loans.py` carries the decisions out.

A run that wants replicas checks in every few seconds to renew its lease. Of the replicas that serve its pool,
whether they belong there or are lent to it (`pools.py`), it gets up to the number that it wants. It loses one
as soon as the replica serves another pool, the run wants fewer, or its lease has expired.
"""

from __future__ import annotations

from collections import Counter
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
    """A run that wants replicas: the body of its check-in."""

    pool: Name
    wanted: int = Field(default=0, ge=0)
    """Most replicas."""
    lease_s: Number = 15.0
    """Time without a check-in after which the run loses its loans; clamped to `_LEASE_S`."""
    load_tokens: Number = 0.0
    """Outstanding tokens per engine of the run, whose requests do not pass through the router."""
    refused: list[str] = Field(default_factory=list[str])
    """Replicas that it cannot use."""
    over: list[str] = Field(default_factory=list[str])
    """Ids of loans that have ended on its side: ended by the replica or by the run."""

    @field_validator("lease_s")
    @classmethod
    def _bounded(cls, lease_s: float) -> float:
        least, most = _LEASE_S
        return min(max(lease_s, least), most)


@dataclass(slots=True, eq=False)
class ReplicaLoan:
    """The loan of one replica to a run: requested, granted, or ending."""

    replica: str
    borrower: str
    id: str = ""
    token: str = ""
    """Gives the run access to the replica; empty until the replica has granted the loan."""
    is_ending: bool = False

    @property
    def is_granted(self) -> bool:
        """Whether the replica has granted the loan, and is not being recalled."""
        return bool(self.token) and not self.is_ending


class LoanBook:
    """All borrowers and loans of a router. Times are seconds of any monotonic clock."""

    def __init__(self) -> None:
        self.borrowers: dict[str, Borrower] = {}
        """Runs, by name."""
        self.loans: dict[str, ReplicaLoan] = {}
        """Loans, by replica."""
        self._lease_ends_s: dict[str, float] = {}
        """By run."""
        self._retry_at_s: dict[str, float] = {}

    def check_in(self, name: str, borrower: Borrower, now_s: float) -> None:
        """Adds a run or renews its lease, and sets what it wants."""
        self.borrowers[name], self._lease_ends_s[name] = borrower, now_s + borrower.lease_s

    def check_out(self, name: str) -> bool:
        """Removes a run, whose loans are then due to end; False if it is not known."""
        self._lease_ends_s.pop(name, None)
        return self.borrowers.pop(name, None) is not None

    def expire(self, now_s: float) -> list[str]:
        """Removes the runs whose leases have expired; returns their names."""
        lost = [name for name, end_s in self._lease_ends_s.items() if end_s < now_s]
        for name in lost:
            self.check_out(name)
        return lost

    def granted_to(self, borrower: str) -> list[ReplicaLoan]:
        """The granted loans of a run."""
        return [loan for loan in self.loans.values() if loan.borrower == borrower and loan.is_granted]

    def load_by_pool(self) -> dict[str, float]:
        """Outstanding tokens per replica by pool, as reported by its most loaded run."""
        found: dict[str, float] = {}
        for borrower in self.borrowers.values():
            found[borrower.pool] = max(found.get(borrower.pool, 0.0), borrower.load_tokens)
        return found

    # ---- decisions ------------------------------------------------------------------------------

    def end_due(self, replicas: Mapping[str, Replica]) -> list[ReplicaLoan]:
        """Marks the granted loans that must end now as ending, and returns them."""
        kept = Counter[str]()
        found: list[ReplicaLoan] = []
        for loan in self.loans.values():
            if loan.is_ending:
                continue
            borrower, replica = self.borrowers.get(loan.borrower), replicas.get(loan.replica)
            if borrower is not None and replica is not None and replica.pool == borrower.pool:
                is_used = loan.replica not in borrower.refused and loan.id not in borrower.over
                if is_used and kept[loan.borrower] < borrower.wanted:
                    kept[loan.borrower] += 1
                    continue
            if loan.is_granted:
                loan.is_ending = True
                found.append(loan)
        return found

    def begin_due(self, replicas: Mapping[str, Replica], now_s: float) -> list[ReplicaLoan]:
        """Adds the loans that can begin now, and returns them; their replicas have yet to grant them."""
        found: list[ReplicaLoan] = []
        for name, borrower in self.borrowers.items():
            free = borrower.wanted - sum(loan.borrower == name for loan in self.loans.values())
            for replica in replicas.values():
                able = replica.ready and replica.pool == borrower.pool and replica.name not in self.loans
                is_time = self._retry_at_s.get(replica.name, now_s) <= now_s
                if free > 0 and able and is_time and replica.name not in borrower.refused:
                    found.append(ReplicaLoan(replica.name, name))
                    self.loans[replica.name] = found[-1]
                    free -= 1
        return found

    def record_refusal(self, loan: ReplicaLoan, now_s: float) -> None:
        """Removes a loan that the replica has not granted; it is asked again after `_RETRY_S`."""
        self._retry_at_s[loan.replica] = now_s + _RETRY_S
        self.remove(loan)

    def remove(self, loan: ReplicaLoan) -> None:
        """Removes an ended loan."""
        if self.loans.get(loan.replica) is loan:
            del self.loans[loan.replica]
