"""A replica that is lent to a training run: it samples with the run's weights, and comes home to its own.

    home ──lend()──> lent ──recall(), end(), or a silent borrower──> returning ──> home
     |                 |                                                |
     users        no new users; those under way end          rollouts are aborted at once, and
                  before the run's weights are served        the weights that users get put back

Users never get a token of the run's weights, nor the run one of theirs: the engine swaps when the last user
has gone, and when the last rollout has. What serves users stays in host memory meanwhile. A loan is a lease:
who does not renew it loses it, so a run that dies, or a router, takes no replica with it.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from etude.config import WeightsConfig
from etude.errors import SamplerError
from etude.inference.exchange import Command, Event, Exchange
from etude.inference.server.errors import LoanConflictError, LoanOverError, UnavailableError
from etude.inference.server.home import HomeWeights, LendableEngine, in_thread
from etude.kit.tasks import unless
from etude.protocols import KvPolicy
from etude.records import PolicyVersion, Scores, WeightManifest
from etude.serving.access import is_token
from etude.weights import make_subscriber

_log = logging.getLogger("etude.inference.server")
_POLL_S = 10.0
"""An empty answer then: no connection stays silent for longer."""
_ABORT_S = 2.0
"""What has not ended so long after it was aborted is cancelled."""
_RETRY_S = 1.0
T = TypeVar("T")
Fetch = Callable[[WeightManifest], Mapping[str, Tensor]]


class LoanState(StrEnum):
    """Where a replica stands."""

    HOME = "home"
    LENT = "lent"
    RETURNING = "returning"


def fetch_from_store(url: str) -> Fetch:
    """Reads a run's weight store, or a relay of it. Raises StoreError."""
    return make_subscriber(WeightsConfig(url=url)).fetch


@dataclass(slots=True, eq=False)
class Loan:
    """One loan, and what the run does with it."""

    borrower: str
    lease_s: float
    renewed_s: float
    id: str = field(default_factory=lambda: secrets.token_hex(6))
    token: str = field(default_factory=lambda: secrets.token_urlsafe(32))
    """Opens the routes of this loan."""
    store: str = ""
    fetch: Fetch | None = None
    served: set[PolicyVersion] = field(default_factory=set[PolicyVersion])
    """Versions that it has had in service."""
    has_swapped: bool = False
    """Whether the engine may have other weights in service than those that users get."""
    exchanges: dict[str, Exchange] = field(default_factory=dict[str, Exchange])
    """By client: each process of the run has its own."""
    closing: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when it ends: nothing new is begun."""
    over: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when all that was in flight has been sent."""


def _over(loan: Loan) -> LoanOverError:
    return LoanOverError("the loan has ended", field="authorization", received=loan.id)


class LoanDesk:
    """Lends one replica, to one run at a time. For one event loop."""

    def __init__(
        self,
        engine: LendableEngine,
        home: WeightManifest,
        about: Mapping[str, Any],
        open_store: Callable[[str], Fetch] = fetch_from_store,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`home`: in service now. `about`: what a borrower learns of the engine. `open_store`: reads the
        store that a borrower names."""
        self.home = HomeWeights(engine, home)
        """The replica's WeightSink for administrators."""
        self.state = LoanState.HOME
        self.loan: Loan | None = None
        """From `lend` until the replica is home again."""
        self.last_return_s = 0.0
        """How long the last return took, from the recall to weights that users get."""
        self._engine, self._about = engine, about
        self._open_store = open_store
        self._clock = clock
        self._past: Loan | None = None
        self._watching: asyncio.Task[None] | None = None
        self._returning: asyncio.Task[None] | None = None
        self._until_no_user: Callable[[], Awaitable[None]] | None = None

    def watch_users(self, until_none: Callable[[], Awaitable[None]]) -> None:
        """`until_none` waits for the answers under way."""
        self._until_no_user = until_none

    def check_home(self) -> None:
        """Raises UnavailableError while users cannot be served here."""
        if self.state is not LoanState.HOME:
            raise UnavailableError(
                "the replica is lent to a training run",
                received=self.home.trouble or (self.loan.borrower if self.loan else None),
                fix="send the request to another replica",
            )

    # ---- the owner's side -----------------------------------------------------------------------

    async def lend(self, borrower: str, lease_s: float) -> Loan:
        """Takes nothing new of users from now on. Raises LoanConflictError where it is lent already, and
        WeightUpdateError where what it serves cannot be kept; then nothing has changed."""
        if self.loan is not None:
            raise LoanConflictError(
                "the replica is lent already", field="state", received=self.loan.borrower, fix="recall it"
            )
        await self.home.leave()
        self.loan = Loan(borrower, lease_s, self._clock())
        self.state = LoanState.LENT
        self._watching = asyncio.create_task(self._watch(self.loan))
        return self.loan

    async def recall(self, cause: str) -> None:
        """Brings the replica home. Idempotent."""
        if self.loan is not None and self._returning is None:
            _log.info("the replica comes home: %s", cause)
            self._returning = asyncio.create_task(self._return(self.loan))
        if self._returning is not None:
            await asyncio.shield(self._returning)

    async def _watch(self, loan: Loan) -> None:
        while (left_s := loan.renewed_s + loan.lease_s - self._clock()) > 0:  # noqa: ASYNC110 (a clock's time)
            await asyncio.sleep(left_s)
        await self.recall(f"{loan.borrower} was silent for {loan.lease_s:g} s")

    async def _return(self, loan: Loan) -> None:
        began_s = self._clock()
        self.state = LoanState.RETURNING
        loan.closing.set()
        ends = (exchange.end(_ABORT_S) for exchange in loan.exchanges.values())
        for error in await asyncio.gather(*ends, return_exceptions=True):
            if error is not None:  # users must get their replica all the same
                _log.error("a rollout could not be ended", exc_info=error)
        loan.over.set()
        while not await self._is_home(loan):  # noqa: ASYNC110 (nobody tells when it can)
            await asyncio.sleep(_RETRY_S)
        loan.fetch = None  # it holds two versions of the run's weights
        self._past, self.loan, self._returning = loan, None, None
        self.state = LoanState.HOME
        self.last_return_s = self._clock() - began_s
        if self._watching is not None:
            self._watching.cancel()

    async def _is_home(self, loan: Loan) -> bool:
        """Brings the engine to what users get; False where that failed. Administrators are let in between two
        attempts: their weights may be the remedy."""
        async with self.home.swapping:
            if loan.has_swapped and not await self.home.put_back():
                return False
            self.home.come_home()
            return True

    def standing(self) -> dict[str, Any]:
        """Where the replica stands, as JSON values."""
        version = self.home.current()
        return {
            "state": str(self.state),
            "borrower": None if self.loan is None else self.loan.borrower,
            "version": None if version is None else str(version),
            "last_return_s": self.last_return_s,
            "trouble": self.home.trouble or None,
        }

    # ---- the borrower's side --------------------------------------------------------------------

    def find(self, token: str) -> Loan:
        """The loan that a token opens; one that has just ended too. Raises LoanOverError."""
        for loan in (self.loan, self._past):
            if loan is not None and is_token(token, loan.token):
                return loan
        raise LoanOverError("there is no such loan, or it has ended", field="authorization")

    async def pulse(self, loan: Loan) -> Mapping[str, float]:
        """Renews the lease: the borrower lives. What the engine has done so far. Raises LoanOverError."""
        if loan.over.is_set():
            self._check_open(loan)
        loan.renewed_s = self._clock()
        return self._engine.usage()

    async def begin(self, loan: Loan, store: str) -> dict[str, Any]:
        """The run begins, or begins anew, with its weights in `store`; returns what it learns of the engine.

        Raises LoanOverError, StoreError.
        """
        self._check_open(loan)
        loan.renewed_s = self._clock()
        if loan.fetch is None or loan.store != store:
            loan.fetch, loan.store = self._open_store(store), store
        exchanges, loan.exchanges = loan.exchanges, {}
        await asyncio.gather(*(exchange.end(_ABORT_S) for exchange in exchanges.values()))
        return {**self._about, "lease_s": loan.lease_s}

    async def stage(self, loan: Loan, manifest: WeightManifest) -> None:
        """Fetches the run's weights, and puts them beside those in service. A recall does not wait for the
        fetching. Raises LoanOverError, WeightUpdateError, StoreError."""
        self._check_open(loan)
        fetch = loan.fetch
        if fetch is None:
            raise LoanConflictError("the loan has not begun", field="state", fix="begin it")
        tensors = await self._unless_over(loan, in_thread(lambda: fetch(manifest)))
        async with self.home.swapping:
            self._check_open(loan)
            await self._engine.stage(manifest, tensors)

    async def activate(self, loan: Loan, version: PolicyVersion, kv: KvPolicy) -> Mapping[str, float]:
        """Serves the run's weights, once no user is answered any more; as `pulse`. Raises LoanOverError,
        WeightUpdateError."""
        if self._until_no_user is not None:
            await self._unless_over(loan, self._until_no_user())
        async with self.home.swapping:
            self._check_open(loan)
            loan.has_swapped = True
            await self._engine.activate(version, kv)
            loan.served.add(version)
        return self._engine.usage()

    async def exchange(self, loan: Loan, commands: Sequence[Command], client: str) -> None:
        """See Exchange.exchange. Raises LoanOverError, and LoanConflictError before a version is served."""
        if loan.over.is_set():
            self._check_open(loan)
        if not loan.served:
            raise LoanConflictError("no version of the run is served yet", field="state", fix="activate one")
        exchange = loan.exchanges.setdefault(client, Exchange(self._engine))
        if loan.closing.is_set():  # what has begun is still sent
            exchange.refuse(commands, SamplerError("the replica is called home", received=loan.id))
        else:
            exchange.exchange(commands)

    async def forget(self, loan: Loan, client: str) -> None:
        """A process of the run is gone: ends what it had asked. Raises LoanOverError."""
        self._check_open(loan)
        exchange = loan.exchanges.pop(client, None)
        if exchange is not None:
            await exchange.end(_ABORT_S)

    async def poll(self, loan: Loan, client: str) -> list[Event]:
        """See Exchange.poll; empty when nothing has come for a while. Raises LoanOverError when the loan has
        ended and all that was to be sent has been."""
        exchange = loan.exchanges.setdefault(client, Exchange(self._engine))
        if not exchange.has_events:
            if loan.over.is_set():
                self._check_open(loan)
            waits = [asyncio.ensure_future(one) for one in (exchange.wait(), loan.over.wait())]
            try:
                await asyncio.wait(waits, timeout=_POLL_S, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for one in waits:
                    one.cancel()
        return await exchange.poll() if exchange.has_events else []

    async def score(self, loan: Loan, tokens: NDArray[np.int32], version: PolicyVersion) -> Scores:
        """See Sampler.score: under a version of the run's alone. Raises SamplerError, LoanOverError."""
        self._check_open(loan)
        if version not in loan.served:
            raise SamplerError("the loan does not serve this version", field="version", received=str(version))
        return await self._unless_over(loan, self._engine.score(tokens, version))

    async def end(self, loan: Loan) -> dict[str, Any]:
        """The run gives the replica back."""
        if self.loan is loan:
            await self.recall(f"{loan.borrower} gives it back")
        return self.standing()

    def _check_open(self, loan: Loan) -> None:
        if loan.closing.is_set():
            raise _over(loan)

    async def _unless_over(self, loan: Loan, work: Awaitable[T]) -> T:
        """What `work` gives, unless the loan ends first. Raises LoanOverError."""
        return await unless(work, loan.closing.wait(), _over(loan))
