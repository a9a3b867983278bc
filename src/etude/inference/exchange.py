"""Batched transport of a sampler to clients in other processes: commands in, events out.

    client ──exchange([open, stream, close, abort, ...])──> Exchange ──> Sampler
           <──────────────── poll() -> [chunks, ends, errors, ...] ────────┘

One message per token, or per session, would cost more than small models take to compute: a batch carries all
events that have accumulated.
"""

from __future__ import annotations

import asyncio
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from etude.config import ModelConfig
from etude.errors import EtudeError, SamplerError
from etude.kit.tasks import end_tasks
from etude.observe import versions
from etude.protocols import Sampler
from etude.records import SampleChunk, SampleRequest

Command = (
    tuple[Literal["open", "close", "abort"], str]
    | tuple[Literal["stream"], SampleRequest]
    | tuple[Literal["beside"], tuple[str, str]]
)
"""A client's command for a session or request; `sibling` opens a session next to its fork parent."""
Event = tuple[str, SampleChunk | EtudeError | None]
"""(request id, item) for the client; None or an error ends the request."""
_AGAIN_S = 0.1
"""Between two attempts to abort requests in `end`."""


@dataclass(frozen=True, slots=True)
class Build:
    """What determines the bits that a process computes: two processes whose builds differ may compute
    different bits for a token, or cannot share weights at all."""

    machine: str
    byte_order: str
    versions: dict[str, str]
    model: str
    """The architecture, as configured."""

    @staticmethod
    def here(model: ModelConfig) -> Build:
        """The build of this process."""
        return Build(platform.machine(), sys.byteorder, versions(), model.model_dump_json())

    @property
    def parts(self) -> dict[str, str]:
        """All parts by readable name, for messages."""
        packages = {f"version of {name}": version for name, version in self.versions.items()}
        return {"machine": self.machine, "byte order": self.byte_order, **packages, "model": self.model}


class Exchange:
    """One client's side of a sampler. For one event loop."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._events: list[Event] = []
        self._filled = asyncio.Event()
        self._sessions: set[str] = set()
        """Sessions that this client has opened."""
        self._streams: dict[str, asyncio.Task[None]] = {}
        """Running streams, by request id."""

    def exchange(self, commands: Sequence[Command]) -> None:
        """Executes a client's commands in order. `poll` returns the results of its requests."""
        for command in commands:
            match command:
                case ("open", str(session)):
                    self._sampler.open(session)
                    self._sessions.add(session)
                case ("beside", (str(session), str(other))):
                    self._sampler.open(session, other)
                    self._sessions.add(session)
                case ("close", str(session)):
                    self._sampler.close(session)
                    self._sessions.discard(session)
                case ("abort", str(request_id)):
                    # Not before a request of the same batch, which reaches the sampler with its task.
                    asyncio.get_running_loop().call_soon(self._sampler.abort, request_id)
                case ("stream", SampleRequest() as request):
                    self._streams[request.id] = asyncio.create_task(self._stream(request))
                case _:
                    raise SamplerError("there is no such command", received=repr(command))

    def refuse(self, commands: Sequence[Command], error: EtudeError) -> None:
        """Answers the requests among `commands` with an error, and ignores other commands."""
        for _, value in commands:
            if isinstance(value, SampleRequest):
                self._push(value, error)

    async def poll(self) -> list[Event]:
        """Returns all events since the last poll; waits for at least one."""
        await self._filled.wait()
        self._filled.clear()
        events, self._events = self._events, []
        return events

    async def wait(self) -> None:
        """Waits until there are events."""
        await self._filled.wait()

    @property
    def has_events(self) -> bool:
        """Whether `poll` would not wait."""
        return self._filled.is_set()

    async def end(self, within_s: float = 5.0) -> None:
        """Aborts all requests in flight, whose tokens so far are still delivered, and closes all sessions.

        `within_s`: requests that have not ended by then are cancelled, and get an error event.
        """
        tasks = list(self._streams.values())
        clock = asyncio.get_running_loop().time
        until_s = clock() + within_s
        while self._streams and (left_s := until_s - clock()) > 0:
            for request_id in self._streams:  # repeatedly: a sampler ignores ids whose stream has not begun
                self._sampler.abort(request_id)
            await asyncio.wait(self._streams.values(), timeout=min(_AGAIN_S, left_s))
        await end_tasks(*tasks)
        self._streams.clear()  # also those that were cancelled before they began
        for session in self._sessions:
            self._sampler.close(session)
        self._sessions.clear()

    async def _stream(self, request: SampleRequest) -> None:
        try:
            async for chunk in self._sampler.stream(request):
                self._push(request, chunk)
        except EtudeError as error:
            self._push(request, error)
        except asyncio.CancelledError:
            self._push(request, SamplerError("the request was ended"))
            raise
        except Exception as error:  # a bug: the client must not wait forever
            self._push(request, SamplerError("the engine failed", received=repr(error)))
            raise
        else:
            self._push(request, None)
        finally:
            if self._streams.get(request.id) is asyncio.current_task():
                del self._streams[request.id]

    def _push(self, request: SampleRequest, item: SampleChunk | EtudeError | None) -> None:
        self._events.append((request.id, item))
        self._filled.set()
