"""One Sampler over engine processes, any of which may be down: in the run's process and in rollout workers.

    run's process                                   worker
    EngineFleet ──EngineTable, whenever it changes──> FollowingSampler <── sessions
                                                          │
    engine processes <──────────exchange, poll────────────┘

The whole table is sent each time, so that changes may be merged or missed.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from etude.controller.remote.engines import EngineProcess, RemoteEngine
from etude.errors import PrefixMissError, SamplerError
from etude.inference.router.sampler import RoutedSampler
from etude.inference.router.types import NoReplicaError
from etude.protocols import Handle
from etude.records import PolicyVersion, SampleChunk, SampleRequest, Scores

_PAUSE_S = 0.05


class PatientSampler:
    """Implements Sampler over engines that join, fail and leave: requests wait. For one event loop."""

    def __init__(self, patience_s: float) -> None:
        """`patience_s`: how long a request waits for an engine, counted from the first loss."""
        self._engines: dict[str, RemoteEngine] = {}
        """All that were ever added, by name; those that have left are disconnected, and may join again."""
        self._routed = RoutedSampler({})
        self._patience_s = patience_s
        self._joined = asyncio.Event()
        self._active: dict[str, str] = {}
        """Request in progress -> its session."""

    @property
    def load_tokens(self) -> float:
        """Mean, over the ready engines, of the tokens that are yet to be sampled there."""
        works = [replica.work for replica in self._routed.router.replicas.values() if replica.ready]
        return sum(works) / len(works) if works else 0.0

    def add_engine(self, engine: RemoteEngine) -> None:
        """Adds an engine; it gets requests once it is ready."""
        self._engines[engine.name] = engine
        self._routed.join(engine.name, engine)

    def engine_ready(self, name: str, version: PolicyVersion) -> None:
        """Marks the engine of that name as serving `version`."""
        self._routed.set_version(name, version)
        self._joined.set()

    def engine_away(self, name: str) -> None:
        """Marks the engine of that name as down, with its prefix cache lost."""
        self._routed.set_version(name, None)
        self._routed.router.drop_prefixes(name)

    def open(self, session_id: str, sibling: str | None = None) -> None:
        with contextlib.suppress(NoReplicaError):  # then it is opened with its first request
            self._routed.open(session_id, sibling)

    @property
    def num_moved(self) -> int:
        """Number of times that a session moved to a less loaded engine between two messages."""
        return self._routed.router.spills

    def close(self, session_id: str) -> None:
        self._active = {name: session for name, session in self._active.items() if session != session_id}
        self._routed.close(session_id)

    async def stream(self, request: SampleRequest) -> AsyncIterator[SampleChunk]:
        """See Sampler.stream. An engine that is withdrawn in an orderly way, as a borrowed one is, ends its
        requests with `abort`: their tokens are kept, and the rest is sampled on another engine."""
        deadline: float | None = None
        remaining = request
        self._active[request.id] = request.session_id
        try:
            while True:
                kept: list[NDArray[np.int32]] = []
                self._joined.clear()
                try:
                    async for chunk in self._routed.stream(remaining):
                        is_cut = chunk.finish == "abort" and self._is_active(request)
                        kept.append(chunk.tokens)
                        yield replace(chunk, finish=None, prefix_digest="") if is_cut else chunk
                        if chunk.finish is not None and not is_cut:
                            return
                    remaining = _remainder(remaining, np.concatenate(kept))
                except SamplerError as error:
                    if kept or not _is_of_engine(error):
                        raise
                    deadline = await self._wait_for_engine(deadline, error)
        finally:
            self._active.pop(request.id, None)

    def _is_active(self, request: SampleRequest) -> bool:
        """Whether the request was not ended from here. An engine itself may end one with a deadline."""
        return request.id in self._active and request.deadline_s is None

    async def score(self, tokens: NDArray[np.int32], version: PolicyVersion) -> Scores:
        deadline: float | None = None
        while True:
            self._joined.clear()
            try:
                return await self._routed.score(tokens, version)
            except SamplerError as error:
                if not _is_of_engine(error):
                    raise
                deadline = await self._wait_for_engine(deadline, error)

    def abort(self, request_id: str) -> None:
        self._active.pop(request_id, None)
        self._routed.abort(request_id)

    async def _wait_for_engine(self, deadline: float | None, error: SamplerError) -> float:
        """Waits until an engine has become ready since `_joined` was cleared, or one serves that the router
        has set aside. Returns the request's deadline, in the loop's time: set when it first has no engine, so
        that earlier queueing and sampling do not count."""
        if deadline is None:
            deadline = asyncio.get_running_loop().time() + self._patience_s
        versions = {name: engine.current() for name, engine in self._engines.items()}
        serving = {name: version for name, version in versions.items() if version is not None}
        for name, version in serving.items():
            self.engine_ready(name, version)  # the router had set it aside for a failure
        try:
            async with asyncio.timeout_at(deadline):
                if serving:
                    await asyncio.sleep(_PAUSE_S)  # it may fail each time
                else:
                    await self._joined.wait()
        except TimeoutError:
            raise error from None
        return deadline


def _remainder(request: SampleRequest, tokens: NDArray[np.int32]) -> SampleRequest:
    """The rest of a request after `tokens` were sampled; its noise depends on positions alone.

    Raises PrefixMissError where the tokens before it must be sent again as well.
    """
    if not len(tokens):
        return request
    if request.prefix_digest is not None:
        raise PrefixMissError("the engine was taken away", field="prefix_digest", fix="send all tokens")
    params = replace(request.params, max_tokens=request.params.max_tokens - len(tokens))
    return replace(request, suffix=np.concatenate([request.suffix, tokens]), params=params)


def _is_of_engine(error: SamplerError) -> bool:
    """Whether the engine failed, rather than the request, whose errors name a field."""
    if isinstance(error, PrefixMissError):
        return False
    return isinstance(error, NoReplicaError) or error.field is None


@dataclass(frozen=True, slots=True)
class EngineEntry:
    """An engine that serves a version."""

    handle: Handle[EngineProcess]
    process: int
    """Number of this engine's process: distinguishes it from earlier ones."""
    version: PolicyVersion


EngineTable = Mapping[str, EngineEntry]
"""The engines that serve a version, by name."""


class FollowingSampler(PatientSampler):
    """Samples with the engines of the newest table. For one event loop."""

    def __init__(self, client: str, patience_s: float) -> None:
        """`client`: unique name at the engines. `patience_s`: how long a request waits for an engine."""
        super().__init__(patience_s)
        self._client = client
        self._table: EngineTable = {}
        self._processes: dict[str, int] = {}
        """Engine -> number of the process that it was last connected to."""

    def follow(self, table: EngineTable) -> None:
        """Replaces the table of engines."""
        self._table = table
        self.reconnect()

    def reconnect(self) -> None:
        """Updates the connections to match the table; retries engines that only this process lost."""
        for name, engine in self._engines.items():
            entry = self._table.get(name)
            if entry is None or entry.process != self._processes.get(name):
                engine.disconnect("it has left")
                self.engine_away(name)
        for name, entry in self._table.items():
            if name not in self._engines:
                self.add_engine(RemoteEngine(name, self._on_engine_lost, self._client))
            engine = self._engines[name]
            if engine.handle is None:
                engine.connect(entry.handle, entry.version)
                self._processes[name] = entry.process
            engine.set_version(entry.version)
            self.engine_ready(name, entry.version)

    def disconnect(self) -> None:
        """Disconnects from all engines."""
        for engine in self._engines.values():
            engine.disconnect("the worker ends")

    def _on_engine_lost(self, handle: Handle[EngineProcess], cause: str) -> None:
        """Sets aside engines without a connection, until they answer or a table names a new process."""
        for name, engine in self._engines.items():
            if engine.handle is None:
                self.engine_away(name)
