"""Client of an engine process: a Sampler and WeightSink over batches of messages.

    sessions ──open, stream, close──> outbox ──one call per batch of commands──> EnginePart
             <──chunks── a queue per request <──one poll for all of them──────────┘

When a process is lost its requests end with SamplerError. Its sessions continue with the next process, which
has none of their prefixes: it answers PrefixMissError, and they send all their tokens again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Concatenate, Literal, ParamSpec, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from etude.errors import EtudeError, PartLostError, SamplerError
from etude.inference.exchange import Build, Command, Event
from etude.inference.times import EngineCounters, ServiceTimes
from etude.protocols import Handle, KvPolicy
from etude.records import PolicyVersion, SampleChunk, SampleRequest, Scores, WeightManifest

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Usage:
    """Counters and times of an engine process since it began."""

    counters: EngineCounters
    times: ServiceTimes


NO_USAGE = Usage(EngineCounters(), ServiceTimes())


def sum_usage(all_of: Sequence[Usage]) -> Usage:
    """Sum over engine processes; the longest swap is the longest of any."""
    counters, times = EngineCounters(), ServiceTimes()
    for usage in all_of:
        _add(counters, usage.counters)
        longest = max(times.longest_swap_s, usage.times.longest_swap_s)
        _add(times, usage.times)
        times.longest_swap_s = longest
    return Usage(counters, times)


def _add(total: Any, more: Any) -> None:
    """Adds field by field, recursing into nested dataclasses."""
    for name in type(total).__dataclass_fields__:
        value = getattr(total, name)
        if hasattr(value, "__dataclass_fields__"):
            _add(value, getattr(more, name))
        else:
            setattr(total, name, value + getattr(more, name))


class EngineProcess(Protocol):
    """The methods of EnginePart, for rollout workers, which do not load torch."""

    async def begin(self) -> Build: ...

    async def pulse(self) -> Usage: ...

    async def exchange(self, commands: Sequence[Command], client: str = "") -> None: ...

    async def poll(self, client: str = "") -> list[Event]: ...

    async def forget(self, client: str) -> None: ...

    async def stage(self, manifest: WeightManifest) -> None: ...

    async def activate(self, version: PolicyVersion, kv: KvPolicy) -> Usage: ...

    async def score(self, tokens: NDArray[np.int32], version: PolicyVersion) -> Scores: ...


OnLoss = Callable[[Handle[EngineProcess], str], None]
_Item = SampleChunk | EtudeError | None


class _Connection:
    """The connection to one engine process, for as long as it lives."""

    def __init__(self, handle: Handle[EngineProcess], on_loss: OnLoss, client: str, before: str) -> None:
        """`client`: name of this connection, and prefix of its sessions' and requests' names in the engine.
        `before`: name of the connection that it replaces, whose state the process may still hold."""
        self.handle = handle
        self._client = client
        self._before = before
        self.sessions: set[str] = set()
        """Open in this process."""
        self._on_loss = on_loss
        self._outbox: list[Command] = []
        self._requests: dict[str, asyncio.Queue[_Item]] = {}
        self._flushing: asyncio.Task[None] | None = None
        self._failure: SamplerError | None = None
        self._polling = asyncio.create_task(self._poll())

    def send(self, what: Literal["open", "close", "abort"], name: str) -> None:
        """Queues a command about a session or a request."""
        self._enqueue((what, self._qualified(name)))

    def open(self, session_id: str, sibling: str | None) -> None:
        """See Sampler.open."""
        self.sessions.add(session_id)
        if sibling is None:
            self.send("open", session_id)
        else:
            self._enqueue(("beside", (self._qualified(session_id), self._qualified(sibling))))

    def _qualified(self, name: str) -> str:
        return f"{self._client}:{name}" if self._client else name

    def _enqueue(self, command: Command) -> None:
        """Adds a command to the next batch."""
        self._outbox.append(command)
        if self._flushing is None and self._failure is None:
            # It runs after all tasks that are ready now, so that their commands share one call.
            self._flushing = asyncio.create_task(self._flush())

    def begin(self, request: SampleRequest) -> asyncio.Queue[_Item]:
        """Sends a request; its chunks arrive in the queue."""
        if self._failure is not None:
            raise self._failure
        if self._client:
            session_id = self._qualified(request.session_id)
            request = replace(request, id=self._qualified(request.id), session_id=session_id)
        answers: asyncio.Queue[_Item] = asyncio.Queue()
        self._requests[request.id] = answers
        self._enqueue(("stream", request))
        return answers

    def end(self, request_id: str, finished: bool) -> None:
        """Closes a request's queue; aborts the request unless it has finished."""
        if self._requests.pop(self._qualified(request_id), None) is not None and not finished:
            self.send("abort", request_id)

    def fail(self, cause: str) -> None:
        """Ends all requests with SamplerError. Idempotent."""
        if self._failure is None:
            self._failure = SamplerError("the engine's process is gone", received=cause)
            self._polling.cancel()
            for answers in self._requests.values():
                answers.put_nowait(self._failure)

    async def _flush(self) -> None:
        try:
            while self._outbox:
                commands, self._outbox = self._outbox, []
                await self.handle.call(EngineProcess.exchange, commands, self._client)
        except Exception as error:  # lost, or an unexpected failure: another process may work
            self._fail_lost(error)
        finally:
            self._flushing = None

    async def _poll(self) -> None:
        try:
            if self._before:
                await self.handle.call(EngineProcess.forget, self._before)
            while True:
                events = await self.handle.call(EngineProcess.poll, self._client)
                for request_id, item in events:
                    answers = self._requests.get(request_id)
                    if answers is not None:
                        answers.put_nowait(item)
        except Exception as error:
            self._fail_lost(error)

    def _fail_lost(self, error: Exception) -> None:
        cause = f"{type(error).__name__}: {error}"
        self.fail(cause)
        self._on_loss(self.handle, cause)


class RemoteEngine:
    """Implements Sampler and WeightSink over the engine's current process.

    Without one, or while it serves no version, every request raises SamplerError.
    """

    def __init__(self, name: str, on_loss: OnLoss, client: str = "") -> None:
        """`on_loss`: called with a process that does not answer. `client`: name of the engine's client;
        empty: the run's own process."""
        self.name = name
        self.process = 0
        """Number of processes that it has been connected to."""
        self._client = client
        self._on_loss = on_loss
        self._connection: _Connection | None = None
        self._version: PolicyVersion | None = None
        self.usage = NO_USAGE
        """Usage of the process, as last reported."""

    @property
    def handle(self) -> Handle[EngineProcess] | None:
        """The process, while it is connected."""
        return self._connection.handle if self._connection is not None else None

    def connect(self, handle: Handle[EngineProcess], version: PolicyVersion | None) -> None:
        """Connects to a new process, which serves `version`."""
        self.disconnect("another process took its place")
        before, self.process = self._connection_name(), self.process + 1
        self._connection = _Connection(handle, self._on_process_lost, self._connection_name(), before)
        self._version = version

    def set_version(self, version: PolicyVersion) -> None:
        """Records that the connected process serves `version`, activated by another caller."""
        self._version = version

    def disconnect(self, cause: str) -> None:
        """Drops the process: its requests end with SamplerError. Idempotent."""
        connection, self._connection, self._version = self._connection, None, None
        if connection is not None:
            connection.fail(cause)

    def _connection_name(self) -> str:
        return f"{self._client}.{self.process}" if self._client else ""

    def _on_process_lost(self, handle: Handle[EngineProcess], cause: str) -> None:
        if self.handle is handle:
            self.disconnect(cause)
        self._on_loss(handle, cause)

    def open(self, session_id: str, sibling: str | None = None) -> None:
        """See Sampler.open. Without a process it is opened with its first request."""
        if self._connection is not None:
            self._connection.open(session_id, sibling)

    def close(self, session_id: str) -> None:
        if self._connection is not None and session_id in self._connection.sessions:
            self._connection.sessions.discard(session_id)
            self._connection.send("close", session_id)

    async def stream(self, request: SampleRequest) -> AsyncIterator[SampleChunk]:
        connection = self._connection
        if connection is None or self._version is None:
            raise SamplerError("the engine has no process that serves a version", received=self.name)
        if request.session_id not in connection.sessions:
            self.open(request.session_id)
        answers = connection.begin(request)
        finished = False
        try:
            while (item := await answers.get()) is not None:
                if isinstance(item, EtudeError):
                    finished = True
                    raise item
                yield item
            finished = True
        finally:
            connection.end(request.id, finished)

    async def score(self, tokens: NDArray[np.int32], version: PolicyVersion) -> Scores:
        return await self._call(EngineProcess.score, tokens, version)

    def abort(self, request_id: str) -> None:
        if self._connection is not None:
            self._connection.send("abort", request_id)

    async def stage(self, manifest: WeightManifest) -> None:
        await self._call(EngineProcess.stage, manifest)

    async def activate(self, version: PolicyVersion, kv: KvPolicy = "keep") -> None:
        connection = self._connection
        usage = await self._call(EngineProcess.activate, version, kv)
        if connection is self._connection:
            self._version, self.usage = version, usage

    def current(self) -> PolicyVersion | None:
        return self._version

    async def _call(
        self,
        method: Callable[Concatenate[EngineProcess, P], Awaitable[T]],
        *arguments: P.args,
        **named: P.kwargs,
    ) -> T:
        connection = self._connection
        if connection is None:
            raise SamplerError("the engine has no process", received=self.name)
        try:
            return await connection.handle.call(method, *arguments, **named)
        except PartLostError as error:
            self._on_process_lost(connection.handle, str(error))
            raise SamplerError("the engine's process is gone", received=str(error)) from error
