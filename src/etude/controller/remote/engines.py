"""What stands for an engine process where sessions are: a Sampler over batches of messages.

    sessions ──open, stream, close──> outbox ──one call for all that gathered──> EnginePart
             <──chunks── a queue per request <──one poll for all of them──────────┘

A process that is lost ends its requests with SamplerError; its sessions go on with the next one, which holds
none of their prefixes and says so (PrefixMissError), whereupon they send themselves whole.
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
    """What an engine process has done since it began."""

    counters: EngineCounters
    times: ServiceTimes


NO_USAGE = Usage(EngineCounters(), ServiceTimes())


def sum_usage(all_of: Sequence[Usage]) -> Usage:
    """What several engine processes have done together; the longest swap is the longest of any."""
    counters, times = EngineCounters(), ServiceTimes()
    for one in all_of:
        _add(counters, one.counters)
        longest = max(times.longest_swap_s, one.times.longest_swap_s)
        _add(times, one.times)
        times.longest_swap_s = longest
    return Usage(counters, times)


def _add(total: Any, more: Any) -> None:
    """Adds field by field, into nested ones."""
    for name in type(total).__dataclass_fields__:
        value = getattr(total, name)
        if hasattr(value, "__dataclass_fields__"):
            _add(value, getattr(more, name))
        else:
            setattr(total, name, value + getattr(more, name))


class EngineProcess(Protocol):
    """What an engine's process answers: see EnginePart."""

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


class _Line:
    """The connection to one engine process, for as long as it lives."""

    def __init__(self, handle: Handle[EngineProcess], on_loss: OnLoss, client: str, before: str) -> None:
        """`client`: names this connection to the engine, and goes before the names of its sessions and
        requests there. `before`: the connection whose place it takes, which the process may still know."""
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
        """Says what to do about a session or a request."""
        self._put((what, self._named(name)))

    def open(self, session_id: str, beside: str | None) -> None:
        """See Sampler.open."""
        self.sessions.add(session_id)
        if beside is None:
            self.send("open", session_id)
        else:
            self._put(("beside", (self._named(session_id), self._named(beside))))

    def _named(self, name: str) -> str:
        return f"{self._client}:{name}" if self._client else name

    def _put(self, command: Command) -> None:
        """Puts a command to those that go out next."""
        self._outbox.append(command)
        if self._flushing is None and self._failure is None:
            # It runs after whatever is ready to run now, all of which so shares one call.
            self._flushing = asyncio.create_task(self._flush())

    def begin(self, request: SampleRequest) -> asyncio.Queue[_Item]:
        """Sends a request; its answers come out of the queue."""
        if self._failure is not None:
            raise self._failure
        if self._client:
            session_id = self._named(request.session_id)
            request = replace(request, id=self._named(request.id), session_id=session_id)
        answers: asyncio.Queue[_Item] = asyncio.Queue()
        self._requests[request.id] = answers
        self._put(("stream", request))
        return answers

    def end(self, request_id: str, finished: bool) -> None:
        """Nobody listens to a request any more."""
        if self._requests.pop(self._named(request_id), None) is not None and not finished:
            self.send("abort", request_id)

    def fail(self, cause: str) -> None:
        """Ends everything that is under way. Idempotent."""
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
        except Exception as error:  # lost, or failed as it never should: another process may do better
            self._lose(error)
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
            self._lose(error)

    def _lose(self, error: Exception) -> None:
        cause = f"{type(error).__name__}: {error}"
        self.fail(cause)
        self._on_loss(self.handle, cause)


class RemoteEngine:
    """Implements Sampler and WeightSink over whichever process the engine has at the time.

    Without one, or while it serves no version, every request raises SamplerError.
    """

    def __init__(self, name: str, on_loss: OnLoss, client: str = "") -> None:
        """`on_loss`: called with a process that does not answer. `client`: names the engine's client;
        empty: the run's own process."""
        self.name = name
        self.process = 0
        """How many processes it has been connected to."""
        self._client = client
        self._on_loss = on_loss
        self._line: _Line | None = None
        self._version: PolicyVersion | None = None
        self.usage = NO_USAGE
        """What the process had done when it last said so."""

    @property
    def handle(self) -> Handle[EngineProcess] | None:
        """The process, while it is connected."""
        return self._line.handle if self._line is not None else None

    def connect(self, handle: Handle[EngineProcess], version: PolicyVersion | None) -> None:
        """Goes on with a process that serves `version`."""
        self.disconnect("another process took its place")
        before, self.process = self._line_name(), self.process + 1
        self._line = _Line(handle, self._lost, self._line_name(), before)
        self._version = version

    def serves(self, version: PolicyVersion) -> None:
        """Another caller has had the process serve `version`."""
        if self._line is not None:
            self._version = version

    def disconnect(self, cause: str) -> None:
        """Goes on without: what is under way ends with SamplerError. Idempotent."""
        line, self._line, self._version = self._line, None, None
        if line is not None:
            line.fail(cause)

    def _line_name(self) -> str:
        return f"{self._client}.{self.process}" if self._client else ""

    def _lost(self, handle: Handle[EngineProcess], cause: str) -> None:
        if self.handle is handle:
            self.disconnect(cause)
        self._on_loss(handle, cause)

    def open(self, session_id: str, beside: str | None = None) -> None:
        """See Sampler.open. Without a process it is opened with its first request."""
        if self._line is not None:
            self._line.open(session_id, beside)

    def close(self, session_id: str) -> None:
        if self._line is not None and session_id in self._line.sessions:
            self._line.sessions.discard(session_id)
            self._line.send("close", session_id)

    async def stream(self, request: SampleRequest) -> AsyncIterator[SampleChunk]:
        line = self._line
        if line is None or self._version is None:
            raise SamplerError("the engine has no process that serves a version", received=self.name)
        if request.session_id not in line.sessions:
            self.open(request.session_id)
        answers = line.begin(request)
        finished = False
        try:
            while (item := await answers.get()) is not None:
                if isinstance(item, EtudeError):
                    finished = True
                    raise item
                yield item
            finished = True
        finally:
            line.end(request.id, finished)

    async def score(self, tokens: NDArray[np.int32], version: PolicyVersion) -> Scores:
        return await self._call(EngineProcess.score, tokens, version)

    def abort(self, request_id: str) -> None:
        if self._line is not None:
            self._line.send("abort", request_id)

    async def stage(self, manifest: WeightManifest) -> None:
        await self._call(EngineProcess.stage, manifest)

    async def activate(self, version: PolicyVersion, kv: KvPolicy = "keep") -> None:
        line = self._line
        usage = await self._call(EngineProcess.activate, version, kv)
        if line is self._line:
            self._version, self.usage = version, usage

    def current(self) -> PolicyVersion | None:
        return self._version

    async def _call(
        self,
        method: Callable[Concatenate[EngineProcess, P], Awaitable[T]],
        *arguments: P.args,
        **named: P.kwargs,
    ) -> T:
        line = self._line
        if line is None:
            raise SamplerError("the engine has no process", received=self.name)
        try:
            return await line.handle.call(method, *arguments, **named)
        except PartLostError as error:
            self._lost(line.handle, str(error))
            raise SamplerError("the engine's process is gone", received=str(error)) from error


async def bring_to(
    handle: Handle[EngineProcess], manifest: WeightManifest, kv: KvPolicy = "recompute"
) -> None:
    """Puts a version into service in an engine's process. Raises WeightUpdateError, PartLostError."""
    await handle.call(EngineProcess.stage, manifest)
    await handle.call(EngineProcess.activate, manifest.version, kv)
