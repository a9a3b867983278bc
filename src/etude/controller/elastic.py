"""Engines that a run borrows from a serving pool, and gives back.

    ElasticPool ──every poll_s: what is wanted──> router ──lends, recalls──> replica
         │       <──the loans it has──────────────┘                            ^
         └─ EngineFleet.join, leave ── BorrowedEngine ── weights, requests ────┘

A borrowed replica is an engine of the fleet like any other: it is brought to the version in service before it
gets requests, and what it was answering when it goes is answered by another. It goes when its loan is no
longer among those that the router names; at once, when the replica itself says that it was called home; when
it does not answer; and when the router has been silent for a lease. One that was of no use is asked for again
after a while, and a longer while each time.
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
"""Of the rows of metrics: one per event of a borrowed replica."""
_DAY_S = 86_400.0
_DRAIN_S = 30.0
"""More than a replica takes to end what it is asked."""
_PAUSE = Backoff(base_s=2.0, most_s=300.0)
"""Before a replica that was of no use is asked for again."""
_UNKNOWN_TOKENS = 1e9
"""Sent to the router where sessions run elsewhere: their requests do not pass here."""


@dataclass(slots=True, eq=False)
class _Held:
    """A loan that the run has."""

    id: str
    replica: str
    url: str
    token: str
    over: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when it must go."""
    engine: BorrowedEngine | None = None
    is_ready: bool = False
    """Whether it samples for the run."""
    is_lost: bool = False
    """Whether it has ceased to answer."""
    life: asyncio.Task[None] | None = None


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
        day: Callable[[], float] = lambda: time.time() % _DAY_S,
    ) -> None:
        """`day`: second of the day, UTC. Raises ConfigError where the token cannot be read."""
        self._settings: ElasticConfig = config.elastic
        self._name = f"{config.name}-{uuid.uuid4().hex[:8]}"
        """Of this sitting: two runs of one name must not share a loan."""
        self._has_workers = config.cluster.workers > 0
        self._store = store_address(config)
        self._needs = needs
        self._fleet = fleet
        self._journal = FaultJournal(metrics, observer, {}, KIND)
        self._clock, self._day = clock, day
        self._held: dict[str, _Held] = {}
        """By replica."""
        self._over: set[str] = set()
        """Loans that have ended here and that the router still names."""
        self._refused: set[str] = set()
        """Replicas that are of no use."""
        self._pauses: dict[str, tuple[int, float]] = {}
        """Replica that failed -> how often in a row, and until when it is left alone."""
        self._wants = not config.elastic.busy_tokens
        self._heard_s = clock()
        self._was_heard = True
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
        for one in self._held.values():
            one.over.set()
        try:
            await asyncio.gather(*(one.life for one in self._held.values() if one.life is not None))
        finally:
            with contextlib.suppress(EtudeError):  # else the replicas go home by themselves
                await self._http.request("DELETE", self._path)
            await self._http.close()

    @property
    def num_lent(self) -> int:
        """Replicas that sample for the run now."""
        return sum(one.is_ready for one in self._held.values())

    @property
    def _path(self) -> str:
        return f"/router/borrowers/{self._name}"

    async def _run(self) -> None:
        while True:
            self._wake.clear()
            try:
                await self._look()
            except Exception as error:  # a full disk, or a defect of ours: it is tried again
                with contextlib.suppress(Exception):  # and said as soon as it can be
                    self._note_silence(repr(error))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._settings.poll_s):
                    await self._wake.wait()

    async def _look(self) -> None:
        """Asks the router, and begins and ends what differs."""
        loans = await self._check_in()
        if loans is None:
            if self._clock() - self._heard_s < self._settings.lease_s:
                return
            loans = {}
        for name, held in self._held.items():
            if name not in loans or loans[name]["id"] != held.id:
                held.over.set()
        self._over &= {loan["id"] for loan in loans.values()}
        for name, loan in loans.items():
            if name not in self._held and loan["id"] not in self._over:
                held = self._held[name] = _Held(loan["id"], name, loan["url"], loan["token"])
                held.life = asyncio.create_task(self._live(held))

    # ---- the router -----------------------------------------------------------------------------

    async def _check_in(self) -> dict[str, dict[str, Any]] | None:
        """The loans that the router says the run has, by replica; None where it does not say."""
        settings = self._settings
        load_tokens = _UNKNOWN_TOKENS if self._has_workers else self._fleet.load_tokens
        self._wants = wants(settings, self._wants, load_tokens)
        may = self._wants and settings.open_at(self._day())
        body = {
            "pool": settings.pool,
            "wanted": settings.most if may else 0,
            "lease_s": settings.lease_s,
            "load_tokens": load_tokens,
            "refused": sorted(self._refused | self._left_alone()),
            "over": sorted(self._over),
        }
        try:
            answer = await self._http.ask("PUT", self._path, json=body)
            loans = {loan["replica"]: loan for loan in answer["loans"]}
        except (EtudeError, KeyError, TypeError) as error:
            self._note_silence(str(error) or repr(error))
            return None
        if not self._was_heard:
            self._journal.record("router", "answers")
        self._heard_s, self._was_heard = self._clock(), True
        return loans

    def _left_alone(self) -> set[str]:
        return {replica for replica, (_, until_s) in self._pauses.items() if self._clock() < until_s}

    def _pause(self, replica: str) -> None:
        num_failures = self._pauses.get(replica, (0, 0.0))[0] + 1
        self._pauses[replica] = (num_failures, self._clock() + _PAUSE.pause_s(num_failures))

    def _note_silence(self, cause: str) -> None:
        if self._was_heard:
            self._journal.record("router", "does not lend", cause)
        self._was_heard = False

    # ---- one replica ----------------------------------------------------------------------------

    async def _live(self, held: _Held) -> None:
        """Has the replica in the fleet until its loan is over."""
        part, began = f"borrowed {held.replica}", self._clock()

        def lost() -> None:
            if held.is_ready and not held.over.is_set():  # else it only begins, or ends in good order
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
                    await self._let_drain(held, part)
        except Exception as error:  # whatever it is: the run goes on without this one
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

    async def _let_drain(self, held: _Held, part: str) -> None:
        """Sends nothing new there, and takes what was sampled until now."""
        held.is_ready = False
        self._fleet.engine_away(part)
        if held.engine is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_DRAIN_S):
                    await held.engine.give_back()


def store_address(config: RunConfig) -> str:
    """Where a replica elsewhere reads the run's weights."""
    url = config.weights.read_url or config.weights.url
    return url if "://" in url else str(Path(url).resolve())


def wants(settings: ElasticConfig, wanted: bool, load_tokens: float) -> bool:
    """Whether the run's own engines have so much to do that others help."""
    if not settings.busy_tokens:
        return True
    return load_tokens > settings.busy_tokens or (wanted and load_tokens >= settings.idle_tokens)
