"""The API of a daemon behind a Unix socket. One connection for each request."""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from etude.errors import SandboxError
from etude.serving.client import Answer, Client, NoAnswerError, NobodyListensError, Request, unix_transport

MAX_BODY_BYTES = 64 << 20
"""Of an answer that is held in memory; archives are streamed."""
CHUNK_BYTES = 1 << 18

Body = bytes | AsyncIterator[bytes]


class ApiError(SandboxError):
    """A daemon refused a request; `status` is its answer's."""

    def __init__(
        self,
        message: str,
        *,
        field: str | None = None,
        received: object = None,
        fix: str | None = None,
        status: int = 0,
    ) -> None:
        super().__init__(message, field=field, received=received, fix=fix)
        self.status = status


@dataclass(frozen=True)
class Response:
    """A whole answer."""

    status: int
    fields: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        """The body as JSON. Raises SandboxError if it is none."""
        try:
            return json.loads(self.body or b"null")
        except ValueError as error:
            raise SandboxError(
                f"the answer is not JSON: {error}", field="body", received=self.body[:200]
            ) from error

    def message(self) -> str:
        """What an error body says: `message`, or the bare text."""
        try:
            said = json.loads(self.body)
        except ValueError:
            said = None
        if isinstance(said, dict):
            text = said.get("message") or said.get("cause")
            if text:
                return str(text)
        return self.body[:500].decode(errors="replace").strip() or f"status {self.status}"


class HttpError(SandboxError):
    """The daemon cannot be reached, breaks the protocol, or let the deadline pass."""


class UnixHttp:
    """A client for one socket. Any number of requests may be under way. Nothing waits without a deadline."""

    def __init__(self, socket: Path, name: str) -> None:
        """`name`: of the daemon, for messages."""
        self.socket = socket
        self.name = name

    async def request(
        self,
        method: str,
        target: str,
        body: object = None,
        *,
        query: Mapping[str, str] | None = None,
        deadline_s: float = 30.0,
        content: Body | None = None,
        content_type: str = "application/json",
    ) -> Response:
        """Sends a request (`body` as JSON, or raw `content`) and reads the whole answer. Raises HttpError."""
        async with (
            self.deadline(deadline_s, method, target),
            self.stream(
                method, target, body, query=query, content=content, content_type=content_type
            ) as answer,
        ):
            data = bytearray()
            async for piece in answer.aiter_bytes():
                data += piece
                if len(data) > MAX_BODY_BYTES:
                    raise HttpError("the answer is too long", field=self.name, received=target)
        return Response(answer.status_code, answer.headers, bytes(data))

    @asynccontextmanager
    async def stream(
        self,
        method: str,
        target: str,
        body: object = None,
        *,
        query: Mapping[str, str] | None = None,
        content: Body | None = None,
        content_type: str = "application/json",
    ) -> AsyncIterator[Answer]:
        """As `request`, but the body comes in pieces. The caller keeps the deadline."""
        sent: Request = {"params": query or {}, "json": body}
        if content is not None:
            sent |= {"content": content, "headers": {"content-type": content_type}}
        with self._typed(method, target), self._short_path() as path:
            client = Client(
                "http://localhost", transport=unix_transport(path), within_s=math.inf, refusal=None
            )
            async with client, client.stream(method, target, **sent) as answer:
                yield answer

    async def hijack(
        self, method: str, target: str, query: Mapping[str, str] | None = None, deadline_s: float = 30.0
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Asks for the connection itself; from the answer on it belongs to the caller. Raises HttpError."""
        line = f"{method} {target}?{urlencode(query or {})} HTTP/1.1"
        fields = "Host: localhost\r\nConnection: Upgrade\r\nUpgrade: tcp\r\nContent-Length: 0"
        async with self.deadline(deadline_s, method, target):
            with self._typed(method, target):
                with self._short_path() as path:
                    reader, writer = await asyncio.open_unix_connection(path)
                try:
                    writer.write(f"{line}\r\n{fields}\r\n\r\n".encode())
                    head = await reader.readuntil(b"\r\n\r\n")
                    status = int(head.split(None, 2)[1])
                    if status not in (101, 200):
                        length = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
                        data = await reader.readexactly(int(length[1])) if length else b""
                        said = Response(status, {}, data).message()
                        raise HttpError(said, field=f"{self.name} {method} {target}", received=status)
                except BaseException:
                    writer.close()
                    raise
        return reader, writer

    @contextmanager
    def _short_path(self) -> Iterator[str]:
        """The socket's path, which may be longer than the 107 bytes that an address holds."""
        directory = os.open(self.socket.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            yield f"/proc/self/fd/{directory}/{self.socket.name}"
        finally:
            os.close(directory)

    @contextmanager
    def _typed(self, method: str, target: str) -> Iterator[None]:
        """Turns failures on the way into errors that name the daemon."""
        try:
            yield
        except (NobodyListensError, FileNotFoundError, ConnectionRefusedError, PermissionError) as error:
            raise HttpError(
                f"{self.name} cannot be reached: {error}",
                field="socket",
                received=str(self.socket),
                fix=f"see that {self.name} runs and that this user may open its socket",
            ) from error
        except (NoAnswerError, OSError, EOFError, ValueError, IndexError) as error:
            text = error.message if isinstance(error, NoAnswerError) else str(error)
            raise HttpError(
                f"the exchange broke off: {text}", field=f"{self.name} {method} {target}"
            ) from error

    @asynccontextmanager
    async def deadline(self, deadline_s: float, method: str, target: str) -> AsyncIterator[None]:
        """Raises HttpError where the block takes longer."""
        try:
            async with asyncio.timeout(deadline_s):
                yield
        except TimeoutError as error:
            raise HttpError(
                f"no answer within {deadline_s:g} s", field=f"{self.name} {method} {target}"
            ) from error
