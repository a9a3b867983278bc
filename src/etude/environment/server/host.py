"""The sessions of a server: who holds which, how many, for how long.

A tenant sees its own sessions only. What a tenant may hold is bounded; what would exceed it is refused with
CapacityError before anything runs, so that it can be asked for again later.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from etude.environment.sessions import EnvironmentSession, Site
from etude.errors import AgentError, UserError
from etude.kit.tasks import Tasks, finish_all
from etude.records import Task, ToolCall
from etude.sandbox.errors import CapacityError, SandboxMissingError, SandboxStateError
from etude.sandbox.server.state import Creations
from etude.serving.metrics import Labels, Metrics

_log = logging.getLogger("etude.environment.server")
_REFUSALS = (CapacityError, SandboxMissingError, SandboxStateError)
_REFUSED = {"session", "sessions", "snapshot", "calls", "kept_bytes", "episode_id", "environment.server"}
"""Fields of this server's own refusals: a limit of the tenant's, a session that it has ended. The same kinds
with other fields come from the sandboxes behind."""


@dataclass(frozen=True, slots=True)
class HostLimits:
    """What a server takes and keeps."""

    tenant_sessions: int = 64
    """That one tenant holds at once."""
    tenant_calls: int = 256
    """That run for one tenant at once."""
    tenant_bytes: int = 256 << 20
    """Of calls, results and archived contexts that one tenant's sessions remember."""
    body_bytes: int = 64 << 20
    """Of one request."""
    idle_s: float = 3600.0
    """A session that nobody uses for so long is closed, unless it is paused; clients may ask for less."""
    num_keys: int = 4096
    """Keys of finished creations that are remembered."""
    max_forks: int = 64
    """Copies in one request."""


@dataclass(slots=True, eq=False)
class Held:
    """A session and whose it is."""

    tenant: str
    session: EnvironmentSession
    idle_s: float
    used_s: float = field(default_factory=time.monotonic)
    num_users: int = 0
    """Requests that work on it."""


class SessionHost:
    """All sessions of one server, for one event loop."""

    def __init__(
        self,
        site: Site,
        limits: HostLimits | None = None,
        tasks: Mapping[str, Task] | None = None,
        roots: Sequence[Path] = (),
    ) -> None:
        """`tasks`: by the name under which clients ask for them, without those with steps: a client is asked
        for one thing only. `roots`: directories of this host below which clients may name files to work on.
        Takes the site's backend over.
        """
        self.site = site
        self.limits = limits or HostLimits()
        self.tasks = {name: task for name, task in (tasks or {}).items() if not task.steps}
        self.roots = tuple(root.resolve() for root in roots)
        self.metrics = Metrics("etude_environment")
        self.metrics.count("etude_environment_background_failures", 0)
        self.snapshots: dict[str, str] = {}
        """Snapshots that clients asked for -> whose they are. They outlive their sessions."""
        self.creations = Creations(self.limits.num_keys)
        self.draining = False
        self._held: dict[str, Held] = {}
        self._making = Counter[str]()
        """Sessions that are being made, by tenant."""
        self._calls = Counter[str]()
        """Calls that run, by tenant."""
        self._background = Tasks(on_error=self._note_background_error)

    async def close(self) -> None:
        """Closes every session and the backend; everything is tried. Raises the first failure."""
        self.draining = True
        await self._background.close()
        held, self._held = list(self._held.values()), {}
        try:
            await finish_all(one.session.close() for one in held)
        finally:
            if self.site.indexes is not None:
                await self.site.indexes.close()
            await self.site.backend.close()

    def check_accepting(self) -> None:
        """Raises CapacityError while the server drains."""
        if self.draining:
            raise CapacityError(
                "the server is shutting down and begins nothing new",
                field="environment.server",
                fix="use another server, or wait for its restart",
            )

    @asynccontextmanager
    async def place(self, tenant: str, count: int = 1) -> AsyncIterator[None]:
        """Room for sessions that are being made. Raises CapacityError."""
        self.check_accepting()
        held = self._making[tenant] + len(self.list(tenant))
        most = self.limits.tenant_sessions
        if held + count > most:
            raise CapacityError(
                f"this tenant holds {held} of {most} sessions",
                field="sessions",
                received=count,
                fix="close sessions that are done",
            )
        self._making[tenant] += count
        try:
            yield
        finally:
            self._making[tenant] -= count

    def hold(self, tenant: str, session: EnvironmentSession, idle_s: float | None = None) -> Held:
        """Knows a session from now on. If the server is shutting down, it is closed instead."""
        most = self.limits.idle_s
        held = Held(tenant, session, most if idle_s is None else min(most, idle_s))
        self._held[session.id] = held
        self.metrics.count("etude_environment_sessions_created", tenant=tenant)
        if self.draining:
            self.in_background(self.end(held))
        return held

    def find(self, tenant: str, session_id: str) -> Held:
        """A session of the tenant's. Raises SandboxMissingError."""
        held = self._held.get(session_id)
        if held is None or held.tenant != tenant:
            raise SandboxMissingError(
                "no such session here: it was closed, was not used for too long, or the server began anew",
                field="session",
                received=session_id,
                fix="begin a new one",
            )
        held.used_s = time.monotonic()
        return held

    def list(self, tenant: str) -> list[Held]:
        """The tenant's sessions, oldest first."""
        return [held for held in self._held.values() if held.tenant == tenant]

    @asynccontextmanager
    async def using(self, held: Held) -> AsyncIterator[EnvironmentSession]:
        """A session while a request works on it: it is not taken for unused."""
        held.num_users += 1
        try:
            yield held.session
        finally:
            held.num_users -= 1
            held.used_s = time.monotonic()

    async def end(self, held: Held) -> None:
        """Closes a session."""
        if self._held.pop(held.session.id, None) is not None:
            self.metrics.count("etude_environment_sessions_closed", tenant=held.tenant)
        await held.session.close()

    @asynccontextmanager
    async def turn(
        self, held: Held, calls: Sequence[ToolCall], number: int | None = None, key: str | None = None
    ) -> AsyncIterator[EnvironmentSession]:
        """A session while a turn is asked of it, within the tenant's limits. One that was asked for before,
        by its number or key, is not counted again. Raises CapacityError, and UserError as `History.find`."""
        session, before = held.session, held.session.num_turns
        is_named = number is not None or key is not None
        again = session.history.find(number, key, calls) is not None
        if not again and not (is_named and session.in_turn):
            self._check_turn(held, len(calls))
        self._calls[held.tenant] += len(calls)
        try:
            async with self.using(held):
                yield session
        finally:
            self._calls[held.tenant] -= len(calls)
        if not again and session.num_turns > before:
            self.metrics.count("etude_environment_turns", tenant=held.tenant)
            for result in session.history.turns[-1].results:
                error = result.error.value if result.error else ""
                self.metrics.count("etude_environment_calls", error=error, tenant=held.tenant)

    def _check_turn(self, held: Held, num_calls: int) -> None:
        self.check_accepting()
        limits, running = self.limits, self._calls[held.tenant]
        if running and running + num_calls > limits.tenant_calls:
            raise CapacityError(
                f"{running} of this tenant's {limits.tenant_calls} calls run",
                field="calls",
                received=num_calls,
                fix="wait until some have ended",
            )
        kept = sum(one.session.history.size_bytes for one in self.list(held.tenant))
        if kept >= limits.tenant_bytes:
            raise CapacityError(
                f"this tenant's sessions keep {kept} bytes of turns",
                field="kept_bytes",
                received=kept,
                fix="close sessions that are done",
            )

    def in_background(self, work: Any) -> asyncio.Task[Any]:
        """Work that goes on without a client; it is counted where it fails through a fault of ours."""
        return self._background.add(asyncio.ensure_future(work))

    def note_error(self, error: BaseException) -> None:
        """Counts what a request failed with."""
        self.metrics.count("etude_environment_errors", kind=type(error).__name__)

    def metrics_text(self, tenant: str) -> str:
        """Prometheus text, with what there is now: the tenant's own figures, and those of the server that
        belong to no tenant."""
        labels, held = (("tenant", tenant),), self.list(tenant)
        gauges: dict[tuple[str, Labels], float] = {
            ("etude_environment_draining", ()): float(self.draining),
            ("etude_environment_sessions", labels): len(held),
            ("etude_environment_calls_running", labels): self._calls[tenant],
            ("etude_environment_kept_bytes", labels): sum(one.session.history.size_bytes for one in held),
        }
        return self.metrics.text(gauges, lambda found: dict(found).get("tenant", tenant) == tenant)

    @property
    def num_busy(self) -> int:
        """Sessions on which something is being done, now."""
        return sum(held.session.busy or held.num_users > 0 for held in self._held.values())

    async def end_idle(self) -> None:
        """Begins to close the sessions that nobody uses any more."""
        now = time.monotonic()
        for held in self._held.values():
            used = held.num_users or held.session.busy or held.session.state == "paused"
            if not used and now - held.used_s >= held.idle_s:
                self.metrics.count("etude_environment_sessions_expired", tenant=held.tenant)
                self.in_background(self.end(held))

    def _note_background_error(self, error: BaseException) -> None:
        if is_our_fault(error):
            self.metrics.count("etude_environment_background_failures")
            _log.error("work in the background failed", exc_info=error)


def is_our_fault(error: BaseException) -> bool:
    """Whether a failure is reported to an operator: the infrastructure's, or a defect of the server."""
    if isinstance(error, _REFUSALS):
        return error.field not in _REFUSED
    return not isinstance(error, (UserError, AgentError))
