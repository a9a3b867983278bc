"""Common behaviour of all servers: host names, errors, bodies, connections."""

from __future__ import annotations

import asyncio
import resource
import socket
import time
from collections.abc import Awaitable, Callable

import httpx
import pytest
from fastapi import FastAPI, Request, Response

from etude.errors import ConfigError, StoreError, UserError
from etude.serving.access import AccessError, check_names, find_token
from etude.serving.application import Json, bearer_required, build_application, read_body, read_request
from etude.serving.errors import BodyTooLargeError, ErrorShape, OpenAIErrors, OwnErrors
from etude.serving.process import HeaderTimeoutProtocol, ServerThread

OWN = OwnErrors({StoreError: 507})
OPENAI = OpenAIErrors(
    ((AccessError, 401, "authentication_error", None), (BodyTooLargeError, 413, "invalid", "large"),
     (UserError, 400, "invalid", None))
)  # fmt: skip


class BusyTest(StoreError):
    """No room now."""


def application(errors: ErrorShape = OWN, token: str | None = None) -> FastAPI:
    app = build_application("Test", errors, guard=bearer_required(token))

    @app.post("/echo", dependencies=[bearer_required(token)])
    async def echo(request: Request) -> Response:
        return Response(await read_body(request, 10))

    @app.post("/json")
    async def document(request: Request) -> Response:
        return Json((await read_request(request, 10_000))[0])

    @app.get("/fails")
    async def fails() -> None:
        raise StoreError("is full", field="store", received=b"\xff", fix="make room")

    @app.get("/defect")
    async def defect(number: int) -> None:
        raise ZeroDivisionError("a secret")

    return app


def ask(app: FastAPI, scenario: Callable[[httpx.AsyncClient], Awaitable[None]], url="http://localhost"):
    async def work() -> None:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url=url) as client:
            await scenario(client)

    asyncio.run(work())


@pytest.mark.parametrize(
    ("address", "host", "origin", "passes"),
    [
        ("127.0.0.1", "127.0.0.1:80", None, True),
        ("127.0.0.1", "LOCALHOST", "http://localhost:3000", True),
        ("::1", "[::1]:80", "http://[::1]", True),
        (None, "localhost", None, True),
        ("127.0.0.1", "evil.example:80", None, False),
        ("127.0.0.1", "localhost", "https://evil.example", False),
        ("127.0.0.1", "localhost", "null", False),
        ("127.0.0.1", "", None, False),
        ("10.0.0.7", "10.0.0.7:80", None, True),
        ("10.0.0.7", "node7.example", None, True),
        ("10.0.0.7", "localhost", None, True),  # through a tunnel
        ("10.0.0.7", "10.0.0.7", "http://evil.example", False),
    ],
)
def test_a_server_answers_by_its_own_names_only(address, host, origin, passes) -> None:
    headers = {"host": host} | ({} if origin is None else {"origin": origin})
    if passes:
        check_names(headers, address, ("node7.example",))
    else:
        with pytest.raises(AccessError):
            check_names(headers, address, ("node7.example",))


def test_credentials_do_not_open_a_server_to_foreign_names() -> None:
    async def scenario(client: httpx.AsyncClient) -> None:
        for name in ("Host", "Origin"):
            headers = {"authorization": "Bearer right", name: "http://evil.example"}
            for path in ("/health", "/nothing"):
                assert (await client.get(path, headers=headers)).status_code == 401
        assert (await client.post("/echo", headers={"authorization": "bearer right"})).status_code == 200
        for given in ("Bearer wrong", "Basic right", "Bearer ", "Bearer \udcff".encode("utf-8", "replace")):
            assert (await client.post("/echo", headers={"authorization": given})).status_code == 401

    ask(application(token="right"), scenario)


def test_a_configured_name_is_accepted() -> None:
    with ServerThread(application(), allowed_hosts=("node7.example",)) as server:
        for name, status in (("node7.example:1", 200), ("node8.example:1", 401)):
            assert httpx.get(f"{server.url}/health", headers={"host": name}).status_code == status


def test_the_value_of_a_token_is_found_by_any_text() -> None:
    assert find_token({"a": 1, "ü": 2}, "ü") == 2
    assert find_token({"a": 1}, "\udcff") is None


def test_errors_have_one_shape_whoever_raises_them() -> None:
    async def own(client: httpx.AsyncClient) -> None:
        answers = {
            507: await client.get("/fails"),
            404: await client.get("/nothing"),
            405: await client.put("/echo"),
            400: await client.get("/defect?number=x"),
            500: await client.get("/defect?number=1"),
        }
        for status, answer in answers.items():
            assert answer.status_code == status
            assert set(answer.json()["error"]) == {"kind", "message", "field", "received", "fix"}
        assert answers[405].headers["allow"] == "POST"
        assert answers[400].json()["error"]["field"] == "number"

    async def openai(client: httpx.AsyncClient) -> None:
        too_large = await client.post("/echo", content=b"x" * 11)
        defect = await client.get("/defect?number=1")
        for answer in (too_large, defect, await client.get("/nothing")):
            assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        assert (too_large.status_code, too_large.json()["error"]["code"]) == (413, "large")
        assert "secret" not in defect.text

    ask(application(), own)
    ask(application(OPENAI), openai)


@pytest.mark.parametrize(
    "errors", [OwnErrors({BusyTest: 503}), OpenAIErrors(((BusyTest, 503, "busy", None),))]
)
def test_who_is_asked_to_come_back_is_given_a_time_and_little_of_what_was_sent(errors: ErrorShape) -> None:
    status, document, headers = errors.describe(BusyTest("is full", field="f" * 10**6, received="r" * 10**6))
    assert (status, headers) == (503, {"retry-after": "1"})
    assert len(str(document)) < 10_000


def test_the_description_of_a_server_names_its_errors() -> None:
    async def scenario(client: httpx.AsyncClient) -> None:
        found = (await client.get("/openapi.json")).json()["paths"]["/fails"]["get"]["responses"]
        assert found["507"]["description"] == "StoreError"
        assert found["401"]["description"] == "AccessError"

    ask(application(), scenario)


def test_a_body_is_refused_while_it_comes() -> None:
    sent = 0

    async def endless():
        nonlocal sent
        while True:
            sent += 1
            yield b"xxxxx"

    async def scenario(client: httpx.AsyncClient) -> None:
        answer = await client.post("/echo", content=endless())
        assert (answer.status_code, sent) == (400, 3)

    ask(application(), scenario)


def test_a_connection_without_a_whole_request_does_not_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HeaderTimeoutProtocol, "head_s", 0.2)
    with ServerThread(application()) as server:
        port = int(server.url.rpartition(":")[2])
        request = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
        for first in (b"", b"GET /health HTTP/1.1\r\nHo", request + b"GET /"):
            with socket.create_connection(("127.0.0.1", port), 10) as connection:
                connection.sendall(first)
                began_s = time.monotonic()
                while connection.recv(4096):
                    pass
                assert time.monotonic() - began_s < 4  # uvicorn's own limit, after an answer, is 5 s


def test_an_answer_that_takes_longer_than_a_head_may_is_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HeaderTimeoutProtocol, "head_s", 0.05)
    app = application()

    @app.get("/slow")
    async def slow() -> str:
        await asyncio.sleep(0.3)
        return "done"

    with ServerThread(app) as server:
        assert httpx.get(f"{server.url}/slow").json() == "done"


def test_a_server_may_open_as_many_files_as_the_machine_allows() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
    try:
        ServerThread(application())._close()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (before[1], before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_an_address_that_is_not_free_is_refused() -> None:
    with ServerThread(application()) as server, pytest.raises(ConfigError, match="another process"):
        ServerThread(application(), port=int(server.url.rpartition(":")[2]))


@pytest.mark.parametrize("body", [b"{", b"\xff", b"[" * 9_999])
def test_a_body_that_is_not_json_is_the_client_s_mistake(body: bytes) -> None:
    async def scenario(client: httpx.AsyncClient) -> None:
        refused = await client.post("/json", content=body)
        assert (refused.status_code, refused.json()["error"]["field"]) == (400, "body")
        assert (await client.post("/json")).json() == {}
        assert (await client.post("/json", content=b"[1]")).json() == [1]

    ask(application(), scenario)
