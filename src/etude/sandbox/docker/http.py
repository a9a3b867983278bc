"""HTTP/1.1 over a Unix socket, as much of it as daemons with a local API speak. Standard library only.

One connection for each request. The client half is `UnixHttp`; the functions below it read and write
heads and bodies, and serve the fake engine of the tests too.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from etude.errors import SandboxError

MAX_HEAD_BYTES = 64 << 10
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
class Head:
    """First line and header fields of a message; field names in lower case."""

    first: tuple[str, str, str]
    """Request: method, target, version. Response: version, status, reason."""
    fields: Mapping[str, str] = field(default_factory=dict)

    @property
    def status(self) -> int:
        """Of a response."""
        return int(self.first[1])

    @property
    def chunked(self) -> bool:
        """Whether the body comes in chunks."""
        return "chunked" in self.fields.get("transfer-encoding", "").lower()

    @property
    def length(self) -> int | None:
        """Length of the body; None: until the end of the connection, or none at all."""
        value = self.fields.get("content-length")
        return int(value) if value is not None and value.isdigit() else None


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
            self._deadline(deadline_s, method, target),
            self.stream(method, target, body, query=query, content=content, content_type=content_type) as (
                head,
                pieces,
            ),
        ):
            data = bytearray()
            async for piece in pieces:
                data += piece
                if len(data) > MAX_BODY_BYTES:
                    raise HttpError("the answer is too long", field=self.name, received=target)
        return Response(head.status, head.fields, bytes(data))

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
    ) -> AsyncIterator[tuple[Head, AsyncIterator[bytes]]]:
        """As `request`, but the body comes in pieces. The caller keeps the deadline."""
        reader, writer = await self.connect()
        try:
            head = await self._ask(reader, writer, method, target, body, query, content, content_type, {})
            yield head, read_body(reader, head, to_end=True, bodiless=method == "HEAD")
        except (OSError, EOFError, ValueError) as error:
            raise self._error(method, target, error) from error
        finally:
            writer.close()

    async def hijack(
        self, method: str, target: str, query: Mapping[str, str] | None = None, deadline_s: float = 30.0
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Asks for the connection itself; from the answer on it belongs to the caller. Raises HttpError."""
        async with self._deadline(deadline_s, method, target):
            reader, writer = await self.connect()
            try:
                extra = {"Connection": "Upgrade", "Upgrade": "tcp"}
                head = await self._ask(reader, writer, method, target, None, query, None, "text/plain", extra)
                if head.status not in (101, 200):
                    data = b"".join([piece async for piece in read_body(reader, head, to_end=True)])
                    said = Response(head.status, head.fields, data).message()
                    raise HttpError(said, field=f"{self.name} {method} {target}", received=head.status)
            except (OSError, EOFError, ValueError) as error:
                writer.close()
                raise self._error(method, target, error) from error
            except BaseException:
                writer.close()
                raise
        return reader, writer

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A new connection. Raises HttpError."""
        try:
            return await connect_unix(self.socket)
        except OSError as error:
            raise HttpError(
                f"{self.name} cannot be reached: {error.strerror or error}",
                field="socket",
                received=str(self.socket),
                fix=f"see that {self.name} runs and that this user may open its socket",
            ) from error

    async def _ask(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        method: str,
        target: str,
        body: object,
        query: Mapping[str, str] | None,
        content: Body | None,
        content_type: str,
        extra: Mapping[str, str],
    ) -> Head:
        if query:
            target = f"{target}?{urlencode(query)}"
        if body is not None:
            content = json.dumps(body, separators=(",", ":")).encode()
        fields = {"Host": "localhost", "Accept": "application/json", "Connection": "close", **extra}
        if isinstance(content, bytes):
            fields |= {"Content-Type": content_type, "Content-Length": str(len(content))}
        elif content is not None:
            fields |= {"Content-Type": content_type, "Transfer-Encoding": "chunked"}
        elif method in ("POST", "PUT", "PATCH"):
            fields["Content-Length"] = "0"
        writer.write(pack_head(f"{method} {target} HTTP/1.1", fields))
        if isinstance(content, bytes):
            writer.write(content)
        elif content is not None:
            await write_chunks(writer, content)
        await writer.drain()
        head = await read_head(reader)
        while head.status == 100:
            head = await read_head(reader)
        return head

    @asynccontextmanager
    async def _deadline(self, deadline_s: float, method: str, target: str) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(deadline_s):
                yield
        except TimeoutError as error:
            raise HttpError(
                f"no answer within {deadline_s:g} s", field=f"{self.name} {method} {target}"
            ) from error

    def _error(self, method: str, target: str, error: Exception) -> HttpError:
        text = str(error) or type(error).__name__
        return HttpError(f"the exchange broke off: {text}", field=f"{self.name} {method} {target}")


async def connect_unix(path: Path) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Connects to a Unix socket whose path may be longer than the 107 bytes that an address holds."""
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return await asyncio.open_unix_connection(f"/proc/self/fd/{directory}/{path.name}")
    finally:
        os.close(directory)


def pack_head(first: str, fields: Mapping[str, str]) -> bytes:
    """A head, ready to send. Raises ValueError for text that would end a line."""
    lines = [first, *(f"{name}: {value}" for name, value in fields.items())]
    if any("\r" in line or "\n" in line for line in lines):
        raise ValueError("a line end within a head")
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1", errors="strict")


async def read_head(reader: asyncio.StreamReader) -> Head:
    """Reads a head. Raises EOFError, or ValueError for what is none."""
    lines: list[str] = []
    size = 0
    while True:
        line = await reader.readline()
        if not line.endswith(b"\n"):
            raise EOFError("the other side closed the connection")
        size += len(line)
        if size > MAX_HEAD_BYTES:
            raise ValueError("the head is too long")
        text = line.decode("latin-1").rstrip("\r\n")
        if not text:
            break
        lines.append(text)
    return parse_head(lines)


def parse_head(lines: list[str]) -> Head:
    """A head from its lines. Raises ValueError."""
    parts = lines[0].split(" ", 2) if lines else []
    if len(parts) < 2:
        raise ValueError("no HTTP head")
    first = (parts[0], parts[1], parts[2] if len(parts) > 2 else "")
    if first[0].startswith("HTTP/") and not first[1].isdigit():
        raise ValueError(f"no status: {lines[0]!r}")
    fields: dict[str, str] = {}
    for line in lines[1:]:
        name, colon, value = line.partition(":")
        if not colon:
            raise ValueError(f"no header field: {line!r}")
        fields[name.strip().lower()] = value.strip()
    return Head(first, fields)


async def read_body(
    reader: asyncio.StreamReader, head: Head, *, to_end: bool, bodiless: bool = False
) -> AsyncIterator[bytes]:
    """The body in pieces. `to_end`: without a length it lasts until the connection ends (responses).

    Raises EOFError if it breaks off, ValueError for broken chunks.
    """
    if bodiless or (head.first[0].startswith("HTTP/") and head.status in (204, 304)):
        return
    if head.chunked:
        while size := int((await reader.readline()).split(b";")[0].strip() or b"x", 16):
            async for piece in _read_exactly(reader, size):
                yield piece
            await reader.readexactly(2)
        while (await reader.readline()).strip():
            pass
    elif head.length is not None:
        async for piece in _read_exactly(reader, head.length):
            yield piece
    elif to_end:
        while piece := await reader.read(CHUNK_BYTES):
            yield piece


async def _read_exactly(reader: asyncio.StreamReader, size: int) -> AsyncIterator[bytes]:
    while size:
        piece = await reader.read(min(size, CHUNK_BYTES))
        if not piece:
            raise EOFError("the body breaks off")
        size -= len(piece)
        yield piece


async def write_chunks(writer: asyncio.StreamWriter, pieces: AsyncIterator[bytes]) -> None:
    """Writes a body in chunks, with its end."""
    async for piece in pieces:
        if piece:
            writer.write(b"%x\r\n" % len(piece) + piece + b"\r\n")
            await writer.drain()
    writer.write(b"0\r\n\r\n")
