"""HTTP/1.1 messages (RFC 9110, 9112): strict parsing of heads, composition of new heads, and bodies.

Where two programs may parse the same bytes differently, a request can be smuggled past the one that checks.
So ambiguous messages are refused, and forwarded heads are composed from the parsed fields, never copied.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from dataclasses import dataclass
from http import HTTPStatus
from typing import Literal

from etude.sandbox.network.rules import HostError, join_authority, split_authority
from etude.sandbox.network.streams import CHUNK_BYTES, BufferedStream, Stream

MAX_HEAD_BYTES = 32 << 10
HTTP_PORT = 80
_MAX_HEADERS = 128
_TOKEN = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+"
_REQUEST_LINE = re.compile(rb"(%s) ([\x21-\x7e]+) HTTP/1\.([01])" % _TOKEN)
_STATUS_LINE = re.compile(rb"HTTP/1\.([01]) ([1-5][0-9]{2})(?: [\x20-\x7e\t\x80-\xff]*)?")
_HEADER = re.compile(rb"(%s):([\x20-\x7e\t\x80-\xff]*)" % _TOKEN)
_LENGTH = re.compile(rb"[0-9]{1,15}")
_HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"http2-settings",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)

Header = tuple[bytes, bytes]


class Refusal(Exception):
    """Refusal of a request. It becomes a response and a log line, and never leaves the proxy."""

    def __init__(self, status: int, reason: str, message: str, received: str = "", address: str = "") -> None:
        """`reason`: code for the log; `message`: for the client; `received`: the host; `address`: its IP."""
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.message = message
        self.received = received
        self.address = address

    def response(self) -> bytes:
        """The error response as bytes; the connection closes after it."""
        body = f"{self.message}\n".encode("ascii", "backslashreplace")
        head = (
            f"HTTP/1.1 {self.status} {HTTPStatus(self.status).phrase}\r\n"
            f"Content-Type: text/plain; charset=utf-8\r\nContent-Length: {len(body)}\r\n"
            "Connection: close\r\n\r\n"
        )
        return head.encode("ascii") + body


@dataclass(frozen=True, slots=True)
class Framing:
    """How the end of a body is determined."""

    kind: Literal["none", "length", "chunked", "close"]
    length_bytes: int = 0
    """Only for kind `length`."""


@dataclass(frozen=True, slots=True)
class Target:
    """The destination of a request."""

    host: str
    """Canonical."""
    port: int
    path: str = ""
    """Path and query of a plain request; empty for CONNECT."""


@dataclass(frozen=True, slots=True)
class RequestHead:
    """A parsed request head."""

    method: str
    target: Target
    headers: tuple[Header, ...]
    framing: Framing
    minor_version: int
    """0 or 1: HTTP/1.0 or HTTP/1.1."""
    keep_alive: bool
    """Whether the client expects to send another request on the connection."""


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """A parsed response head."""

    status: int
    headers: tuple[Header, ...]
    framing: Framing
    length: bytes | None
    """Content-Length as received; also says how long the body of a HEAD would have been."""


def parse_request_head(data: bytes, own: Target | None = None) -> RequestHead:
    """Parses a request head, including its empty line. Raises Refusal, and nothing else.

    `own`: the target of requests that name a path alone, whatever their Host header says.
    """
    first, headers = _split_head(data, 400)
    match = _REQUEST_LINE.fullmatch(first)
    if match is None:
        raise Refusal(400, "malformed", "not a request line of HTTP/1.1")
    method, minor_version = match[1].decode("ascii"), int(match[3])
    target = _parse_target(method, match[2].decode("ascii"), own)
    hosts = _values(headers, b"host")
    if len(hosts) > 1 or (minor_version == 1 and not hosts):
        raise Refusal(400, "malformed", "a request has exactly one Host header", target.host)
    if method == "CONNECT":
        return RequestHead(method, target, headers, Framing("none"), minor_version, False)
    if hosts and not match[2].startswith(b"/"):
        _check_host_header(hosts[0], target)
    framing, _ = _framing(headers, 400)
    if framing.kind == "chunked" and minor_version == 0:
        raise Refusal(400, "malformed", "HTTP/1.0 has no Transfer-Encoding", target.host)
    tokens = _connection_tokens(headers)
    keep_alive = minor_version == 1 and b"close" not in tokens
    if framing.kind == "close":
        framing = Framing("none")
    return RequestHead(method, target, headers, framing, minor_version, keep_alive)


def parse_response_head(data: bytes, method: str) -> ResponseHead:
    """Parses the response head to a request of `method`. Raises Refusal with status 502."""
    first, headers = _split_head(data, 502)
    match = _STATUS_LINE.fullmatch(first)
    if match is None:
        raise Refusal(502, "bad_response", "the server's answer is not HTTP/1.1")
    status = int(match[2])
    framing, length = _framing(headers, 502)
    if method == "HEAD" or status < 200 or status in (204, 304):
        framing = Framing("none")
    return ResponseHead(status, headers, framing, length)


def upstream_head(request: RequestHead) -> bytes:
    """The request head sent to the server. Its connection serves this one request."""
    target = request.target
    authority = join_authority(target.host, target.port)
    if target.port == HTTP_PORT:
        authority = authority.removesuffix(f":{HTTP_PORT}")
    lines = [f"{request.method} {target.path} HTTP/1.1".encode(), b"Host: " + authority.encode()]
    lines += _end_to_end(request.headers, frozenset({b"host", b"content-length"}))
    if request.framing.kind == "chunked":
        lines.append(b"Transfer-Encoding: chunked")
    elif request.framing.kind == "length":
        lines.append(b"Content-Length: %d" % request.framing.length_bytes)
    lines += [b"Via: 1.1 etude", b"Connection: close"]
    return b"\r\n".join(lines) + b"\r\n\r\n"


def client_head(response: ResponseHead, framing: Framing, keep_alive: bool) -> bytes:
    """The response head sent to the client, with the body framed as `framing`."""
    lines = [f"HTTP/1.1 {response.status} {_phrase(response.status)}".encode()]
    lines += _end_to_end(response.headers, frozenset({b"content-length"}))
    if framing.kind == "chunked":
        lines.append(b"Transfer-Encoding: chunked")
    elif response.length is not None and response.status >= 200 and response.status != 204:
        lines.append(b"Content-Length: " + response.length)
    if response.status >= 200:
        lines += [b"Via: 1.1 etude", b"Connection: keep-alive" if keep_alive else b"Connection: close"]
    return b"\r\n".join(lines) + b"\r\n\r\n"


def parse_headers(data: bytes, status: int) -> tuple[Header, ...]:
    """Parses header lines, each with its CRLF. Raises Refusal with `status`."""
    lines = data.split(b"\r\n")
    if lines.pop() != b"" or len(lines) > _MAX_HEADERS:
        raise Refusal(status, "malformed", f"more than {_MAX_HEADERS} headers, or one without its line end")
    headers: list[Header] = []
    for line in lines:
        match = _HEADER.fullmatch(line)
        if match is None:
            # Folded lines among them: they begin with white space, which no name does.
            raise Refusal(status, "malformed", "a header that is not `name: value` on one line")
        headers.append((match[1], match[2].strip(b" \t")))
    return tuple(headers)


def _split_head(data: bytes, status: int) -> tuple[bytes, tuple[Header, ...]]:
    if len(data) > MAX_HEAD_BYTES:
        raise Refusal(431 if status == 400 else status, "head_too_large", "a head of more than 32 KiB")
    if not data.endswith(b"\r\n\r\n"):
        raise Refusal(status, "malformed", "a head ends with an empty line, and its lines with CR LF")
    first, _, rest = data[:-2].partition(b"\r\n")
    return first, parse_headers(rest, status)


def _parse_target(method: str, text: str, own: Target | None) -> Target:
    """The target of CONNECT (`host:port`), of a plain request (`http://host/path`), or of one to `own`."""
    if method == "CONNECT":
        authority, port, path = text, None, ""
    elif own is not None and text.startswith("/"):
        return Target(own.host, own.port, text)
    else:
        scheme, colon, rest = text.partition("://")
        if not colon or scheme.lower() != "http":
            raise Refusal(400, "malformed", "this is a proxy: send http://host/path, or CONNECT host:port")
        length = min((at for at in map(rest.find, "/?#") if at >= 0), default=len(rest))
        authority, port, path = rest[:length], HTTP_PORT, rest[length:]
        path = path if path.startswith("/") else "/" + path
    # Credentials are dropped from what may be logged.
    received = authority.rpartition("@")[2]
    if "#" in path or "\\" in text or "@" in authority:
        raise Refusal(400, "malformed", "a fragment, a backslash or credentials in the target", received)
    try:
        return Target(*split_authority(authority, port), path)
    except HostError as error:
        raise Refusal(400, "bad_host", f"not a host and port: {error}", received) from error


def _check_host_header(value: bytes, target: Target) -> None:
    try:
        named = split_authority(value.decode("latin-1"), HTTP_PORT)
    except HostError as error:
        raise Refusal(400, "bad_host", f"the Host header: {error}", target.host) from error
    if named != (target.host, target.port):
        raise Refusal(400, "host_mismatch", "the Host header names another host than the URL", target.host)


def _framing(headers: tuple[Header, ...], status: int) -> tuple[Framing, bytes | None]:
    """(framing, Content-Length). `close` without either of the two headers."""
    lengths, codings = _values(headers, b"content-length"), _values(headers, b"transfer-encoding")
    if len(lengths) + len(codings) > 1:
        raise Refusal(status, "ambiguous_length", "more than one Content-Length or Transfer-Encoding")
    if codings:
        if codings[0].lower() != b"chunked":
            raise Refusal(501 if status == 400 else status, "coding", "a Transfer-Encoding but `chunked`")
        return Framing("chunked"), None
    if lengths:
        if not _LENGTH.fullmatch(lengths[0]):
            raise Refusal(status, "ambiguous_length", "a Content-Length that is no number")
        return Framing("length", int(lengths[0])), b"%d" % int(lengths[0])
    return Framing("close"), None


def _values(headers: tuple[Header, ...], name: bytes) -> list[bytes]:
    return [value for key, value in headers if key.lower() == name]


def _connection_tokens(headers: tuple[Header, ...]) -> frozenset[bytes]:
    values = _values(headers, b"connection") + _values(headers, b"proxy-connection")
    return frozenset(token.strip(b" \t").lower() for value in values for token in value.split(b","))


def _end_to_end(headers: tuple[Header, ...], composed: frozenset[bytes]) -> list[bytes]:
    """Header lines without the hop-by-hop headers and those in `composed`, which are written anew."""
    dropped = _HOP_BY_HOP | composed | _connection_tokens(headers)
    return [name + b": " + value for name, value in headers if name.lower() not in dropped]


def _phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "Unknown"


LAST_CHUNK = b"0\r\n\r\n"
_MAX_LINE_BYTES = 1 << 10
_MAX_TRAILER_BYTES = 8 << 10
_CHUNK_LINE = re.compile(rb"([0-9A-Fa-f]{1,12})[ \t]*(?:;[\x20-\x7e\t\x80-\xff]*)?\r\n")


async def read_body(source: BufferedStream, framing: Framing) -> AsyncIterator[bytes]:
    """Yields the body in pieces as they arrive. Raises Refusal if it is truncated or badly chunked."""
    if framing.kind == "length":
        async for piece in _read_exactly(source, framing.length_bytes):
            yield piece
    elif framing.kind == "chunked":
        async for piece in _read_chunked(source):
            yield piece
    elif framing.kind == "close":
        while piece := await source.read(CHUNK_BYTES):
            yield piece


async def send_body(pieces: AsyncIterator[bytes], to: Stream, chunked: bool) -> None:
    """Writes the pieces, each as one chunk if `chunked`."""
    async for piece in pieces:
        await to.write(b"%x\r\n%b\r\n" % (len(piece), piece) if chunked else piece)
    if chunked:
        await to.write(LAST_CHUNK)


async def _read_exactly(source: BufferedStream, num_bytes: int) -> AsyncIterator[bytes]:
    while num_bytes:
        piece = await source.read(min(num_bytes, CHUNK_BYTES))
        if not piece:
            raise Refusal(400, "incomplete", "the body ended before its announced length")
        num_bytes -= len(piece)
        yield piece


async def _read_chunked(source: BufferedStream) -> AsyncIterator[bytes]:
    while True:
        line = await source.read_line(_MAX_LINE_BYTES)
        match = _CHUNK_LINE.fullmatch(line or b"")
        if match is None:
            raise Refusal(400, "bad_chunk", "not the first line of a chunk")
        size = int(match[1], 16)
        if not size:
            break
        async for piece in _read_exactly(source, size):
            yield piece
        if await source.read_line(_MAX_LINE_BYTES) != b"\r\n":
            raise Refusal(400, "bad_chunk", "a chunk longer than its announced size")
    await _drop_trailers(source)


async def _drop_trailers(source: BufferedStream) -> None:
    """Reads the trailers after the last chunk; they are checked and not forwarded."""
    trailers = b""
    while (line := await source.read_line(_MAX_LINE_BYTES)) != b"\r\n":
        trailers += line or b""
        if line is None or len(trailers) > _MAX_TRAILER_BYTES:
            raise Refusal(400, "bad_chunk", "trailers that do not end")
    if trailers:
        parse_headers(trailers, 400)
