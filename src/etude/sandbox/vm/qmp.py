"""Client of QMP, QEMU's control protocol: one JSON object per line, over a socket; commands have ids.

A reader task passes answers to waiting callers and keeps the latest events. Every wait has a deadline; the
end of the socket means that QEMU has died, and all waiting callers get SandboxLostError.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import socket
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, TypeVar

from etude.errors import SandboxError
from etude.kit.tasks import Changes
from etude.sandbox.errors import SandboxLostError

COMMAND_S = 30.0
_MAX_EVENTS = 512
_MAX_LINE_BYTES = 16 << 20
_CHUNK_BYTES = 1 << 16

_T = TypeVar("_T")
Event = Mapping[str, Any]
"""An event as QEMU sends it: `event`, `data` and `timestamp`."""


class QmpError(SandboxError):
    """QEMU refused a command."""


class Qmp:
    """The owner's end of one QEMU's control socket. Any number of commands may be in flight."""

    def __init__(self, sock: socket.socket, name: str) -> None:
        """`name`: of the machine, for errors. Takes ownership of the socket."""
        sock.setblocking(False)
        self._sock = sock
        self._name = name
        self._ids = itertools.count(1)
        self._greeting: dict[str, Any] | None = None
        self._answers: dict[int, dict[str, Any]] = {}
        self._events: deque[Event] = deque(maxlen=_MAX_EVENTS)
        self._changes = Changes()
        self._sending = asyncio.Lock()
        self._end: str | None = None
        self.on_end: Callable[[], None] = lambda: None
        """Called once when QEMU has closed its end."""
        self._reader = asyncio.ensure_future(self._read())

    @property
    def closed(self) -> bool:
        """Whether QEMU can no longer be reached."""
        return self._end is not None

    async def negotiate(self, deadline_s: float = COMMAND_S) -> None:
        """Waits for QEMU's greeting and enters command mode. Raises SandboxError."""
        async with self._deadline(deadline_s, "greeting"):
            await self._wait_for(lambda: self._greeting)
        await self.execute("qmp_capabilities", deadline_s=deadline_s)

    async def execute(
        self,
        command: str,
        arguments: Mapping[str, Any] | None = None,
        deadline_s: float = COMMAND_S,
        descriptor: int | None = None,
    ) -> Any:
        """Runs a command and returns its `return`. `descriptor` is sent with it (for `getfd`).

        Raises QmpError if QEMU refuses it, SandboxLostError if QEMU died, SandboxError after `deadline_s`.
        """
        number = next(self._ids)
        request: dict[str, Any] = {"execute": command, "id": number}
        if arguments:
            request["arguments"] = dict(arguments)
        async with self._deadline(deadline_s, command):
            await self._send(json.dumps(request).encode() + b"\n", descriptor)
            answer = await self._wait_for(lambda: self._answers.pop(number, None))
        if "error" in answer:
            raise QmpError(f"QEMU refuses {command}: {answer['error'].get('desc')}", field=self._name)
        return answer["return"]

    async def event(self, matches: Callable[[Event], bool], deadline_s: float, what: str = "event") -> Event:
        """Waits for an event that matches; also finds recent ones. Raises as `execute`."""
        async with self._deadline(deadline_s, what):
            return await self._wait_for(lambda: next(filter(matches, self._events), None))

    async def _wait_for(self, find: Callable[[], _T | None]) -> _T:
        """Waits until `find` returns a value. Raises SandboxLostError."""
        while (found := find()) is None:
            if self._end is not None:
                raise self._lost_error()
            await self._changes.wait()
        return found

    @contextlib.asynccontextmanager
    async def _deadline(self, deadline_s: float, what: str) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(deadline_s):
                yield
        except TimeoutError as error:
            message = f"QEMU: no {what} within {deadline_s:g} s"
            raise SandboxError(message, field="sandbox", received=self._name) from error

    def close(self) -> None:
        """Closes the socket and ends the reader task. Idempotent."""
        self._finish("the machine was closed")
        self._reader.cancel()

    async def _send(self, data: bytes, descriptor: int | None) -> None:
        loop = asyncio.get_running_loop()
        async with self._sending:
            if self._end is not None:
                raise self._lost_error()
            try:
                if descriptor is not None:
                    sent = socket.send_fds(self._sock, [data], [descriptor])
                    data = data[sent:]
                await loop.sock_sendall(self._sock, data)
            except OSError as error:
                self._finish(f"QEMU died: {error.strerror}")
                raise self._lost_error() from error

    async def _read(self) -> None:
        loop = asyncio.get_running_loop()
        buffer = bytearray()
        try:
            while data := await loop.sock_recv(self._sock, _CHUNK_BYTES):
                buffer += data
                if len(buffer) > _MAX_LINE_BYTES:
                    self._finish("QEMU sent an invalid QMP message")
                    return
                while (end := buffer.find(b"\n")) >= 0:
                    line = bytes(buffer[:end])
                    del buffer[: end + 1]
                    if line.strip():
                        self._handle(json.loads(line))
            self._finish("QEMU ended")
        except OSError as error:
            self._finish(f"QEMU died: {error.strerror}")
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            self._finish(f"QEMU sent an invalid QMP message: {error}")

    def _handle(self, message: dict[str, Any]) -> None:
        if "QMP" in message:
            self._greeting = message
        elif "event" in message:
            self._events.append(message)
        else:
            self._answers[message.get("id", 0)] = message
        self._changes.notify()

    def _finish(self, reason: str) -> None:
        if self._end is not None:
            return
        self._end = reason
        with contextlib.suppress(OSError):
            self._sock.close()
        self._changes.notify()
        self.on_end()

    def _lost_error(self) -> SandboxLostError:
        return SandboxLostError(self._end or "QEMU ended", field="sandbox", received=self._name)
