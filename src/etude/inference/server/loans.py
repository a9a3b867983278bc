"""Loans of a replica to a training run: it samples with the run's weights, then returns to its own.

    home ──lend()──> lent ──recall(), end(), or an expired lease───> returning ──> home
     |                 |                                                |
     users        no new users; answers in progress end      rollouts are aborted at once, and
                  before the run's weights are served        the users' weights are restored

Users never get a token of the run's weights, nor the run one of theirs: the engine swaps only when the last
user's answer, or the last rollout, has ended. The users' weights stay in host memory meanwhile. A loan is a
lease: it ends unless it is renewed, so a run or router that dies keeps no replica.
"""

from __future__ import annotations

import asyncio
import functools
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
"""Time after which a poll answers with nothing, so that no connection is silent for longer."""
_ABORT_S = 2.0
"""Time after an abort at which requests that have not ended are cancelled."""
_RETRY_S = 1.0
T = TypeVar("T")
Fetch = Callable[[WeightManifest], Mapping[str, Tensor]]


class LoanState(StrEnum):
    """Loan state of a replica."""

    HOME = "home"
    LENT = "lent"
    RETURNING = "returning"


def fetch_from_store(url: str) -> Fetch:
    """Opens a run's weight store, or a relay of it, for reading. Raises StoreError."""
    return make_subscriber(WeightsConfig(url=url)).fetch


@dataclass(slots=True, eq=False)
class Loan:
    """One loan: its lease, and what the run does under it."""

    borrower: str
    lease_s: float
    renewed_s: float = field(default_factory=time.monotonic)
    id: str = field(default_factory=lambda: secrets.token_hex(6))
    token: str = field(default_factory=lambda: secrets.token_urlsafe(32))
    """Bearer token of this loan's routes."""
    store: str = ""
    fetch: Fetch | None = None
    served: set[PolicyVersion] = field(default_factory=set[PolicyVersion])
    """Versions of the run that have been in service."""
    has_swapped: bool = False
    """Whether the engine may have the run's weights in service."""
    exchanges: dict[str, Exchange] = field(default_factory=dict[str, Exchange])
    """One per client: each process of the run is a client."""
    closing: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the loan begins to end: no new calls are accepted."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when all requests in flight have ended."""


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
    ) -> None:
        """`home`: of the weights in service. `about`: facts about the engine for borrowers. `open_store`:
        opens the store that a borrower names."""
        self.home = HomeWeights(engine, home)
        """The replica's WeightSink for administrators."""
        self.state = LoanState.HOME
        self.loan: Loan | None = None
        """The current loan, from `lend` until the replica is home again."""
        self.last_return_s = 0.0
        """Duration of the last return, from the recall until the users' weights served again."""
        self._engine, self._about = engine, about
        self._open_store = open_store
        self._last_loan: Loan | None = None
        self._watching: asyncio.Task[None] | None = None
        self._returning: asyncio.Task[None] | None = None
        self.wait_until_idle: Callable[[], Awaitable[None]] = functools.partial(asyncio.sleep, 0)
        """Waits for users' answers in progress; set by the server."""

    def check_home(self) -> None:
        """Raises UnavailableError while the replica is not at home."""
        if self.state is not LoanState.HOME:
            raise UnavailableError(
                "the replica is lent to a training run",
                received=self.home.trouble or (self.loan.borrower if self.loan else None),
                fix="send the request to another replica",
            )

    # ---- the owner's side -----------------------------------------------------------------------

    async def lend(self, borrower: str, lease_s: float) -> Loan:
        """Lends the replica: it accepts no new requests of users. Raises LoanConflictError if it is lent
        already, WeightUpdateError if its weights cannot be kept; then nothing has changed."""
        if self.loan is not None:
            raise LoanConflictError(
                "the replica is lent already", field="state", received=self.loan.borrower, fix="recall it"
            )
        await self.home.begin_loan()
        self.loan = Loan(borrower, lease_s)
        self.state = LoanState.LENT
        self._watching = asyncio.create_task(self._watch(self.loan))
        return self.loan

    async def recall(self, cause: str) -> None:
        """Ends the loan, if any, and waits until the replica serves users again. Idempotent."""
        if self.loan is not None and self._returning is None:
            _log.info("the replica returns from its loan: %s", cause)
            self._returning = asyncio.create_task(self._return(self.loan))
        if self._returning is not None:
            await asyncio.shield(self._returning)

    async def _watch(self, loan: Loan) -> None:
        while (left_s := loan.renewed_s + loan.lease_s - time.monotonic()) > 0:  # noqa: ASYNC110 (a clock's time)
            await asyncio.sleep(left_s)
        await self.recall(f"{loan.borrower} sent nothing for {loan.lease_s:g} s")

    async def _return(self, loan: Loan) -> None:
        began_s = time.monotonic()
        self.state = LoanState.RETURNING
        loan.closing.set()
        ends = (exchange.end(_ABORT_S) for exchange in loan.exchanges.values())
        for error in await asyncio.gather(*ends, return_exceptions=True):
            if error is not None:  # users must get their replica nevertheless
                _log.error("a rollout could not be ended", exc_info=error)
        loan.ended.set()
        while not await self._try_return(loan):  # noqa: ASYNC110 (there is no event to wait for)
            await asyncio.sleep(_RETRY_S)
        loan.fetch = None  # it holds two versions of the run's weights
        self._last_loan, self.loan, self._returning = loan, None, None
        self.state = LoanState.HOME
        self.last_return_s = time.monotonic() - began_s
        if self._watching is not None:
            self._watching.cancel()

    async def _try_return(self, loan: Loan) -> bool:
        """Restores the users' weights; False if that failed. Between two attempts administrators may activate
        other weights, which may be the remedy."""
        async with self.home.swap_lock:
            if loan.has_swapped and not await self.home.restore():
                return False
            self.home.end_loan()
            return True

    def status(self) -> dict[str, Any]:
        """The loan state of the replica, as JSON values."""
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
        """The loan with this token: the current or the last one. Raises LoanOverError."""
        for loan in (self.loan, self._last_loan):
            if loan is not None and is_token(token, loan.token):
                return loan
        raise LoanOverError("there is no such loan, or it has ended", field="authorization")

    async def pulse(self, loan: Loan) -> Mapping[str, float]:
        """Renews the lease; returns the engine's usage counters. Raises LoanOverError."""
        if loan.ended.is_set():
            self._check_open(loan)
        loan.renewed_s = time.monotonic()
        return self._engine.usage()

    async def begin(self, loan: Loan, store: str) -> dict[str, Any]:
        """Begins, or restarts, the run's use of the loan, with its weights in `store`; returns facts about
        the engine.

        Raises LoanOverError, StoreError.
        """
        self._check_open(loan)
        loan.renewed_s = time.monotonic()
        if loan.fetch is None or loan.store != store:
            loan.fetch, loan.store = self._open_store(store), store
        exchanges, loan.exchanges = loan.exchanges, {}
        await asyncio.gather(*(exchange.end(_ABORT_S) for exchange in exchanges.values()))
        return {**self._about, "lease_s": loan.lease_s}

    async def stage(self, loan: Loan, manifest: WeightManifest) -> None:
        """Fetches and stages the run's weights. A recall does not wait for the fetch. Raises LoanOverError,
        WeightUpdateError, StoreError."""
        self._check_open(loan)
        fetch = loan.fetch
        if fetch is None:
            raise LoanConflictError("the loan has not begun", field="state", fix="begin it")
        tensors = await self._unless_over(loan, in_thread(lambda: fetch(manifest)))
        async with self.home.swap_lock:
            self._check_open(loan)
            await self._engine.stage(manifest, tensors)

    async def activate(self, loan: Loan, version: PolicyVersion, kv: KvPolicy) -> Mapping[str, float]:
        """Activates the run's weights once no user's answer is in progress; returns usage counters as
        `pulse`. Raises LoanOverError, WeightUpdateError."""
        await self._unless_over(loan, self.wait_until_idle())
        async with self.home.swap_lock:
            self._check_open(loan)
            loan.has_swapped = True
            await self._engine.activate(version, kv)
            loan.served.add(version)
        return self._engine.usage()

    async def exchange(self, loan: Loan, commands: Sequence[Command], client: str) -> None:
        """See Exchange.exchange. Raises LoanOverError, and LoanConflictError before a version is served."""
        if loan.ended.is_set():
            self._check_open(loan)
        if not loan.served:
            raise LoanConflictError("no version of the run is served yet", field="state", fix="activate one")
        exchange = loan.exchanges.setdefault(client, Exchange(self._engine))
        if loan.closing.is_set():  # requests in flight still end in order
            exchange.refuse(commands, SamplerError("the replica is being recalled", received=loan.id))
        else:
            exchange.exchange(commands)

    async def forget(self, loan: Loan, client: str) -> None:
        """Removes a client whose process has ended, with its requests. Raises LoanOverError."""
        self._check_open(loan)
        exchange = loan.exchanges.pop(client, None)
        if exchange is not None:
            await exchange.end(_ABORT_S)

    async def poll(self, loan: Loan, client: str) -> list[Event]:
        """See Exchange.poll; returns nothing after `_POLL_S` without events. Raises LoanOverError once the
        loan has ended and all events are delivered."""
        exchange = loan.exchanges.setdefault(client, Exchange(self._engine))
        if not exchange.has_events:
            if loan.ended.is_set():
                self._check_open(loan)
            waits = [asyncio.ensure_future(wait) for wait in (exchange.wait(), loan.ended.wait())]
            try:
                await asyncio.wait(waits, timeout=_POLL_S, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()
        return await exchange.poll() if exchange.has_events else []

    async def score(self, loan: Loan, tokens: NDArray[np.int32], version: PolicyVersion) -> Scores:
        """See Sampler.score; only for versions of the run. Raises SamplerError, LoanOverError."""
        self._check_open(loan)
        if version not in loan.served:
            raise SamplerError("the loan does not serve this version", field="version", received=str(version))
        return await self._unless_over(loan, self._engine.score(tokens, version))

    async def end(self, loan: Loan) -> dict[str, Any]:
        """Ends the loan on behalf of the run."""
        if self.loan is loan:
            await self.recall(f"{loan.borrower} returned it")
        return self.status()

    def _check_open(self, loan: Loan) -> None:
        if loan.closing.is_set():
            raise _over(loan)

    async def _unless_over(self, loan: Loan, work: Awaitable[T]) -> T:
        """The result of `work`, unless the loan ends first. Raises LoanOverError."""
        return await unless(work, loan.closing.wait(), _over(loan))
