"""Hostile WebSockets: OpenEnv's messages, and the events of a session."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="needs etude[serve]")
pytest.importorskip("websockets", reason="needs etude[serve]")

from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from tests.adversary.servers import OTHER_TOKEN, SECRET, TOKEN, Pulse, Server, serving

STALL_S = 1.0
MESSAGES: dict[str, tuple[str | bytes, str]] = {
    "a binary frame": (b"\x00\xff\xfe", "INVALID_JSON"),
    "a binary frame of JSON": (b'{"type": "state"}', "INVALID_JSON"),
    "an empty text": ("", "INVALID_JSON"),
    "no JSON": ("{oh no", "INVALID_JSON"),
    "NaN": ('{"type": NaN}', "INVALID_JSON"),
    "a list": ("[]", "INVALID_JSON"),
    "a number": ("5", "INVALID_JSON"),
    "lists 100,000 deep": ("[" * 100000, "INVALID_JSON"),
    "lists 900 deep": ('{"type": ' + "[" * 900 + "]" * 900 + "}", "INVALID_JSON"),
    "a lone surrogate": ('{"type": "\\ud800"}', "UNKNOWN_TYPE"),
    "no type": ("{}", "UNKNOWN_TYPE"),
    "a type that is an object": ('{"type": {}}', "UNKNOWN_TYPE"),
    "a type of 1 MB": (json.dumps({"type": "t" * (1 << 20)}), "UNKNOWN_TYPE"),
    "data that is a list": ('{"type": "reset", "data": []}', "VALIDATION_ERROR"),
    "a field that there is not": ('{"type": "reset", "data": {"root": 1}}', "VALIDATION_ERROR"),
    "a task that there is not": ('{"type": "reset", "data": {"task": "none"}}', "VALIDATION_ERROR"),
    "a task that leaves the server's": ('{"type": "reset", "data": {"task": "../../x"}}', "VALIDATION_ERROR"),
    "a step before a reset": ('{"type": "step", "data": {"calls": []}}', "VALIDATION_ERROR"),
    "a step that is a text": ('{"type": "step", "data": "x"}', "VALIDATION_ERROR"),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("environment"), "environment") as found:
        yield found["environment"]


def address(server: Server, path: str) -> str:
    return f"ws://127.0.0.1:{server.port}{path}"


def ask(socket: Any, message: str | bytes) -> Any:
    socket.send(message)
    return json.loads(socket.recv(30))


@pytest.mark.parametrize("kind", MESSAGES)
def test_a_hostile_message_is_an_error_and_the_episode_goes_on(server: Server, kind: str) -> None:
    message, code = MESSAGES[kind]
    with Pulse(server) as pulse, connect(address(server, f"/openenv/{TOKEN}/ws"), proxy=None) as socket:
        answer = ask(socket, message)
        assert (answer["type"], answer["data"]["code"]) == ("error", code)
        assert len(json.dumps(answer)) < 4096
        assert ask(socket, '{"type": "state"}')["type"] == "state"
    assert pulse.failure is None and pulse.longest_s < STALL_S


def test_a_message_of_32_mb_ends_its_own_socket_alone(server: Server) -> None:
    path = address(server, f"/openenv/{TOKEN}/ws")
    with Pulse(server) as pulse, connect(path, proxy=None) as socket, pytest.raises(ConnectionClosed):
        for _ in range(2):
            ask(socket, "x" * (32 << 20))
    assert pulse.failure is None and pulse.longest_s < STALL_S


@pytest.mark.parametrize("path", ["/openenv/ws", "/openenv/another/ws", "/openenv/%00/ws"])
def test_an_episode_needs_a_token(server: Server, path: str) -> None:
    with connect(address(server, path), proxy=None) as socket:
        assert json.loads(socket.recv(30))["data"]["code"] == "SESSION_ERROR"


@pytest.mark.parametrize("origin", ["https://evil.example", "null"])
def test_a_page_from_elsewhere_gets_no_socket(server: Server, origin: str) -> None:
    with pytest.raises(InvalidStatus):
        connect(address(server, f"/openenv/{TOKEN}/ws"), origin=origin, proxy=None)  # type: ignore[arg-type]


def test_the_events_of_another_tenant_are_not_shown(server: Server) -> None:
    for session in (server.names["other"], "none", "%ff"):
        headers = {"authorization": f"Bearer {TOKEN}"}
        path = address(server, f"/sessions/{session}/events?after=-1")
        with connect(path, additional_headers=headers, proxy=None) as socket:
            answer = socket.recv(30)
            assert json.loads(answer)["event"] == "refused"
            assert SECRET not in str(answer) and OTHER_TOKEN not in str(answer)


@pytest.mark.parametrize("after", ["-1", "9" * 4400, "x", "%D9%A3"])
def test_events_begin_where_a_client_says_whatever_that_is(server: Server, after: str) -> None:
    headers = {"authorization": f"Bearer {TOKEN}"}
    path = address(server, f"/sessions/{server.names['mine']}/events?after={after}")
    with Pulse(server) as pulse, connect(path, additional_headers=headers, proxy=None) as socket:
        socket.send(b"\xff" * 1000)
    assert pulse.failure is None
