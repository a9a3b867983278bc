"""JSON lines between an editor and the agent. An invalid message is answered with an error and ignored."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

from acp.core import DEFAULT_STDIO_BUFFER_LIMIT_BYTES
from acp.stdio import stdio_streams

PARSE_ERROR = -32700
INVALID_REQUEST = -32600


class LineTransport:
    """Implements the protocol library's `Transport` on two streams. The library's own (0.12) ends on JSON
    that is no object, and waits forever for an editor that disconnected without reading what was sent."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._sending = asyncio.Lock()

    @classmethod
    async def on_stdio(cls) -> LineTransport:
        """A transport on standard input and output."""
        reader, writer = await stdio_streams(limit=DEFAULT_STDIO_BUFFER_LIMIT_BYTES)
        return cls(reader, writer)

    async def receive(self) -> dict[str, Any] | None:
        """The next message; None when the editor has disconnected."""
        while True:
            try:
                line = await self._reader.readline()
            except ValueError:  # longer than the buffer: what was read of it is dropped
                await self._refuse(INVALID_REQUEST, "the message is too long")
                continue
            except ConnectionError:
                return None
            if not line:
                return None
            if not line.strip():
                continue
            try:
                message = json.loads(line)
            except (ValueError, RecursionError):
                await self._refuse(PARSE_ERROR, "the line is not valid JSON")
                continue
            if isinstance(message, dict) and _is_sound(message):
                return message
            await self._refuse(INVALID_REQUEST, "the line is not a JSON-RPC message")

    async def send(self, message: dict[str, Any]) -> None:
        """Writes one message. Raises ConnectionError if the editor has disconnected."""
        async with self._sending:
            self._writer.write(json.dumps(message, separators=(",", ":")).encode() + b"\n")
            await self._writer.drain()

    async def close(self) -> None:
        """Closes the output. Idempotent."""
        self._writer.close()

    async def _refuse(self, code: int, words: str) -> None:
        with contextlib.suppress(ConnectionError):  # messages sent before it disconnected are still read
            await self.send({"jsonrpc": "2.0", "id": None, "error": {"code": code, "message": words}})


def _is_sound(message: dict[str, Any]) -> bool:
    """Whether the library can process it: a method is a string, an id is hashable, an error is an object."""
    method, identity, error = message.get("method", ""), message.get("id"), message.get("error", {})
    sound_id = identity is None or (isinstance(identity, str | int) and not isinstance(identity, bool))
    return isinstance(method, str) and sound_id and (error is None or isinstance(error, dict))
