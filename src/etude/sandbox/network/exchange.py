"""A connection from the proxy to a server: a CONNECT tunnel, or one HTTP request and its response.

Both directions run at the same time. They are unblocked by bytes, the end of either side, or `idle_s` without
a byte to or from the server.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from etude.kit.tasks import end_tasks
from etude.sandbox.network.messages import (
    MAX_HEAD_BYTES,
    Framing,
    Refusal,
    RequestHead,
    ResponseHead,
    client_head,
    parse_response_head,
    read_body,
    send_body,
    upstream_head,
)
from etude.sandbox.network.rules import HostError, canonical_host, is_address
from etude.sandbox.network.streams import CHUNK_BYTES, BufferedStream, Stream, UpstreamError, UpstreamStream

_MAX_INTERIM = 8
HANDSHAKE = 22
UNRECOGNIZED_NAME = bytes((21, 3, 3, 0, 2, 2, 112))
"""A fatal alert that says that the server name is not accepted."""
_CLIENT_HELLO = 1
_SERVER_NAME = 0
_ENCRYPTED_HELLO = 0xFE0D
_MAX_HELLO_BYTES = 32 << 10
_MAX_RECORDS = 32
_MAX_RECORD_BYTES = 1 << 14
TUNNEL_OPEN = b"HTTP/1.1 200 Connection established\r\n\r\n"


class CutError(Exception):
    """The connection is closed without a refusal, since a response has begun. `reason`: for the log."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@asynccontextmanager
async def idle_deadline(upstream: UpstreamStream, idle_s: float) -> AsyncIterator[None]:
    """Raises TimeoutError in its body after `idle_s` without a byte to or from the server."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(idle_s) as deadline:

        def progress() -> None:
            if not deadline.expired():
                deadline.reschedule(loop.time() + idle_s)

        upstream.on_progress = progress
        try:
            yield
        finally:
            upstream.on_progress = lambda: None


class Tunnel:
    """The bytes behind a CONNECT, opaque but for the ClientHello with which TLS begins."""

    def __init__(self, client: BufferedStream, upstream: UpstreamStream, host: str, hello_s: float) -> None:
        """`host`: the canonical host of CONNECT; `hello_s`: how long a begun ClientHello may take."""
        self._client = client
        self._upstream = upstream
        self._host = host
        self._hello_s = hello_s

    async def run(self, idle_s: float) -> None:
        """Runs until both directions have ended; a half-closed tunnel continues. Raises CutError."""
        await self._client.write(TUNNEL_OPEN)
        try:
            async with idle_deadline(self._upstream, idle_s):
                await run_both(self._send_to_server(), _pump(self._upstream, self._client))
        except TimeoutError as error:
            raise CutError("idle") from error
        except UpstreamError as error:
            raise CutError("upstream_failed") from error

    async def _send_to_server(self) -> None:
        """Client to server. The other direction does not wait for it: some servers send first."""
        await self._upstream.write(await self._first_bytes())
        await _pump(self._client, self._upstream)

    async def _first_bytes(self) -> bytes:
        """The first bytes of the client; if they begin a ClientHello, all of it, checked."""
        data = await self._client.read(CHUNK_BYTES)
        if data[:1] != bytes([HANDSHAKE]):
            return data
        try:
            async with asyncio.timeout(self._hello_s):
                while (hello := parse_client_hello(data)) is None:
                    more = await self._client.read(CHUNK_BYTES)
                    if not more:
                        raise CutError("tls_incomplete")
                    data += more
            check_server_name(hello, self._host)
        except TimeoutError as error:
            raise CutError("tls_timeout") from error
        except Refusal as refusal:
            await self._client.write(UNRECOGNIZED_NAME)
            raise CutError(refusal.reason) from refusal
        return data


class Forwarding:
    """One plain request to its server and the response back."""

    def __init__(self, client: BufferedStream, upstream: UpstreamStream, request: RequestHead) -> None:
        self._client = client
        self._upstream = BufferedStream(upstream)
        self._counted = upstream
        self._request = request
        self._uploaded = False
        self.status = 0
        """Status of the response whose head was sent to the client; 0: none yet."""

    async def run(self, idle_s: float) -> bool:
        """Returns whether the client's connection can carry another request. Raises Refusal, CutError."""
        try:
            async with idle_deadline(self._counted, idle_s):
                return await run_both(self._upload(), self._respond(), stop_with_response=True)
        except TimeoutError as error:
            raise self._failure(Refusal(504, "idle", "the server did not answer in time")) from error
        except UpstreamError as error:
            raise self._failure(Refusal(502, "upstream_failed", "the server's connection broke")) from error
        except Refusal as refusal:
            raise self._failure(refusal) from refusal

    def _failure(self, refusal: Refusal) -> Refusal | CutError:
        """CutError once a response has begun, which cannot be replaced by a refusal."""
        return CutError(refusal.reason) if self.status else refusal

    async def _upload(self) -> None:
        framing = self._request.framing
        try:
            await self._upstream.write(upstream_head(self._request))
            await send_body(read_body(self._client, framing), self._upstream, framing.kind == "chunked")
        except UpstreamError:
            # A server may answer and close before it has read all; its response must still be read.
            return
        self._uploaded = True

    async def _respond(self) -> bool:
        response = await self._read_final_head()
        framing = response.framing
        if framing.kind == "close" and self._request.minor_version == 1:
            framing = Framing("chunked")
        elif framing.kind == "chunked" and self._request.minor_version == 0:
            framing = Framing("close")
        keep = self._request.keep_alive and self._uploaded
        self.status = response.status
        await self._client.write(client_head(response, framing, keep))
        try:
            body = read_body(self._upstream, response.framing)
            await send_body(body, self._client, framing.kind == "chunked")
        except Refusal as refusal:
            raise CutError("upstream_" + refusal.reason) from refusal
        return keep

    async def _read_final_head(self) -> ResponseHead:
        """The head of the final response; interim ones (1xx) are forwarded."""
        for _ in range(_MAX_INTERIM):
            try:
                data = await self._upstream.read_head(MAX_HEAD_BYTES)
            except EOFError as error:
                raise Refusal(502, "upstream_ended", "the server ended the connection") from error
            if data is None:
                raise Refusal(502, "bad_response", "the server's answer has a head of more than 32 KiB")
            response = parse_response_head(data, self._request.method)
            if response.status >= 200:
                return response
            if response.status == 101:
                raise Refusal(502, "bad_response", "the server changed to a protocol that nobody asked for")
            if self._request.minor_version == 1:
                await self._client.write(client_head(response, Framing("none"), True))
        raise Refusal(502, "bad_response", "the server sent too many interim answers")


async def run_both(
    upwards: Coroutine[Any, Any, None], downwards: Coroutine[Any, Any, Any], stop_with_response: bool = False
) -> Any:
    """Runs both at the same time and returns the result of `downwards`; on return both have ended.

    The first exception of either cancels the other. `stop_with_response`: so does the end of `downwards`.
    """
    up, down = asyncio.ensure_future(upwards), asyncio.ensure_future(downwards)
    try:
        await asyncio.wait({up, down}, return_when=asyncio.FIRST_COMPLETED)
        if up.done():
            up.result()
            return await down
        result = down.result()
        if not stop_with_response:
            await up
        return result
    finally:
        await end_tasks(up, down)


async def _pump(source: Stream, target: Stream) -> None:
    while data := await source.read(CHUNK_BYTES):
        await target.write(data)
    await target.write_eof()


# The server name in a TLS ClientHello. A tunnel carries encrypted bytes, but its first message is plain text
# (RFC 8446, 4.1.2; server name: RFC 6066). Hosts requested later, inside the encryption, are not checked: a
# server that serves several hosts under one name is reachable for all of them.


@dataclass(frozen=True, slots=True)
class ClientHello:
    """The fields of a ClientHello that name its destination."""

    server_name: str | None
    encrypted: bool
    """Whether it also carries an encrypted ClientHello, whose server name the proxy cannot read."""


def parse_client_hello(data: bytes) -> ClientHello | None:
    """The ClientHello at the start of `data`; None if incomplete. Raises Refusal if it is malformed."""
    message = _handshake_message(data)
    if message is None:
        return None
    try:
        return _parse_hello(_Cursor(message))
    except IndexError as error:
        raise _malformed("a field exceeds the ClientHello") from error


def check_server_name(hello: ClientHello, host: str) -> None:
    """Raises Refusal unless the ClientHello names `host` (canonical), and no other server.

    An address as `host` needs no server name (RFC 6066 has names only).
    """
    if hello.encrypted:
        raise Refusal(403, "tls_encrypted_hello", "an encrypted ClientHello hides its server name")
    if hello.server_name is None:
        if is_address(host):
            return
        raise Refusal(403, "tls_name_missing", "the ClientHello names no server")
    try:
        name = canonical_host(hello.server_name)
    except HostError as error:
        raise Refusal(403, "tls_name_mismatch", "the ClientHello's server name is none") from error
    if name != host:
        raise Refusal(403, "tls_name_mismatch", "the ClientHello names another server than CONNECT")


class _Cursor:
    """Reads big-endian fields; raises IndexError past the end."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.position = 0

    def read_bytes(self, num_bytes: int) -> bytes:
        if self.position + num_bytes > len(self.data):
            raise IndexError(num_bytes)
        self.position += num_bytes
        return self.data[self.position - num_bytes : self.position]

    def read_uint(self, num_bytes: int) -> int:
        return int.from_bytes(self.read_bytes(num_bytes), "big")

    def read_vector(self, length_bytes: int) -> _Cursor:
        """A TLS vector: a length of `length_bytes` bytes, then its content."""
        return _Cursor(self.read_bytes(self.read_uint(length_bytes)))

    @property
    def ended(self) -> bool:
        return self.position == len(self.data)


def _handshake_message(data: bytes) -> bytes | None:
    """The body of the first handshake message, joined from its records; None if incomplete."""
    message = bytearray()
    at = 0
    for _ in range(_MAX_RECORDS):
        header = data[at : at + 5]
        if (header and header[0] != HANDSHAKE) or (len(header) > 1 and header[1] != 3):
            raise _malformed("a record of another kind within the handshake")
        length = int.from_bytes(header[3:5], "big")
        if len(header) == 5 and not 0 < length <= _MAX_RECORD_BYTES:
            raise _malformed("a record of no valid length")
        message += data[at + 5 : at + 5 + length] if len(header) == 5 else b""
        if message and message[0] != _CLIENT_HELLO:
            raise _malformed("the first handshake message is no ClientHello")
        size = int.from_bytes(message[1:4], "big")
        if len(message) >= 4 and size > _MAX_HELLO_BYTES:
            raise _malformed("a ClientHello of more than 32 KiB")
        if len(message) >= 4 + size and len(message) >= 4:
            return bytes(message[4 : 4 + size])
        if len(header) < 5 or len(data) < at + 5 + length:
            return None
        at += 5 + length
    raise _malformed("a ClientHello in too many records")


def _parse_hello(hello: _Cursor) -> ClientHello:
    hello.read_bytes(2 + 32)  # version, random
    hello.read_vector(1)  # session id
    hello.read_vector(2)  # cipher suites
    hello.read_vector(1)  # compression methods
    if hello.ended:
        return ClientHello(None, False)
    extensions = hello.read_vector(2)
    if not hello.ended:
        raise _malformed("bytes after the ClientHello's extensions")
    found: dict[int, _Cursor] = {}
    while not extensions.ended:
        kind, value = extensions.read_uint(2), extensions.read_vector(2)
        if kind in found:
            raise _malformed("an extension stands twice")
        found[kind] = value
    name = _parse_server_name(found[_SERVER_NAME]) if _SERVER_NAME in found else None
    return ClientHello(name, _ENCRYPTED_HELLO in found)


def _parse_server_name(extension: _Cursor) -> str:
    names = extension.read_vector(2)
    kind, name = names.read_uint(1), names.read_vector(2).data
    if kind != 0 or not names.ended or not extension.ended or not name.isascii():
        raise _malformed("not exactly one server name")
    return name.decode("ascii")


def _malformed(message: str) -> Refusal:
    return Refusal(400, "tls_malformed", message)
