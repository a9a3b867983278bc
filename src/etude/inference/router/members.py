"""Which replicas are there, and which of them may get requests: joining, ejection, return, leaving.

    joining ──answers, names a version──> ready ──fails `eject_after` times──> ejected
                                            ^                                     |
                                            └──answers, after a growing wait──────┘
    any ──leave()──> draining ──last request ends──> gone

No I/O here: the code that probes (`server/health.py`) or sends requests reports what happened.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from etude.config.routing import HealthCheckConfig
from etude.errors import ConfigError
from etude.inference.router.policy import Router
from etude.kit.retry import Backoff


class MemberState(StrEnum):
    """Where a replica stands."""

    JOINING = "joining"
    """Never answered yet, or serves no named version."""
    READY = "ready"
    EJECTED = "ejected"
    DRAINING = "draining"
    """Takes nothing new; gone when its last request ends."""


@dataclass(slots=True, eq=False)
class Member:
    """One replica's health."""

    name: str
    state: MemberState = MemberState.JOINING
    failures: int = 0
    """In a row."""
    ejections: int = 0
    """In a row: how often it failed again without having been ready for a request in between."""
    next_probe_s: float = 0.0
    cause: str = ""
    """Of the last failure."""


class Members:
    """Keeps the router's table of replicas in line with their health."""

    def __init__(self, router: Router, config: HealthCheckConfig | None = None) -> None:
        self.config = config or HealthCheckConfig()
        self.router = router
        self.members: dict[str, Member] = {}
        self.ejections = 0

    def join(self, name: str, pool: str = "serve", version: str | None = None) -> Member:
        """Adds a replica; it gets nothing before its first good probe. With `version` it is ready at once.

        Raises ConfigError for a name that is taken.
        """
        if name in self.members:
            raise ConfigError("is a member already", field="replica", received=name, fix="let it leave first")
        self.router.join(name, pool, version, ready=version is not None)
        member = self.members[name] = Member(name)
        if version is not None:
            member.state = MemberState.READY
        return member

    def leave(self, name: str) -> bool:
        """Drains a replica; False if there is none of that name. `sweep` removes it once it is empty."""
        member = self.members.get(name)
        if member is None:
            return False
        member.state = MemberState.DRAINING
        self.router.set_ready(name, False)
        return True

    def sweep(self) -> list[str]:
        """Removes the drained replicas that have nothing left in flight; returns their names."""
        draining = [m.name for m in self.members.values() if m.state is MemberState.DRAINING]
        empty = [name for name in draining if self.router.replicas[name].running == 0]
        for name in empty:
            del self.members[name]
            self.router.leave(name)
        return empty

    def due(self, now_s: float) -> list[str]:
        """Replicas that should be probed now."""
        return [
            m.name
            for m in self.members.values()
            if m.next_probe_s <= now_s and m.state is not MemberState.DRAINING
        ]

    def answered(self, name: str, now_s: float, version: str | None) -> None:
        """A probe was answered. `version`: what it serves; None: it is alive and serves nothing."""
        member = self.members.get(name)
        if member is None or member.state is MemberState.DRAINING:
            return
        member.next_probe_s = now_s + self.config.interval_s
        member.failures = 0
        if version is None:
            member.state = MemberState.JOINING
            self.router.set_ready(name, False)
            return
        member.state = MemberState.READY
        self.router.replicas[name].version = version
        self.router.set_ready(name, True)

    def served(self, name: str) -> None:
        """A request was answered whole: what was wrong before is over."""
        member = self.members.get(name)
        if member is not None and member.state is MemberState.READY:
            member.failures = member.ejections = 0

    def failed(self, name: str, now_s: float, cause: str, *, fatal: bool = False) -> None:
        """A probe or a request failed because of the replica. `fatal`: nobody is there, eject at once."""
        member = self.members.get(name)
        if member is None or member.state is MemberState.DRAINING:
            return
        member.failures += 1
        member.cause = cause
        if member.state is MemberState.EJECTED:
            # Requests that were under way when it was ejected say nothing new; its next probe does.
            if now_s < member.next_probe_s:
                return
        elif member.failures < self.config.eject_after and not fatal:
            member.next_probe_s = now_s + self.config.interval_s
            return
        else:
            self.ejections += 1
        member.state = MemberState.EJECTED
        member.ejections += 1
        wait_s = Backoff(self.config.backoff_s, self.config.most_backoff_s).pause_s(member.ejections)
        member.next_probe_s = now_s + wait_s
        self.router.set_ready(name, False)
        self.router.lose_prefixes(name)
