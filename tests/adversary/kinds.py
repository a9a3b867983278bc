"""Kinds of hostile requests, one line each: the difference from an honest request, and the allowed answers."""

# ruff: noqa: E501 -- a kind has one line
# fmt: off

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tests.adversary.sending import as_json, fill, request_bytes
from tests.adversary.servers import SERVERS, Server

Data = bytes | list[bytes]
MB = 1 << 20


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind. Distinct by its cause, not by the server that it is sent to."""

    name: str
    servers: tuple[str, ...]
    data: Callable[[Server], Data]
    expect: frozenset[int]
    """Statuses of the answers; 0: the connection is closed without one."""
    waits: bool = True
    slow: bool = False


KINDS: list[Kind] = []
_JSON_TYPES: dict[str, Any] = {
    "null": None, "a number": 5, "a list": [], "a text": "x", "true": True,
}  # fmt: skip


def every(name: str, expect: Sequence[int], data: Callable[[Server], Data], **more: Any) -> None:
    """A kind that every server meets."""
    KINDS.append(Kind(name, SERVERS, data, frozenset(expect), **more))


def one(
    server: str,
    name: str,
    expect: Sequence[int],
    line: str,
    json: Any = ...,
    body: bytes = b"",
    headers: dict[str, Any] | None = None,
    slow: bool = False,
) -> None:
    """A kind that one server meets. `line`: method and path."""
    method, _, path = line.partition(" ")

    def data(at: Server) -> bytes:
        found = body if json is ... else as_json(json)
        if b"{" in found and len(found) < MB:
            found = fill(found.decode("utf-8", "surrogateescape"), at).encode("utf-8", "surrogateescape")
        named = {k: None if v is None else fill(v, at) for k, v in (headers or {}).items()}
        return request_bytes(at, method, fill(path, at), named, found)

    KINDS.append(Kind(f"{server}: {name}", (server,), data, frozenset(expect), slow=slow))


def head(server: Server, *lines: str, first: str = "", end: str = "\r\n\r\n", host: bool = True) -> bytes:
    """A request's head, written by hand."""
    rows = [first or f"GET {server.path} HTTP/1.1"]
    rows += [f"host: 127.0.0.1:{server.port}"] * host
    rows += [f"authorization: Bearer {server.token}", "connection: close", *lines]
    return ("\r\n".join(rows) + end).encode("latin-1")


def nested(levels: int, inner: str = "") -> bytes:
    """Lists in lists."""
    return b"[" * levels + inner.encode() + b"]" * levels


# ---- the line that a request begins with ---------------------------------------------------------

every("no HTTP at all", [400], lambda s: b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 64 + b"\r\n\r\n")
every("an empty line first", [200, 400], lambda s: b"\r\n" + head(s))
every("a method that there is not", [405], lambda s: head(s, first=f"BREW {s.path} HTTP/1.1"))
every("a method of 4,000 letters", [400, 405], lambda s: head(s, first=f"{'A' * 4000} {s.path} HTTP/1.1"))
every("TRACE, which would give headers back", [405], lambda s: head(s, "cookie: a=b", first=f"TRACE {s.path} HTTP/1.1"))
every("CONNECT to elsewhere", [400, 404, 405], lambda s: head(s, first="CONNECT example.org:443 HTTP/1.1"))
every("OPTIONS of everything", [400, 404, 405], lambda s: head(s, first="OPTIONS * HTTP/1.1"))
every("an absolute target of another host", [400, 404], lambda s: head(s, first="GET http://169.254.169.254/latest HTTP/1.1"))
every("HTTP 1.0 without a host", [400, 401], lambda s: head(s, first=f"GET {s.path} HTTP/1.0", host=False))
every("HTTP 0.9", [400], lambda s: f"GET {s.path}\r\n\r\n".encode())
every("HTTP 2 at once", [400, 401], lambda s: b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
every("HTTP 3.7", [200, 400, 505], lambda s: head(s, first=f"GET {s.path} HTTP/3.7"))
every("an upgrade to HTTP 2", [200], lambda s: head(s, "upgrade: h2c", "http2-settings: AAMAAABkAARAAAAAAAIAAAAA"))
every("spaces in the target", [400], lambda s: head(s, first="GET /a b c HTTP/1.1"))
every("a NUL in the target", [400, 404], lambda s: head(s, first="GET /\0 HTTP/1.1"))
every("bytes that are not ASCII in the target", [400, 404], lambda s: head(s, first="GET /\xff\xfe HTTP/1.1"))
every("escapes that are no UTF-8", [400, 401, 404], lambda s: head(s, first="GET /%ff%fe%c0%80 HTTP/1.1"))
every("half an escape", [400, 401, 404], lambda s: head(s, first="GET /%zz% HTTP/1.1"))
every("a path of 60,000 characters", [400, 404, 414], lambda s: head(s, first=f"GET /{'a/' * 30000} HTTP/1.1"))
every("a query of 60,000 fields", [200, 400, 414], lambda s: head(s, first=f"GET {s.path}?{'&' * 60000} HTTP/1.1"))
every("a query that names a field twice", [200], lambda s: head(s, first=f"GET {s.path}?a=1&a=2&a[]=3 HTTP/1.1"))
every("dots that leave the root", [400, 404], lambda s: head(s, first="GET /../../../etc/passwd HTTP/1.1"))
every("escaped dots that leave the root", [400, 404], lambda s: head(s, first="GET /%2e%2e/%2e%2e/etc/passwd HTTP/1.1"))
every("back slashes that leave the root", [400, 404], lambda s: head(s, first="GET /..\\..\\etc\\passwd HTTP/1.1"))
every("slashes doubled", [404], lambda s: head(s, first=f"GET /{s.path.replace('/', '//')} HTTP/1.1"))

# ---- headers -------------------------------------------------------------------------------------

every("no host", [400, 401], lambda s: head(s, host=False))
every("two hosts", [400, 401], lambda s: head(s, "host: evil.example"))
every("a foreign host", [401], lambda s: head(s, "host: evil.example", host=False))
every("a foreign host that begins as ours", [401], lambda s: head(s, "host: localhost.evil.example", host=False))
every("a foreign host before an at sign", [401], lambda s: head(s, "host: localhost@evil.example", host=False))
every("an empty host", [400, 401], lambda s: head(s, "host: ", host=False))
every("a foreign origin", [401], lambda s: head(s, "origin: https://evil.example"))
every("an origin of null", [401], lambda s: head(s, "origin: null"))
every("a foreign origin with ours in its path", [401], lambda s: head(s, "origin: https://evil.example/localhost"))
every("a forwarded host", [200], lambda s: head(s, "x-forwarded-host: evil.example", "forwarded: host=evil.example"))
every("a method in a header", [200], lambda s: head(s, "x-http-method-override: DELETE"))
every("a header without a colon", [400], lambda s: head(s, "no colon"))
every("a header with a space in its name", [400], lambda s: head(s, "a b: c"))
every("a header folded over lines", [200, 400], lambda s: head(s, "x-a: b", " c"))
every("a NUL in a header", [400], lambda s: head(s, "x-a: b\0c"))
every("a bare line feed in a header", [200, 400], lambda s: head(s, "x-a: b\nx-c: d"))
every("a bare carriage return in a header", [400], lambda s: head(s, "x-a: b\rc"))
every("a header of 100,000 bytes", [0, 200, 400, 431], lambda s: head(s, f"x-a: {'b' * 100000}"))
every("2,000 headers", [0, 200, 400, 431], lambda s: head(s, *(f"x-{n}: b" for n in range(2000))))
every("headers in Latin-1", [200], lambda s: head(s, "x-a: \xfc\xff"))
every("an empty header name", [400], lambda s: head(s, ": b"))
every("an expectation that there is not", [200, 400, 417], lambda s: head(s, "expect: the-unexpected"))
every("an encoding that there is not", [200, 400, 415], lambda s: head(s, "content-encoding: zip"))
every("a media type of nonsense", [200], lambda s: head(s, "accept: /;q=nan,*", "content-type: /;;="))
every("a range far beyond the end", [200], lambda s: head(s, "range: bytes=99999999999-"))

# ---- credentials ---------------------------------------------------------------------------------

LOCKED = ("sandbox", "environment", "inference", "router", "relay", "control")


def _with_key(name: str, expect: Sequence[int], value: str | None) -> None:
    def data(s: Server) -> bytes:
        return request_bytes(s, "GET", s.path, {"authorization": value})  # type: ignore[dict-item]

    KINDS.append(Kind(name, LOCKED, data, frozenset(expect)))


_with_key("no credentials", [401], None)
_with_key("an empty bearer", [401], "Bearer ")
_with_key("another bearer", [401], "Bearer another")
_with_key("a bearer that is not ASCII", [401], "Bearer \xfc\xff")
_with_key("a bearer of 50,000 characters", [401], "Bearer " + "x" * 50000)
_with_key("the beginning of the bearer", [401], "Bearer a-token-of-the-")
_with_key("the token by another scheme", [401], "Basic a-token-of-the-first-tenant")
_with_key("the token without a scheme", [401], "a-token-of-the-first-tenant")
_with_key("the token with a tail", [401], "Bearer a-token-of-the-first-tenant x")

# ---- lengths and chunks --------------------------------------------------------------------------

POSTS = {
    "sandbox": "/v1/sandboxes", "environment": "/sessions", "inference": "/v1/completions",
    "recording": "/sessions", "router": "/v1/completions", "relay": "/files/pins/a.json", "control": "/v1/join",
}  # fmt: skip


def post(server: Server) -> str:
    """The first line of a request with a body."""
    return f"{'PUT' if server.name == 'relay' else 'POST'} {POSTS[server.name]} HTTP/1.1"


def posting(server: Server, *lines: str, rest: bytes = b"") -> bytes:
    """A request with a body, written by hand."""
    return head(server, "content-type: application/json", *lines, first=post(server)) + rest


every("a length that is no number", [400], lambda s: posting(s, "content-length: many"))
every("a length below zero", [400], lambda s: posting(s, "content-length: -5"))
every("a length of 10^18", [400, 413], lambda s: posting(s, f"content-length: {10**18}"))
every("a length of 3,000 digits", [400, 413], lambda s: posting(s, f"content-length: {'9' * 3000}"))
every("two lengths", [400], lambda s: posting(s, "content-length: 2", "content-length: 3", rest=b"{}x"))
every("a length and chunks", [400, 401, 404, 409, 200], lambda s: posting(s, "content-length: 4", "transfer-encoding: chunked", rest=b"2\r\n{}\r\n0\r\n\r\n"))
every("chunks of a size that is none", [400], lambda s: posting(s, "transfer-encoding: chunked", rest=b"zz\r\n{}\r\n0\r\n\r\n"))
every("a chunk of 2^64 bytes", [0, 400, 413], lambda s: posting(s, "transfer-encoding: chunked", rest=b"fffffffffffffff1\r\n"), waits=False)
every("a chunk below zero", [400], lambda s: posting(s, "transfer-encoding: chunked", rest=b"-1\r\n{}\r\n0\r\n\r\n"))
every("an encoding of a transfer that there is not", [400, 501], lambda s: posting(s, "transfer-encoding: gzip, chunked"))
every("a chunk extension of 100,000 bytes", [200, 201, 400, 409], lambda s: posting(s, "transfer-encoding: chunked", rest=b"2;" + b"a" * 100000 + b"\r\n{}\r\n0\r\n\r\n"))
every("trailers that would be headers", [400, 200, 409], lambda s: posting(s, "transfer-encoding: chunked", rest=b"2\r\n{}\r\n0\r\nhost: evil.example\r\n\r\n"))
every("a second request behind the first", [200], lambda s: head(s).replace(b"connection: close\r\n", b"") + head(s))
every("a smuggled request behind a GET with a body", [200, 400, 404], lambda s: head(s, "content-length: 40").replace(b"connection: close\r\n", b"") + b"GET /smuggled HTTP/1.1\r\nhost: localhost\r\n\r\n" + head(s))
every("half a head", [0], lambda s: b"GET / HTTP/1.1\r\nhos", waits=False)
every("half a body", [0], lambda s: posting(s, "content-length: 100", rest=b'{"a'), waits=False)
every("nothing", [0], lambda s: b"", waits=False)
every("a head in 400 pieces", [200], lambda s: [bytes([b]) for b in head(s)])

# ---- JSON that no field expects ------------------------------------------------------------------

_BAD_BODIES: dict[str, bytes] = {
    "an empty body": b"",
    "a body that is no JSON": b"{oh no",
    "a body that is no UTF-8": b'{"a": "\xff\xfe"}',
    "a body in UTF-16": '{"a": 1}'.encode("utf-16"),
    "a body with a byte order mark": b"\xef\xbb\xbf{}",
    "a body of NaN": b"NaN",
    "a body of infinity": b'{"a": Infinity}',
    "a number of 100,000 digits": b'{"a": ' + b"9" * 100000 + b"}",
    "a number of 10^400": b'{"a": 1e400}',
    "a lone surrogate": b'{"a\\ud800": "\\udfff"}',
    "a NUL in a key": b'{"a\\u0000": 1}',
    "a key twice": b'{"a": 1, "a": 2}',
    "a key of 1 MB": b'{"' + b"k" * MB + b'": 1}',
    "lists 100,000 deep": nested(100000),
    "lists 900 deep in an object": b'{"a": ' + nested(900) + b"}",
    "objects 50,000 deep": b'{"a":' * 50000 + b"1" + b"}" * 50000,
    "unclosed lists of 1 MB": b"[" * MB,
    "an object with __proto__": b'{"__proto__": {"admin": true}, "__class__": "x"}',
    "300,000 keys": b"{" + b",".join(b'"%d":0' % n for n in range(300000)) + b"}",
    "JSON behind JSON": b"{}{}",
    "a comment in JSON": b'{"a": 1 /* no */}',
}
_NO_JSON = ("relay",)  # its bodies are notes of any bytes
for _name, _body in _BAD_BODIES.items():
    KINDS.append(
        Kind(
            _name,
            tuple(s for s in SERVERS if s not in _NO_JSON),
            lambda s, body=_body: posting(s, f"content-length: {len(body)}", rest=body),
            frozenset([200, 201, 400, 409, 413] if _name in ("an empty body", "a body with a byte order mark", "a key twice") else [400, 413]),
        )
    )
for _name, _value in _JSON_TYPES.items():
    KINDS.append(
        Kind(
            f"a body that is {_name}",
            tuple(s for s in SERVERS if s not in _NO_JSON),
            lambda s, value=_value: posting(s, f"content-length: {len(as_json(value))}", rest=as_json(value)),
            frozenset([400]),
        )
    )
_BRACKETS = b"[" + b"[]," * (5 * MB) + b"[]]"
KINDS.append(
    Kind(
        "five million lists",
        tuple(s for s in SERVERS if s not in _NO_JSON),
        lambda s: posting(s, f"content-length: {len(_BRACKETS)}", rest=_BRACKETS),
        frozenset([400, 413]),
        slow=True,
    )
)
