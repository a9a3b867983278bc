"""Lends replicas to training runs and recalls them, as `borrowing.py` decides."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from etude.errors import EtudeError, PartLostError
from etude.inference.router.borrowing import LoanBook, ReplicaLoan
from etude.inference.router.server.events import object_in
from etude.inference.router.types import ReplicaState
from etude.kit.tasks import Tasks
from etude.serving.client import Answer, answer_error, read_json

if TYPE_CHECKING:
    from etude.inference.router.server.proxy import Proxy

_LEND_S = 60.0
"""Long, since the replica may have to read its own weights from disk."""
_RECALL_S = 120.0
_TICK_S = 0.02


class LoanKeeper:
    """The router's side of all loans. For one event loop."""

    def __init__(self, proxy: Proxy, token: str) -> None:
        """`token`: admin token of the replicas."""
        self.book = LoanBook()
        self.last_recall_s = 0.0
        """Time of the last recall, until the replica served users again."""
        self._proxy = proxy
        self._headers = {"authorization": f"Bearer {token}"}
        self._tasks = Tasks()

    def tick(self, now_s: float) -> None:
        """Starts all loans and recalls that are due. Returns at once."""
        alive = {
            name: replica
            for name, replica in self._proxy.router.replicas.items()
            if replica.state is not ReplicaState.EJECTED
        }
        for _ in self.book.expire(now_s):
            self._proxy.metrics.count("etude_router_borrowers_lost")
        for loan in self.book.end_due(alive):
            self._tasks.start(self._end(loan))
        for loan in self.book.begin_due(alive, now_s):
            alive[loan.replica].state = ReplicaState.JOINING
            self._tasks.start(self._lend(loan))

    async def wait_until_returned(self, replica: str) -> None:
        """Starts what is due, and waits until a replica's loan, if it is ending, has ended."""
        while True:
            self.tick(time.monotonic())
            loan = self.book.loans.get(replica)
            if loan is None or loan.is_granted:
                return
            await asyncio.sleep(_TICK_S)

    async def close(self) -> None:
        """Cancels calls in progress. Granted loans continue for as long as their runs renew them."""
        await self._tasks.close()

    async def _lend(self, loan: ReplicaLoan) -> None:
        borrower = self.book.borrowers.get(loan.borrower)
        body = {"borrower": loan.borrower, "lease_s": borrower.lease_s if borrower is not None else 1.0}
        try:
            answer = await self._ask("POST", loan.replica, _LEND_S, body)
            if not answer.is_success:
                raise answer_error(answer)
            granted = read_json(answer)
            loan.id, loan.token = granted["id"], granted["token"]
        except (EtudeError, KeyError, TypeError) as error:
            self.book.record_refusal(loan, time.monotonic())
            self._note_failure(loan, f"cannot be lent: {error}")
            return
        self._proxy.metrics.count("etude_router_loans", replica=loan.replica)
        self._proxy.members.record_probe(loan.replica, time.monotonic(), None)

    async def _end(self, loan: ReplicaLoan) -> None:
        began_s = time.monotonic()
        version: str | None = None
        try:
            answer = await self._ask("DELETE", loan.replica, _RECALL_S, None)
            version = object_in(answer.content).get("version") if answer.is_success else None
        except EtudeError as error:
            self._note_failure(loan, f"was not returned: {error!r}")
        finally:
            self.book.remove(loan)
        if isinstance(version, str):
            self._proxy.members.record_probe(loan.replica, time.monotonic(), version)
            self.last_recall_s = time.monotonic() - began_s

    async def _ask(self, method: str, replica: str, within_s: float, body: dict[str, Any] | None) -> Answer:
        address = self._proxy.addresses.get(replica)
        if address is None:
            raise PartLostError("the replica has left", field=replica)
        url = address.url.rstrip("/") + "/admin/loan"
        return await self._proxy.http.request(
            method, url, json=body, headers=self._headers, within_s=within_s
        )

    def _note_failure(self, loan: ReplicaLoan, cause: str) -> None:
        """Records a failure, and has the replica probed at once, to find out whether it serves users."""
        self._proxy.metrics.count("etude_router_loan_failures", replica=loan.replica)
        replica = self._proxy.router.replicas.get(loan.replica)
        if replica is not None:
            replica.cause, replica.next_probe_s = cause, 0.0
