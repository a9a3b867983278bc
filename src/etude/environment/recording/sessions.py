"""The recorded sessions of one server: who may use them, what they may hold, how they end.

create --> live --> finishing --> finished          its trajectory is stored, durably
             |          |
             |          +-> live                    the store failed: nothing is lost, finish again
             +--> deleted | expired                 nothing is stored | stored: see `Recordings.expire`

A live session is journaled (`journal`): a server that was killed has it again (`Recordings.recover`).
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections import Counter, OrderedDict
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from blake3 import blake3

from etude.environment.recording.errors import (
    BusyError,
    DrainingError,
    NoSuchSessionError,
    RefusedKeyError,
    SessionEndedError,
)
from etude.environment.recording.journal import SessionJournal
from etude.environment.recording.limits import RecordingLimits
from etude.environment.recording.recovery import LIVE, find_sessions, session_document
from etude.environment.recording.service import AnswerService, Serving
from etude.environment.recording.session_map import SessionMap
from etude.environment.recording.spec import RECORDED_ROUTES, SessionSpec
from etude.protocols import Sampler
from etude.records import Group, RewardBreakdown, Status, Trajectory
from etude.serving.access import find_token
from etude.store.blobs import BlobStore, FileBlobs
from etude.store.trajectories import TrajectoryLog
from etude.tokens.chat.errors import BadRequestError
from etude.tokens.chat.shelf import RendererShelf

_MAX_ENDED = 4096


@dataclass(slots=True, eq=False)
class RecordedSession:
    """One session of one agent."""

    id: str
    """Cannot be guessed: who knows it may send requests, and nothing else."""
    key: str
    """The agent's API key, where its base URL does not name the session."""
    tenant: str
    spec: SessionSpec
    service: AnswerService
    created_s: float
    used_s: float
    """Monotonic, as `created_s`."""
    num_requests: int = 0
    """Under way."""
    state: Literal["live", "finishing"] = "live"
    reward: RewardBreakdown | None = None

    @property
    def map(self) -> SessionMap:
        """Its histories."""
        return self.service.session_map

    @property
    def journal(self) -> SessionJournal:
        """What is on the disk of it."""
        assert self.service.journal is not None, "recorded sessions have one"
        return self.service.journal

    def describe(self) -> dict[str, Any]:
        """What its owner may know, as plain JSON values."""
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


class Recordings:
    """All sessions of one server. For one event loop; the store's files are written by threads."""

    def __init__(
        self,
        sampler: Sampler,
        renderers: RendererShelf,
        store: Path,
        tenants: Mapping[str, str],
        limits: RecordingLimits | None = None,
        serving: Serving | None = None,
        blobs: BlobStore | None = None,
    ) -> None:
        """`store`: directory of the trajectory log. `tenants`: token -> name of who may create sessions."""
        self.renderers = renderers
        self.limits = limits or RecordingLimits()
        self.draining = False
        self.counts: Counter[str] = Counter()
        self._sampler = sampler
        self._serving = serving or Serving()
        self._log = TrajectoryLog(store)
        self._live = store / LIVE
        self._blobs: BlobStore = FileBlobs(store / RECORDED_ROUTES) if blobs is None else blobs
        self._tenants = dict(tenants)
        self._store_lock = asyncio.Lock()
        self._sessions: dict[str, RecordedSession] = {}
        self._by_key: dict[str, RecordedSession] = {}
        self._ended: OrderedDict[str, tuple[str, dict[str, Any]]] = OrderedDict()
        """Finished sessions: tenant, and what finishing them answered."""
        self._heard_s: dict[str, float] = {}
        """Tenant -> when it was last heard of."""

    def __len__(self) -> int:
        """Sessions that have not ended."""
        return len(self._sessions)

    @property
    def num_requests(self) -> int:
        """Requests that are being answered."""
        return sum(session.num_requests for session in self._sessions.values())

    # ---- who ------------------------------------------------------------------------------------

    def tenant_of(self, token: str) -> str:
        """The tenant of a token. Raises RefusedKeyError."""
        tenant = find_token(self._tenants, token)
        if tenant is None:
            raise RefusedKeyError("no such token", field="Authorization", fix="send a tenant's token")
        self._heard_s[tenant] = time.monotonic()
        return tenant

    def find(self, session_id: str) -> RecordedSession:
        """The live session of an id. Raises NoSuchSessionError and SessionEndedError."""
        session = self._sessions.get(session_id)
        if session is None and session_id in self._ended:
            raise SessionEndedError("the session has ended", field="session")
        if session is None:
            raise NoSuchSessionError("no such session", field="session", fix="create it first")
        return session

    def find_owned(self, tenant: str, session_id: str) -> RecordedSession:
        """The same, for its owner alone: of others' sessions it says that there are none."""
        session = self.find(session_id)
        if session.tenant != tenant:
            raise NoSuchSessionError("no such session", field="session", fix="create it first")
        return session

    def find_for_agent(self, path_id: str | None, header_id: str | None, key: str) -> RecordedSession:
        """The session that an agent's request belongs to: by its path, its key, or a tenant's token with a
        header. Raises RefusedKeyError, NoSuchSessionError and SessionEndedError."""
        if path_id is not None:
            session = self.find(path_id)
        elif key in self._by_key:
            session = self._by_key[key]
        elif header_id is not None:
            session = self.find_owned(self.tenant_of(key), header_id)
        else:
            raise RefusedKeyError(
                "no session has this key",
                field="Authorization",
                fix="use the session's base URL, or its key as the API key",
            )
        if session.state != "live":
            raise SessionEndedError("the session is being finished", field="session")
        return session

    # ---- beginning and end ----------------------------------------------------------------------

    def recover(self) -> int:
        """Takes up the sessions that a killed server left; how many. Once, before anything is served.

        Raises StoreError for a damaged journal or log, ConfigError for a journal of another tokenizer or
        template.
        """
        len(self._log)  # reads what is stored, which takes long, and not while a session is being stored
        for found in find_sessions(self._live, self.renderers):
            service = AnswerService(found.map, self._sampler, self._serving, journal=found.journal)
            self._hold(found.id, found.key, found.tenant, found.spec, service, found.age_s, found.reward)
            self.counts["sessions_recovered"] += 1
        return self.counts["sessions_recovered"]

    def create(self, tenant: str, spec: SessionSpec) -> RecordedSession:
        """Begins a session; it is on the disk once its journal is synced.

        Raises BusyError, DrainingError, StoreError, and BadRequestError for an id that is open or stored.
        """
        if self.draining:
            raise DrainingError("the server takes no new sessions: it is about to end")
        held = sum(session.tenant == tenant for session in self._sessions.values())
        if held >= self.limits.sessions_per_tenant:
            raise BusyError("too many sessions", field="tenant", received=held, fix="finish or delete some")
        is_open = any(one.spec.trajectory_id == spec.trajectory_id for one in self._sessions.values())
        if is_open or self._log.contains(spec.trajectory_id):  # what is stored already is not stored again
            raise BadRequestError(
                f"a session of this trajectory is {'open' if is_open else 'stored'}",
                field="trajectory",
                received=str(spec.trajectory_id),
                fix="use another run, epoch, group or index",
            )
        session_map = SessionMap(
            str(spec.trajectory_id), self.renderers.find, self.limits.session, spec.keep_thinking
        )
        session_id, key = secrets.token_hex(16), f"etude-{secrets.token_urlsafe(24)}"
        described = session_document(session_id, key, tenant, spec, self.limits.session, self.renderers)
        journal = SessionJournal.create(self._live / f"{session_id}.jsonl", described)
        service = AnswerService(session_map, self._sampler, self._serving, journal=journal)
        self.counts["sessions_created"] += 1
        return self._hold(session_id, key, tenant, spec, service)

    def _hold(
        self,
        session_id: str,
        key: str,
        tenant: str,
        spec: SessionSpec,
        service: AnswerService,
        age_s: float = 0.0,
        reward: RewardBreakdown | None = None,
    ) -> RecordedSession:
        now = time.monotonic()
        session = RecordedSession(session_id, key, tenant, spec, service, now - age_s, now, reward=reward)
        self._sessions[session.id] = self._by_key[session.key] = session
        return session

    async def set_reward(self, session: RecordedSession, reward: RewardBreakdown) -> None:
        """Sets the reward, durably; a later one replaces it. Raises StoreError and SessionEndedError."""
        self._check_live(session)
        session.journal.reward(reward)
        await session.journal.sync()
        self._check_live(session)  # else its trajectory may have been made without
        session.reward = reward

    def enter(self, session: RecordedSession) -> None:
        """A request of the session begins. Raises BusyError, and SessionEndedError for one that has ended
        since it was found."""
        self._check_live(session)
        if session.num_requests >= self.limits.requests_per_session:
            raise BusyError(
                "too many requests of one session at once", field="session", received=session.num_requests
            )
        session.num_requests += 1
        session.used_s = time.monotonic()

    def leave(self, session: RecordedSession) -> None:
        """A request of the session has ended."""
        session.num_requests -= 1
        session.used_s = time.monotonic()

    async def finish(
        self,
        tenant: str,
        session_id: str,
        status: Status = Status.DONE,
        cause: str = "",
        reward: RewardBreakdown | None = None,
    ) -> dict[str, Any]:
        """Stores the session's trajectory durably and forgets the session. Again, it says the same.

        `reward` replaces what was set before.

        Requests under way are aborted first. Raises StoreError; the session then lives on.
        """
        ended = self._ended.get(session_id)
        if ended is not None and ended[0] == tenant:
            return ended[1]
        session = self.find_owned(tenant, session_id)
        if session.state == "finishing":
            raise SessionEndedError("the session is being finished", field="session")
        session.reward = reward or session.reward
        return await self._finish(session, status, cause, session.reward)

    async def _finish(
        self, session: RecordedSession, status: Status, cause: str, reward: RewardBreakdown | None
    ) -> dict[str, Any]:
        before, session.reward = session.reward, reward
        session.state = "finishing"
        try:
            await session.service.stop()
            trajectory = await asyncio.to_thread(self._trajectory, session, status, cause)
            identity = trajectory.id
            group = Group(
                f"{identity.run}/{identity.task}/e{identity.epoch}/g{identity.group}",
                "task",
                session.spec.group_size,
                (trajectory,),
            )
            async with self._store_lock:
                stored = await asyncio.to_thread(self._log.append, [group])
        except BaseException:
            session.state, session.reward = "live", before
            raise
        told = {
            "trajectory": str(identity),
            "status": status.value,
            "stored": bool(stored),
            "segments": len(trajectory.segments),
            "sampled_tokens": trajectory.num_sampled_tokens,
            "reward": None if trajectory.reward is None else trajectory.reward.total,
            "facts": dict(trajectory.facts),
        }
        self._forget(session)
        session.journal.remove()
        self._ended[session.id] = (session.tenant, told)
        while len(self._ended) > _MAX_ENDED:
            self._ended.popitem(last=False)
        self.counts["sessions_finished"] += 1
        self.counts["sampled_tokens"] += trajectory.num_sampled_tokens
        return told

    async def delete(self, tenant: str, session_id: str) -> None:
        """Ends a session; nothing of it is stored."""
        session = self.find_owned(tenant, session_id)
        if session.state == "finishing":
            raise SessionEndedError("the session is being finished", field="session")
        self._forget(session)
        try:
            await session.service.stop()
        finally:
            session.journal.remove()
        self.counts["sessions_deleted"] += 1

    async def expire(self) -> int:
        """Ends the sessions that nobody uses any more; how many.

        It ran into a limit, and earns what was set before, or nothing, if the agent had its answers, and
        the tenant was there later, in the second half of the time, and did not end it: then the harness
        still waits, for something that the agent began. Else the failure is ours: the sampler failed, or
        harness and tenant are gone.
        """
        end_s = time.monotonic() - self.limits.idle_s
        num_ended = 0
        for session in list(self._sessions.values()):
            # Looked at only now: while the ones before were stored, it may have been used, or have ended.
            if session.used_s < end_s and not session.num_requests and self._is_live(session):
                seen_s = self._heard_s.get(session.tenant, 0.0) - session.used_s
                is_seen = session.reward is not None or seen_s > self.limits.idle_s / 2
                is_ours = not is_seen or session.map.counts.failed or not session.map.num_sampled_tokens
                status = Status.INFRASTRUCTURE if is_ours else Status.LIMIT
                await self._finish(session, status, "idle", session.reward or RewardBreakdown(0.0))
                self.counts["sessions_expired"] += 1
                num_ended += 1
        return num_ended

    async def close(self) -> None:
        """Stops all sampling. What was not finished stays in its journal, for the next server. Every session
        is tried; raises the first failure."""
        self.draining = True
        leaving = [self._leave(session) for session in self._sessions.values()]
        for result in await asyncio.gather(*leaving, return_exceptions=True):
            if isinstance(result, BaseException):
                raise result

    async def _leave(self, session: RecordedSession) -> None:
        self._forget(session)
        try:
            await session.service.stop()
        finally:
            session.journal.close()

    def _is_live(self, session: RecordedSession) -> bool:
        return session.state == "live" and session.id in self._sessions

    def _check_live(self, session: RecordedSession) -> None:
        if not self._is_live(session):
            raise SessionEndedError("the session has ended, or is being finished", field="session")

    def _forget(self, session: RecordedSession) -> None:
        self._sessions.pop(session.id, None)
        self._by_key.pop(session.key, None)

    def _trajectory(self, session: RecordedSession, status: Status, cause: str) -> Trajectory:
        recorded, spec = session.map, session.spec
        failed = status is Status.INFRASTRUCTURE
        facts = {
            **asdict(recorded.counts),
            "abandoned": [list(row) for row in recorded.abandoned()],
            "metadata": dict(spec.metadata),
        }
        openings = sorted({e.key.hex() for b in recorded.branches for e in b.entries[:1]})
        return Trajectory(
            id=spec.trajectory_id,
            segments=recorded.segments(self._blobs.put),
            turns=recorded.turns(),
            status=status,
            cause=cause,
            reward=None if failed else session.reward,
            harness_digest=blake3(json.dumps(openings).encode()).hexdigest(),
            timings={"session": time.monotonic() - session.created_s},
            tenant=session.tenant,
            consent=spec.consent,
            facts=facts,
        )
