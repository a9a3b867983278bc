"""An MCP server inside a sandbox: its standard input and output as a transport of the protocol's library."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Mapping
from types import TracebackType
from typing import Any

import anyio
import mcp_types as types
from mcp.client._transport import TransportStreams
from mcp.shared.message import SessionMessage

from etude.errors import EtudeError
from etude.kit.tasks import end_tasks
from etude.sandbox.interface import Sandbox

_KEPT_BYTES = 64 << 10
_SHOWN_BYTES = 300
_LINE_BYTES = 1 << 20
_NUM_LINES = 256
"""Bound of the queue of unread lines."""
_STDERR = 2


class SandboxTransport:
    """Implements the library's Transport: a program of the sandbox, from `__aenter__` to `__aexit__`.

    The connection ends with the program, which is killed if it prints more than we buffer: a line of over
    1 MiB, or more lines than are read from it. Its standard error is shown if it does not start.
    """

    def __init__(self, sandbox: Sandbox, command: str, env: Mapping[str, str]) -> None:
        self._sandbox, self._command, self._env = sandbox, command, env
        self._lines: asyncio.Queue[bytes | None] = asyncio.Queue(_NUM_LINES)
        self._buffer = bytearray()
        self._flooded = asyncio.Event()
        self._errors = b""

    async def __aenter__(self) -> TransportStreams:
        """Starts the program. Raises SandboxError."""
        self._program = program = await self._sandbox.commands.start(
            self._command, env=self._env, limit_bytes=_KEPT_BYTES, on_output=self._on_output
        )
        to_client, from_server = anyio.create_memory_object_stream[SessionMessage | Exception](0)
        to_server, from_client = anyio.create_memory_object_stream[SessionMessage](0)

        async def read() -> None:
            async with to_client:
                while (line := await self._lines.get()) is not None:
                    await to_client.send(_parsed(line))

        async def write() -> None:
            async with from_client:
                async for message in from_client:
                    text = message.message.model_dump_json(by_alias=True, exclude_unset=True)
                    await program.send_stdin(text + "\n")

        async def watch() -> None:
            """Ends the lines when the program has ended."""
            with contextlib.suppress(EtudeError):
                await program.wait()
            await self._lines.put(None)

        async def stop() -> None:
            await self._flooded.wait()
            await program.kill()

        self._tasks = [asyncio.create_task(_run_quietly(work())) for work in (read, write, watch, stop)]
        self._streams = (from_server, to_server)
        return from_server, to_server

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Kills the program; one whose sandbox has ended is gone already."""
        for stream in self._streams:
            stream.close()
        await end_tasks(*self._tasks)
        with contextlib.suppress(EtudeError):
            await self._program.kill()

    @property
    def stderr_tail(self) -> str:
        """The end of what the program printed to standard error."""
        return self._errors.decode("utf-8", "replace").strip()

    def _on_output(self, descriptor: int, data: bytes) -> None:
        if descriptor == _STDERR:
            self._errors = (self._errors + data)[-_SHOWN_BYTES:]
            return
        if self._flooded.is_set():
            return
        *ends, begun = data.split(b"\n")
        try:
            for end in ends:
                self._extend_line(end)
                if self._buffer.strip():
                    self._lines.put_nowait(bytes(self._buffer))
                self._buffer.clear()
            self._extend_line(begun)
        except (ValueError, asyncio.QueueFull):
            self._flooded.set()

    def _extend_line(self, data: bytes) -> None:
        """Appends to the current line. Raises ValueError if it gets too long."""
        if len(self._buffer) + len(data) > _LINE_BYTES:
            raise ValueError("a line of an MCP server is too long")
        self._buffer += data


async def _run_quietly(work: Coroutine[Any, Any, None]) -> None:
    """Ends silently if the other side is closed: the client sees its stream end."""
    with contextlib.suppress(anyio.ClosedResourceError, anyio.BrokenResourceError, EtudeError):
        await work


def _parsed(line: bytes) -> SessionMessage | Exception:
    try:
        return SessionMessage(types.jsonrpc_message_adapter.validate_json(line, by_name=False))
    except ValueError as error:
        return error
