"""The server: who may ask, what is refused, idempotent creation, events, metrics, OpenAPI, the end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from etude.environment.history import EventLog
from etude.records import ToolCall
from etude_quickstart.memory_backend import MemoryBackend
from tests.environment.playing import MEND, READ, TASK
from tests.environment.server.serving import (
    OTHER_TOKEN,
    TOKEN,
    asking,
    httpx,
    new_host,
    new_services,
    until,
)
from tests.environment.server.test_sessions import counting_services

from etude.agent.inputs import call_document  # isort: skip
from etude.environment.server import HostLimits, read_tenants  # isort: skip
from etude.environment.server.process import serve  # isort: skip
from etude.errors import ConfigError  # isort: skip
from etude.kit.tasks import sweeping  # isort: skip

OTHER = {"authorization": f"Bearer {OTHER_TOKEN}"}


def ask(scenario: Callable[..., Awaitable[Any]], host: Any = None, **options: Any) -> Any:
    host = host or new_host()

    async def run() -> Any:
        async with asking(host, **options) as client:
            return await scenario(client, host)

    return asyncio.run(run())


async def create(client: httpx.AsyncClient, key: str | None = None, **body: Any) -> Any:
    headers = {} if key is None else {"idempotency-key": key}
    answer = await client.post("/sessions", json=body or {"task": "tally"}, headers=headers)
    return answer.json()


def calls(*asked: ToolCall) -> dict[str, Any]:
    return {"calls": [call_document(call) for call in asked]}


# Who may ask


def test_without_a_token_everything_but_health_is_refused() -> None:
    async def scenario(client: httpx.AsyncClient, host: Any) -> None:
        session = (await create(client))["id"]
        client.headers.pop("authorization")
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/ready")).json() == {"status": "ready"}
        for method, path in (
            ("GET", "/metrics"), ("GET", "/tools"), ("GET", "/tasks"), ("GET", "/sessions"),
            ("POST", "/sessions"),
            ("GET", f"/sessions/{session}"), ("DELETE", f"/sessions/{session}"),
            *(("POST", f"/sessions/{session}/{name}") for name in
              ("turns", "archive", "submit", "pause", "resume", "fork", "snapshot", "mcp")),
            ("GET", f"/sessions/{session}/diff"), ("POST", "/openenv/reset"), ("POST", "/openenv/step"),
        ):  # fmt: skip
            answer = await client.request(method, path)
            assert answer.status_code == 401, path
            assert answer.json()["error"]["field"] == "token"

    ask(scenario)


def test_tenants_do_not_see_each_other() -> None:
    async def scenario(client: httpx.AsyncClient, host: Any) -> None:
        session = (await create(client))["id"]
        assert (await client.get("/sessions", headers=OTHER)).json() == []
        for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/turns"), ("POST", "/fork")):
            answer = await client.request(method, f"/sessions/{session}{path}", json={}, headers=OTHER)
            assert answer.status_code == 404
        fork = await client.post("/sessions", json={"fork": {"session": session}}, headers=OTHER)
        assert fork.status_code == 404
        snapshot = (await client.post(f"/sessions/{session}/snapshot")).json()["snapshot"]
        assert (await client.post("/sessions", json={"snapshot": snapshot}, headers=OTHER)).status_code == 404
        assert (await client.post("/sessions", json={"snapshot": snapshot})).status_code == 200
        assert (await client.delete(f"/snapshots/{snapshot}", headers=OTHER)).status_code == 404
        assert (await client.get("/snapshots")).json() == [snapshot]
        assert (await client.delete(f"/snapshots/{snapshot}")).json() == {"deleted": True}
        assert (await client.get("/snapshots")).json() == []

    ask(scenario)


def test_without_tokens_only_loopback_names_reach_the_server() -> None:
    async def scenario(client: httpx.AsyncClient, host: Any) -> None:
        for name, status in (("localhost:80", 200), ("127.0.0.1", 200), ("evil.example:80", 401)):
            assert (await client.get("/sessions", headers={"host": name})).status_code == status
        for origin, status in (("http://localhost:3000", 200), ("https://evil.example", 401), ("null", 401)):
            assert (await client.get("/sessions", headers={"origin": origin})).status_code == status

    ask(scenario, tokens={})
    with pytest.raises(ConfigError, match="no token"):
        serve(new_host(), host="0.0.0.0")


def test_tenants_are_read_from_a_file_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "tenants"
    path.write_text("# ours\none aaa\ntwo bbb # theirs\n\n")
    path.chmod(0o600)
    assert read_tenants(path) == {"aaa": "one", "bbb": "two"}
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="other users can read"):
        read_tenants(path)
    path.chmod(0o600)
    for text in ("one", "one a\ntwo a\n", "\n"):
        path.write_text(text)
        with pytest.raises(ConfigError):
            read_tenants(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_tenants(tmp_path / "absent")


# Creation


def test_one_key_gives_one_session() -> None:
    async def scenario(client: httpx.AsyncClient, host: Any) -> None:
        first, second = await asyncio.gather(create(client, "k"), create(client, "k"))
        assert first["id"] == second["id"]
        assert (await create(client, "l"))["id"] != first["id"]
        other = await client.post("/sessions", json={"files": {"a": "b"}}, headers={"idempotency-key": "k"})
        assert other.status_code == 409
        assert (await create(client))["turns"] == 0

    ask(scenario)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "body"),
        ({"task": "tally", "files": {}}, "body"),
        ({"task": "absent"}, "task"),
        ({"task": {"id": "x"}}, "task.instruction"),
        ({"files": {"a": 1}}, "files"),
        ({"directory": "/etc"}, "directory"),
        ({"repository": "/"}, "repository"),
        ({"fork": {"session": "absent"}}, "session"),
        ({"snapshot": "absent"}, "snapshot"),
        ({"task": "tally", "nonsense": 1}, "nonsense"),
        ({"task": "tally", "idle_s": -1}, "idle_s"),
        ([], "body"),
    ],
)
def test_a_request_that_makes_no_sense_says_what_is_wrong(body: Any, field: str) -> None:
    async def scenario(client: httpx.AsyncClient, host: Any) -> None:
        answer = await client.post("/sessions", json=body)
        assert answer.status_code in (400, 404)
        assert answer.json()["error"]["field"] == field
        assert (await client.get("/sessions")).json() == []

    ask(scenario)


def test_sessions_begin_with_files_a_directory_and_a_snapshot(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\n")

    async def scenario(client: httpx.AsyncClient, host: Any) -> None:
        read = calls(ToolCall("read_file", {"path": "a.py"}))
        bodies: list[dict[str, Any]] = [{"files": {"a.py": "x = 1\n"}}, {"directory": str(tmp_path)}]
        first = (await create(client, **bodies[0]))["id"]
        bodies.append({"snapshot": (await client.post(f"/sessions/{first}/snapshot")).json()["snapshot"]})
        bodies.append({"fork": {"session": first}})
        for body in bodies:
            session = (await create(client, **body))["id"]
            answer = (await client.post(f"/sessions/{session}/turns", json=read)).json()
            assert answer["results"][0]["output"] == "1\tx = 1", body

    ask(scenario, new_host(roots=[tmp_path]))


# Bounds


def test_a_tenant_holds_so_many_sessions() -> None:
    async def scenario(client: httpx.AsyncClient, host: Any) -> None:
        made = await asyncio.gather(*(create(client) for _ in range(3)))
        refused = [row["error"]["kind"] for row in made if "error" in row]
        assert refused == ["CapacityError"]
        session = next(row["id"] for row in made if "id" in row)
        fork = await client.post(f"/sessions/{session}/fork", json={"count": 1})
        assert fork.status_code == 503
        assert (await client.post("/sessions", json={"task": "tally"}, headers=OTHER)).status_code == 200
        assert (await client.delete(f"/sessions/{session}")).json() == {"closed": True}
        assert "id" in await create(client)

    ask(scenario, new_host(limits=HostLimits(tenant_sessions=2)))


def test_calls_in_flight_and_kept_bytes_are_bounded() -> None:
    services, tool = counting_services()

    async def scenario(client: httpx.AsyncClient, host: Any) -> None:
        one, two = (await create(client))["id"], (await create(client))["id"]
        tool.gate.clear()
        running = asyncio.create_task(client.post(f"/sessions/{one}/turns", json=calls(ToolCall("count"))))
        await until(lambda: tool.num_calls == 1)
        refused = await client.post(f"/sessions/{two}/turns", json=calls(READ))
        assert (refused.status_code, refused.json()["error"]["field"]) == (503, "calls")
        tool.gate.set()
        assert (await running).status_code == 200
        assert (await client.post(f"/sessions/{two}/turns", json=calls(READ))).status_code == 200
        refused = await client.post(f"/sessions/{two}/turns", json=calls(READ))
        assert (refused.status_code, refused.json()["error"]["field"]) == (503, "kept_bytes")

    ask(scenario, new_host(services, HostLimits(tenant_calls=1, tenant_bytes=500)))


def test_a_request_that_is_too_large_is_refused() -> None:
    async def scenario(client: httpx.AsyncClient, host: Any) -> None:
        answer = await client.post("/sessions", json={"files": {"a": "x" * 5000}})
        assert answer.json()["error"]["message"] == "the request is too large"

    ask(scenario, new_host(limits=HostLimits(body_bytes=1000)))


def test_a_session_that_nobody_uses_is_closed() -> None:
    backend = MemoryBackend()

    async def scenario(client: httpx.AsyncClient, host: Any) -> None:
        asleep = (await create(client, task="tally", idle_s=0.05))["id"]
        await client.post(f"/sessions/{asleep}/pause")
        num_kept = len(backend.live)
        session = (await create(client, task="tally", idle_s=0.05))["id"]
        assert len(backend.live) > num_kept
        async with sweeping(host.end_idle, 0.05, 1.0):
            await until(lambda: len(backend.live) == num_kept)
        answer = await client.get(f"/sessions/{session}")
        assert (answer.status_code, answer.json()["error"]["kind"]) == (404, "SandboxMissingError")
        assert "etude_environment_sessions_expired_total" in (await client.get("/metrics")).text
        await asyncio.sleep(0.1)
        assert (await client.get(f"/sessions/{asleep}")).json()["state"] == "paused"

    ask(scenario, new_host(new_services(backend), HostLimits(idle_s=0.2)))


# Turns


def test_turns_run_once_by_number_and_by_key() -> None:
    services, tool = counting_services()

    async def scenario(client: httpx.AsyncClient, host: Any) -> None:
        path = f"/sessions/{(await create(client))['id']}/turns"
        body = calls(ToolCall("count"))
        for _ in range(2):
            assert (await client.post(path, json={**body, "turn": 0})).json()["turns"] == 1
        for _ in range(2):
            await client.post(path, json=body, headers={"idempotency-key": "k"})
        assert tool.num_calls == 2
        assert (await client.post(path, json={**calls(READ), "turn": 0})).status_code == 409
        assert (await client.post(path, json={**calls(READ), "turn": 7})).status_code == 400

    ask(scenario, new_host(services))


def test_a_whole_session_by_plain_http() -> None:
    async def scenario(client: httpx.AsyncClient, host: Any) -> None:
        path = f"/sessions/{(await create(client))['id']}"
        await client.post(f"{path}/turns", json=calls(READ, MEND))
        assert (await client.get(f"{path}/diff")).json()["files"]["lib/tally.py"].endswith("sum(xs)\n")
        assert (await client.post(f"{path}/pause")).json() == {"kept": "filesystem"}
        assert (await client.post(f"{path}/turns", json=calls(READ))).status_code == 409
        assert (await client.post(f"{path}/resume")).json()["state"] == "open"
        fork = (await client.post(f"{path}/fork", json={"count": 2, "turn": 0})).json()
        assert [row["turns"] for row in fork] == [0, 0]
        outcome = (await client.post(f"{path}/submit", json={"status": "done"})).json()
        assert (outcome["total"], outcome["verdict"]["passed"]) == (1.0, True)
        assert (await client.post(f"/sessions/{fork[0]['id']}/submit")).json()["total"] == 0.0
        text = (await client.get("/metrics")).text
        for line in (
            'etude_environment_sessions{tenant="one"} 3',
            'etude_environment_turns_total{tenant="one"} 1',
            'etude_environment_calls_total{error="",tenant="one"} 2',
            'etude_environment_graded_total{passed="true",tenant="one"} 1',
            'etude_environment_forks_total{tenant="one"} 2',
            'etude_environment_request_seconds_count{operation="run_turn"} 2',
        ):
            assert line in text

    ask(scenario)


def test_tools_tasks_and_openapi_are_told() -> None:
    async def scenario(client: httpx.AsyncClient, host: Any) -> None:
        tools = (await client.get("/tools")).json()
        assert tools["digest"] == host.services.tools.digest
        assert {"path", "offset", "limit"} == set(
            next(t for t in tools["tools"] if t["name"] == "read_file")["input_schema"]["properties"]
        )
        assert (await client.get("/tasks")).json() == [{"name": "tally", "instruction": TASK.instruction}]
        paths = (await client.get("/openapi.json")).json()["paths"]
        turn = paths["/sessions/{session_id}/turns"]["post"]
        schema = turn["requestBody"]["content"]["application/json"]["schema"]
        assert schema["required"] == ["calls"]
        docs = (Path(__file__).parents[3] / "docs" / "environment-server.md").read_text()
        for path in paths:
            assert f"/{path.split('/')[1]}" in docs
            assert path.rpartition("/")[2] in docs or path.endswith("}"), path

    ask(scenario)


def test_a_draining_server_finishes_turns_and_begins_nothing() -> None:
    services, tool = counting_services()

    async def scenario(client: httpx.AsyncClient, host: Any) -> None:
        path = f"/sessions/{(await create(client))['id']}/turns"
        tool.gate.clear()
        body = {**calls(ToolCall("count")), "turn": 0}
        running = asyncio.create_task(client.post(path, json=body))
        await until(lambda: tool.num_calls == 1)
        host.draining = True
        assert host.num_busy == 1
        assert (await client.get("/ready")).status_code == 503
        assert (await create(client))["error"]["kind"] == "CapacityError"
        tool.gate.set()
        assert (await running).status_code == 200
        assert (await client.post(path, json=body)).status_code == 200
        assert (await client.post(path, json=calls(READ))).status_code == 503
        assert host.num_busy == 0

    ask(scenario, new_host(services))


# Events


class Socket:
    """A WebSocket client of an application in this process."""

    def __init__(self, app: Any, path: str, token: str | None = TOKEN) -> None:
        path, _, query = path.partition("?")
        headers = [(b"host", b"localhost")]
        headers += [] if token is None else [(b"authorization", f"Bearer {token}".encode())]
        self.sent: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.received: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        scope = {
            "type": "websocket", "asgi": {"version": "3.0"}, "path": path, "raw_path": path.encode(),
            "query_string": query.encode(), "headers": headers, "subprotocols": [], "scheme": "ws",
            "server": ("localhost", 80), "client": ("localhost", 1), "root_path": "", "http_version": "1.1",
        }  # fmt: skip
        self.sent.put_nowait({"type": "websocket.connect"})
        self.task = asyncio.create_task(app(scope, self.sent.get, self.received.put))

    async def receive(self) -> dict[str, Any]:
        """The next JSON text, or `{"close": code}`."""
        async with asyncio.timeout(60):
            message = await self.received.get()
        if message["type"] == "websocket.accept":
            return await self.receive()
        if message["type"] == "websocket.close":
            return {"close": message.get("code", 1000)}
        return json.loads(message["text"])

    async def send(self, message: object) -> None:
        await self.sent.put({"type": "websocket.receive", "text": json.dumps(message)})

    async def leave(self) -> None:
        await self.sent.put({"type": "websocket.disconnect", "code": 1001})
        await asyncio.wait({self.task}, timeout=60)


def test_events_are_streamed_and_replayed() -> None:
    async def scenario(client: Any, host: Any) -> None:
        session = (await create(client))["id"]
        live = Socket(client.app, f"/sessions/{session}/events")
        await client.post(f"/sessions/{session}/turns", json=calls(READ))
        kinds = [(await live.receive())["event"] for _ in range(3)]
        assert kinds == ["call_started", "call_ended", "turn_ended"]
        await live.leave()
        assert live.task.done()
        again = Socket(client.app, f"/sessions/{session}/events?after=2")
        assert (await again.receive())["event"] == "turn_ended"
        await client.delete(f"/sessions/{session}")
        assert (await again.receive())["event"] == "closed"
        assert (await again.receive()) == {"close": 1000}
        for path, token in ((f"/sessions/{session}/events", TOKEN), (f"/sessions/{session}/events", None)):
            refused = Socket(client.app, path, token)
            assert (await refused.receive())["event"] == "refused"
            assert (await refused.receive()) == {"close": 4401}

    ask(scenario)


def test_a_slow_watcher_is_let_go_with_a_word_and_old_events_are_a_gap() -> None:
    async def scenario() -> None:
        log = EventLog(kept_events=4)
        slow = log.watch()
        log.put("first")
        assert (await anext(slow))["event"] == "first"
        for number in range(10):
            log.put("more", number=number)
        rest = [event async for event in slow]
        assert [event["event"] for event in rest] == ["dropped"]
        assert rest[-1]["first_missing"] == 2
        log.close()
        late = [event async for event in log.watch(after=4)]
        assert late[0] == {"event": "gap", "first_missing": 5, "last_missing": 7}
        assert [event["n"] for event in late[1:]] == [8, 9, 10, 11]
        assert [event async for event in log.watch(after=99)] == []

    asyncio.run(scenario())
