"""Common behaviour of all HTTP clients: addresses, tokens, typed errors, retries, streams."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import pytest

from etude.errors import ConfigError, InfrastructureError, StoreError, UserError
from etude.kit.retry import Backoff
from etude.serving.client import (
    Answer,
    Client,
    NoAnswerError,
    NobodyListensError,
    SilentServerError,
    SyncClient,
    check_address,
    read_events,
)
from etude.serving.errors import encode_error, openai_document

QUICK = Backoff(base_s=0.01, attempts=3)


class Scripted:
    """Answers requests in turn: a status and a body, or an error on the way."""

    def __init__(self, *answers: tuple[int, Any] | Exception) -> None:
        self.answers = list(answers)
        self.seen: list[httpx.Request] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.seen.append(request)
        given = self.answers.pop(0)
        if isinstance(given, Exception):
            raise given
        status, body = given
        return httpx.Response(status, content=body if isinstance(body, bytes) else json.dumps(body).encode())


def asked(script: Scripted, ask: Callable[[Client], Awaitable[Any]], **options: Any) -> Any:
    async def work() -> Any:
        transport = httpx.MockTransport(script)
        async with Client("http://server/base/", "secret", transport=transport, **options) as client:
            return await ask(client)

    return asyncio.run(work())


def test_a_request_carries_the_token_and_names_of_any_bytes() -> None:
    script = Scripted((200, {"a": 1}))
    params = {"path": "x \udcff&", "left_out": None}
    answer = asked(script, lambda client: client.ask("POST", "/v1/x", json={"s": "\udcff"}, params=params))
    assert answer == {"a": 1}
    (sent,) = script.seen
    assert str(sent.url) == "http://server/base/v1/x?path=x%20%ED%B3%BF%26"
    assert sent.headers["authorization"] == "Bearer secret"
    assert sent.headers["content-type"] == "application/json"
    assert json.loads(sent.content) == {"s": "\udcff"}


def test_what_does_the_same_twice_is_sent_again_and_nothing_else() -> None:
    lost, there = httpx.ReadError("lost"), (200, {})
    script = Scripted(lost, lost, there)
    assert asked(script, lambda client: client.ask("GET", "/", again=True), backoff=QUICK) == {}
    assert len(script.seen) == 3
    for again, num_sent in ((True, 3), (False, 1)):
        script = Scripted(lost, lost, lost, lost)
        with pytest.raises(NoAnswerError, match="ReadError: lost"):
            asked(script, lambda client, again=again: client.request("GET", "/", again=again), backoff=QUICK)
        assert len(script.seen) == num_sent


def test_a_refusal_is_never_sent_again() -> None:
    script = Scripted((503, {}), (200, {}))
    with pytest.raises(InfrastructureError, match="the server answered 503"):
        asked(script, lambda client: client.ask("GET", "/", again=True), backoff=QUICK)
    assert len(script.seen) == 1


@pytest.mark.parametrize(
    ("status", "body", "kind", "words"),
    [
        (
            507,
            {"error": encode_error(StoreError("is full", field="store", received=1, fix="make room"))},
            StoreError,
            "store: is full; received 1; fix: make room",
        ),
        (400, openai_document("no such model", param="model"), UserError, "model: .*400: no such model"),
        (404, {"detail": "nothing"}, UserError, "404"),
        (502, b"<html>a proxy</html>", InfrastructureError, "502: <html>a proxy</html>"),
        (500, {"error": {"kind": "Unheard", "message": "new", "field": "x"}}, InfrastructureError, "x: new"),
    ],
)
def test_an_error_arrives_as_the_server_names_it(
    status: int, body: Any, kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind, match=words) as caught:
        asked(Scripted((status, body)), lambda client: client.request("GET", "/"))
    assert type(caught.value) is kind


def test_every_status_is_an_answer_where_none_is_a_refusal() -> None:
    answer = asked(Scripted((503, {"busy": 1})), lambda client: client.ask("GET", "/"), refusal=None)
    assert answer == {"busy": 1}


def test_something_else_that_answers_is_no_answer() -> None:
    with pytest.raises(NoAnswerError, match=r"not JSON.*<html>"):
        asked(Scripted((200, b"<html>")), lambda client: client.ask("GET", "/"))


def test_nobody_and_silence_are_different_errors() -> None:
    with socket.socket() as closed, socket.create_server(("127.0.0.1", 0)) as silent:
        closed.bind(("127.0.0.1", 0))

        async def work() -> None:
            async with Client(f"http://127.0.0.1:{closed.getsockname()[1]}") as client:
                with pytest.raises(NobodyListensError):
                    await client.request("GET", "/")
            async with Client(f"http://127.0.0.1:{silent.getsockname()[1]}") as client:
                with pytest.raises(SilentServerError):
                    await client.request("GET", "/", within_s=0.05)

        asyncio.run(work())
        address = f"http://127.0.0.1:{closed.getsockname()[1]}"
        with pytest.raises(NobodyListensError), SyncClient(address) as client:
            client.request("GET", "/")
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(SilentServerError), SyncClient(address, within_s=0.05) as client:
            client.ask("GET", "/")


class Torn(httpx.AsyncByteStream):
    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield b"data: 1\n"
        raise httpx.RemoteProtocolError("closed")


def test_a_stream_that_breaks_off_is_no_answer_however_it_is_read() -> None:
    def torn(request: httpx.Request) -> Answer:
        return httpx.Response(200, stream=Torn())

    async def work() -> None:
        async with Client("http://server", transport=httpx.MockTransport(torn)) as client:
            found: list[str] = []
            with pytest.raises(NoAnswerError, match="closed"):
                async with client.stream("GET", "/") as answer:
                    async for data in read_events(answer.aiter_bytes()):
                        found.append(data)
            opened = await client.open("GET", "/")
            with pytest.raises(NoAnswerError, match="closed"):
                async for piece in client.pieces(opened):
                    found.append(piece.decode())
            await opened.aclose()
            with pytest.raises(NoAnswerError, match="closed"):
                await client.request("GET", "/")
            assert found == ["1", "data: 1\n"]

    asyncio.run(work())


def test_events_are_lines_of_data_however_they_are_cut() -> None:
    text = ': hello\ndata: {"a": "\u2028"}\r\nevent: x\n\ndata:[DONE]'.encode()

    async def cut(size: int) -> list[str]:
        async def pieces() -> AsyncIterator[bytes]:
            for start in range(0, len(text), size):
                yield text[start : start + size]

        return [data async for data in read_events(pieces())]

    for size in range(1, len(text) + 1):
        assert asyncio.run(cut(size)) == ['{"a": "\u2028"}', "[DONE]"]


@pytest.mark.parametrize("url", ["", "host:80", "ftp://host", "http://", "http://host:0", "http://host:no"])
def test_what_can_be_no_address_is_named(url: str) -> None:
    check_address("https://[::1]:8000/v1", "here")
    with pytest.raises(ConfigError, match="here: is not a server address"):
        check_address(url, "here")


def test_headers_that_cannot_be_sent_are_the_caller_s_error() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        async def work() -> None:
            async with Client(f"http://127.0.0.1:{server.getsockname()[1]}") as client:
                await client.request("GET", "/", headers=[(b"x", b"a\nb")])

        with pytest.raises(UserError, match="cannot be sent"):
            asyncio.run(work())
