"""Lends replicas to training runs and calls them home: what the books (`borrowing.py`) say is due."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

from etude.errors import EtudeError, PartLostError
from etude.inference.router.borrowing import Borrowing, Lent
from etude.inference.router.types import ReplicaState
from etude.kit.tasks import Tasks
from etude.serving.client import Answer, read_json, refused

if TYPE_CHECKING:
    from etude.inference.router.server.proxy import Proxy

_LEND_S = 60.0
"""A replica may have to read the weights that it keeps from disk."""
_RECALL_S = 120.0
_TICK_S = 0.02
_CREATED = 201


class LoanKeeper:
    """The router's side of all loans. For one event loop."""

    def __init__(self, proxy: Proxy, token: str) -> None:
        """`token`: the replicas' administrators'."""
        self.books = Borrowing()
        self.last_recall_s = 0.0
        """From the recall of a replica to its word that it serves users again."""
        self._proxy = proxy
        self._headers = {"authorization": f"Bearer {token}"}
        self._tasks = Tasks()

    def tick(self, now_s: float) -> None:
        """Begins what is due. Returns at once."""
        alive = {
            name: replica
            for name, replica in self._proxy.router.replicas.items()
            if replica.state is not ReplicaState.EJECTED
        }
        for _ in self.books.expire(now_s):
            self._proxy.metrics.count("etude_router_borrowers_lost")
        for one in self.books.to_end(alive):
            self._tasks.start(self._end(one))
        for one in self.books.to_lend(alive, now_s):
            alive[one.replica].ready = False
            self._tasks.start(self._lend(one))

    async def until_home(self, replica: str) -> None:
        """Begins what is due, and waits until a replica's loan is over, if it is to end."""
        while True:
            self.tick(time.monotonic())
            one = self.books.lent.get(replica)
            if one is None or one.is_granted:
                return
            await asyncio.sleep(_TICK_S)

    async def close(self) -> None:
        """Stops what is under way. Loans go on for as long as their runs renew them."""
        await self._tasks.close()

    async def _lend(self, one: Lent) -> None:
        borrower = self.books.borrowers.get(one.borrower)
        body = {"borrower": one.borrower, "lease_s": borrower.lease_s if borrower is not None else 1.0}
        try:
            answer = await self._ask("POST", one.replica, _LEND_S, body)
            if answer.status_code != _CREATED:
                raise refused(answer)
            said = read_json(answer)
            one.id, one.token = said["id"], said["token"]
        except (EtudeError, KeyError, TypeError) as error:
            self.books.failed(one, time.monotonic())
            self._note_failure(one, f"cannot be lent: {error}")
            return
        self._proxy.metrics.count("etude_router_loans", replica=one.replica)
        self._proxy.members.answered(one.replica, time.monotonic(), None)

    async def _end(self, one: Lent) -> None:
        began_s = time.monotonic()
        version: str | None = None
        try:
            answer = await self._ask("DELETE", one.replica, _RECALL_S, None)
            version = read_json(answer).get("version") if answer.is_success else None
        except (EtudeError, AttributeError) as error:
            self._note_failure(one, f"does not come home: {error!r}")
        finally:
            self.books.ended(one)
        if isinstance(version, str):
            self._proxy.members.answered(one.replica, time.monotonic(), version)
            self.last_recall_s = time.monotonic() - began_s

    async def _ask(self, method: str, replica: str, within_s: float, body: dict[str, Any] | None) -> Answer:
        address = self._proxy.addresses.get(replica)
        if address is None:
            raise PartLostError("the replica has left", field=replica)
        url = address.url.rstrip("/") + "/admin/loan"
        return await self._proxy.http.request(
            method, url, json=body, headers=self._headers, within_s=within_s
        )

    def _note_failure(self, one: Lent, cause: str) -> None:
        """Its next probe says whether it serves users."""
        self._proxy.metrics.count("etude_router_loan_failures", replica=one.replica)
        replica = self._proxy.router.replicas.get(one.replica)
        if replica is not None:
            replica.cause, replica.next_probe_s = cause, 0.0
