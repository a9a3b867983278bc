"""Which replicas are there, and which of them may get requests: joining, ejection, return, leaving.

    joining ──answers, names a version──> ready ──fails `eject_after` times──> ejected
                                            ^                                     |
                                            └──answers, after a growing wait──────┘
    any ──leave()──> draining ──last request ends──> gone

No I/O here: the code that probes (`server/health.py`) or sends requests reports what happened.
"""

from __future__ import annotations

from etude.config.routing import HealthCheckConfig
from etude.errors import ConfigError
from etude.inference.router.policy import Router
from etude.inference.router.types import Replica, ReplicaState
from etude.kit.retry import Backoff


class Members:
    """Keeps the health of the router's replicas."""

    def __init__(self, router: Router, config: HealthCheckConfig | None = None) -> None:
        self.config = config or HealthCheckConfig()
        self.router = router
        self.ejections = 0

    def join(self, name: str, pool: str = "serve", version: str | None = None) -> None:
        """Adds a replica; it gets nothing before its first good probe. With `version` it is ready at once.

        Raises ConfigError for a name that is taken.
        """
        if name in self.router.replicas:
            raise ConfigError("is a member already", field="replica", received=name, fix="let it leave first")
        self.router.join(name, pool, version, ready=version is not None)

    def leave(self, name: str) -> bool:
        """Drains a replica; False if there is none of that name. `sweep` removes it once it is empty."""
        replica = self.router.replicas.get(name)
        if replica is None:
            return False
        replica.state, replica.ready = ReplicaState.DRAINING, False
        return True

    def sweep(self) -> list[str]:
        """Removes the drained replicas that have nothing left in flight; returns their names."""
        every = self.router.replicas.values()
        empty = [one.name for one in every if one.state is ReplicaState.DRAINING and not one.running]
        for name in empty:
            self.router.leave(name)
        return empty

    def due(self, now_s: float) -> list[str]:
        """Replicas that should be probed now."""
        every = self.router.replicas.values()
        return [
            one.name for one in every if one.next_probe_s <= now_s and one.state is not ReplicaState.DRAINING
        ]

    def answered(self, name: str, now_s: float, version: str | None) -> None:
        """A probe was answered. `version`: what it serves; None: it is alive and serves nothing."""
        replica = self._staying(name)
        if replica is None:
            return
        replica.next_probe_s = now_s + self.config.interval_s
        replica.failures = 0
        replica.version = version or replica.version
        replica.ready = version is not None
        replica.state = ReplicaState.READY if replica.ready else ReplicaState.JOINING

    def served(self, name: str) -> None:
        """A request was answered whole: what was wrong before is over."""
        replica = self.router.replicas.get(name)
        if replica is not None and replica.state is ReplicaState.READY:
            replica.failures = replica.ejections = 0

    def failed(self, name: str, now_s: float, cause: str, *, fatal: bool = False) -> None:
        """A probe or a request failed because of the replica. `fatal`: nobody is there, eject at once."""
        replica = self._staying(name)
        if replica is None:
            return
        replica.failures += 1
        replica.cause = cause
        if replica.state is ReplicaState.EJECTED:
            # Requests that were under way when it was ejected say nothing new; its next probe does.
            if now_s < replica.next_probe_s:
                return
        elif replica.failures < self.config.eject_after and not fatal:
            replica.next_probe_s = now_s + self.config.interval_s
            return
        else:
            self.ejections += 1
        replica.state, replica.ready = ReplicaState.EJECTED, False
        replica.ejections += 1
        wait_s = Backoff(self.config.backoff_s, self.config.most_backoff_s).pause_s(replica.ejections)
        replica.next_probe_s = now_s + wait_s
        self.router.lose_prefixes(name)

    def _staying(self, name: str) -> Replica | None:
        """The replica of that name, unless it has left or is about to: its health no longer matters."""
        replica = self.router.replicas.get(name)
        return None if replica is None or replica.state is ReplicaState.DRAINING else replica
