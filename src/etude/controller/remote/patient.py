"""Engine processes of which any may be away, as one Sampler: in the run's process and in rollout workers.

    run's process                                   worker
    EngineFleet ──EngineTable, whenever it changes──> FollowingSampler <── sessions
                                                          │
    engine processes <──────────exchange, poll────────────┘

The whole table travels each time, so that it matters neither how many changes it stands for nor whether one
was missed.
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
    """Implements Sampler over engines that come and go: requests wait until one is there. For one
    event loop."""

    def __init__(self, patience_s: float) -> None:
        """`patience_s`: how long a request waits for an engine, from the first one on that it lost."""
        self._engines: dict[str, RemoteEngine] = {}
        """All that were ever added, by name. One that has left is away, and may come back."""
        self._routed = RoutedSampler({})
        self._patience_s = patience_s
        self._joined = asyncio.Event()
        self._going: dict[str, str] = {}
        """Request that is wanted -> its session."""

    @property
    def load_tokens(self) -> float:
        """Mean, over the engines that are ready, of the tokens that are yet to be sampled there."""
        works = [one.work for one in self._routed.router.replicas.values() if one.ready]
        return sum(works) / len(works) if works else 0.0

    def add_engine(self, engine: RemoteEngine) -> None:
        """Samples with one more engine, as soon as it is ready."""
        self._engines[engine.name] = engine
        self._routed.join(engine.name, engine)

    def engine_ready(self, name: str, version: PolicyVersion) -> None:
        """The engine of that name serves `version` from now on."""
        self._routed.set_version(name, version)
        self._joined.set()

    def engine_away(self, name: str) -> None:
        """The engine of that name serves nothing for now, and has forgotten everything."""
        self._routed.set_version(name, None)
        self._routed.router.drop_prefixes(name)

    def open(self, session_id: str, beside: str | None = None) -> None:
        with contextlib.suppress(NoReplicaError):  # then it is opened where its first request goes
            self._routed.open(session_id, beside)

    @property
    def num_moved(self) -> int:
        """Times that a session left an engine for one with less to do, when its next message was due."""
        return self._routed.router.spills

    def close(self, session_id: str) -> None:
        self._going = {name: one for name, one in self._going.items() if one != session_id}
        self._routed.close(session_id)

    async def stream(self, request: SampleRequest) -> AsyncIterator[SampleChunk]:
        """See Sampler.stream. An engine that is taken away in good order, as one that was borrowed is,
        ends its requests with `abort`: their tokens are kept, and the rest is sampled elsewhere."""
        deadline: float | None = None
        left = request
        self._going[request.id] = request.session_id
        try:
            while True:
                kept: list[NDArray[np.int32]] = []
                self._joined.clear()
                try:
                    async for chunk in self._routed.stream(left):
                        is_cut = chunk.finish == "abort" and self._goes_on(request)
                        kept.append(chunk.tokens)
                        yield replace(chunk, finish=None, prefix_digest="") if is_cut else chunk
                        if chunk.finish is not None and not is_cut:
                            return
                    left = _rest(left, np.concatenate(kept))
                except SamplerError as error:
                    if kept or not _is_of_engine(error):
                        raise
                    deadline = await self._wait_for_one(deadline, error)
        finally:
            self._going.pop(request.id, None)

    def _goes_on(self, request: SampleRequest) -> bool:
        """Whether nobody here has ended the request. One with a deadline its engine may have."""
        return request.id in self._going and request.deadline_s is None

    async def score(self, tokens: NDArray[np.int32], version: PolicyVersion) -> Scores:
        deadline: float | None = None
        while True:
            self._joined.clear()
            try:
                return await self._routed.score(tokens, version)
            except SamplerError as error:
                if not _is_of_engine(error):
                    raise
                deadline = await self._wait_for_one(deadline, error)

    def abort(self, request_id: str) -> None:
        self._going.pop(request_id, None)
        self._routed.abort(request_id)

    async def _wait_for_one(self, deadline: float | None, error: SamplerError) -> float:
        """Waits until an engine has come back since `_joined` was cleared, or one is there unnoticed. Returns
        the request's deadline, in the loop's time: set when it first has no engine, so that what it queued
        and was sampled for before does not count."""
        if deadline is None:
            deadline = asyncio.get_running_loop().time() + self._patience_s
        serving = {name: one.current() for name, one in self._engines.items()}
        there = {name: version for name, version in serving.items() if version is not None}
        for name, version in there.items():
            self.engine_ready(name, version)  # the router had put it aside for a failure
        try:
            async with asyncio.timeout_at(deadline):
                if there:
                    await asyncio.sleep(_PAUSE_S)  # it may fail each time
                else:
                    await self._joined.wait()
        except TimeoutError:
            raise error from None
        return deadline


def _rest(request: SampleRequest, tokens: NDArray[np.int32]) -> SampleRequest:
    """What is left of a request when these have been sampled: its noise depends on positions alone.

    Raises PrefixMissError where the tokens before it must be sent again as well.
    """
    if not len(tokens):
        return request
    if request.prefix_digest is not None:
        raise PrefixMissError("the engine was taken away", field="prefix_digest", fix="send all tokens")
    params = replace(request.params, max_tokens=request.params.max_tokens - len(tokens))
    return replace(request, suffix=np.concatenate([request.suffix, tokens]), params=params)


def _is_of_engine(error: SamplerError) -> bool:
    """Whether an engine failed, and not the request: those errors name a field."""
    if isinstance(error, PrefixMissError):
        return False
    return isinstance(error, NoReplicaError) or error.field is None


@dataclass(frozen=True, slots=True)
class EngineEntry:
    """An engine that serves a version."""

    handle: Handle[EngineProcess]
    process: int
    """Tells one process of this engine from the next."""
    version: PolicyVersion


EngineTable = Mapping[str, EngineEntry]
"""The engines that serve something, by name."""


class FollowingSampler(PatientSampler):
    """Samples with whichever engines the newest table names. For one event loop."""

    def __init__(self, client: str, patience_s: float) -> None:
        """`client`: names this process to the engines, unlike any other's name. `patience_s`: how long a
        request waits for an engine."""
        super().__init__(patience_s)
        self._client = client
        self._table: EngineTable = {}
        self._processes: dict[str, int] = {}
        """Engine -> which of its processes it was last connected to."""

    def follow(self, table: EngineTable) -> None:
        """Goes on with the engines of `table`."""
        self._table = table
        self.reconnect()

    def reconnect(self) -> None:
        """Brings what is connected in line with the table; engines that only this process lost are tried
        again."""
        for name, engine in self._engines.items():
            entry = self._table.get(name)
            if entry is None or entry.process != self._processes.get(name):
                engine.disconnect("it has left")
                self.engine_away(name)
        for name, entry in self._table.items():
            if name not in self._engines:
                self.add_engine(RemoteEngine(name, self._lost, self._client))
            engine = self._engines[name]
            if engine.handle is None:
                engine.connect(entry.handle, entry.version)
                self._processes[name] = entry.process
            engine.serves(entry.version)
            self.engine_ready(name, entry.version)

    def disconnect(self) -> None:
        """Leaves all engines."""
        for engine in self._engines.values():
            engine.disconnect("the worker ends")

    def _lost(self, handle: Handle[EngineProcess], cause: str) -> None:
        """An engine does not answer: sessions go elsewhere, until it does or a table names its next one."""
        for name, engine in self._engines.items():
            if engine.handle is None:
                self.engine_away(name)
