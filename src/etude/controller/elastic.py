"""Elastic engines: replicas that a run borrows from a serving pool, and returns.

    ElasticPool ──every poll_s: number wanted───> router ──lends, recalls──> replica
         │       <──the run's current loans───────┘                            ^
         └─ EngineFleet.join, leave ── BorrowedEngine ── weights, requests ────┘

A borrowed replica is an engine of the fleet like any other: it activates the version in service before it
gets requests, and its pending requests move to another engine when it leaves. It leaves when the router no
longer lists its loan; at once, when the replica itself reports that it was recalled; when it does not answer;
and when the router has been silent for a lease's time. A replica that failed is requested again after a
pause, which grows with every failure.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from etude.config import ElasticConfig, RunConfig
from etude.controller.borrowed_engine import BorrowedEngine, Needs
from etude.controller.remote.engines import EngineProcess
from etude.controller.remote.fleet import EngineFleet
from etude.controller.supervision import FaultJournal
from etude.errors import ConfigError, EtudeError, UserError
from etude.kit.retry import Backoff
from etude.kit.secrets import read_secret
from etude.kit.tasks import end_tasks
from etude.observe import MetricSink, Observer
from etude.protocols import Handle
from etude.serving.client import Client

KIND = "elastic"
"""Kind of the metric rows: one per event of a borrowed replica."""
_DAY_S = 86_400.0
_DRAIN_S = 30.0
"""More than a replica needs to end its requests."""
_PAUSE = Backoff(base_s=2.0, most_s=300.0)
"""Before a replica that failed is requested again."""
_UNKNOWN_TOKENS = 1e9
"""Load sent to the router where sessions run in workers: their requests do not pass through this process."""


@dataclass(slots=True, eq=False)
class _Loan:
    """A loan of the run."""

    id: str
    replica: str
    url: str
    token: str
    over: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the replica must leave the fleet."""
    engine: BorrowedEngine | None = None
    is_ready: bool = False
    """Whether it samples for the run."""
    is_lost: bool = False
    """Whether it has stopped answering."""
    life: asyncio.Task[None] | None = None
    """Runs from joining the fleet to leaving it."""


class ElasticPool:
    """Borrows replicas for a run. Use as an async context manager; for one event loop."""

    def __init__(
        self,
        config: RunConfig,
        needs: Needs,
        fleet: EngineFleet,
        metrics: MetricSink,
        observer: Observer,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises ConfigError where the token cannot be read."""
        self._settings: ElasticConfig = config.elastic
        self._name = f"{config.name}-{uuid.uuid4().hex[:8]}"
        """Unique to this process: two runs of one name must not share a loan."""
        self._has_workers = config.cluster.workers > 0
        self._store = store_address(config)
        self._needs = needs
        self._fleet = fleet
        self._journal = FaultJournal(metrics, observer, kind=KIND)
        self._clock = clock
        self._held: dict[str, _Loan] = {}
        """By replica."""
        self._over: set[str] = set()
        """Loans that have ended here and that the router still lists."""
        self._refused: set[str] = set()
        """Replicas that do not fit the run."""
        self._pauses: dict[str, tuple[int, float]] = {}
        """Replica that failed -> number of failures in a row, and end of its pause."""
        self._wants = not config.elastic.busy_tokens
        self._answered_s = clock()
        self._is_answering = True
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        secret = read_secret(config.elastic.token, "elastic.token")
        self._http = Client(config.elastic.router, secret, within_s=max(2.0, config.elastic.poll_s))

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        await end_tasks(self._task)
        for held in self._held.values():
            held.over.set()
        try:
            await asyncio.gather(*(held.life for held in self._held.values() if held.life is not None))
        finally:
            with contextlib.suppress(EtudeError):  # else the replicas' leases expire
                await self._http.request("DELETE", self._path)
            await self._http.close()

    @property
    def num_lent(self) -> int:
        """Number of replicas that sample for the run now."""
        return sum(held.is_ready for held in self._held.values())

    @property
    def _path(self) -> str:
        return f"/router/borrowers/{self._name}"

    async def _run(self) -> None:
        while True:
            self._wake.clear()
            try:
                await self._adjust()
            except Exception as error:  # a full disk, or a defect of our own: it is retried
                with contextlib.suppress(Exception):  # and recorded as soon as possible
                    self._record_silence(repr(error))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._settings.poll_s):
                    await self._wake.wait()

    async def _adjust(self) -> None:
        """Requests the current loans from the router; starts new ones and ends those no longer listed."""
        loans = await self._check_in()
        if loans is None:
            if self._clock() - self._answered_s < self._settings.lease_s:
                return
            loans = {}
        for name, held in self._held.items():
            if name not in loans or loans[name]["id"] != held.id:
                held.over.set()
        self._over &= {loan["id"] for loan in loans.values()}
        for name, loan in loans.items():
            if name not in self._held and loan["id"] not in self._over:
                held = self._held[name] = _Loan(loan["id"], name, loan["url"], loan["token"])
                held.life = asyncio.create_task(self._use(held))

    # ---- the router -----------------------------------------------------------------------------

    async def _check_in(self) -> dict[str, dict[str, Any]] | None:
        """Reports the wanted number to the router; returns the loans by replica, None without an answer."""
        settings = self._settings
        load_tokens = _UNKNOWN_TOKENS if self._has_workers else self._fleet.load_tokens
        self._wants = wants(settings, self._wants, load_tokens)
        may = self._wants and settings.open_at(time.time() % _DAY_S)
        body = {
            "pool": settings.pool,
            "wanted": settings.most if may else 0,
            "lease_s": settings.lease_s,
            "load_tokens": load_tokens,
            "refused": sorted(self._refused | self._paused()),
            "over": sorted(self._over),
        }
        try:
            answer = await self._http.ask("PUT", self._path, json=body)
            loans = {loan["replica"]: loan for loan in answer["loans"]}
        except (EtudeError, KeyError, TypeError) as error:
            self._record_silence(str(error) or repr(error))
            return None
        if not self._is_answering:
            self._journal.record("router", "answers")
        self._answered_s, self._is_answering = self._clock(), True
        return loans

    def _paused(self) -> set[str]:
        return {replica for replica, (_, until_s) in self._pauses.items() if self._clock() < until_s}

    def _pause(self, replica: str) -> None:
        num_failures = self._pauses.get(replica, (0, 0.0))[0] + 1
        self._pauses[replica] = (num_failures, self._clock() + _PAUSE.pause_s(num_failures))

    def _record_silence(self, cause: str) -> None:
        if self._is_answering:
            self._journal.record("router", "does not lend", cause)
        self._is_answering = False

    # ---- one replica ----------------------------------------------------------------------------

    async def _use(self, held: _Loan) -> None:
        """Keeps the replica in the fleet until its loan ends."""
        part, began = f"borrowed {held.replica}", self._clock()

        def lost() -> None:
            if held.is_ready and not held.over.is_set():  # else it is joining, or leaving in an orderly way
                held.is_lost = True
                held.over.set()

        async def spawn(avoid: frozenset[str]) -> Handle[EngineProcess]:
            held.engine = BorrowedEngine(held.url, held.token, self._store, self._needs, held.over.set, lost)
            return held.engine

        joining = asyncio.ensure_future(self._fleet.join(part, spawn, self._journal))
        over = asyncio.ensure_future(held.over.wait())
        try:
            await asyncio.wait([joining, over], return_when=asyncio.FIRST_COMPLETED)
            if not held.over.is_set():
                joining.result()
                held.is_ready = True
                self._pauses.pop(held.replica, None)
                self._journal.record(part, "joined", waited_s=self._clock() - began)
                await over
                if held.is_lost:
                    self._pause(held.replica)
                else:
                    await self._drain(held, part)
        except Exception as error:  # of any kind: the run continues without this replica
            if isinstance(error, UserError):
                self._refused.add(held.replica)
            else:
                self._pause(held.replica)
            event = "refused" if isinstance(error, ConfigError) else "failed"
            self._journal.record(part, event, str(error) or repr(error))
        finally:
            held.is_ready = False
            await end_tasks(over, joining)
            try:
                await self._fleet.leave(part)
                self._journal.record(part, "left", had_s=self._clock() - began)
            finally:
                self._over.add(held.id)
                del self._held[held.replica]
                self._wake.set()

    async def _drain(self, held: _Loan, part: str) -> None:
        """Sends the replica no new requests, and collects the tokens sampled so far."""
        held.is_ready = False
        self._fleet.engine_away(part)
        assert held.engine is not None, "it has joined"
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_DRAIN_S):
                await held.engine.return_loan()


def store_address(config: RunConfig) -> str:
    """Address from which a replica on another machine reads the run's weights."""
    url = config.weights.read_url or config.weights.url
    return url if "://" in url else str(Path(url).resolve())


def wants(settings: ElasticConfig, wanted: bool, load_tokens: float) -> bool:
    """Whether the run's own engines are loaded enough to borrow replicas; with hysteresis."""
    if not settings.busy_tokens:
        return True
    return load_tokens > settings.busy_tokens or (wanted and load_tokens >= settings.idle_tokens)
