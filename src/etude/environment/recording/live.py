"""The open sessions of a recording endpoint, by id and by key.

`Recordings` adds tenants that may create sessions, and durability; a run that plays a foreign harness
(`environment.harness`) uses `LiveSessions` itself.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from blake3 import blake3

from etude.agent.recording import KeepRoutes
from etude.environment.recording.journal import SessionJournal
from etude.environment.recording.service import AnswerService
from etude.environment.recording.session_map import MapLimits, SessionMap
from etude.environment.recording.spec import SessionSpec
from etude.errors import EtudeError, InfrastructureError, UserError
from etude.protocols import Sampler
from etude.records import RewardBreakdown, Status, Trajectory
from etude.tokens.chat.renderer_cache import RendererCache


class RefusedKeyError(UserError):
    """A key that is missing, unknown, or of another tenant."""


class NoSuchSessionError(UserError):
    """There is no such session."""


class SessionEndedError(UserError):
    """The session accepts no more requests: it is finished, or is being finished."""


class BusyError(UserError):
    """A limit of the tenant or the session is reached: try later, or after something has ended."""


class DrainingError(InfrastructureError):
    """The server is shutting down and accepts no new sessions."""


@dataclass(frozen=True, slots=True)
class RecordingLimits:
    """Limits for the clients of a server."""

    body_bytes: int = 64 << 20
    sessions_per_tenant: int = 1024
    requests_per_session: int = 64
    """Concurrent ones."""
    idle_s: float = 3600.0
    """A session without requests for so long is ended: see `Recordings.expire`."""
    session: MapLimits = field(default_factory=MapLimits)
    default_max_tokens: int = 4096
    answer_s: float = 600.0
    abort_s: float = 30.0
    """See `AnswerService`, both."""


@dataclass(slots=True, eq=False)
class RecordedSession:
    """One session of one agent."""

    id: str
    """A secret: it allows to send requests, and nothing else."""
    key: str
    """The agent's API key, used if its base URL does not name the session."""
    tenant: str
    spec: SessionSpec
    service: AnswerService
    created_s: float = field(default_factory=time.monotonic)
    used_s: float = field(default_factory=time.monotonic)
    num_requests: int = 0
    """In progress."""
    state: Literal["live", "finishing"] = "live"
    reward: RewardBreakdown | None = None
    refusal: EtudeError | None = None
    """The error of the agent's last refused request."""

    @property
    def map(self) -> SessionMap:
        """Its session map."""
        return self.service.session_map

    @property
    def journal(self) -> SessionJournal:
        """Its journal on disk."""
        assert self.service.journal is not None, "recorded sessions have one"
        return self.service.journal

    def describe(self) -> dict[str, Any]:
        """Its description for the owner, as plain JSON values."""
        return {
            "id": self.id,
            "trajectory": str(self.spec.trajectory_id),
            "state": self.state,
            "requests_running": self.num_requests,
            "branches": len(self.map.branches),
            "tokens": self.map.num_tokens,
            "sampled_tokens": self.map.num_sampled_tokens,
            "counts": asdict(self.map.counts),
            "reward": None if self.reward is None else self.reward.total,
            "metadata": dict(self.spec.metadata),
        }

    def trajectory(self, status: Status, cause: str, keep_routes: KeepRoutes | None) -> Trajectory:
        """The trajectory of the session, with its current reward."""
        failed = status is Status.INFRASTRUCTURE
        facts = {
            **asdict(self.map.counts),
            "abandoned": [list(row) for row in self.map.abandoned()],
            "metadata": dict(self.spec.metadata),
        }
        openings = sorted({e.key.hex() for b in self.map.branches for e in b.entries[:1]})
        return Trajectory(
            id=self.spec.trajectory_id,
            segments=self.map.segments(keep_routes),
            turns=self.map.turns(),
            status=status,
            cause=cause,
            reward=None if failed else self.reward,
            harness_digest=blake3(json.dumps(openings).encode()).hexdigest(),
            timings={"session": time.monotonic() - self.created_s},
            tenant=self.tenant,
            consent=self.spec.consent,
            facts=facts,
        )


class LiveSessions:
    """Sessions that have not ended. For one event loop."""

    def __init__(self, renderers: RendererCache, limits: RecordingLimits | None = None) -> None:
        self.renderers = renderers
        self.limits = limits or RecordingLimits()
        self.draining = False
        self.counts: Counter[str] = Counter()
        self._sessions: dict[str, RecordedSession] = {}
        self._by_key: dict[str, RecordedSession] = {}

    def __len__(self) -> int:
        """Sessions that have not ended."""
        return len(self._sessions)

    @property
    def num_requests(self) -> int:
        """Requests that are being answered."""
        return sum(session.num_requests for session in self._sessions.values())

    def find(self, session_id: str) -> RecordedSession:
        """The live session with this id. Raises NoSuchSessionError and SessionEndedError."""
        session = self._sessions.get(session_id)
        if session is None:
            raise NoSuchSessionError("no such session", field="session", fix="create it first")
        return session

    def find_for_agent(self, path_id: str | None, header_id: str | None, key: str) -> RecordedSession:
        """The session of an agent's request, by its path or its key. `header_id`: only for owners of
        sessions. Raises RefusedKeyError, NoSuchSessionError and SessionEndedError."""
        session = self.find(path_id) if path_id is not None else self._by_key.get(key)
        if session is None:
            raise RefusedKeyError(
                "no session has this key",
                field="Authorization",
                fix="use the session's base URL, or its key as the API key",
            )
        self.check_live(session)
        return session

    def open(self, spec: SessionSpec, sampler: Sampler, rng_key: tuple[int, ...]) -> RecordedSession:
        """Begins a session that is not stored: the caller uses its trajectory. `rng_key`: key of its sampling
        noise, to which the number of the segment is appended."""
        service = self._service(self._map_of(spec), sampler, rng_key=rng_key)
        return self._register(RecordedSession(*new_names(), "local", spec, service))

    async def end(self, session: RecordedSession) -> None:
        """Ends a session: no more requests are accepted, and those in progress are aborted. Idempotent."""
        self._remove(session)
        session.state = "finishing"
        await session.service.stop()

    @contextlib.contextmanager
    def using(self, session: RecordedSession) -> Iterator[None]:
        """Context of one request. Raises BusyError, and SessionEndedError if the session has since ended."""
        self.check_live(session)
        if session.num_requests >= self.limits.requests_per_session:
            raise BusyError(
                "too many requests of one session at once", field="session", received=session.num_requests
            )
        session.num_requests += 1
        session.used_s = time.monotonic()
        try:
            yield
        finally:
            session.num_requests -= 1
            session.used_s = time.monotonic()

    def _map_of(self, spec: SessionSpec) -> SessionMap:
        name, limits = str(spec.trajectory_id), self.limits.session
        return SessionMap(name, self.renderers.find, limits, spec.keep_thinking)

    def _service(self, session_map: SessionMap, sampler: Sampler, **more: Any) -> AnswerService:
        return AnswerService(session_map, sampler, self.limits.answer_s, self.limits.abort_s, **more)

    def _register(self, session: RecordedSession) -> RecordedSession:
        self._sessions[session.id] = self._by_key[session.key] = session
        return session

    def _is_live(self, session: RecordedSession) -> bool:
        return session.state == "live" and session.id in self._sessions

    def check_live(self, session: RecordedSession) -> None:
        """Raises SessionEndedError."""
        if not self._is_live(session):
            raise SessionEndedError("the session has ended, or is being finished", field="session")

    def _remove(self, session: RecordedSession) -> None:
        self._sessions.pop(session.id, None)
        self._by_key.pop(session.key, None)


def new_names() -> tuple[str, str]:
    """Random, secret id and key of a new session."""
    return secrets.token_hex(16), f"etude-{secrets.token_urlsafe(24)}"
