"""A sampler for clients in other processes: requests and answers go in batches.

    client ──exchange([open, stream, close, abort, ...])──> Exchange ──> Sampler
           <──────────────── poll() -> [chunks, ends, errors, ...] ────────┘

One message per token, or per session, would cost more than small models take to compute: a batch holds as
many sessions as have something to say at the time.
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
"""What the client wants: of a session, of a request, of a session that has left another one."""
Event = tuple[str, SampleChunk | EtudeError | None]
"""What the client receives of a request; None or an error ends it."""
_AGAIN_S = 0.1
"""Between two attempts to abort what is to end."""


@dataclass(frozen=True, slots=True)
class Build:
    """What a process computes with. Two that differ do not give a token the same bits, or do not fit at
    all."""

    machine: str
    byte_order: str
    versions: dict[str, str]
    model: str
    """The architecture, as configured."""

    @staticmethod
    def here(model: ModelConfig) -> Build:
        """This process's."""
        return Build(platform.machine(), sys.byteorder, versions(), model.model_dump_json())

    @property
    def parts(self) -> dict[str, str]:
        """All of it by name, for people."""
        packages = {f"version of {name}": version for name, version in self.versions.items()}
        return {"machine": self.machine, "byte order": self.byte_order, **packages, "model": self.model}


class Exchange:
    """One client's side of a sampler. For one event loop."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._events: list[Event] = []
        self._filled = asyncio.Event()
        self._sessions: set[str] = set()
        """Open for this client."""
        self._streams: dict[str, asyncio.Task[None]] = {}
        """By request."""

    def exchange(self, commands: Sequence[Command]) -> None:
        """Does what the client wants, in its order. `poll` returns how requests go."""
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
        """Answers requests with an error; what else the client wants no longer matters."""
        for _, value in commands:
            if isinstance(value, SampleRequest):
                self._tell(value, error)

    async def poll(self) -> list[Event]:
        """What there is to tell the client; waits until there is something."""
        await self._filled.wait()
        self._filled.clear()
        events, self._events = self._events, []
        return events

    async def wait(self) -> None:
        """Waits until there is something to tell."""
        await self._filled.wait()

    @property
    def has_events(self) -> bool:
        """Whether `poll` would not wait."""
        return self._filled.is_set()

    async def end(self, within_s: float = 5.0) -> None:
        """Aborts what is in flight, whose tokens so far the client still receives, and closes its sessions.

        `within_s`: what has not ended by then is cancelled, which the client learns too.
        """
        tasks = list(self._streams.values())
        clock = asyncio.get_running_loop().time
        until_s = clock() + within_s
        while self._streams and (left_s := until_s - clock()) > 0:
            for request_id in self._streams:  # again and again: a sampler hears nothing of what only begins
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
                self._tell(request, chunk)
        except EtudeError as error:
            self._tell(request, error)
        except asyncio.CancelledError:
            self._tell(request, SamplerError("the request was cut off"))
            raise
        except Exception as error:  # a defect, which the client must not wait for
            self._tell(request, SamplerError("the engine failed", received=repr(error)))
            raise
        else:
            self._tell(request, None)
        finally:
            if self._streams.get(request.id) is asyncio.current_task():
                del self._streams[request.id]

    def _tell(self, request: SampleRequest, item: SampleChunk | EtudeError | None) -> None:
        self._events.append((request.id, item))
        self._filled.set()
