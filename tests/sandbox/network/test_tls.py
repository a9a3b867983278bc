"""The server name is read from real ClientHellos, whole or in pieces, and nothing is guessed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.sandbox.network.exchange import ClientHello, check_server_name, parse_client_hello
from etude.sandbox.network.messages import Refusal
from tests.sandbox.network.builders import client_hello

HELLO = client_hello("example.org")


def in_records(hello: bytes, size: int) -> bytes:
    """The same handshake message in records of `size` bytes."""
    message = hello[5:]
    pieces = [message[at : at + size] for at in range(0, len(message), size)]
    return b"".join(hello[:3] + len(piece).to_bytes(2, "big") + piece for piece in pieces)


def with_extensions(*extensions: tuple[int, bytes]) -> bytes:
    """A ClientHello in one record with just these extensions."""
    body = b"".join(
        kind.to_bytes(2, "big") + len(data).to_bytes(2, "big") + data for kind, data in extensions
    )
    hello = b"\x03\x03" + bytes(32) + b"\0" + b"\0\2\x13\x01" + b"\1\0" + len(body).to_bytes(2, "big") + body
    message = b"\1" + len(hello).to_bytes(3, "big") + hello
    return b"\x16\x03\x01" + len(message).to_bytes(2, "big") + message


def server_names(*names: bytes) -> bytes:
    rows = b"".join(b"\0" + len(name).to_bytes(2, "big") + name for name in names)
    return len(rows).to_bytes(2, "big") + rows


def test_a_real_hello_says_its_server_name() -> None:
    assert parse_client_hello(HELLO) == ClientHello("example.org", False)
    assert parse_client_hello(client_hello(None)) == ClientHello(None, False)
    assert parse_client_hello(client_hello("127.0.0.1")) == ClientHello(None, False)


def test_every_beginning_of_a_hello_asks_for_more() -> None:
    assert all(parse_client_hello(HELLO[:length]) is None for length in range(len(HELLO)))


def test_a_hello_in_several_records_is_put_together() -> None:
    data = in_records(HELLO, 100)
    assert parse_client_hello(data) == ClientHello("example.org", False)
    assert all(parse_client_hello(data[:length]) is None for length in range(len(data)))


def test_bytes_after_the_hello_do_not_matter() -> None:
    assert parse_client_hello(HELLO + b"\x14\x03\x03\0\1\1") == ClientHello("example.org", False)


def test_a_hello_in_too_many_records_is_refused() -> None:
    with pytest.raises(Refusal):
        parse_client_hello(in_records(HELLO, 1))


@pytest.mark.parametrize(
    "data",
    [
        with_extensions((0, server_names(b"a.org", b"b.org"))),
        with_extensions((0, server_names())),
        with_extensions((0, b"")),
        with_extensions((0, server_names(b"a.org") + b"x")),
        with_extensions((0, server_names(b"a.org")), (0, server_names(b"b.org"))),
        with_extensions((0, server_names("ä.org".encode()))),
        b"\x16\x03\x01\0\0",
        b"\x16\x03\x01\xff\xff",
        b"\x16\x02\0",
        b"\x16\x03\x01\0\x04\x02\0\0\0",
        b"\x16\x03\x01\0\x04\x01\xff\xff\xff",
        b"\x16\x03\x01\0\x06\x01\0\0\2\3\3",
    ],
)
def test_broken_hellos_are_refused(data: bytes) -> None:
    with pytest.raises(Refusal) as caught:
        parse_client_hello(data)
    assert caught.value.reason == "tls_malformed"


@given(st.lists(st.tuples(st.integers(0, len(HELLO) - 1), st.integers(0, 255)), max_size=4))
def test_a_damaged_hello_is_read_refused_or_unfinished(damage: list[tuple[int, int]]) -> None:
    data = bytearray(HELLO)
    for place, value in damage:
        data[place] = value
    try:
        hello = parse_client_hello(bytes(data))
    except Refusal:
        return
    assert hello is None or isinstance(hello, ClientHello)


@given(st.binary())
def test_any_bytes_of_a_handshake_have_a_verdict(data: bytes) -> None:
    try:
        parse_client_hello(b"\x16\x03\x01" + data)
    except Refusal as refusal:
        assert refusal.reason == "tls_malformed"


@pytest.mark.parametrize("name", ["example.org", "EXAMPLE.org"])
def test_the_name_of_connect_passes(name: str) -> None:
    check_server_name(ClientHello(name, False), "example.org")


def test_an_address_needs_no_name() -> None:
    check_server_name(ClientHello(None, False), "93.184.216.34")
    check_server_name(ClientHello(None, False), "2606:4700::1")


@pytest.mark.parametrize(
    ("hello", "host", "reason"),
    [
        (ClientHello("evil.example", False), "example.org", "tls_name_mismatch"),
        (ClientHello("www.example.org", False), "example.org", "tls_name_mismatch"),
        (ClientHello("example.org\0.evil", False), "example.org", "tls_name_mismatch"),
        (ClientHello("evil.example", False), "93.184.216.34", "tls_name_mismatch"),
        (ClientHello(None, False), "example.org", "tls_name_missing"),
        (ClientHello("example.org", True), "example.org", "tls_encrypted_hello"),
    ],
)
def test_another_name_is_domain_fronting(hello: ClientHello, host: str, reason: str) -> None:
    with pytest.raises(Refusal) as caught:
        check_server_name(hello, host)
    assert caught.value.reason == reason


def test_an_encrypted_hello_is_seen() -> None:
    data = with_extensions((0, server_names(b"example.org")), (0xFE0D, b"\0"))
    assert parse_client_hello(data) == ClientHello("example.org", True)
