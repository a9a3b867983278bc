"""The engine's stream framing, and the line that bridges it to a channel."""

from __future__ import annotations

import asyncio
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.sandbox.docker.frames import STDERR, STDOUT, Demultiplexer, pack_frame
from etude.sandbox.docker.line import Line


@given(
    st.lists(st.tuples(st.sampled_from((STDOUT, STDERR)), st.binary(max_size=50)), max_size=20),
    st.integers(1, 17),
)
def test_streams_come_apart_however_they_are_cut(rows: list[tuple[int, bytes]], step: int) -> None:
    wire = b"".join(pack_frame(stream, data) for stream, data in rows)
    demultiplexer = Demultiplexer()
    output = b"".join(demultiplexer.feed(wire[start : start + step]) for start in range(0, len(wire), step))
    assert output == b"".join(data for stream, data in rows if stream == STDOUT)
    assert demultiplexer.errors == b"".join(data for stream, data in rows if stream == STDERR)


@given(st.binary(min_size=8, max_size=64))
def test_what_is_no_frame_is_refused_or_waited_for(data: bytes) -> None:
    demultiplexer = Demultiplexer()
    try:
        output = demultiplexer.feed(data)
    except ValueError:
        return
    assert len(output) + len(demultiplexer.errors) <= len(data)


def test_only_the_end_of_standard_error_is_kept() -> None:
    demultiplexer = Demultiplexer()
    for number in range(1000):
        demultiplexer.feed(pack_frame(STDERR, b"%09d\n" % number))
    assert len(demultiplexer.errors) == 4000 and demultiplexer.errors.endswith(b"999\n")


async def _remote() -> tuple[asyncio.StreamReader, asyncio.StreamWriter, socket.socket]:
    ours, theirs = socket.socketpair()
    reader, writer = await asyncio.open_connection(sock=ours)
    theirs.setblocking(False)
    return reader, writer, theirs


def test_a_line_outlives_its_remote_end() -> None:
    async def run() -> tuple[bytes, bytes, list[str]]:
        ended: list[str] = []
        line = Line(ended.append)
        line.socket.setblocking(False)
        loop = asyncio.get_running_loop()
        reader, writer, first = await _remote()
        await line.connect(reader, writer)
        await loop.sock_sendall(line.socket, b"one")
        got = await loop.sock_recv(first, 100)
        await line.suspend()
        await loop.sock_sendall(line.socket, b"two")
        reader, writer, second = await _remote()
        await line.connect(reader, writer)
        more = await loop.sock_recv(second, 100)
        assert ended == []
        second.close()
        assert await loop.sock_recv(line.socket, 100) == b""
        await line.close()
        first.close()
        line.socket.close()
        return got, more, ended

    got, more, ended = asyncio.run(run())
    assert (got, more) == (b"one", b"two")
    assert ended == ["the other end closed the line"]


def test_a_remote_end_that_speaks_nonsense_ends_the_line() -> None:
    async def run() -> list[str]:
        ended: list[str] = []
        line = Line(ended.append)
        line.socket.setblocking(False)
        reader, writer, remote = await _remote()
        await line.connect(reader, writer, Demultiplexer().feed)
        remote.send(b"HTTP/1.1 500 Internal")
        assert await asyncio.get_running_loop().sock_recv(line.socket, 100) == b""
        await line.close()
        remote.close()
        line.socket.close()
        return ended

    (reason,) = asyncio.run(run())
    assert reason.startswith("the line broke")


def test_a_line_that_never_was_connected_closes() -> None:
    async def run() -> None:
        line = Line()
        await line.close()
        await line.close()
        with pytest.raises(OSError):
            line.socket.send(b"x")
        line.socket.close()

    asyncio.run(run())
