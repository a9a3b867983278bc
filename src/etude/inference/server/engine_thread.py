"""An engine's service in a thread of its own, so that a long step delays no HTTP.

    server's loop                                  engine's loop, in its thread
    stream() --request--------------------------->  service.stream()
        ^------ queue <-- one wake-up for all <---- outbox: chunks of a step

Steps never suspend: in the server's own loop the prefill of a long prompt would hold up every health check
and every other stream for as long as it takes. Calls reach the engine in the order in which they were made.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from etude.errors import SamplerError
from etude.inference.service import EngineService
from etude.protocols import KvPolicy
from etude.records import PolicyVersion, SampleChunk, SampleRequest, Scores, WeightManifest

_END_S = 30.0
T = TypeVar("T")
Item = SampleChunk | BaseException | None
"""None ends a stream."""


@dataclass(slots=True)
class _Outbox:
    """What goes from the engine's thread to the server's loop; woken once for all that has gathered."""

    loop: asyncio.AbstractEventLoop
    _items: deque[tuple[asyncio.Queue[Item], Item]] = field(default_factory=deque)
    _woken: bool = False

    def put(self, queue: asyncio.Queue[Item], item: Item) -> None:
        """Called in the engine's thread."""
        self._items.append((queue, item))
        if not self._woken:
            self._woken = True
            with contextlib.suppress(RuntimeError):  # the server's loop has ended: nobody listens
                self.loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        # First, so that what comes from now on wakes again.
        self._woken = False
        while self._items:
            queue, item = self._items.popleft()
            queue.put_nowait(item)


class EngineThread:
    """Implements `Sampler` and `WeightSink` over a service that lives elsewhere. Use as an async context
    manager, in the loop that will call it."""

    def __init__(self, service: EngineService) -> None:
        """`service`: not yet entered; it is entered and left in its thread."""
        self.service = service
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._failure: BaseException | None = None

    async def __aenter__(self) -> EngineThread:
        self._outbox = _Outbox(asyncio.get_running_loop())
        self._thread.start()
        await self._call(self.service.__aenter__())
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            async with asyncio.timeout(_END_S):
                await self._call(self.service.__aexit__())
        except Exception as error:  # the loop inside has failed before, and told its requests
            self._failure = self._failure or error
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            await asyncio.to_thread(self._thread.join, _END_S)
            if not self._thread.is_alive():
                self._loop.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    async def _call(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs in the engine's loop; cancelled there if it is cancelled here."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    @property
    def failure(self) -> BaseException | None:
        """Why the service will never answer again; None while it works."""
        return self._failure or self.service.failure

    async def ask(self, question: Callable[[EngineService], T]) -> T:
        """What the service says, asked in its own thread: between two steps."""

        async def answer() -> T:
            return question(self.service)

        return await self._call(answer())

    def _tell(self, function: Callable[[str], None], name: str) -> None:
        if not self._loop.is_closed():
            # By way of the loop's queue, as coroutines go: else an abort would overtake its request.
            self._loop.call_soon_threadsafe(self._loop.call_soon, function, name)

    # ---- Sampler --------------------------------------------------------------------------------

    def open(self, session_id: str) -> None:
        """See Sampler.open. A session that is open already is told by its first request."""
        self._tell(self.service.open, session_id)

    def close(self, session_id: str) -> None:
        """See Sampler.close."""
        self._tell(self.service.close, session_id)

    def abort(self, request_id: str) -> None:
        """See Sampler.abort."""
        self._tell(self.service.abort, request_id)

    async def stream(self, request: SampleRequest) -> AsyncGenerator[SampleChunk]:
        """See Sampler.stream."""
        if self._loop.is_closed():
            raise SamplerError("the engine was stopped")
        queue: asyncio.Queue[Item] = asyncio.Queue()
        pumping: Future[None] = asyncio.run_coroutine_threadsafe(self._pump(request, queue), self._loop)
        try:
            while (item := await queue.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            pumping.cancel()

    async def _pump(self, request: SampleRequest, queue: asyncio.Queue[Item]) -> None:
        try:
            async for chunk in self.service.stream(request):
                self._outbox.put(queue, chunk)
            self._outbox.put(queue, None)
        except asyncio.CancelledError:
            self._outbox.put(queue, SamplerError("the engine was stopped"))
            raise
        except Exception as error:  # handed on to whoever listens
            self._outbox.put(queue, error)

    async def score(self, tokens: NDArray[np.int32], version: PolicyVersion) -> Scores:
        """See Sampler.score. Computed between two steps, as a prompt of its length would be."""
        return await self._call(self.service.score(tokens, version))

    # ---- WeightSink -----------------------------------------------------------------------------

    async def stage(self, manifest: WeightManifest) -> None:
        """See WeightSink.stage."""
        await self._call(self.service.stage(manifest))

    async def activate(self, version: PolicyVersion, kv: KvPolicy = "keep") -> None:
        """See WeightSink.activate."""
        await self._call(self.service.activate(version, kv))

    def current(self) -> PolicyVersion | None:
        """See WeightSink.current."""
        return self.service.current()
