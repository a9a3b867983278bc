"""The recorded sessions of one server: access, limits and life cycle.

create --> live --> finishing --> finished          its trajectory is stored, durably
             |          |
             |          +-> live                    the store failed: nothing is lost, finish again
             +--> deleted | expired                 nothing is stored | stored: see `Recordings.expire`

A live session is journaled (`journal`) and recovered when the server starts again (`Recordings.recover`).
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from etude.environment.recording.journal import LIVE, SessionFacts, SessionJournal, find_sessions
from etude.environment.recording.live import (
    BusyError,
    DrainingError,
    LiveSessions,
    NoSuchSessionError,
    RecordedSession,
    RecordingLimits,
    RefusedKeyError,
    SessionEndedError,
    new_names,
)
from etude.environment.recording.spec import RECORDED_ROUTES, SessionSpec
from etude.kit.tasks import finish_all
from etude.protocols import Sampler
from etude.records import Group, RewardBreakdown, Status
from etude.serving.access import find_token
from etude.store.blobs import BlobStore, FileBlobs
from etude.store.trajectories import TrajectoryLog
from etude.tokens.chat.errors import BadRequestError
from etude.tokens.chat.renderer_cache import RendererCache

_MAX_ENDED = 4096


class Recordings(LiveSessions):
    """All sessions of one server. For one event loop; the store's files are written by threads."""

    def __init__(
        self,
        sampler: Sampler,
        renderers: RendererCache,
        store: Path,
        tenants: Mapping[str, str],
        limits: RecordingLimits | None = None,
        blobs: BlobStore | None = None,
    ) -> None:
        """`store`: directory of the trajectory log. `tenants`: token -> tenant that may create sessions."""
        super().__init__(renderers, limits)
        self._sampler = sampler
        self._log = TrajectoryLog(store)
        self._live = store / LIVE
        self._blobs: BlobStore = FileBlobs(store / RECORDED_ROUTES) if blobs is None else blobs
        self._tenants = dict(tenants)
        self._store_lock = asyncio.Lock()
        self._ended: OrderedDict[str, tuple[str, dict[str, Any]]] = OrderedDict()
        """Finished sessions: (tenant, answer of `finish`)."""
        self._last_request_s: dict[str, float] = {}
        """Tenant -> time of its last request."""

    # ---- access ---------------------------------------------------------------------------------

    def tenant_of(self, token: str) -> str:
        """The tenant of a token. Raises RefusedKeyError."""
        tenant = find_token(self._tenants, token)
        if tenant is None:
            raise RefusedKeyError("no such token", field="Authorization", fix="send a tenant's token")
        self._last_request_s[tenant] = time.monotonic()
        return tenant

    def find(self, session_id: str) -> RecordedSession:
        if session_id not in self._sessions and session_id in self._ended:
            raise SessionEndedError("the session has ended", field="session")
        return super().find(session_id)

    def find_owned(self, tenant: str, session_id: str) -> RecordedSession:
        """The same, for its owner only: other tenants get NoSuchSessionError."""
        session = self.find(session_id)
        if session.tenant != tenant:
            raise NoSuchSessionError("no such session", field="session", fix="create it first")
        return session

    def find_for_agent(self, path_id: str | None, header_id: str | None, key: str) -> RecordedSession:
        """See LiveSessions.find_for_agent; also by a tenant's token with a header."""
        if path_id is None and header_id is not None and key not in self._by_key:
            path_id = self.find_owned(self.tenant_of(key), header_id).id
        return super().find_for_agent(path_id, header_id, key)

    # ---- beginning and end ----------------------------------------------------------------------

    def recover(self) -> int:
        """Recovers the sessions of a killed server; returns how many. Call it once, before serving.

        Raises StoreError for a damaged journal or log, ConfigError for a journal of another tokenizer or
        template.
        """
        len(self._log)  # reads the index of the log now, as that takes long
        for facts, journal, session_map, reward in find_sessions(self._live, self.renderers):
            service = self._service(session_map, self._sampler, journal=journal)
            began_s = time.monotonic() - max(time.time() - facts.created_unix_s, 0.0)
            names = facts.id, facts.key, facts.tenant
            self._register(RecordedSession(*names, facts.spec, service, began_s, reward=reward))
            self.counts["sessions_recovered"] += 1
        return self.counts["sessions_recovered"]

    def create(self, tenant: str, spec: SessionSpec) -> RecordedSession:
        """Begins a session; it is durable once its journal is synced.

        Raises BusyError, DrainingError, StoreError, and BadRequestError for an id that is open or stored.
        """
        if self.draining:
            raise DrainingError("the server takes no new sessions: it is about to end")
        held = sum(session.tenant == tenant for session in self._sessions.values())
        if held >= self.limits.sessions_per_tenant:
            raise BusyError("too many sessions", field="tenant", received=held, fix="finish or delete some")
        is_open = any(one.spec.trajectory_id == spec.trajectory_id for one in self._sessions.values())
        if is_open or self._log.contains(spec.trajectory_id):  # the log would not store it again
            raise BadRequestError(
                f"a session of this trajectory is {'open' if is_open else 'stored'}",
                field="trajectory",
                received=str(spec.trajectory_id),
                fix="use another run, epoch, group or index",
            )
        session_id, key = new_names()
        digest, limits = self.renderers.digest, self.limits.session
        facts = SessionFacts(session_id, key, tenant, spec, limits, digest, time.time())
        journal = SessionJournal.create(self._live / f"{session_id}.jsonl", asdict(facts))
        service = self._service(self._map_of(spec), self._sampler, journal=journal)
        self.counts["sessions_created"] += 1
        return self._register(RecordedSession(session_id, key, tenant, spec, service))

    async def set_reward(self, session: RecordedSession, reward: RewardBreakdown) -> None:
        """Sets the reward, durably; a later one replaces it. Raises StoreError and SessionEndedError."""
        self.check_live(session)
        session.journal.reward(reward)
        await session.journal.sync()
        self.check_live(session)  # else its trajectory may have been made without
        session.reward = reward

    async def finish(
        self,
        tenant: str,
        session_id: str,
        status: Status = Status.DONE,
        cause: str = "",
        reward: RewardBreakdown | None = None,
    ) -> dict[str, Any]:
        """Stores the session's trajectory durably and removes the session. Idempotent.

        `reward` replaces the one set before. Requests in progress are aborted first. Raises StoreError; the
        session then stays live.
        """
        ended = self._ended.get(session_id)
        if ended is not None and ended[0] == tenant:
            return ended[1]
        session = self.find_owned(tenant, session_id)
        self.check_live(session)
        session.reward = reward or session.reward
        return await self._finish(session, status, cause, session.reward)

    async def _finish(
        self, session: RecordedSession, status: Status, cause: str, reward: RewardBreakdown | None
    ) -> dict[str, Any]:
        before, session.reward = session.reward, reward
        session.state = "finishing"
        try:
            await session.service.stop()
            trajectory = await asyncio.to_thread(session.trajectory, status, cause, self._blobs.put)
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
        summary = {
            "trajectory": str(identity),
            "status": status.value,
            "stored": bool(stored),
            "segments": len(trajectory.segments),
            "sampled_tokens": trajectory.num_sampled_tokens,
            "reward": None if trajectory.reward is None else trajectory.reward.total,
            "facts": dict(trajectory.facts),
        }
        self._remove(session)
        session.journal.remove()
        self._ended[session.id] = (session.tenant, summary)
        while len(self._ended) > _MAX_ENDED:
            self._ended.popitem(last=False)
        self.counts["sessions_finished"] += 1
        self.counts["sampled_tokens"] += trajectory.num_sampled_tokens
        return summary

    async def delete(self, tenant: str, session_id: str) -> None:
        """Ends a session without storing it."""
        session = self.find_owned(tenant, session_id)
        self.check_live(session)
        self._remove(session)
        try:
            await session.service.stop()
        finally:
            session.journal.remove()
        self.counts["sessions_deleted"] += 1

    async def expire(self) -> int:
        """Ends idle sessions; returns how many.

        A session ends as `limit`, with its reward or 0, if the agent got its answers and the tenant sent
        requests in the second half of the idle time without ending it: then the harness is still waiting for
        something that the agent has started. Otherwise it is an infrastructure failure: the sampler failed,
        or harness and tenant have ended.
        """
        end_s = time.monotonic() - self.limits.idle_s
        num_ended = 0
        for session in list(self._sessions.values()):
            # Checked only now: while earlier ones were stored, it may have been used, or have ended.
            if session.used_s < end_s and not session.num_requests and self._is_live(session):
                seen_s = self._last_request_s.get(session.tenant, 0.0) - session.used_s
                is_seen = session.reward is not None or seen_s > self.limits.idle_s / 2
                is_ours = not is_seen or session.map.counts.failed or not session.map.num_sampled_tokens
                status = Status.INFRASTRUCTURE if is_ours else Status.LIMIT
                await self._finish(session, status, "idle", session.reward or RewardBreakdown(0.0))
                self.counts["sessions_expired"] += 1
                num_ended += 1
        return num_ended

    async def close(self) -> None:
        """Stops all sampling. Unfinished sessions stay in their journals, for the next server. Tries every
        session; raises the first failure."""
        self.draining = True
        await finish_all([self._suspend(session) for session in self._sessions.values()])

    async def _suspend(self, session: RecordedSession) -> None:
        self._remove(session)
        try:
            await session.service.stop()
        finally:
            session.journal.close()
