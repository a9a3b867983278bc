"""QEMU's control protocol: one JSON object a line, over a socket; commands have ids, events come unasked.

A reader task hands answers to whoever waits for them and keeps the latest events. Nothing waits without a
deadline; the end of the socket means that QEMU died, and everything that waits raises SandboxLostError.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import socket
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from etude.errors import SandboxError
from etude.sandbox.errors import SandboxLostError

COMMAND_S = 30.0
_MAX_EVENTS = 512
_MAX_LINE_BYTES = 16 << 20
_CHUNK_BYTES = 1 << 16

Event = Mapping[str, Any]
"""`event`, `data` and `timestamp`, as QEMU sends them."""


class QmpError(SandboxError):
    """QEMU refused a command."""


class Qmp:
    """The owner's end of one QEMU's control socket. Any number of commands may be in flight."""

    def __init__(self, sock: socket.socket, name: str) -> None:
        """`name` is what errors call the machine. Takes the socket over."""
        sock.setblocking(False)
        self._sock = sock
        self._name = name
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._events: deque[tuple[int, Event]] = deque(maxlen=_MAX_EVENTS)
        self._num_events = 0
        self._watchers: list[asyncio.Future[None]] = []
        self._greeted = asyncio.get_running_loop().create_future()
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
        try:
            async with asyncio.timeout(deadline_s):
                await asyncio.shield(self._greeted)
        except TimeoutError as error:
            raise self._late("greeting", deadline_s) from error
        await self.execute("qmp_capabilities", deadline_s=deadline_s)

    async def execute(
        self,
        command: str,
        arguments: Mapping[str, Any] | None = None,
        deadline_s: float = COMMAND_S,
        descriptor: int | None = None,
    ) -> Any:
        """The `return` of a command. `descriptor` travels along (for `getfd`).

        Raises QmpError if QEMU refuses, SandboxLostError if it died, SandboxError after `deadline_s`.
        """
        if self._end is not None:
            raise self._lost()
        number = next(self._ids)
        request: dict[str, Any] = {"execute": command, "id": number}
        if arguments:
            request["arguments"] = dict(arguments)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        try:
            async with asyncio.timeout(deadline_s):
                await self._send(json.dumps(request).encode() + b"\n", descriptor)
                answer = await future
        except TimeoutError as error:
            raise self._late(command, deadline_s) from error
        finally:
            self._waiting.pop(number, None)
        if "error" in answer:
            raise QmpError(f"QEMU refuses {command}: {answer['error'].get('desc')}", field=self._name)
        return answer["return"]

    @property
    def mark(self) -> int:
        """The present point in the stream of events, for `event`."""
        return self._num_events

    async def event(
        self, matches: Callable[[Event], bool], deadline_s: float, since: int, what: str = "event"
    ) -> Event:
        """The first event after the mark `since` that matches. Raises as `execute`."""
        try:
            async with asyncio.timeout(deadline_s):
                while True:
                    for number, event in self._events:
                        if number >= since and matches(event):
                            return event
                    if self._end is not None:
                        raise self._lost()
                    watcher: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                    self._watchers.append(watcher)
                    await watcher
        except TimeoutError as error:
            raise self._late(what, deadline_s) from error

    def close(self) -> None:
        """Lets go of QEMU. Idempotent."""
        self._finish("the machine was closed")
        self._reader.cancel()

    async def _send(self, data: bytes, descriptor: int | None) -> None:
        loop = asyncio.get_running_loop()
        async with self._sending:
            try:
                if descriptor is not None:
                    sent = socket.send_fds(self._sock, [data], [descriptor])
                    data = data[sent:]
                await loop.sock_sendall(self._sock, data)
            except OSError as error:
                self._finish(f"QEMU died: {error.strerror}")
                raise self._lost() from error

    async def _read(self) -> None:
        loop = asyncio.get_running_loop()
        buffer = bytearray()
        try:
            while data := await loop.sock_recv(self._sock, _CHUNK_BYTES):
                buffer += data
                if len(buffer) > _MAX_LINE_BYTES:
                    self._finish("QEMU sends what is no QMP")
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
            self._finish(f"QEMU sends what is no QMP: {error}")

    def _handle(self, message: dict[str, Any]) -> None:
        if "QMP" in message:
            if not self._greeted.done():
                self._greeted.set_result(None)
        elif "event" in message:
            self._events.append((self._num_events, message))
            self._num_events += 1
            self._wake()
        else:
            future = self._waiting.get(message.get("id", 0))
            if future is not None and not future.done():
                future.set_result(message)

    def _wake(self) -> None:
        watchers, self._watchers = self._watchers, []
        for watcher in watchers:
            if not watcher.done():
                watcher.set_result(None)

    def _finish(self, reason: str) -> None:
        if self._end is not None:
            return
        self._end = reason
        with contextlib.suppress(OSError):
            self._sock.close()
        for future in [*self._waiting.values(), self._greeted]:
            if not future.done():
                future.set_exception(self._lost())
        # Nobody may be left to look at the greeting's failure.
        if self._greeted.exception() is not None:
            self._greeted.exception()
        self._wake()
        self.on_end()

    def _lost(self) -> SandboxLostError:
        return SandboxLostError(self._end or "QEMU ended", field="sandbox", received=self._name)

    def _late(self, what: str, deadline_s: float) -> SandboxError:
        return SandboxError(f"QEMU: no {what} within {deadline_s:g} s", field="sandbox", received=self._name)
