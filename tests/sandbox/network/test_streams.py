"""Heads and lines are found however their bytes arrive; the fakes behave as streams."""

from __future__ import annotations

import asyncio
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.sandbox.network.streams import AsyncioStream, BufferedStream, UpstreamError, UpstreamStream
from tests.fakes.network import memory_streams
from tests.sandbox.network.builders import LOOPBACK, echo, serving


class Pieces:
    """A stream that gives its bytes in given pieces, then ends."""

    def __init__(self, data: bytes, cuts: list[int]) -> None:
        places = [0, *sorted({cut % (len(data) + 1) for cut in cuts} - {0, len(data)}), len(data)]
        self._pieces = [data[a:b] for a, b in itertools.pairwise(places) if a < b]

    async def read(self, num_bytes: int) -> bytes:
        if not self._pieces:
            return b""
        piece = self._pieces.pop(0)
        if len(piece) > num_bytes:
            self._pieces.insert(0, piece[num_bytes:])
        return piece[:num_bytes]

    async def write(self, data: bytes) -> None:
        raise BrokenPipeError("read only")

    async def write_eof(self) -> None:
        raise BrokenPipeError("read only")

    def close(self) -> None:
        self._pieces.clear()


@given(st.text("ab:\r\n").map(str.encode), st.binary(max_size=20), st.lists(st.integers(0, 99)))
def test_a_head_is_found_wherever_its_pieces_are_cut(head: bytes, rest: bytes, cuts: list[int]) -> None:
    async def run(cuts: list[int]) -> tuple[bytes | None, bytes]:
        stream = BufferedStream(Pieces(head + b"\r\n\r\n" + rest, cuts))
        found = await stream.read_head(1 << 10)
        left = b""
        while data := await stream.read(7):
            left += data
        return found, left

    whole = asyncio.run(run([]))
    assert asyncio.run(run(cuts)) == whole
    assert whole[0] is not None
    assert whole[0] + whole[1] == head + b"\r\n\r\n" + rest


def test_a_head_longer_than_its_limit_is_not_read_on() -> None:
    async def run(size: int) -> bytes | None:
        return await BufferedStream(Pieces(b"a" * size + b"\r\n\r\n", [])).read_head(100)

    assert asyncio.run(run(96)) == b"a" * 96 + b"\r\n\r\n"
    assert asyncio.run(run(97)) is None
    assert asyncio.run(run(5000)) is None


def test_a_head_without_its_end_is_an_error() -> None:
    with pytest.raises(EOFError):
        asyncio.run(BufferedStream(Pieces(b"GET / HTTP/1.1\r\n", [3])).read_head(100))


def test_a_line_end_without_cr_ends_the_head_at_once() -> None:
    stream = BufferedStream(Pieces(b"GET / HTTP/1.1\nHost: a\n", []))
    assert asyncio.run(stream.read_head(100)) == b"GET / HTTP/1.1\n"


@pytest.mark.parametrize(("data", "line"), [(b"ab\r\ncd", b"ab\r\n"), (b"abcdefghi\n", None), (b"abc", None)])
def test_lines_are_bounded(data: bytes, line: bytes | None) -> None:
    assert asyncio.run(BufferedStream(Pieces(data, [1])).read_line(8)) == line


def test_errors_of_the_server_are_told_from_the_clients() -> None:
    async def run() -> None:
        stream = UpstreamStream(Pieces(b"abc", []))
        assert await stream.read(2) == b"ab"
        with pytest.raises(UpstreamError):
            await stream.write(b"x")
        assert (stream.num_sent_bytes, stream.num_received_bytes) == (0, 2)

    asyncio.run(run())


def test_memory_streams_end_each_direction_by_itself() -> None:
    async def run() -> None:
        near, far = memory_streams()
        await near.write(b"ping")
        await near.write_eof()
        assert (await far.read(100), await far.read(100)) == (b"ping", b"")
        await far.write(b"pong")
        assert await near.read(100) == b"pong"
        near.close()
        with pytest.raises(BrokenPipeError):
            await far.write(b"late")

    asyncio.run(run())


def test_a_closed_socket_stream_drops_what_nobody_reads() -> None:
    async def run() -> None:
        async def deaf(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await asyncio.sleep(60)

        async with serving(deaf) as port:
            reader, writer = await asyncio.open_connection(LOOPBACK, port)
            stream = AsyncioStream(reader, writer)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await stream.write(b"x" * (32 << 20))
            stream.close()
            with pytest.raises(ConnectionError):
                await stream.write(b"x")

    asyncio.run(run())


def test_a_socket_stream_can_end_one_direction() -> None:
    async def run() -> bytes:
        async with serving(echo) as port:
            stream = AsyncioStream(*await asyncio.open_connection(LOOPBACK, port))
            await stream.write(b"over")
            await stream.write_eof()
            await stream.write_eof()
            data = b""
            while piece := await stream.read(100):
                data += piece
            stream.close()
            return data

    assert asyncio.run(run()) == b"over"
