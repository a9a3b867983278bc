"""Health states of the router's replicas: joining, ready, ejected, draining.

    joining ──answers, names a version──> ready ──fails `eject_after` times──> ejected
                                            ^                                     |
                                            └──answers, after a growing wait──────┘
    any ──drain()──> draining ──last request ends──> removed

No I/O here: the code that probes (`server/health.py`) or sends requests reports the outcomes.
"""

from __future__ import annotations

from etude.config.routing import HealthCheckConfig
from etude.inference.router.policy import Router
from etude.inference.router.types import Replica, ReplicaState
from etude.kit.retry import Backoff


class Members:
    """Tracks the health of the router's replicas, and thereby which of them may get requests."""

    def __init__(self, router: Router, config: HealthCheckConfig | None = None) -> None:
        self.config = config or HealthCheckConfig()
        self.router = router
        self.ejections = 0

    def join(self, name: str, pool: str = "serve", version: str | None = None) -> None:
        """Adds a replica, which gets requests after its first good probe, or with `version` at once.

        Raises ConfigError for a name that is in use.
        """
        self.router.join(name, pool, version, ready=version is not None)

    def drain(self, name: str) -> bool:
        """Drains a replica, for `remove_drained` to remove it; False if there is none of that name."""
        replica = self.router.replicas.get(name)
        if replica is None:
            return False
        replica.state = ReplicaState.DRAINING
        return True

    def remove_drained(self) -> list[str]:
        """Removes the draining replicas without requests in flight; returns their names."""
        every = self.router.replicas.values()
        empty = [r.name for r in every if r.state is ReplicaState.DRAINING and not r.running]
        for name in empty:
            self.router.remove(name)
        return empty

    def due_probes(self, now_s: float) -> list[str]:
        """Replicas that should be probed now."""
        every = self.router.replicas.values()
        return [r.name for r in every if r.next_probe_s <= now_s and r.state is not ReplicaState.DRAINING]

    def record_probe(self, name: str, now_s: float, version: str | None) -> None:
        """Records an answered probe. `version`: what the replica serves; None: alive, but serving nothing."""
        replica = self._monitored(name)
        if replica is None:
            return
        replica.next_probe_s = now_s + self.config.interval_s
        replica.failures = 0
        replica.version = version or replica.version
        replica.state = ReplicaState.READY if version is not None else ReplicaState.JOINING

    def record_success(self, name: str) -> None:
        """Records a completely answered request, which resets the failure counts."""
        replica = self.router.replicas.get(name)
        if replica is not None and replica.ready:
            replica.failures = replica.ejections = 0

    def record_failure(self, name: str, now_s: float, cause: str, *, fatal: bool = False) -> None:
        """Records a failed probe or request. `fatal`: nothing listens at its address, so eject it at once."""
        replica = self._monitored(name)
        if replica is None:
            return
        replica.failures += 1
        replica.cause = cause
        if replica.state is ReplicaState.EJECTED:
            # Failures of requests that were in flight at the ejection do not count; the next probe does.
            if now_s < replica.next_probe_s:
                return
        elif replica.failures < self.config.eject_after and not fatal:
            replica.next_probe_s = now_s + self.config.interval_s
            return
        else:
            self.ejections += 1
        replica.state = ReplicaState.EJECTED
        replica.ejections += 1
        wait_s = Backoff(self.config.backoff_s, self.config.most_backoff_s).pause_s(replica.ejections)
        replica.next_probe_s = now_s + wait_s
        self.router.drop_prefixes(name)

    def _monitored(self, name: str) -> Replica | None:
        """The replica of that name, unless it is removed or draining."""
        replica = self.router.replicas.get(name)
        return None if replica is None or replica.state is ReplicaState.DRAINING else replica
