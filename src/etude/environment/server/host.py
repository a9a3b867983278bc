"""The sessions of a server: their owners, limits and idle times.

A tenant sees its own sessions only, and its resources are limited; a request that would exceed a limit is
refused with CapacityError before anything runs, so that it can be retried later.
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

from etude.environment.sessions import EnvironmentSession, SessionServices
from etude.errors import AgentError, UserError
from etude.kit.tasks import Tasks, finish_all
from etude.records import Task, ToolCall
from etude.sandbox.errors import CapacityError, SandboxMissingError, SandboxStateError
from etude.sandbox.server.state import Creations
from etude.serving.metrics import Labels, Metrics

_log = logging.getLogger("etude.environment.server")
_REFUSALS = (CapacityError, SandboxMissingError, SandboxStateError)
_REFUSED = {"session", "sessions", "snapshot", "calls", "kept_bytes", "episode_id", "environment.server"}
"""Fields of this server's own refusals: a tenant's limit, an ended session. The same error types with other
fields come from the sandboxes."""


@dataclass(frozen=True, slots=True)
class HostLimits:
    """Limits of a server."""

    tenant_sessions: int = 64
    """Sessions of one tenant."""
    tenant_calls: int = 256
    """Running calls of one tenant."""
    tenant_bytes: int = 256 << 20
    """Calls, results and archived contexts in the histories of one tenant's sessions."""
    body_bytes: int = 64 << 20
    """Body of one request."""
    idle_s: float = 3600.0
    """A session without requests for so long is closed, unless it is paused; clients may set less."""
    num_keys: int = 4096
    """Idempotency keys of finished creations that are kept."""
    max_forks: int = 64
    """Copies in one request."""


@dataclass(slots=True, eq=False)
class HostSession:
    """A session and its owner."""

    tenant: str
    session: EnvironmentSession
    idle_s: float
    used_s: float = field(default_factory=time.monotonic)
    num_users: int = 0
    """Requests that are using it."""


class SessionHost:
    """All sessions of one server, for one event loop."""

    def __init__(
        self,
        services: SessionServices,
        limits: HostLimits | None = None,
        tasks: Mapping[str, Task] | None = None,
        roots: Sequence[Path] = (),
    ) -> None:
        """`tasks`: by the name that clients use; those with steps are left out, because a client gets one
        instruction only. `roots`: directories of this host below which clients may name files to work on.
        Takes ownership of the site's backend.
        """
        self.services = services
        self.limits = limits or HostLimits()
        self.tasks = {name: task for name, task in (tasks or {}).items() if not task.steps}
        self.roots = tuple(root.resolve() for root in roots)
        self.metrics = Metrics("etude_environment")
        self.metrics.count("etude_environment_background_failures", 0)
        self.snapshots: dict[str, str] = {}
        """Snapshot that a client has made -> its tenant. Snapshots outlive their sessions."""
        self.creations = Creations(self.limits.num_keys)
        self.draining = False
        self._sessions: dict[str, HostSession] = {}
        self._making = Counter[str]()
        """Tenant -> number of sessions that are being created."""
        self._calls = Counter[str]()
        """Tenant -> number of running calls."""
        self._background = Tasks(on_error=self._note_background_error)

    async def close(self) -> None:
        """Closes every session and the backend, also after a failure. Raises the first failure."""
        self.draining = True
        await self._background.close()
        owned, self._sessions = list(self._sessions.values()), {}
        try:
            await finish_all(entry.session.close() for entry in owned)
        finally:
            if self.services.indexes is not None:
                await self.services.indexes.close()
            await self.services.backend.close()

    def check_accepting(self) -> None:
        """Raises CapacityError while the server drains."""
        if self.draining:
            raise CapacityError(
                "the server is shutting down",
                field="environment.server",
                fix="use another server, or wait for its restart",
            )

    @asynccontextmanager
    async def reserve(self, tenant: str, count: int = 1) -> AsyncIterator[None]:
        """Reserves room for `count` sessions while they are being created. Raises CapacityError."""
        self.check_accepting()
        num_owned = self._making[tenant] + len(self.list(tenant))
        most = self.limits.tenant_sessions
        if num_owned + count > most:
            raise CapacityError(
                f"this tenant holds {num_owned} of {most} sessions",
                field="sessions",
                received=count,
                fix="close finished sessions",
            )
        self._making[tenant] += count
        try:
            yield
        finally:
            self._making[tenant] -= count

    def register(self, tenant: str, session: EnvironmentSession, idle_s: float | None = None) -> HostSession:
        """Registers a session. If the server is shutting down, it is closed instead."""
        most = self.limits.idle_s
        owned = HostSession(tenant, session, most if idle_s is None else min(most, idle_s))
        self._sessions[session.id] = owned
        self.metrics.count("etude_environment_sessions_created", tenant=tenant)
        if self.draining:
            self.in_background(self.end(owned))
        return owned

    def find(self, tenant: str, session_id: str) -> HostSession:
        """A session of the tenant, marked as used. Raises SandboxMissingError."""
        owned = self._sessions.get(session_id)
        if owned is None or owned.tenant != tenant:
            raise SandboxMissingError(
                "no such session here: it was closed, was unused for too long, or the server was restarted",
                field="session",
                received=session_id,
                fix="begin a new session",
            )
        owned.used_s = time.monotonic()
        return owned

    def list(self, tenant: str) -> list[HostSession]:
        """The tenant's sessions, oldest first."""
        return [owned for owned in self._sessions.values() if owned.tenant == tenant]

    @asynccontextmanager
    async def using(self, owned: HostSession) -> AsyncIterator[EnvironmentSession]:
        """Context in which a request uses a session, which is then not idle."""
        owned.num_users += 1
        try:
            yield owned.session
        finally:
            owned.num_users -= 1
            owned.used_s = time.monotonic()

    async def end(self, owned: HostSession) -> None:
        """Closes a session."""
        if self._sessions.pop(owned.session.id, None) is not None:
            self.metrics.count("etude_environment_sessions_closed", tenant=owned.tenant)
        await owned.session.close()

    @asynccontextmanager
    async def turn(
        self, owned: HostSession, calls: Sequence[ToolCall], number: int | None = None, key: str | None = None
    ) -> AsyncIterator[EnvironmentSession]:
        """Context in which a request runs a turn of a session, within the tenant's limits. A repeated
        request, by number or key, is not counted again. Raises CapacityError, and UserError as
        `History.find`."""
        session, before = owned.session, owned.session.num_turns
        is_named = number is not None or key is not None
        again = session.history.find(number, key, calls) is not None
        if not again and not (is_named and session.in_turn):
            self._check_turn(owned, len(calls))
        self._calls[owned.tenant] += len(calls)
        try:
            async with self.using(owned):
                yield session
        finally:
            self._calls[owned.tenant] -= len(calls)
        if not again and session.num_turns > before:
            self.metrics.count("etude_environment_turns", tenant=owned.tenant)
            for result in session.history.turns[-1].results:
                error = result.error.value if result.error else ""
                self.metrics.count("etude_environment_calls", error=error, tenant=owned.tenant)

    def _check_turn(self, owned: HostSession, num_calls: int) -> None:
        self.check_accepting()
        limits, running = self.limits, self._calls[owned.tenant]
        if running and running + num_calls > limits.tenant_calls:
            raise CapacityError(
                f"{running} of this tenant's {limits.tenant_calls} calls run",
                field="calls",
                received=num_calls,
                fix="wait until some have ended",
            )
        kept = sum(entry.session.history.size_bytes for entry in self.list(owned.tenant))
        if kept >= limits.tenant_bytes:
            raise CapacityError(
                f"this tenant's sessions keep {kept} bytes of turns",
                field="kept_bytes",
                received=kept,
                fix="close finished sessions",
            )

    def in_background(self, work: Any) -> asyncio.Task[Any]:
        """Starts work that continues without a client; failures that are ours are counted."""
        return self._background.add(asyncio.ensure_future(work))

    def note_error(self, error: BaseException) -> None:
        """Counts the error of a request by its type."""
        self.metrics.count("etude_environment_errors", kind=type(error).__name__)

    def metrics_text(self, tenant: str) -> str:
        """Metrics as Prometheus text: the tenant's own, and those of the server that belong to no tenant."""
        labels, owned = (("tenant", tenant),), self.list(tenant)
        gauges: dict[tuple[str, Labels], float] = {
            ("etude_environment_draining", ()): float(self.draining),
            ("etude_environment_sessions", labels): len(owned),
            ("etude_environment_calls_running", labels): self._calls[tenant],
            ("etude_environment_kept_bytes", labels): sum(o.session.history.size_bytes for o in owned),
        }
        return self.metrics.text(gauges, lambda found: dict(found).get("tenant", tenant) == tenant)

    @property
    def num_busy(self) -> int:
        """Number of sessions with an operation in progress."""
        return sum(owned.session.busy or owned.num_users > 0 for owned in self._sessions.values())

    async def end_idle(self) -> None:
        """Starts to close idle sessions."""
        now = time.monotonic()
        for owned in self._sessions.values():
            used = owned.num_users or owned.session.busy or owned.session.state == "paused"
            if not used and now - owned.used_s >= owned.idle_s:
                self.metrics.count("etude_environment_sessions_expired", tenant=owned.tenant)
                self.in_background(self.end(owned))

    def _note_background_error(self, error: BaseException) -> None:
        if is_our_fault(error):
            self.metrics.count("etude_environment_background_failures")
            _log.error("work in the background failed", exc_info=error)


def is_our_fault(error: BaseException) -> bool:
    """Whether a failure is reported to an operator: the infrastructure's, or a defect of the server."""
    if isinstance(error, _REFUSALS):
        return error.field not in _REFUSED
    return not isinstance(error, (UserError, AgentError))
