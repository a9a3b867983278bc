"""A cluster that plays a run's sessions: it claims them, and may join and leave at any time.

    claim ──leases──> sessions (engine, sandboxes) ──bundles──> deliver ──accepted, or not needed──> done
    beat: heartbeat, tokens sampled by lease      <── leases no longer valid
    follow: new weights <── relay

Every request that the run does not answer is retried: a link that is down for a while costs only those
sessions that the run leases to another cluster meanwhile; the next heartbeat's response names them.
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
from etude.environment.runners import EpisodeRequest, EpisodeRunner
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
class ClusterResources:
    """A cluster's resources: engine, environment and link to the weights."""

    runner: EpisodeRunner
    sampler: Sampler
    sink: WeightSink
    blobs: MemoryBlobs
    """Where `runner` stores expert routes."""
    fingerprint: RunFingerprint
    max_sessions: int
    kv: KvPolicy
    check: Callable[[], None]
    """Raises SamplerError once the engine has failed for good."""
    link: Subscriber
    """Through which `sink` fetches weights."""
    source: str
    """Address of the weights, for messages: a relay, or the store itself."""


@dataclass(frozen=True, slots=True)
class Terms:
    """The run's limits and intervals for its clusters, from its description."""

    lease_s: float
    poll_s: float
    max_bytes: int
    store: Folder | None
    """Trajectory store for finished sessions; None: they are sent to the run itself."""


@dataclass(slots=True)
class SamplingCounts:
    """Counts of this process."""

    played: int = 0
    kept: int = 0
    unwanted: int = 0
    """Sessions aborted or not accepted: another cluster delivered them, or the run cancelled them."""
    failed: int = 0
    sent_bytes: int = 0
    versions: int = 0
    """Versions of weights that were in service here."""
    unanswered: int = 0
    """Requests that the run did not answer; each was retried."""


T = TypeVar("T")

_ATTEMPTS = 5
"""Deliveries of one session while the run answers with an error."""
_SHORTEST_BEAT_S = 2.0
"""Shortest timeout of a heartbeat's response."""
OVER = "the run has ended: no sessions are left"
"""Message of a cluster that ends with its run."""
_OLD_WEIGHTS_S = 1.0
"""Pause after weights that could not be fetched or activated."""
_NO_NEWS_S = 0.1
"""Pause after a long poll that brought no new weights."""


@dataclass(slots=True, eq=False)
class _Session:
    """A leased session and the task that plays it."""

    identity: TrajectoryId
    view: MemberSampler
    task: asyncio.Task[None]
    playing: bool = True
    """Until it is graded; a session that is being delivered takes no slot of the engine."""


class SamplingCluster:
    """Plays a run's sessions, as described above. For one event loop."""

    def __init__(
        self,
        client: ControlClient,
        name: str,
        resources: ClusterResources,
        terms: Terms,
        observer: Observer,
        patience_s: float,
        drain_s: float,
        mark: EndMark | None = None,
    ) -> None:
        """`patience_s`: how long the run may be unreachable, and weights may fail to come. `drain_s`: how
        long sessions may continue at the end. `mark`: read for the run's end when the run does not answer."""
        self.counts = SamplingCounts()
        self._supply = Supply(resources.link, resources.source, patience_s)
        self._mark = mark
        self._client, self._name, self._resources, self._terms = client, name, resources, terms
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
        """Plays until the run has ended or `draining` is set; then running sessions may finish.

        Raises ConfigError where the run refuses this cluster, ControlLostError where it is unreachable for
        too long, WeightsLostError where its weights do not come for too long, SamplerError where the engine
        fails. When it is cancelled, its sessions are leased to others at once.
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
                lost = error  # running sessions may finish
            await end_tasks(claiming)
            if not self._over.is_set():
                self._say(f"waiting for {len(self._sessions)} sessions to finish")
                await self._drain({beating, following, over})
            if lost is not None and not self._over.is_set():
                raise lost
        finally:
            await end_tasks(beating, supplied, claiming, over, asked)  # none joins again after this
            self._resources.link.close()  # ends a fetch that waits
            following.cancel()
            ending = self._abort(list(self._sessions))
            # Before the sessions' teardown, which may take a while: other clusters may begin them now.
            with contextlib.suppress(EtudeError):  # where the run does not answer, the leases expire
                await asyncio.shield(self._client.leave(self._member))
            await end_tasks(following, *ending)

    async def _drain(self, others: set[asyncio.Task[Any]]) -> None:
        """Waits up to `drain_s` for running sessions. `others`: when one ends, stops and raises its error."""
        deadline = asyncio.get_running_loop().time() + self._drain_s
        while self._sessions and not self._over.is_set():
            left_s = deadline - asyncio.get_running_loop().time()
            running = {session.task for session in self._sessions.values()}
            if left_s <= 0:
                return
            await _until_first({*running, *others}, left_s)

    def _say(self, text: str) -> None:
        self._observer.say(f"{self._name}: {text}")

    # ---- with the run ---------------------------------------------------------------------------

    async def _join(self, former: str) -> None:
        """Joins in place of the membership `former`, unless that was done meanwhile; aborts its sessions."""
        async with self._joining:
            if self._member != former:
                return
            await end_tasks(*self._abort(list(self._sessions)))
            fingerprint = self._resources.fingerprint.parts
            self._member = await self._ask_with_retries(
                lambda: self._client.join(self._name, API, fingerprint)
            )
            self._say(f"joined the run at {self._client.url}")

    async def _ask_with_retries(self, ask: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Retries a request until the run answers. Raises ControlLostError after `patience_s`."""

        async def ask_once() -> T:
            try:
                return await ask()
            except ControlLostError:
                self.counts.unanswered += 1
                if self._mark is not None and await self._mark.is_set():
                    self._over.set()  # ends `play`, and this request with it
                raise

        return await retry_async(ask_once, ControlLostError, self._backoff)

    async def _beat(self) -> None:
        within_s = max(_SHORTEST_BEAT_S, self._terms.lease_s / 3)
        while True:
            self._beat_now.clear()
            member, version = self._member, self._resources.sink.current()
            running = {lease: session.view.num_tokens for lease, session in self._sessions.items()}
            self._resources.check()
            try:
                answer = await self._ask_with_retries(
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
        """Activates the weights that the run announces, version after version."""
        while True:
            known = version_key(self._resources.sink.current())
            raw = await self._ask_with_retries(lambda k=known: self._client.manifest(k, self._terms.poll_s))
            if raw is None:  # no new version yet, or none any more, which the heartbeat's response says
                self._beat_now.set()
                await asyncio.sleep(_NO_NEWS_S)
                continue
            manifest = manifest_of(raw)
            try:
                await self._resources.sink.stage(manifest)
                await self._resources.sink.activate(manifest.version, self._resources.kv)
            except (WeightUpdateError, StoreError, SamplerError) as error:
                self._resources.check()
                if not self._supply.trouble:
                    self._beat_now.set()
                self._supply.record_failure(error)
                await asyncio.sleep(_OLD_WEIGHTS_S)
            else:
                self._supply.record_arrival()
                self.counts.versions += 1
                self._beat_now.set()
                self._changed.set()

    async def _claim(self) -> None:
        """Claims and starts sessions while there is room."""
        while True:
            room = self._resources.max_sessions - sum(session.playing for session in self._sessions.values())
            version, member = self._resources.sink.current(), self._member
            if room < 1 or version is None:
                self._changed.clear()
                await self._changed.wait()
                continue
            try:
                answer = await self._ask_with_retries(
                    lambda m=member, v=version, r=room: self._client.claim(m, v, r, self._terms.poll_s)
                )
            except UnknownMemberError:
                await self._join(member)
                continue
            if answer["finished"]:
                self._over.set()
                return
            if member == self._member:  # else these are of a former membership
                for raw in answer["leases"]:
                    self._begin(str(raw["lease"]), order_of(raw))

    # ---- sessions -------------------------------------------------------------------------------

    def _begin(self, lease: str, request: EpisodeRequest) -> None:
        """Starts a session; it waits for the end of an aborted one of the same identity, if there is any."""
        former = {other.task for other in self._sessions.values() if other.identity == request.identity}
        task = asyncio.create_task(self._session(lease, request, former))
        view = MemberSampler(self._resources.sampler, defers_close=False)
        self._sessions[lease] = _Session(request.identity, view, task)

    async def _session(self, lease: str, request: EpisodeRequest, former: set[asyncio.Task[None]]) -> None:
        member, session = self._member, self._sessions[lease]
        try:
            if former:
                await asyncio.wait(former)
            data = await self._play_packed(session, request)
            session.playing = False
            self._changed.set()
            await self._deliver(member, lease, data)
        except asyncio.CancelledError:
            self.counts.unwanted += 1
            raise
        except UnknownMemberError:
            self.counts.unwanted += 1  # the next request to the run joins again
        except Exception as error:  # reported to the run, which counts it and leases it to another cluster
            self.counts.failed += 1
            self._say(f"a session failed: {type(error).__name__}: {error}")
            with contextlib.suppress(EtudeError):  # then the lease expires
                await self._client.fail(member, lease, f"{type(error).__name__}: {error}")
        finally:
            self._sessions.pop(lease, None)
            self._changed.set()

    async def _play_packed(self, session: _Session, request: EpisodeRequest) -> bytes:
        """Plays and grades a session; returns it packed."""
        try:
            trajectory = (await self._resources.runner.play(request, session.view)).trajectory
        finally:
            session.view.end()
        self.counts.played += 1
        trajectory = replace(trajectory, cluster=self._name)
        blobs = self._resources.blobs
        try:
            data = await asyncio.to_thread(pack_trajectory, trajectory, blobs.get)
        finally:
            for ref in blobs_of(trajectory):
                blobs.discard(ref)
        if len(data) > self._terms.max_bytes:
            raise StoreError(
                "the session is larger than the run accepts",
                field="clusters.max_result_bytes",
                received=len(data),
            )
        return data

    async def _deliver(self, member: str, lease: str, data: bytes) -> None:
        """Sends a session until it is accepted or rejected. Raises InfrastructureError after retries."""
        store, name = self._terms.store, session_name(lease)

        async def send() -> str:
            if store is not None:
                await asyncio.to_thread(store.write, name, data)
            self.counts.sent_bytes += len(data)
            body = data if store is None else None
            return await self._ask_with_retries(lambda: self._client.send(member, lease, body))

        backoff = replace(self._backoff, attempts=_ATTEMPTS)
        lost = (UnknownMemberError, ControlLostError)
        if await retry_async(send, InfrastructureError, backoff, unless=lost) in ("kept", "repeated"):
            self.counts.kept += 1
        else:
            self.counts.unwanted += 1
        if store is not None:
            with contextlib.suppress(StoreError):  # the run deletes leftovers when it starts again
                await asyncio.to_thread(store.delete, name)

    def _abort(self, leases: Iterable[str]) -> set[asyncio.Task[Any]]:
        """Cancels the sessions of these leases, without waiting for their teardown; returns their tasks."""
        sessions = (self._sessions[lease] for lease in leases if lease in self._sessions)
        tasks = {session.task for session in sessions}
        for task in tasks:
            task.cancel()
        return tasks


async def _until_first(tasks: set[asyncio.Task[Any]], timeout_s: float | None = None) -> None:
    """Waits until one of the tasks ends; raises what it raised."""
    done, _ = await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        if not task.cancelled():
            task.result()
