"""The queue of pending sessions and their leases. No I/O; the clock is passed in.

    added ──> waiting ──claimed──> leased ──completed─────────> ended
                 ^                   │ lease expires, or the session fails
                 └───────────────────┴──too often──> exhausted ──> ended

Exactly one result is accepted per session: only the newest lease's. A lease that has expired remains valid
until the session is leased to another cluster. All times are of the run's own monotonic clock.
"""

from __future__ import annotations

import re
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from etude.environment.runners import EpisodeRequest
from etude.errors import ConfigError, InfrastructureError, PartLostError
from etude.store.bundles import Bundle

Clock = Callable[[], float]
_MOST_REMEMBERED = 100_000
"""Completed leases kept in memory, to tell a repeated result from one with an unknown lease."""
_MEMBER_EXPIRY_S = 24 * 3600.0
"""A cluster that is silent for this long, or for a lease's time if that is longer, must join again."""


OnSessionEnded = Callable[[Bundle | PartLostError | str], None]
"""Called once with a session's outcome: its bundle, the error that ends the run, or why it was given up."""


class UnknownMemberError(InfrastructureError):
    """A cluster that has not joined, or was replaced by another of the same name: it must join again."""


class ResultStanding(StrEnum):
    """Whether a result under a lease is accepted, and if not, why."""

    CURRENT = "current"
    REPEATED = "repeated"
    """The session's result was accepted before."""
    LATE = "late"
    """The session was leased to another cluster, or withdrawn."""


@dataclass(slots=True, eq=False)
class PendingSession:
    """A session in the queue, from submission to its outcome."""

    request: EpisodeRequest
    min_step: int = 0
    """Oldest step of the weights that may sample it."""
    on_ended: OnSessionEnded = lambda _: None
    """Called once, when it ends."""
    on_progress: Callable[[int], None] = lambda _: None
    """Called with the number of tokens sampled so far, whenever it changes."""
    num_tokens: int = 0
    """Sampled so far, as reported by the newest lease's cluster."""
    num_gives: int = 0
    """How often it was leased."""
    lease: Lease | None = None
    """The newest."""
    ended: bool = False
    withdrawn: bool = False
    """The run cancelled it before it was complete."""
    avoids: str = ""
    """Name of the cluster that failed last; until `avoids_until_s` others may claim the session first."""
    avoids_until_s: float = 0.0


@dataclass(slots=True, eq=False)
class Lease:
    """The right of one cluster to play a session."""

    id: str
    session: PendingSession
    member: Member
    granted_s: float


@dataclass(slots=True, eq=False)
class Member:
    """A cluster, from joining until it leaves or another of the same name joins."""

    id: str
    name: str
    last_heard_s: float
    step: int | None = None
    """Step of the weights that it serves; None: none that the run knows."""
    trouble: str = ""
    """Why new weights do not reach it, as it reports; empty while they do."""
    leases: dict[str, Lease] = field(default_factory=dict[str, Lease])


@dataclass(slots=True)
class BoardCounts:
    """Counts since the run's process began."""

    given: int = 0
    kept: int = 0
    repeated: int = 0
    late: int = 0
    lapsed: int = 0
    """Expired leases, of clusters that sent nothing."""
    failed: int = 0
    """Leases that ended with a failure, or because the cluster left."""
    withdrawn: int = 0
    """Sessions that the run cancelled."""
    exhausted: int = 0
    """Sessions given up after too many leases."""


class Board:
    """The queue described above. For one thread, except where a method says otherwise."""

    def __init__(self, lease_s: float, max_gives: int, clock: Clock = time.monotonic) -> None:
        self.counts = BoardCounts()
        self.members: dict[str, Member] = {}
        self.waiting: deque[PendingSession] = deque()
        self._lease_s = lease_s
        self._max_gives = max_gives
        self._clock = clock
        self._leases: dict[str, Lease] = {}
        self._completed: dict[str, None] = {}

    # ---- the run --------------------------------------------------------------------------------

    def add(self, session: PendingSession) -> None:
        """Queues a session."""
        self.waiting.append(session)

    def withdraw(self, session: PendingSession) -> None:
        """Cancels a session. Idempotent; does nothing after its end."""
        if session.ended:
            return
        self.counts.withdrawn += 1
        session.withdrawn = True
        self._end(session)

    def expire_leases(self) -> None:
        """Requeues the sessions of silent clusters, and removes clusters that are silent for too long."""
        for member in list(self.members.values()):
            if member.leases and not self.is_alive(member):
                self.counts.lapsed += len(member.leases)
                cause = f"{member.name} sent nothing for {self._lease_s:g} s"
                self._return_all(list(member.leases.values()), cause)
            if self._clock() - member.last_heard_s > max(_MEMBER_EXPIRY_S, self._lease_s):
                del self.members[member.id]

    def is_alive(self, member: Member) -> bool:
        """Whether it sent anything within one lease's time."""
        return self._clock() - member.last_heard_s <= self._lease_s

    @property
    def alive(self) -> list[Member]:
        """Clusters that sent something lately. From any thread."""
        return [member for member in list(self.members.values()) if self.is_alive(member)]

    @property
    def unfinished(self) -> list[PendingSession]:
        """All sessions that have not ended."""
        leases = (lease for member in self.members.values() for lease in member.leases.values())
        return [*self.waiting, *(lease.session for lease in leases)]

    @property
    def is_deserted(self) -> bool:
        """Whether sessions wait and no cluster plays any, or will once the weights reach it."""
        return bool(self.waiting) and not any(
            member.leases or not member.trouble or self._may_play(member) for member in self.alive
        )

    def _may_play(self, member: Member) -> bool:
        """Whether its weights are new enough for some waiting session."""
        step = member.step
        return step is not None and any(session.min_step <= step for session in self.waiting)

    # ---- clusters -------------------------------------------------------------------------------

    def join(self, name: str) -> Member:
        """Adds a cluster; replaces another of the same name."""
        for other in [member for member in self.members.values() if member.name == name]:
            self.leave(other)
        member = Member(uuid.uuid4().hex, name, self._clock())
        self.members[member.id] = member
        return member

    def find(self, member_id: str) -> Member:
        """The cluster of this id; counts as a sign of life from it. Raises UnknownMemberError."""
        member = self.members.get(member_id)
        if member is None:
            raise UnknownMemberError(
                "this cluster has not joined, or another has joined under its name",
                field="member",
                received=member_id,
                fix="join again, and give every cluster its own name",
            )
        member.last_heard_s = self._clock()
        return member

    def leave(self, member: Member) -> None:
        """Removes a cluster and requeues its sessions."""
        self.members.pop(member.id, None)
        leases = list(member.leases.values())
        self.counts.failed += len(leases)
        self._return_all(leases, f"{member.name} has left")
        for lease in leases:
            self._leases.pop(lease.id, None)

    def record_heartbeat(self, member: Member, running: Mapping[str, int]) -> list[str]:
        """`running`: lease -> tokens sampled so far. Returns the leases that are no longer valid: the cluster
        must abort their sessions.

        An expired lease is renewed unless its session was leased to another cluster. A lease that the cluster
        has not named for one lease's time was lost in transit: its session is queued again.
        """
        gone: list[str] = []
        for lease_id, num_tokens in running.items():
            lease = self._leases.get(lease_id)
            if lease is None or lease.member is not member:
                if lease_id not in self._completed:  # else the response to its result is still in transit
                    gone.append(lease_id)
                continue
            if lease.session.num_tokens != num_tokens:
                lease.session.num_tokens = num_tokens
                lease.session.on_progress(num_tokens)
            if lease_id not in member.leases:
                member.leases[lease_id] = lease
                self.waiting.remove(lease.session)
        now = self._clock()
        lost = [
            lease
            for lease in member.leases.values()
            if lease.id not in running and now - lease.granted_s > self._lease_s
        ]
        self.counts.lapsed += len(lost)
        self._return_all(lost, f"it did not arrive at {member.name}")
        return gone

    def claim(self, member: Member, most: int) -> list[Lease]:
        """Leases up to `most` sessions that the cluster's weights may sample, the oldest first.

        Where several clusters may play the waiting sessions, each gets at most its share, so that the first
        does not leave the others idle.
        """
        if member.step is None or most < 1:
            return []
        alive, now = self.alive, self._clock()
        share = -(-len(self.waiting) // max(1, sum(self._may_play(other) for other in alive)))
        has_others = any(other is not member and not other.trouble for other in alive)
        claimed: list[PendingSession] = []
        for session in self.waiting:
            if len(claimed) >= min(most, share):
                break
            avoided = session.avoids == member.name and now < session.avoids_until_s and has_others
            if session.min_step <= member.step and not avoided:
                claimed.append(session)
        for session in claimed:
            self.waiting.remove(session)
        return [self._lease(session, member) for session in claimed]

    def judge_result(self, lease_id: str) -> tuple[ResultStanding, Lease | None]:
        """Whether a result under this lease is accepted; the lease where it is."""
        lease = self._leases.get(lease_id)
        if lease is not None and lease.session.lease is lease and not lease.session.ended:
            return ResultStanding.CURRENT, lease
        return (ResultStanding.REPEATED if lease_id in self._completed else ResultStanding.LATE), None

    def complete(self, lease: Lease) -> None:
        """Ends a session whose result was accepted."""
        self.counts.kept += 1
        self._completed[lease.id] = None
        while len(self._completed) > _MOST_REMEMBERED:
            del self._completed[next(iter(self._completed))]
        self._end(lease.session)

    def fail(self, lease: Lease, cause: str) -> None:
        """Requeues a session that the cluster could not run."""
        self.counts.failed += 1
        lease.session.avoids = lease.member.name
        lease.session.avoids_until_s = self._clock() + self._lease_s
        self._leases.pop(lease.id, None)
        self._return_all([lease], cause)

    # ---- inside ---------------------------------------------------------------------------------

    def _lease(self, session: PendingSession, member: Member) -> Lease:
        before = session.lease
        if before is not None:  # expired, but valid until now
            self._leases.pop(before.id, None)
        session.num_gives += 1
        self.counts.given += 1
        lease = Lease(uuid.uuid4().hex, session, member, self._clock())
        session.lease = self._leases[lease.id] = member.leases[lease.id] = lease
        return lease

    def _return_all(self, leases: Sequence[Lease], cause: str) -> None:
        """Puts the sessions back at the head of the queue; ends those that were leased too often."""
        for lease in reversed(leases):
            if lease.member.leases.pop(lease.id, None) is None:
                continue  # expired: its session is queued already
            session = lease.session
            if session.num_gives >= self._max_gives:
                self.counts.exhausted += 1
                self._end(session)
                session.on_ended(f"given to clusters {session.num_gives} times: {cause}")
            else:
                self.waiting.appendleft(session)

    def _end(self, session: PendingSession) -> None:
        session.ended = True
        if session in self.waiting:
            self.waiting.remove(session)
        lease = session.lease
        if lease is not None:
            self._leases.pop(lease.id, None)
            lease.member.leases.pop(lease.id, None)


def check_name(name: str) -> str:
    """Returns a valid cluster name unchanged. Raises ConfigError for any other."""
    if re.fullmatch(r"[A-Za-z0-9._-]{1,64}", name) is None:
        raise ConfigError(
            "is not a valid cluster name",
            field="name",
            received=name[:100],
            fix="use up to 64 letters, digits, dots, dashes and underscores",
        )
    return name
