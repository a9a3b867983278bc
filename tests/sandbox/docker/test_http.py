"""HTTP over a Unix socket: every form of body, and daemons that break the rules."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from etude.sandbox.docker.http import HttpError, UnixHttp

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def ask(tmp_path: Path, answer: bytes, **options: float) -> tuple[int, bytes]:
    """What the client makes of an answer that is sent as it stands."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        writer.close()

    server = await asyncio.start_unix_server(serve, tmp_path / "s")
    async with server:
        response = await UnixHttp(tmp_path / "s", "daemon").request("GET", "/x", **options)  # type: ignore[arg-type]
    return response.status, response.body


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi-more", (200, b"hi")),
        (b"HTTP/1.1 200 OK\r\n\r\nto the end", (200, b"to the end")),
        (b"HTTP/1.1 204 No Content\r\n\r\n", (204, b"")),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 201 Created\r\nContent-Length: 0\r\n\r\n", (201, b"")),
        (
            b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
            b"3;x=y\r\nabc\r\nA\r\n0123456789\r\n0\r\nT: 1\r\n\r\n",
            (200, b"abc0123456789"),
        ),
    ],
)
def test_every_form_of_body_is_read(tmp_path: Path, answer: bytes, expected: tuple[int, bytes]) -> None:
    assert asyncio.run(ask(tmp_path, answer)) == expected


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1\r\n\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhi",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab",
    ],
)
def test_what_is_no_answer_is_a_typed_error(tmp_path: Path, answer: bytes) -> None:
    with pytest.raises(HttpError):
        asyncio.run(ask(tmp_path, answer))


def test_a_daemon_that_never_answers_meets_the_deadline(tmp_path: Path) -> None:
    async def silent() -> None:
        server = await asyncio.start_unix_server(lambda reader, writer: asyncio.sleep(30), tmp_path / "s")
        async with server:
            with pytest.raises(HttpError, match=r"within 0\.1 s"):
                await UnixHttp(tmp_path / "s", "daemon").request("GET", "/x", deadline_s=0.1)

    asyncio.run(silent())


def test_no_daemon_is_a_typed_error_with_a_fix(tmp_path: Path) -> None:
    with pytest.raises(HttpError) as caught:
        asyncio.run(UnixHttp(tmp_path / "none", "daemon").request("GET", "/x"))
    assert caught.value.fix is not None


def test_sockets_with_long_paths_are_reached(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 120)
    deep.mkdir()

    async def run() -> int:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

        server = await asyncio.start_unix_server(serve, tmp_path / "short")
        (tmp_path / "short").rename(deep / "s")
        async with server:
            return (await UnixHttp(deep / "s", "daemon").request("GET", "/x")).status

    assert asyncio.run(run()) == 200
