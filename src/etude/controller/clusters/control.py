"""The run's side of the control API: what clusters ask, and the answers.

    run's loop ──order, announce, withdraw──> Control (its own thread's loop) <──HTTP── clusters
               <──────arrived, tally─────────────────┘

It has a loop of its own, since the run's stands still while a trainer in this process takes a step, and
clusters must be heard meanwhile. The run's loop calls only what says so; everything else belongs to the
control's.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from etude.config import ClustersConfig
from etude.controller.clusters.board import Board, Clock, Episode, Member, Standing, check_name
from etude.controller.clusters.intake import AnnouncedWeights, Inbox, Intake, Traffic
from etude.controller.clusters.wire import API, RunFingerprint, order_document, version_key
from etude.errors import ConfigError, PartLostError, StoreError
from etude.kit.tasks import Changes, end_tasks
from etude.records import PolicyVersion, Status, WeightManifest
from etude.weights.documents import manifest_document

Answer = dict[str, Any]
Gone = Callable[[], Coroutine[Any, Any, bool]]
"""Whether nobody waits for an answer any more."""


class Control:
    """See above. One per run."""

    def __init__(
        self,
        settings: ClustersConfig,
        offer: Answer,
        inbox: Inbox,
        tell: Callable[[str], None] = lambda line: None,
        clock: Clock = time.monotonic,
    ) -> None:
        """`offer`: what the run is, from `make_offer`. `tell`: called in the control's loop with what people
        should know of a cluster. `clock`: in seconds, the only one that leases and patience go by."""
        self.board = Board(settings.lease_s, settings.max_gives, clock)
        self.settings = settings
        self.num_refused = 0
        """Clusters that would have played other sessions."""
        self._weights = AnnouncedWeights()
        self._intake = Intake(settings, self._weights, inbox)
        self._offer = offer
        self._tell_people = tell
        self._clock = clock
        self._changes = Changes()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watching: asyncio.Task[None] | None = None
        self._failure: PartLostError | None = None
        self._finished = False
        self._deserted_since: float | None = None

    @property
    def traffic(self) -> Traffic:
        """Sessions that came, so far."""
        return self._intake.traffic

    # ---- the run's loop -------------------------------------------------------------------------

    def announce(self, manifest: WeightManifest) -> None:
        """These weights are in service from now on. From any thread."""
        self._post(self._announce, manifest)

    def order(self, episode: Episode) -> None:
        """Has a session played; its `arrived` is called in the control's loop. From any thread."""
        self._post(self._order, episode)

    def withdraw(self, episode: Episode) -> None:
        """A session that was ordered is wanted no more. From any thread; idempotent."""
        self._post(self.board.withdraw, episode)

    def finish(self) -> None:
        """The run has ended: clusters read so when they ask. From any thread."""
        self._post(self._finish)

    def _post(self, work: Callable[..., None], *arguments: Any) -> None:
        assert self._loop is not None, "begun with the server"
        self._loop.call_soon_threadsafe(work, *arguments)

    # ---- its own loop ---------------------------------------------------------------------------

    async def begin(self) -> None:
        """Called in the loop that it belongs to from then on."""
        self._loop = asyncio.get_running_loop()
        self._watching = asyncio.create_task(self._watch(await self._intake.list_left()))

    async def close(self) -> None:
        """Ends what `begin` began."""
        if self._watching is not None:
            await end_tasks(self._watching)

    def _announce(self, manifest: WeightManifest) -> None:
        self._weights.announce(manifest)
        self._changes.tell()

    def _order(self, episode: Episode) -> None:
        if self._failure is not None:
            episode.ended = True
            episode.arrived(self._failure)
            return
        episode.min_step = max(0, self._weights.step - self.settings.max_version_lag)
        self.board.add(episode)
        self._changes.tell()

    def _finish(self) -> None:
        self._finished = True
        self._changes.tell()

    async def _watch(self, left: Sequence[str]) -> None:
        """Takes back what lapses. `left`: in the trajectory store by an earlier sitting, of which no lease is
        good any more."""
        try:
            for name in left:
                with contextlib.suppress(StoreError):  # the next sitting tries again
                    await self._intake.delete(name)
            while True:
                await asyncio.sleep(self.settings.lease_s / 8)
                self.board.lapse()
                self._look_for_clusters()
                self._changes.tell()
        except Exception as error:
            self._failure = PartLostError(f"the control API failed: {error!r}", field="clusters")
            for episode in self.board.open:
                episode.arrived(self._failure)
            raise

    def _look_for_clusters(self) -> None:
        """Ends what waits once nobody who could play it has been there for too long."""
        if not self.board.is_deserted:
            self._deserted_since = None
        elif self._deserted_since is None:
            self._deserted_since = self._clock()
        elif self._clock() - self._deserted_since > self.settings.patience_s:
            error = self._desertion()
            for episode in self.board.open:
                episode.arrived(error)

    def _desertion(self) -> PartLostError:
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
            fix="see whether their relays run, and reach the weight store",
        )

    # ---- what clusters ask ----------------------------------------------------------------------

    def run(self) -> Answer:
        """What the run is."""
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
        """A cluster comes. Raises ConfigError for one that would play other sessions."""
        try:
            check_name(name)
            if api != API:
                raise ConfigError(
                    "speaks another version of the control API", field="api", received=api, fix=f"{API} here"
                )
            RunFingerprint(self._offer["fingerprint"]).check(fingerprint, name)
        except ConfigError:
            self.num_refused += 1
            raise
        return {"member": self.board.join(name).id}

    def beat(
        self, member_id: str, version: PolicyVersion | None, running: Mapping[str, int], trouble: str
    ) -> Answer:
        """A cluster lives. `trouble`: why new weights do not reach it. Raises UnknownMemberError."""
        before = self.board.find(member_id).step
        member = self._heard(member_id, version)
        self._note_trouble(member, trouble)
        if member.step != before:
            self._changes.tell()
        return {"gone": self.board.hear(member, running), "finished": self._finished}

    async def manifest(self, known: str, gone: Gone) -> Answer | None:
        """Of the weights in service; waits for another version than that with the key `known`. None where
        there is none."""
        deadline = self._clock() + self.settings.poll_s
        while True:
            manifest = self._weights.manifest
            if manifest is not None and version_key(manifest.version) != known:
                return manifest_document(manifest)
            if not await self._wait(deadline, gone):
                return None

    async def claim(self, member_id: str, version: PolicyVersion | None, most: int, gone: Gone) -> Answer:
        """Leases; waits for some. Raises UnknownMemberError."""
        member = self._heard(member_id, version)
        deadline = self._clock() + self.settings.poll_s
        while True:
            leases = [] if self._finished else self.board.claim(member, most)
            if leases or self._finished or not await self._wait(deadline, gone):
                break
            if member.id not in self.board.members:
                self.board.find(member.id)
        return {
            "leases": [{"lease": lease.id, **order_document(lease.episode.order)} for lease in leases],
            "finished": self._finished,
        }

    async def _wait(self, deadline: float, gone: Gone) -> bool:
        """Waits until something has changed; False when it is time to answer with nothing."""
        left_s = deadline - self._clock()
        if left_s <= 0 or self._finished:
            return False
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(left_s, self.settings.lease_s / 4)):
                await self._changes.wait()
        return not await gone()

    async def take_session(self, member_id: str, lease_id: str, data: bytes) -> Answer:
        """A finished session. It is on disk when this returns `kept`.

        Raises UnknownMemberError, DamagedSessionError also for another session than was asked for, and
        UnwrittenSessionError: then the lease goes on, and it may be sent again.
        """
        member = self.board.find(member_id)
        self.traffic.received_bytes += len(data)
        standing, lease = self.board.standing(lease_id)
        if lease is None or lease.member is not member:
            return self._unwanted(standing)
        bundle = await self._intake.unpack(data, lease)
        trajectory = bundle.trajectory
        if trajectory.status is Status.INFRASTRUCTURE and lease.episode.num_gives < self.settings.max_gives:
            self.board.give_back(lease, trajectory.cause)
            self._changes.tell()
            return {"standing": "failed"}
        episode = lease.episode
        await self._intake.keep(bundle, data)
        standing, lease = self.board.standing(lease_id)  # meanwhile it may have come twice, or be withdrawn
        if lease is None:
            if episode.withdrawn:
                await self._intake.drop(trajectory.id)
            return self._unwanted(standing)
        self.board.keep(lease)
        lease.episode.arrived(bundle)
        return {"standing": "kept"}

    async def fetch_session(self, member_id: str, lease_id: str) -> Answer:
        """The same of a session that lies in the trajectory store, under `session_name`."""
        standing = self.board.standing(lease_id)[0]
        if standing is not Standing.CURRENT:
            return self._unwanted(standing)
        data = await self._intake.fetch(lease_id)
        return await self.take_session(member_id, lease_id, data)

    def take_failure(self, member_id: str, lease_id: str, cause: str) -> Answer:
        """A session that the cluster could not run. Raises UnknownMemberError."""
        member = self.board.find(member_id)
        standing, lease = self.board.standing(lease_id)
        if lease is None or lease.member is not member:
            return {"standing": standing.value}
        self.board.give_back(lease, cause)
        self._changes.tell()
        return {"standing": "failed"}

    def leave(self, member_id: str) -> Answer:
        """A cluster goes. Idempotent."""
        member = self.board.members.get(member_id)
        if member is not None:
            self.board.leave(member)
            self._changes.tell()
        return {}

    def figures(self) -> dict[str, float]:
        """Counts of this process, and what is under way. From any thread."""
        board, alive = self.board, self.board.alive
        return {
            **{name: float(value) for name, value in asdict(board.counts).items()},
            **{name: float(value) for name, value in asdict(self.traffic).items()},
            "refused_clusters": float(self.num_refused),
            "clusters": float(len(alive)),
            "without_weights": float(sum(bool(member.trouble) for member in alive)),
            "waiting": float(len(board.waiting)),
            "leased": float(sum(len(member.leases) for member in list(board.members.values()))),
        }

    def _heard(self, member_id: str, version: PolicyVersion | None) -> Member:
        member = self.board.find(member_id)
        member.step = version.step if version is not None and self._weights.knows(version) else None
        return member

    def _note_trouble(self, member: Member, trouble: str) -> None:
        before, member.trouble = member.trouble, trouble
        if trouble and not before:
            self._tell_people(f"new weights do not reach the cluster {member.name}: {trouble}")
        elif before and not trouble:
            self._tell_people(f"new weights reach the cluster {member.name} again")

    def _unwanted(self, standing: Standing) -> Answer:
        if standing is Standing.REPEATED:
            self.board.counts.repeated += 1
        else:
            self.board.counts.late += 1
        return {"standing": standing.value}
