"""The process of a rollout worker: runs agents, their sandboxes and their grading.

    RemoteEpisodes ──run(ticket, order)──────────> RolloutPart ── Environment ── sandboxes
                   <──DoneEpisode──────────────────    │
                   ──follow(table), cancel(ticket)──>  └── FollowingSampler <──> engine processes

One call per session, however many turns it has: the work of its turns is done here.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace

from etude.config import RunConfig
from etude.controller.backends import open_run_backend
from etude.controller.remote.patient import EngineTable, FollowingSampler
from etude.environment.episodes import Environment, EpisodeLimits
from etude.environment.fork_groups import ForkRefusal
from etude.environment.member import MemberSampler
from etude.environment.runners import EnvironmentTimes, EpisodeRequest
from etude.inference.exchange import Build
from etude.kit.tasks import end_tasks
from etude.records import GroupOrigin
from etude.store.blobs import MemoryBlobs, blobs_of
from etude.store.bundles import pack_trajectory
from etude.tokens.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class DoneEpisode:
    """The result of an order."""

    bundles: tuple[bytes, ...]
    """The session and those forked from it, packed: plain arrays would stay in Ray's object store for as long
    as the trajectory is referenced, and fill it."""
    origin: GroupOrigin | None
    refused: ForkRefusal | None
    """See ForkedEpisode."""
    num_tokens: int
    """Number of sampled tokens, those of failed attempts included."""
    times: EnvironmentTimes
    """Totals of all episodes of this process so far."""


@dataclass(frozen=True, slots=True)
class Progress:
    """A worker's answer to a heartbeat."""

    num_tokens: Mapping[int, int]
    """Tokens sampled so far, by ticket of the running sessions."""
    times: EnvironmentTimes


class RolloutPart:
    """Runs episodes for the run's process. For one event loop; `begin` comes first."""

    def __init__(
        self, config: RunConfig, tokenizer: Tokenizer, limits: EpisodeLimits, name: str, owner: str
    ) -> None:
        """`config`: resolved. `owner`: of its sandboxes, as in open_run_backend. Raises ResourceError where
        sandboxes are not available."""
        self._build, self._client = Build.here(config.model), f"{name}-{uuid.uuid4().hex[:12]}"
        self._backend = open_run_backend(config.sandbox, owner)
        self._blobs = MemoryBlobs()
        self._sampler = FollowingSampler(self._client, config.cluster.patience_s)
        self._environment = Environment.of_run(config, tokenizer, self._backend, limits, self._blobs.put)
        self._sessions: dict[int, asyncio.Task[DoneEpisode]] = {}
        self._views: dict[int, MemberSampler] = {}
        self._cancelled: set[int] = set()
        """Tickets that were cancelled before their order arrived."""

    async def begin(self) -> tuple[Build, str]:
        """This process's build, and its unique client name at the engines."""
        return self._build, self._client

    async def follow(self, table: EngineTable) -> None:
        """Samples with these engines from now on."""
        self._sampler.follow(table)

    async def pulse(self) -> Progress:
        """Progress of the sessions. Also retries engines that did not answer this process."""
        self._sampler.reconnect()
        return Progress({ticket: view.num_tokens for ticket, view in self._views.items()}, self._times())

    async def run(self, ticket: int, request: EpisodeRequest) -> DoneEpisode | None:
        """Plays a session; None if it was cancelled."""
        if ticket in self._cancelled:
            self._cancelled.discard(ticket)
            return None
        view = self._views[ticket] = MemberSampler(self._sampler, defers_close=False)
        session = self._sessions[ticket] = asyncio.create_task(self._play(request, view))
        try:
            await asyncio.wait([session])
        finally:
            session.cancel()  # it has ended, unless this call was cancelled
            del self._sessions[ticket], self._views[ticket]
        return None if session.cancelled() else session.result()

    async def cancel(self, ticket: int) -> int:
        """Cancels a session and waits for its cleanup; returns the number of tokens it had sampled."""
        session, view = self._sessions.get(ticket), self._views.get(ticket)
        if session is None or view is None:
            self._cancelled.add(ticket)
            return 0
        session.cancel()
        await asyncio.wait([session])
        return view.num_tokens

    async def close(self) -> None:
        """Ends all sessions and their sandboxes."""
        await end_tasks(*self._sessions.values())
        self._sampler.disconnect()
        await self._environment.close()
        await self._backend.close()

    async def _play(self, request: EpisodeRequest, view: MemberSampler) -> DoneEpisode:
        episode = await self._environment.play(request, view)
        played = (episode.trajectory, *episode.siblings)  # which may name the same arrays
        bundles = [await asyncio.to_thread(pack_trajectory, t, self._blobs.get) for t in played]
        for ref in (ref for trajectory in played for ref in blobs_of(trajectory)):
            self._blobs.discard(ref)
        return DoneEpisode(tuple(bundles), episode.origin, episode.refused, view.num_tokens, self._times())

    def _times(self) -> EnvironmentTimes:
        return replace(self._environment.times, num_moved=self._sampler.num_moved)
