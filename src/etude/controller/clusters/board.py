"""Which sessions are to be had, who has them, and until when. No I/O: a clock is given.

    added ──> waiting ──claimed──> leased ──kept──────────────> ended
                 ^                   │ lapses, is given back
                 └───────────────────┴──too often──> exhausted ──> ended

A session is kept once: a result counts only while its lease is the session's newest. A lease that has lapsed
is still good until the session is given to somebody else. All times are of the run's own monotonic clock.
"""

from __future__ import annotations

import re
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from etude.environment.runners import Order
from etude.errors import ConfigError, InfrastructureError, PartLostError
from etude.store.bundles import Bundle

Clock = Callable[[], float]
_REMEMBERED = 100_000
"""Leases that have ended, to tell a result that comes twice from one that is not known at all."""
_FORGET_S = 24 * 3600.0
"""After this time, or a lease's if that is longer, a cluster that sends nothing must join again."""


Arrived = Callable[[Bundle | PartLostError | str], None]
"""Called with the end of a session: it has come, all is lost, or why it never will."""


class UnknownMemberError(InfrastructureError):
    """A cluster that has not joined, or has been replaced by another of its name: it must join again."""


class Standing(StrEnum):
    """What a result is worth."""

    CURRENT = "current"
    REPEATED = "repeated"
    """It has been kept already."""
    LATE = "late"
    """The session was given to somebody else, or is wanted no more."""


@dataclass(slots=True, eq=False)
class Episode:
    """One session that somebody waits for."""

    order: Order
    min_step: int = 0
    """Of the weights that may sample it."""
    arrived: Arrived = lambda _: None
    """Called once it has ended."""
    tally: Callable[[int], None] = lambda _: None
    """Called with the tokens sampled so far, when there are others."""
    num_tokens: int = 0
    """Sampled so far, as the newest lease's cluster says."""
    num_gives: int = 0
    lease: Lease | None = None
    """The newest."""
    ended: bool = False
    withdrawn: bool = False
    """It was wanted no more before it had come."""
    avoids: str = ""
    """Name of the cluster that failed last, until `avoids_until_s`: others may take the session first."""
    avoids_until_s: float = 0.0


@dataclass(slots=True, eq=False)
class Lease:
    """A session in a cluster's hands."""

    id: str
    episode: Episode
    member: Member
    given_s: float


@dataclass(slots=True, eq=False)
class Member:
    """A cluster, from its joining until it leaves or another of its name joins."""

    id: str
    name: str
    heard_s: float
    step: int | None = None
    """Of the weights that it serves; None: none that the run knows."""
    trouble: str = ""
    """Why new weights do not reach it, as it says; empty while they do."""
    leases: dict[str, Lease] = field(default_factory=dict[str, Lease])


@dataclass(slots=True)
class BoardCounts:
    """Since the run's process began."""

    given: int = 0
    kept: int = 0
    repeated: int = 0
    late: int = 0
    lapsed: int = 0
    """Leases of clusters that sent nothing."""
    failed: int = 0
    """Sessions that a cluster could not run, or gave back."""
    withdrawn: int = 0
    """Sessions that were wanted no more."""
    exhausted: int = 0
    """Sessions that were given away too often."""


class Board:
    """See above. For one thread."""

    def __init__(self, lease_s: float, max_gives: int, clock: Clock = time.monotonic) -> None:
        self.counts = BoardCounts()
        self.members: dict[str, Member] = {}
        self.waiting: deque[Episode] = deque()
        self._lease_s = lease_s
        self._max_gives = max_gives
        self._clock = clock
        self._leases: dict[str, Lease] = {}
        self._kept: dict[str, None] = {}

    # ---- the run --------------------------------------------------------------------------------

    def add(self, episode: Episode) -> None:
        """From now on the session is to be had."""
        self.waiting.append(episode)

    def withdraw(self, episode: Episode) -> None:
        """The session is wanted no more. Idempotent; nothing after its end."""
        if episode.ended:
            return
        self.counts.withdrawn += 1
        episode.withdrawn = True
        self._end(episode)

    def lapse(self) -> None:
        """Takes back what clusters have that sent nothing, and forgets those that stay away."""
        for member in list(self.members.values()):
            if member.leases and not self.is_alive(member):
                self.counts.lapsed += len(member.leases)
                cause = f"{member.name} sent nothing for {self._lease_s:g} s"
                self._return_all(list(member.leases.values()), cause)
            if self._clock() - member.heard_s > max(_FORGET_S, self._lease_s):
                del self.members[member.id]

    def is_alive(self, member: Member) -> bool:
        """Whether it sent anything within a lease's time."""
        return self._clock() - member.heard_s <= self._lease_s

    @property
    def alive(self) -> list[Member]:
        """Clusters that are there. From any thread."""
        return [member for member in list(self.members.values()) if self.is_alive(member)]

    @property
    def open(self) -> list[Episode]:
        """All sessions that have not ended."""
        return [*self.waiting, *(one.episode for m in self.members.values() for one in m.leases.values())]

    @property
    def is_deserted(self) -> bool:
        """Whether sessions wait and no cluster is there that plays any, or will once it has the weights."""
        return bool(self.waiting) and not any(
            member.leases or not member.trouble or self._may_play(member) for member in self.alive
        )

    def _may_play(self, member: Member) -> bool:
        """Whether its weights are good for some session that waits."""
        step = member.step
        return step is not None and any(episode.min_step <= step for episode in self.waiting)

    # ---- clusters -------------------------------------------------------------------------------

    def join(self, name: str) -> Member:
        """A cluster has come, in place of another of its name."""
        for other in [member for member in self.members.values() if member.name == name]:
            self.leave(other)
        member = Member(uuid.uuid4().hex, name, self._clock())
        self.members[member.id] = member
        return member

    def find(self, member_id: str) -> Member:
        """The cluster, which herewith has sent something. Raises UnknownMemberError."""
        member = self.members.get(member_id)
        if member is None:
            raise UnknownMemberError(
                "this cluster has not joined, or another has joined under its name",
                field="member",
                received=member_id,
                fix="join again; give every cluster a name of its own",
            )
        member.heard_s = self._clock()
        return member

    def leave(self, member: Member) -> None:
        """The cluster goes; what it has is given to others."""
        self.members.pop(member.id, None)
        leases = list(member.leases.values())
        self.counts.failed += len(leases)
        self._return_all(leases, f"{member.name} has left")
        for lease in leases:
            self._leases.pop(lease.id, None)

    def hear(self, member: Member, running: Mapping[str, int]) -> list[str]:
        """`running`: lease -> tokens sampled so far. Returns those leases that are over, so that what runs
        there must end.

        A lease that had lapsed goes on, if nobody else was given its session. One that the cluster has not
        named for a lease's time got lost on its way there: it is taken back.
        """
        gone: list[str] = []
        for lease_id, num_tokens in running.items():
            lease = self._leases.get(lease_id)
            if lease is None or lease.member is not member:
                if lease_id not in self._kept:  # else the answer to its result is still under way
                    gone.append(lease_id)
                continue
            if lease.episode.num_tokens != num_tokens:
                lease.episode.num_tokens = num_tokens
                lease.episode.tally(num_tokens)
            if lease_id not in member.leases:
                member.leases[lease_id] = lease
                self.waiting.remove(lease.episode)
        now = self._clock()
        lost = [
            lease
            for lease in member.leases.values()
            if lease.id not in running and now - lease.given_s > self._lease_s
        ]
        self.counts.lapsed += len(lost)
        self._return_all(lost, f"it did not arrive at {member.name}")
        return gone

    def claim(self, member: Member, most: int) -> list[Lease]:
        """Up to `most` sessions that the cluster's weights may sample, the oldest first.

        Where several clusters may play what waits, each is given its share, so that the first to ask does not
        leave the others idle.
        """
        if member.step is None or most < 1:
            return []
        alive, now = self.alive, self._clock()
        share = -(-len(self.waiting) // max(1, sum(self._may_play(one) for one in alive)))
        has_others = any(one is not member and not one.trouble for one in alive)
        taken: list[Episode] = []
        for episode in self.waiting:
            if len(taken) >= min(most, share):
                break
            avoided = episode.avoids == member.name and now < episode.avoids_until_s and has_others
            if episode.min_step <= member.step and not avoided:
                taken.append(episode)
        for episode in taken:
            self.waiting.remove(episode)
        return [self._lease(episode, member) for episode in taken]

    def standing(self, lease_id: str) -> tuple[Standing, Lease | None]:
        """What a result under this lease is worth."""
        lease = self._leases.get(lease_id)
        if lease is not None and lease.episode.lease is lease and not lease.episode.ended:
            return Standing.CURRENT, lease
        return (Standing.REPEATED if lease_id in self._kept else Standing.LATE), None

    def keep(self, lease: Lease) -> None:
        """The session has come: it is over."""
        self.counts.kept += 1
        self._kept[lease.id] = None
        while len(self._kept) > _REMEMBERED:
            del self._kept[next(iter(self._kept))]
        self._end(lease.episode)

    def give_back(self, lease: Lease, cause: str) -> None:
        """The cluster could not run the session."""
        self.counts.failed += 1
        lease.episode.avoids = lease.member.name
        lease.episode.avoids_until_s = self._clock() + self._lease_s
        self._leases.pop(lease.id, None)
        self._return_all([lease], cause)

    # ---- inside ---------------------------------------------------------------------------------

    def _lease(self, episode: Episode, member: Member) -> Lease:
        before = episode.lease
        if before is not None:  # lapsed, and good until now
            self._leases.pop(before.id, None)
        episode.num_gives += 1
        self.counts.given += 1
        lease = Lease(uuid.uuid4().hex, episode, member, self._clock())
        episode.lease = self._leases[lease.id] = member.leases[lease.id] = lease
        return lease

    def _return_all(self, leases: Sequence[Lease], cause: str) -> None:
        """The sessions wait again, before those that came later; those that were given too often end."""
        for lease in reversed(leases):
            if lease.member.leases.pop(lease.id, None) is None:
                continue  # has lapsed: its session waits already
            episode = lease.episode
            if episode.num_gives >= self._max_gives:
                self.counts.exhausted += 1
                self._end(episode)
                episode.arrived(f"given to clusters {episode.num_gives} times: {cause}")
            else:
                self.waiting.appendleft(episode)

    def _end(self, episode: Episode) -> None:
        episode.ended = True
        if episode in self.waiting:
            self.waiting.remove(episode)
        lease = episode.lease
        if lease is not None:
            self._leases.pop(lease.id, None)
            lease.member.leases.pop(lease.id, None)


def check_name(name: str) -> str:
    """A cluster's name as records carry it. Raises ConfigError."""
    if re.fullmatch(r"[A-Za-z0-9._-]{1,64}", name) is None:
        raise ConfigError(
            "is no name for a cluster",
            field="name",
            received=name[:100],
            fix="letters, digits, dots, dashes; 64 at most",
        )
    return name
