"""The server name that a TLS client asks for, read from the first bytes of its connection.

A tunnel carries what the proxy cannot read, but its first message is in the clear (RFC 8446, 4.1.2;
server name: RFC 6066). What is asked for later, inside the encryption, stays unseen: a server that
answers for several hosts under one name answers a sandbox for all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from etude.sandbox.network.messages import Refusal
from etude.sandbox.network.rules import HostError, canonical_host, is_address

HANDSHAKE = 22
UNRECOGNIZED_NAME = bytes((21, 3, 3, 0, 2, 2, 112))
"""A fatal alert that says that the server name is not accepted."""
_CLIENT_HELLO = 1
_SERVER_NAME = 0
_ENCRYPTED_HELLO = 0xFE0D
_MAX_HELLO_BYTES = 32 << 10
_MAX_RECORDS = 32
_MAX_RECORD_BYTES = 1 << 14


@dataclass(frozen=True, slots=True)
class ClientHello:
    """What a ClientHello says about its destination."""

    server_name: str | None
    encrypted: bool
    """Whether it also carries an encrypted ClientHello, whose server name nobody on the way can see."""


def parse_client_hello(data: bytes) -> ClientHello | None:
    """The ClientHello at the start of `data`; None if there must be more. Raises Refusal if it is none."""
    message = _handshake_message(data)
    if message is None:
        return None
    try:
        return _parse_hello(_Cursor(message))
    except IndexError as error:
        raise _malformed("a field exceeds the ClientHello") from error


def check_server_name(hello: ClientHello, host: str) -> None:
    """Raises Refusal unless the ClientHello asks for `host` (canonical) and for it alone.

    For an address as `host` no server name is asked for (RFC 6066 has names only).
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
        self.at = 0

    def take(self, num_bytes: int) -> bytes:
        if self.at + num_bytes > len(self.data):
            raise IndexError(num_bytes)
        self.at += num_bytes
        return self.data[self.at - num_bytes : self.at]

    def number(self, num_bytes: int) -> int:
        return int.from_bytes(self.take(num_bytes), "big")

    def vector(self, length_bytes: int) -> _Cursor:
        """What follows a length of `length_bytes` bytes."""
        return _Cursor(self.take(self.number(length_bytes)))

    @property
    def ended(self) -> bool:
        return self.at == len(self.data)


def _handshake_message(data: bytes) -> bytes | None:
    """The body of the first handshake message, put together from its records; None if it is incomplete."""
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
    hello.take(2 + 32)  # version, random
    hello.vector(1)  # session id
    hello.vector(2)  # cipher suites
    hello.vector(1)  # compression methods
    if hello.ended:
        return ClientHello(None, False)
    extensions = hello.vector(2)
    if not hello.ended:
        raise _malformed("bytes after the ClientHello's extensions")
    found: dict[int, _Cursor] = {}
    while not extensions.ended:
        kind, value = extensions.number(2), extensions.vector(2)
        if kind in found:
            raise _malformed("an extension stands twice")
        found[kind] = value
    name = _parse_server_name(found[_SERVER_NAME]) if _SERVER_NAME in found else None
    return ClientHello(name, _ENCRYPTED_HELLO in found)


def _parse_server_name(extension: _Cursor) -> str:
    names = extension.vector(2)
    kind, name = names.number(1), names.vector(2).data
    if kind != 0 or not names.ended or not extension.ended or not name.isascii():
        raise _malformed("not exactly one server name")
    return name.decode("ascii")


def _malformed(message: str) -> Refusal:
    return Refusal(400, "tls_malformed", message)
