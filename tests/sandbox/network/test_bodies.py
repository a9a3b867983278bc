"""Bodies end where their framing says, or are refused."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.sandbox.network.messages import LAST_CHUNK, Framing, Refusal, read_body, send_body
from etude.sandbox.network.streams import BufferedStream
from tests.fakes.network import memory_streams
from tests.sandbox.network.builders import read_all
from tests.sandbox.network.test_streams import Pieces

CHUNKED = Framing("chunked")


def read(data: bytes, framing: Framing, cuts: list[int] | None = None) -> tuple[bytes, bytes]:
    """(body, what follows it)."""

    async def run() -> tuple[bytes, bytes]:
        stream = BufferedStream(Pieces(data, cuts or []))
        body = b"".join([piece async for piece in read_body(stream, framing)])
        return body, await stream.read(1 << 16)

    return asyncio.run(run())


@given(st.lists(st.binary(min_size=1, max_size=300)), st.binary(max_size=9), st.lists(st.integers(0, 4000)))
def test_chunks_survive_a_round_trip_however_they_are_cut(
    pieces: list[bytes], rest: bytes, cuts: list[int]
) -> None:
    async def encode() -> bytes:
        async def source():
            for piece in pieces:
                yield piece

        near, far = memory_streams()
        await send_body(source(), near, chunked=True)
        await near.write_eof()
        return await read_all(far)

    data = asyncio.run(encode())
    body, left = read(data + rest, CHUNKED, cuts)
    assert body == b"".join(pieces)
    assert rest.startswith(left)


@pytest.mark.parametrize(
    "data",
    [
        b"5\r\nhello" + LAST_CHUNK,
        b"4\r\nhello\r\n" + LAST_CHUNK,
        b"6\r\nhello\r\n" + LAST_CHUNK,
        b"5\nhello\r\n" + LAST_CHUNK,
        b"0x5\r\nhello\r\n" + LAST_CHUNK,
        b"+5\r\nhello\r\n" + LAST_CHUNK,
        b"-5\r\nhello\r\n" + LAST_CHUNK,
        b" 5\r\nhello\r\n" + LAST_CHUNK,
        b"5_0\r\nhello\r\n" + LAST_CHUNK,
        b"\r\nhello\r\n" + LAST_CHUNK,
        b"5;a\nb\r\nhello\r\n" + LAST_CHUNK,
        b"5;a\rb\r\nhello\r\n" + LAST_CHUNK,
        b"f" * 13 + b"\r\nhello",
        b"5;" + b"x" * 2000 + b"\r\nhello\r\n" + LAST_CHUNK,
        b"5\r\nhello\r\n0\r\n",
        b"5\r\nhello\r\n",
        b"5\r\nhel",
        b"0\r\nbad trailer\r\n\r\n",
        b"0\r\n" + b"a: b\r\n" * 5000,
        b"",
    ],
)
def test_bad_chunks_are_refused(data: bytes) -> None:
    with pytest.raises(Refusal) as caught:
        read(data, CHUNKED)
    assert caught.value.status == 400


def test_trailers_and_extensions_are_dropped() -> None:
    assert read(b"5;x=y\r\nhello\r\n0\r\nA: b\r\n\r\nnext", CHUNKED) == (b"hello", b"next")


def test_a_body_cut_short_is_refused() -> None:
    with pytest.raises(Refusal):
        read(b"hell", Framing("length", 5))
    assert read(b"hello!", Framing("length", 5)) == (b"hello", b"!")


@given(st.binary() | st.text("0123456789af;\r\n ").map(str.encode))
def test_any_bytes_are_chunks_or_a_refusal(data: bytes) -> None:
    try:
        body, _ = read(data, CHUNKED)
    except Refusal:
        return
    assert len(body) < len(data)
