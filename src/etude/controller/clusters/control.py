"""The run's side of the control API: handles clusters' requests.

    run's loop ──submit, announce, withdraw─> Control (its own thread's loop) <──HTTP── clusters
               <───on_ended, on_progress─────────────┘

It has an event loop of its own: the run's is blocked while a trainer in this process takes a step, and
clusters' requests must be answered meanwhile. The run's loop may call only the methods that say "from any
thread"; all others belong to the control's loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from etude.config import ClustersConfig
from etude.controller.clusters.board import Board, Clock, Member, PendingSession, ResultStanding, check_name
from etude.controller.clusters.intake import AnnouncedWeights, Inbox, Intake, Traffic
from etude.controller.clusters.wire import API, RunFingerprint, order_document, version_key
from etude.errors import ConfigError, PartLostError, StoreError
from etude.kit.tasks import Changes, end_tasks
from etude.records import PolicyVersion, Status, WeightManifest
from etude.weights.documents import manifest_document

Answer = dict[str, Any]
IsDisconnected = Callable[[], Coroutine[Any, Any, bool]]
"""Whether the client of a request has disconnected."""


class Control:
    """The control API's handlers and state, as described above. One per run."""

    def __init__(
        self,
        settings: ClustersConfig,
        offer: Answer,
        inbox: Inbox,
        notify: Callable[[str], None] = lambda line: None,
        clock: Clock = time.monotonic,
    ) -> None:
        """`offer`: the run's description, from `describe_run`. `notify`: called in the control's loop with
        messages for people about a cluster. `clock`: in seconds, for leases and patience."""
        self.board = Board(settings.lease_s, settings.max_gives, clock)
        self.settings = settings
        self.num_refused = 0
        """Attempts to join that were refused."""
        self._weights = AnnouncedWeights()
        self._intake = Intake(settings, self._weights, inbox)
        self._offer = offer
        self._notify = notify
        self._clock = clock
        self._changes = Changes()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watching: asyncio.Task[None] | None = None
        self._failure: PartLostError | None = None
        self._finished = False
        self._deserted_since: float | None = None

    @property
    def traffic(self) -> Traffic:
        """Counts of received sessions, so far."""
        return self._intake.traffic

    # ---- the run's loop -------------------------------------------------------------------------

    def announce(self, manifest: WeightManifest) -> None:
        """Announces the weights that are in service from now on. From any thread."""
        self._post(self._announce, manifest)

    def submit(self, session: PendingSession) -> None:
        """Queues a session for clusters; its `on_ended` is called in the control's loop. From any thread."""
        self._post(self._submit, session)

    def withdraw(self, session: PendingSession) -> None:
        """Cancels a session that was submitted. From any thread; idempotent."""
        self._post(self.board.withdraw, session)

    def finish(self) -> None:
        """Marks the run as ended: responses to clusters say so from now on. From any thread."""
        self._post(self._finish)

    def _post(self, work: Callable[..., None], *arguments: Any) -> None:
        assert self._loop is not None, "begun with the server"
        self._loop.call_soon_threadsafe(work, *arguments)

    # ---- its own loop ---------------------------------------------------------------------------

    async def begin(self) -> None:
        """Binds the control to the running event loop and starts its background task."""
        self._loop = asyncio.get_running_loop()
        self._watching = asyncio.create_task(self._watch(await self._intake.list_leftovers()))

    async def close(self) -> None:
        """Ends the background task."""
        if self._watching is not None:
            await end_tasks(self._watching)

    def _announce(self, manifest: WeightManifest) -> None:
        self._weights.announce(manifest)
        self._changes.notify()

    def _submit(self, session: PendingSession) -> None:
        if self._failure is not None:
            session.ended = True
            session.on_ended(self._failure)
            return
        session.min_step = max(0, self._weights.step - self.settings.max_version_lag)
        self.board.add(session)
        self._changes.notify()

    def _finish(self) -> None:
        self._finished = True
        self._changes.notify()

    async def _watch(self, left: Sequence[str]) -> None:
        """Expires leases, periodically. `left`: objects that an earlier process of the run left in the
        trajectory store, without valid leases: deleted first."""
        try:
            for name in left:
                with contextlib.suppress(StoreError):  # the next process tries again
                    await self._intake.delete(name)
            while True:
                await asyncio.sleep(self.settings.lease_s / 8)
                self.board.expire_leases()
                self._fail_if_deserted()
                self._changes.notify()
        except Exception as error:
            self._failure = PartLostError(f"the control API failed: {error!r}", field="clusters")
            for session in self.board.unfinished:
                session.on_ended(self._failure)
            raise

    def _fail_if_deserted(self) -> None:
        """Fails all sessions once the board has been deserted for longer than `patience_s`."""
        if not self.board.is_deserted:
            self._deserted_since = None
        elif self._deserted_since is None:
            self._deserted_since = self._clock()
        elif self._clock() - self._deserted_since > self.settings.patience_s:
            error = self._desertion_error()
            for session in self.board.unfinished:
                session.on_ended(error)

    def _desertion_error(self) -> PartLostError:
        patience, stuck = f"{self.settings.patience_s:g} s", self.board.alive
        if not stuck:
            return PartLostError(
                f"no cluster has asked for sessions for {patience}",
                field="clusters.patience_s",
                received=len(self.board.waiting),
                fix="start one with `etude sample`, or let some run here with clusters.local_sessions",
            )
        return PartLostError(
            f"new weights have reached no cluster for {patience}",
            field="clusters.patience_s",
            received="; ".join(f"{member.name}: {member.trouble}" for member in stuck),
            fix="check that their relays are running and can reach the weight store",
        )

    # ---- requests of clusters -------------------------------------------------------------------

    def run(self) -> Answer:
        """Describes the run."""
        return {
            "api": API,
            **self._offer,
            "lease_s": self.settings.lease_s,
            "poll_s": self.settings.poll_s,
            "max_result_bytes": self.settings.max_result_bytes,
            "trajectories_url": self.settings.trajectories_url,
            "finished": self._finished,
        }

    def join(self, name: str, api: int, fingerprint: Mapping[str, str]) -> Answer:
        """Registers a cluster. Raises ConfigError for one whose sessions would differ from the run's own."""
        try:
            check_name(name)
            if api != API:
                raise ConfigError(
                    "uses another version of the control API", field="api", received=api, fix=f"use {API}"
                )
            RunFingerprint(self._offer["fingerprint"]).check(fingerprint, name)
        except ConfigError:
            self.num_refused += 1
            raise
        return {"member": self.board.join(name).id}

    def beat(
        self, member_id: str, version: PolicyVersion | None, running: Mapping[str, int], trouble: str
    ) -> Answer:
        """A heartbeat. `trouble`: why new weights do not reach the cluster. Raises UnknownMemberError."""
        before = self.board.find(member_id).step
        member = self._record_contact(member_id, version)
        self._update_trouble(member, trouble)
        if member.step != before:
            self._changes.notify()
        return {"gone": self.board.record_heartbeat(member, running), "finished": self._finished}

    async def manifest(self, known: str, is_disconnected: IsDisconnected) -> Answer | None:
        """The manifest of the weights in service; waits until their version key differs from `known`. None
        where it does not within `poll_s`."""
        deadline = self._clock() + self.settings.poll_s
        while True:
            manifest = self._weights.manifest
            if manifest is not None and version_key(manifest.version) != known:
                return manifest_document(manifest)
            if not await self._wait(deadline, is_disconnected):
                return None

    async def claim(
        self, member_id: str, version: PolicyVersion | None, most: int, is_disconnected: IsDisconnected
    ) -> Answer:
        """Leases sessions; waits up to `poll_s` for some. Raises UnknownMemberError."""
        member = self._record_contact(member_id, version)
        deadline = self._clock() + self.settings.poll_s
        while True:
            leases = [] if self._finished else self.board.claim(member, most)
            if leases or self._finished or not await self._wait(deadline, is_disconnected):
                break
            if member.id not in self.board.members:
                self.board.find(member.id)
        return {
            "leases": [{"lease": lease.id, **order_document(lease.session.request)} for lease in leases],
            "finished": self._finished,
        }

    async def _wait(self, deadline: float, is_disconnected: IsDisconnected) -> bool:
        """Waits until something may have changed; False when it is time for an empty response."""
        left_s = deadline - self._clock()
        if left_s <= 0 or self._finished:
            return False
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(left_s, self.settings.lease_s / 4)):
                await self._changes.wait()
        return not await is_disconnected()

    async def receive_session(self, member_id: str, lease_id: str, data: bytes) -> Answer:
        """Receives a finished session; it is durably on disk when the standing is `kept`.

        Raises UnknownMemberError; DamagedSessionError, also for a session other than the leased one; and
        UnwrittenSessionError: then the lease remains valid and the session may be sent again.
        """
        member = self.board.find(member_id)
        self.traffic.received_bytes += len(data)
        standing, lease = self.board.judge_result(lease_id)
        if lease is None or lease.member is not member:
            return self._reject(standing)
        bundle = await self._intake.unpack(data, lease)
        trajectory = bundle.trajectory
        if trajectory.status is Status.INFRASTRUCTURE and lease.session.num_gives < self.settings.max_gives:
            self.board.fail(lease, trajectory.cause)
            self._changes.notify()
            return {"standing": "failed"}
        session = lease.session
        await self._intake.store(bundle, data)
        # Meanwhile the result may have arrived twice, or the session may have been withdrawn.
        standing, lease = self.board.judge_result(lease_id)
        if lease is None:
            if session.withdrawn:
                await self._intake.discard(trajectory.id)
            return self._reject(standing)
        self.board.complete(lease)
        lease.session.on_ended(bundle)
        return {"standing": "kept"}

    async def fetch_session(self, member_id: str, lease_id: str) -> Answer:
        """As `receive_session`, for a session that is in the trajectory store under `session_name`."""
        standing = self.board.judge_result(lease_id)[0]
        if standing is not ResultStanding.CURRENT:
            return self._reject(standing)
        data = await self._intake.fetch(lease_id)
        return await self.receive_session(member_id, lease_id, data)

    def receive_failure(self, member_id: str, lease_id: str, cause: str) -> Answer:
        """Receives a failure: the cluster could not run the session. Raises UnknownMemberError."""
        member = self.board.find(member_id)
        standing, lease = self.board.judge_result(lease_id)
        if lease is None or lease.member is not member:
            return {"standing": standing.value}
        self.board.fail(lease, cause)
        self._changes.notify()
        return {"standing": "failed"}

    def leave(self, member_id: str) -> Answer:
        """Unregisters a cluster. Idempotent."""
        member = self.board.members.get(member_id)
        if member is not None:
            self.board.leave(member)
            self._changes.notify()
        return {}

    def figures(self) -> dict[str, float]:
        """Metrics: counts since this process began, and current sizes. From any thread."""
        board, alive = self.board, self.board.alive
        return {
            **{name: float(n) for name, n in (asdict(board.counts) | asdict(self.traffic)).items()},
            "refused_clusters": float(self.num_refused),
            "clusters": float(len(alive)),
            "without_weights": float(sum(bool(member.trouble) for member in alive)),
            "waiting": float(len(board.waiting)),
            "leased": float(sum(len(member.leases) for member in list(board.members.values()))),
        }

    def _record_contact(self, member_id: str, version: PolicyVersion | None) -> Member:
        member = self.board.find(member_id)
        member.step = version.step if version is not None and self._weights.knows(version) else None
        return member

    def _update_trouble(self, member: Member, trouble: str) -> None:
        before, member.trouble = member.trouble, trouble
        if trouble and not before:
            self._notify(f"new weights do not reach the cluster {member.name}: {trouble}")
        elif before and not trouble:
            self._notify(f"new weights reach the cluster {member.name} again")

    def _reject(self, standing: ResultStanding) -> Answer:
        if standing is ResultStanding.REPEATED:
            self.board.counts.repeated += 1
        else:
            self.board.counts.late += 1
        return {"standing": standing.value}
