"""A cluster that plays a run's sessions: it asks for them, and may come and go at any time.

    claim ──leases──> sessions (engine, sandboxes) ──bundles──> deliver ──kept, or wanted no more──> over
    beat: it lives, how far its sessions are      <── which are over
    follow: new weights <── relay

Everything that the run does not answer is asked again: a link that is down for a while costs sessions only if
the run gives them to somebody else meanwhile, and then it says so.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from etude.controller.clusters.board import UnknownMemberError
from etude.controller.clusters.client import BACKOFF, ControlClient, ControlLostError, unless
from etude.controller.clusters.intake import session_name
from etude.controller.clusters.supply import Supply, WeightsLostError
from etude.controller.clusters.wire import API, RunFingerprint, order_of, version_key
from etude.environment.member import MemberSampler
from etude.environment.runners import Order, Player
from etude.errors import (
    EtudeError,
    InfrastructureError,
    SamplerError,
    StoreError,
    WeightUpdateError,
)
from etude.kit.retry import retry_async
from etude.kit.tasks import end_tasks
from etude.observe import Observer
from etude.protocols import KvPolicy, Sampler, WeightSink
from etude.records import TrajectoryId
from etude.store.blobs import MemoryBlobs, blobs_of
from etude.store.bundles import pack_trajectory
from etude.weights import Subscriber
from etude.weights.documents import manifest_of
from etude.weights.ending import EndMark
from etude.weights.folders import Folder


@dataclass(frozen=True, slots=True)
class Site:
    """What a cluster plays sessions with."""

    runner: Player
    sampler: Sampler
    sink: WeightSink
    blobs: MemoryBlobs
    """Where `runner` keeps expert routes."""
    fingerprint: RunFingerprint
    max_sessions: int
    kv: KvPolicy
    check: Callable[[], None]
    """Raises SamplerError where nothing will be sampled any more."""
    link: Subscriber
    """What `sink` fetches weights through."""
    source: str
    """Where they come from: a relay, or the store itself."""


@dataclass(frozen=True, slots=True)
class Terms:
    """What the run asks of its clusters."""

    lease_s: float
    poll_s: float
    max_bytes: int
    store: Folder | None
    """Where finished sessions go; None: to the run itself."""


@dataclass(slots=True)
class SamplingCounts:
    """What this process has done."""

    played: int = 0
    kept: int = 0
    unwanted: int = 0
    """Sessions that the run had from somebody else, or no longer wanted, when they were done or before."""
    failed: int = 0
    sent_bytes: int = 0
    versions: int = 0
    """Of weights that were in service here."""
    unanswered: int = 0
    """Requests that the run did not answer; each was made again."""


T = TypeVar("T")

_ATTEMPTS = 5
"""To deliver a session that the run answers for and does not take."""
_SHORTEST_BEAT_S = 2.0
"""For the answer to a sign of life, after which it is given anew."""
OVER = "the run has ended: nothing is left to play"
"""What a cluster says when it ends with its run."""
_OLD_WEIGHTS_S = 1.0
"""Before weights that could not be had are asked for again."""
_NO_NEWS_S = 0.1
"""Before others are asked for where there are none."""


@dataclass(slots=True, eq=False)
class _Session:
    """One lease and what runs under it."""

    identity: TrajectoryId
    view: MemberSampler
    task: asyncio.Task[None] | None = None
    playing: bool = True
    """Until it is graded; delivering takes no place of the engine's."""


class SamplingCluster:
    """See above. For one event loop."""

    def __init__(
        self,
        client: ControlClient,
        name: str,
        site: Site,
        terms: Terms,
        observer: Observer,
        patience_s: float,
        drain_s: float,
        mark: EndMark | None = None,
    ) -> None:
        """`patience_s`: how long the run may be away, and for how long weights may fail to come. `drain_s`:
        how long sessions may go on at the end. `mark`: tells of the run's end once it is away."""
        self.counts = SamplingCounts()
        self._supply = Supply(site.link, site.source, patience_s)
        self._mark = mark
        self._client, self._name, self._site, self._terms = client, name, site, terms
        self._observer = observer
        self._backoff, self._drain_s = replace(BACKOFF, within_s=patience_s), drain_s
        self._member = ""
        self._sessions: dict[str, _Session] = {}
        """By lease."""
        self._changed = asyncio.Event()
        self._beat_now = asyncio.Event()
        self._over = asyncio.Event()
        self._joining = asyncio.Lock()

    async def play(self, draining: asyncio.Event) -> None:
        """Plays until the run is over or `draining` is set; then what runs may finish.

        Raises ConfigError where the run does not take this cluster, ControlLostError where it is away for too
        long, WeightsLostError where its weights do not come for too long, SamplerError where the engine
        fails. What runs when it is cancelled is given to others at once.
        """
        await unless(draining, unless(self._over, self._join("")))
        if self._member:
            await self._play(draining)
        if self._over.is_set():
            self._observer.say(f"{self._name}: {OVER}")

    async def _play(self, draining: asyncio.Event) -> None:
        beating, following = asyncio.create_task(self._beat()), asyncio.create_task(self._follow())
        supplied = asyncio.create_task(self._supply.watch(self._say))
        claiming = asyncio.create_task(self._claim())
        over, asked = (asyncio.create_task(event.wait()) for event in (self._over, draining))
        lost: WeightsLostError | None = None
        try:
            try:
                await _until_first({beating, following, supplied, claiming, over, asked})
            except WeightsLostError as error:
                lost = error  # what runs may finish
            await end_tasks(claiming)
            if not self._over.is_set():
                self._say(f"{len(self._sessions)} sessions may finish")
                await self._drain({beating, following, over})
            if lost is not None and not self._over.is_set():
                raise lost
        finally:
            await end_tasks(beating, supplied, claiming, over, asked)  # none joins again after this
            self._supply.close()
            following.cancel()
            ending = self._abort(list(self._sessions))
            # Before what runs here is torn down, which may take a while: others may begin.
            with contextlib.suppress(EtudeError):  # sent in vain where the run is gone, and lapses then
                await asyncio.shield(self._client.leave(self._member))
            await end_tasks(following, *ending)

    async def _drain(self, others: set[asyncio.Task[Any]]) -> None:
        """Waits for what runs. `others`: end the wait when one of them ends; raises what it raised."""
        deadline = asyncio.get_running_loop().time() + self._drain_s
        while self._sessions and not self._over.is_set():
            left_s = deadline - asyncio.get_running_loop().time()
            running = {session.task for session in self._sessions.values() if session.task is not None}
            if left_s <= 0 or not running:
                return
            await _until_first({*running, *others}, left_s)

    def _say(self, text: str) -> None:
        self._observer.say(f"{self._name}: {text}")

    # ---- with the run ---------------------------------------------------------------------------

    async def _join(self, former: str) -> None:
        """Joins in place of `former`, unless that was done meanwhile. What ran under it is over."""
        async with self._joining:
            if self._member != former:
                return
            await end_tasks(*self._abort(list(self._sessions)))
            fingerprint = self._site.fingerprint.parts
            self._member = await self._patiently(lambda: self._client.join(self._name, API, fingerprint))
            self._say(f"joined the run at {self._client.url}")

    async def _patiently(self, ask: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Asks until the run answers. Raises ControlLostError where it is away for too long."""

        async def ask_once() -> T:
            try:
                return await ask()
            except ControlLostError:
                self.counts.unanswered += 1
                if self._mark is not None and await self._mark.is_set():
                    self._over.set()  # what waits for that ends this
                raise

        return await retry_async(ask_once, ControlLostError, self._backoff)

    async def _beat(self) -> None:
        within_s = max(_SHORTEST_BEAT_S, self._terms.lease_s / 3)
        while True:
            self._beat_now.clear()
            member, version = self._member, self._site.sink.current()
            running = {lease: session.view.num_tokens for lease, session in self._sessions.items()}
            self._site.check()
            try:
                answer = await self._patiently(
                    lambda m=member, v=version, r=running, t=self._supply.trouble: self._client.beat(
                        m, v, r, t, within_s
                    )
                )
            except UnknownMemberError:
                await self._join(member)
                continue
            self._abort(answer["gone"])
            if answer["finished"]:
                self._over.set()
            with contextlib.suppress(TimeoutError):  # wait_for loses a cancellation that comes with the event
                async with asyncio.timeout(self._terms.lease_s / 4):
                    await self._beat_now.wait()

    async def _follow(self) -> None:
        """Brings the weights that the run announces into service here."""
        while True:
            known = version_key(self._site.sink.current())
            raw = await self._patiently(lambda k=known: self._client.manifest(k, self._terms.poll_s))
            if raw is None:  # no others yet, or none any more, which the run's answers to heartbeats say
                self._beat_now.set()
                await asyncio.sleep(_NO_NEWS_S)
                continue
            manifest = manifest_of(raw)
            try:
                await self._site.sink.stage(manifest)
                await self._site.sink.activate(manifest.version, self._site.kv)
            except (WeightUpdateError, StoreError, SamplerError) as error:
                self._site.check()
                if not self._supply.trouble:
                    self._beat_now.set()
                self._supply.failed(error)
                await asyncio.sleep(_OLD_WEIGHTS_S)
            else:
                self._supply.arrived()
                self.counts.versions += 1
                self._beat_now.set()
                self._changed.set()

    async def _claim(self) -> None:
        """Begins sessions while there is room."""
        while True:
            room = self._site.max_sessions - sum(one.playing for one in self._sessions.values())
            version, member = self._site.sink.current(), self._member
            if room < 1 or version is None:
                self._changed.clear()
                await self._changed.wait()
                continue
            try:
                answer = await self._patiently(
                    lambda m=member, v=version, r=room: self._client.claim(m, v, r, self._terms.poll_s)
                )
            except UnknownMemberError:
                await self._join(member)
                continue
            if answer["finished"]:
                self._over.set()
                return
            if member == self._member:  # else these are of a membership that is over
                for raw in answer["leases"]:
                    self._begin(str(raw["lease"]), order_of(raw))

    # ---- sessions -------------------------------------------------------------------------------

    def _begin(self, lease: str, order: Order) -> None:
        """Plays a session; after one of its name that is being ended, if there is one."""
        before = [one.task for one in self._sessions.values() if one.identity == order.identity]
        session = _Session(order.identity, MemberSampler(self._site.sampler, holds=False))
        self._sessions[lease] = session
        former = {task for task in before if task is not None}
        session.task = asyncio.create_task(self._session(lease, session, order, former))

    async def _session(
        self, lease: str, session: _Session, order: Order, former: set[asyncio.Task[None]]
    ) -> None:
        member = self._member
        try:
            if former:
                await asyncio.wait(former)
            data = await self._played(session, order)
            session.playing = False
            self._changed.set()
            await self._deliver(member, lease, data)
        except asyncio.CancelledError:
            self.counts.unwanted += 1
            raise
        except UnknownMemberError:
            self.counts.unwanted += 1  # the next request to the run joins again
        except Exception as error:  # reported to the run, which counts it and has it played elsewhere
            self.counts.failed += 1
            self._say(f"a session failed: {type(error).__name__}: {error}")
            with contextlib.suppress(EtudeError):  # then the lease lapses
                await self._client.fail(member, lease, f"{type(error).__name__}: {error}")
        finally:
            self._sessions.pop(lease, None)
            self._changed.set()

    async def _played(self, session: _Session, order: Order) -> bytes:
        """Plays a session to its grade; returns it packed."""
        try:
            trajectory = (await self._site.runner.play(order, session.view)).trajectory
        finally:
            session.view.end()
        self.counts.played += 1
        trajectory = replace(trajectory, cluster=self._name)
        blobs = self._site.blobs
        try:
            data = await asyncio.to_thread(pack_trajectory, trajectory, blobs.get)
        finally:
            for ref in blobs_of(trajectory):
                blobs.discard(ref)
        if len(data) > self._terms.max_bytes:
            raise StoreError(
                "the session is larger than the run takes",
                field="clusters.max_result_bytes",
                received=len(data),
            )
        return data

    async def _deliver(self, member: str, lease: str, data: bytes) -> None:
        """Sends a session until the run has it or does not want it. Raises InfrastructureError where it
        answers and takes it not."""
        store, name = self._terms.store, session_name(lease)

        async def send() -> str:
            if store is not None:
                await asyncio.to_thread(store.write, name, data)
            self.counts.sent_bytes += len(data)
            body = data if store is None else None
            return await self._patiently(lambda: self._client.send(member, lease, body))

        backoff = replace(self._backoff, attempts=_ATTEMPTS)
        lost = (UnknownMemberError, ControlLostError)
        if await retry_async(send, InfrastructureError, backoff, unless=lost) in ("kept", "repeated"):
            self.counts.kept += 1
        else:
            self.counts.unwanted += 1
        if store is not None:
            with contextlib.suppress(StoreError):  # the run deletes what is left there when it begins again
                await asyncio.to_thread(store.delete, name)

    def _abort(self, leases: Iterable[str]) -> set[asyncio.Task[Any]]:
        """Has what runs under these leases end; each tidies up in a time of its own."""
        sessions = (self._sessions.get(lease) for lease in leases)
        tasks = {one.task for one in sessions if one is not None and one.task is not None}
        for task in tasks:
            task.cancel()
        return tasks


async def _until_first(tasks: set[asyncio.Task[Any]], timeout_s: float | None = None) -> None:
    """Waits until one of them ends; raises what it raised."""
    done, _ = await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        if not task.cancelled():
            task.result()
