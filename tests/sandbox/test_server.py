"""The server: authorisation, idempotent creation, limits, long answers, metrics, the end of a process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from hypothesis import given
from hypothesis import strategies as st

from etude.errors import ConfigError, SandboxError, ToolArgumentError
from etude.kit.retry import Backoff
from etude.sandbox.errors import CapacityError, SandboxLostError, SandboxMissingError
from etude.sandbox.inside.frames import Unpacker, pack
from etude.sandbox.local.backend import LocalBackend
from etude.sandbox.pool import PooledBackend
from etude.sandbox.server import Limits, read_token, sandbox_routes, serve
from etude.sandbox.server import state as server_state
from etude.sandbox.template import Template
from etude.serving import answers, long_answers
from etude.serving.listening import is_loopback
from etude.serving.long_answers import BUFFER_BYTES, OutputBuffer, Pack
from etude.serving.messages import FRAMES
from etude.serving.metrics import Metrics
from etude.serving.process import Draining, DrainingServer
from etude_quickstart.memory_backend import MemoryBackend
from tests.sandbox.scenes import open_local
from tests.sandbox.serving import TOKEN, RemoteBackend, ScriptedBackend, build_app, served, until

HEADERS = {"authorization": f"Bearer {TOKEN}", "accept": "application/json"}


@asynccontextmanager
async def asking(
    *backends: Any, limits: Limits | None = None, token: str | None = TOKEN
) -> AsyncIterator[httpx.AsyncClient]:
    """A plain HTTP client of an application in this process; its state is at `client.state`."""
    app = build_app({f"backend-{n}": backend for n, backend in enumerate(backends)}, token, limits)
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://localhost", headers=HEADERS
    ) as client:
        client.state = app.state.sandboxes  # type: ignore[attr-defined]
        yield client
    await app.state.sandboxes.close()


def patient_client(url: str) -> httpx.AsyncClient:
    """A plain HTTP client of a running server."""
    return httpx.AsyncClient(base_url=url, headers=HEADERS, timeout=60)


async def call(client: httpx.AsyncClient, sandbox: str, op: str, **fields: Any) -> httpx.Response:
    """One call of a sandbox, as JSON."""
    return await client.post(f"/v1/sandboxes/{sandbox}/call", json={"op": op, **fields})


def ask(scenario: Callable[..., Awaitable[Any]], *backends: Any, **options: Any) -> Any:
    async def run() -> Any:
        async with asking(*(backends or (MemoryBackend(),)), **options) as client:
            return await scenario(client)

    return asyncio.run(run())


# Who may ask


@pytest.mark.parametrize("header", [{}, {"authorization": "Bearer x"}, {"authorization": TOKEN}])
def test_without_the_token_everything_but_health_is_refused(header: dict[str, str]) -> None:
    async def scenario(client: httpx.AsyncClient) -> None:
        client.headers.pop("authorization")
        assert (await client.get("/health")).json() == {"status": "ready"}
        for method, path in (
            ("GET", "/metrics"), ("GET", "/v1/capabilities"), ("GET", "/v1/sandboxes"),
            ("POST", "/v1/sandboxes"), ("PUT", "/v1/templates"), ("GET", "/v1/problems"),
            ("POST", "/v1/sandboxes/x/call"), ("POST", "/v1/snapshots/import"),
            ("POST", "/v1/sandboxes/x/migrate"),
        ):  # fmt: skip
            answer = await client.request(method, path, headers=header)
            assert answer.status_code == 401, path
            assert answer.json()["error"]["field"] == "token"

    ask(scenario)


def test_without_a_token_only_loopback_names_reach_the_server() -> None:
    async def scenario(client: httpx.AsyncClient) -> None:
        for host, status in (
            ("localhost:80", 200),
            ("127.0.0.1", 200),
            ("[::1]:9", 200),
            ("evil.example:80", 401),
        ):
            assert (await client.get("/v1/sandboxes", headers={"host": host})).status_code == status

    ask(scenario, token=None)


def test_another_host_needs_a_token() -> None:
    with pytest.raises(ConfigError, match="no token"):
        serve({"memory": MemoryBackend()}, host="0.0.0.0", token=None)
    assert [is_loopback(h) for h in ("localhost", "127.1.2.3", "::1", "0.0.0.0", "example.org")] == [
        True, True, True, False, False,
    ]  # fmt: skip


def test_a_token_is_made_once_and_kept_from_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "token"
    token = read_token(path)
    told = capsys.readouterr().err
    assert str(path) in told and token not in told
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_token(path) == token
    assert capsys.readouterr().err == ""
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="other users can read"):
        read_token(path)
    path.chmod(0o600)
    path.write_text("\n")
    with pytest.raises(ConfigError, match="is empty or not set"):
        read_token(path)
    with pytest.raises(ConfigError, match="cannot write"):
        read_token(tmp_path / "absent" / "token")


# Creation


async def create(client: httpx.AsyncClient, key: str | None = None, **body: Any) -> httpx.Response:
    return await client.post(
        "/v1/sandboxes", json=body, headers={} if key is None else {"idempotency-key": key}
    )


def test_one_key_gives_one_sandbox_also_while_it_starts() -> None:
    inner = []

    async def scenario(client: httpx.AsyncClient) -> None:
        backend = inner[0]
        backend.gate.clear()
        asked = [asyncio.ensure_future(create(client, "k", metadata={"a": "b"})) for _ in range(3)]
        await until(lambda: backend.num_begun)
        await asyncio.sleep(0.02)
        conflict = await create(client, "k", metadata={"a": "c"})
        assert (conflict.status_code, conflict.json()["error"]["kind"]) == (409, "ConfigError")
        backend.gate.set()
        ids = {(await one).json()["id"] for one in asked}
        ids.add((await create(client, "k", metadata={"a": "b"})).json()["id"])
        assert len(ids) == 1
        assert (backend.num_begun, backend.num_created) == (1, 1)
        assert (await create(client, "other")).json()["id"] not in ids
        await client.delete(f"/v1/sandboxes/{ids.pop()}")
        gone = await create(client, "k", metadata={"a": "b"})
        assert (gone.status_code, gone.json()["error"]["kind"]) == (404, "SandboxMissingError")

    async def run() -> None:
        inner.append(ScriptedBackend())
        async with asking(*inner) as client:
            await scenario(client)

    asyncio.run(run())


def test_a_failed_creation_is_tried_again_with_its_key() -> None:
    async def run() -> None:
        backend = ScriptedBackend()
        backend.failures = [CapacityError("full", field="pool.max_live", fix="wait")]
        async with asking(backend) as client:
            first = await create(client, "k")
            assert first.status_code == 503
            assert first.json()["error"] == {
                "kind": "CapacityError", "message": "full", "field": "pool.max_live", "received": None,
                "fix": "wait",
            }  # fmt: skip
            assert (await create(client, "k")).status_code == 200

    asyncio.run(run())


def test_the_memory_of_keys_is_bounded() -> None:
    async def scenario(client: httpx.AsyncClient) -> None:
        first = (await create(client, "0")).json()["id"]
        for number in range(1, 6):
            await create(client, str(number))
        state = client.state  # type: ignore[attr-defined]
        assert len(state.creations) <= 4
        assert (await create(client, "0")).json()["id"] != first

    ask(scenario, limits=Limits(num_keys=3))


def test_a_creation_whose_client_left_ends_unless_it_asks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    graces_s: list[float] = []
    over = asyncio.Event()
    original = sandbox_routes._end_unclaimed

    async def end_when_told(state: Any, creation: Any, grace_s: float) -> None:
        graces_s.append(grace_s)
        await over.wait()
        await original(state, creation, 0.0)

    monkeypatch.setattr(sandbox_routes, "_end_unclaimed", end_when_told)

    async def run() -> None:
        backend = ScriptedBackend()
        app = build_app({"memory": backend}, TOKEN, Limits(unclaimed_s=7.0))
        background = app.state.sandboxes._background
        async with served(app) as url, patient_client(url) as client:
            for key, num_live in (("a", 0), (None, 0), ("b", 1)):
                backend.gate.clear()
                over.clear()
                graces_s.clear()
                begun = backend.num_begun
                asking_once = asyncio.ensure_future(create(client, key))
                await until(lambda begun=begun: backend.num_begun > begun)
                asking_once.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await asking_once
                await until(lambda: graces_s)
                assert graces_s == [0.0 if key is None else 7.0]
                backend.gate.set()
                if num_live:
                    await create(client, key)
                over.set()
                await until(lambda: not background)
                assert len(backend.live) == num_live, key

    asyncio.run(run())


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"colour": 1}, "colour"),
        ({"timeout_s": "soon"}, "timeout_s"),
        ({"timeout_s": -1}, "timeout_s"),
        ({"resources": {"memory": 3}}, "memory"),
        ({"resources": {"cpu_s": True}}, "cpu_s"),
        ({"network": {"allow": [1]}}, "network.allow"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"backend": "none"}, "backend"),
        ({"template": {"files": {"a": 1}}}, "template.files"),
        ({"template": "unknown"}, "template"),
        ({"template": {"files": {"d/" * 1500 + "file": ""}}}, "template.files"),
        ({"template": {"files": {"x" * 300: ""}}}, "template.files"),
        ({"template": {"files": {"a": "", "a/b": ""}}}, "template.files"),
        ([], "body"),
    ],
)
def test_a_mistaken_request_names_its_field(body: Any, field: str) -> None:
    async def scenario(client: httpx.AsyncClient) -> None:
        answer = await client.post("/v1/sandboxes", json=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["field"] == field
        assert await client.get("/v1/sandboxes") is not None

    ask(scenario)


@pytest.mark.parametrize(
    "name", ["cpu_s", "num_processes", "file_bytes", "open_files", "memory_bytes", "cpus"]
)
@pytest.mark.parametrize("value", [-1, 0, 1 << 62])
def test_resources_that_no_host_can_give_are_the_clients_mistake(
    tmp_path: Path, name: str, value: int
) -> None:
    if (name, value) in (("cpu_s", 1 << 62), ("file_bytes", 1 << 62)):
        pytest.skip("the kernel takes that as a limit")

    async def scenario(client: httpx.AsyncClient) -> None:
        answer = await client.post("/v1/sandboxes", json={"resources": {name: value}})
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["field"] == f"resources.{name}"

    ask(scenario, LocalBackend(tmp_path))


def test_a_snapshot_that_is_not_there_is_not_found(tmp_path: Path) -> None:
    async def scenario(client: httpx.AsyncClient) -> None:
        for method, path, body in (
            ("DELETE", "/v1/snapshots/unknown", None),
            ("DELETE", "/v1/snapshots/..%2Fx", None),
            ("GET", "/v1/snapshots/unknown/export", None),
            ("POST", "/v1/sandboxes", {"snapshot": "unknown"}),
        ):
            answer = await client.request(method, path, json=body)
            assert answer.status_code == 404, (path, answer.text)
        answer = await client.post("/v1/snapshots/import", content=b"this is no snapshot")
        assert 400 <= answer.status_code < 500, answer.text

    for backend in (MemoryBackend(), LocalBackend(tmp_path)):
        ask(scenario, backend)


def test_a_sandbox_can_be_made_and_used_with_plain_http() -> None:
    async def scenario(client: httpx.AsyncClient) -> None:
        body = {"template": {"files": {"a.txt": "one"}}, "timeout_s": 60}
        sandbox = (await create(client, **body)).json()
        base = f"/v1/sandboxes/{sandbox['id']}"
        assert (await call(client, sandbox["id"], "read", path="a.txt")).json() == {"payload": "one"}
        written = pack({"op": "write", "files": [["b.txt", 3]]}, b"two")
        answer = await client.post(f"{base}/call", content=written, headers={"content-type": FRAMES})
        assert answer.json() == {"payload": ""}
        entries = (await call(client, sandbox["id"], "list")).json()["entries"]
        assert entries == [["a.txt", "file", 3], ["b.txt", "file", 3]]
        assert (await client.get(base)).json()["state"] == "running"
        assert (await client.delete(base)).json() == {"killed": True}
        assert (await client.delete(base)).json() == {"killed": False}
        assert (await client.get(base)).status_code == 404
        assert (await call(client, sandbox["id"], "read", path="a.txt")).status_code == 404

    ask(scenario)


def test_requests_are_bounded() -> None:
    async def scenario(client: httpx.AsyncClient) -> None:
        sandbox = (await create(client)).json()["id"]

        async def pieces() -> AsyncIterator[bytes]:
            for _ in range(3):
                yield b"x" * 600

        for content in (b"x" * 1001, pieces()):
            answer = await client.post(f"/v1/sandboxes/{sandbox}/call", content=content)
            assert (answer.status_code, answer.json()["error"]["field"]) == (400, "body")
        file = pack({"event": "piece"}, b"x" * 2500)
        answer = await client.post("/v1/snapshots/import", content=file)
        assert (answer.status_code, answer.json()["error"]["field"]) == (400, "body")
        assert (await call(client, sandbox, "list")).json()["entries"] == []

    ask(scenario, limits=Limits(body_bytes=1000, upload_bytes=2000))


def test_a_torn_import_leaves_nothing(tmp_path: Path) -> None:
    async def run() -> None:
        backend = MemoryBackend()
        app = build_app({"memory": backend}, TOKEN, spool=tmp_path)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test", headers=HEADERS) as client:
            piece = pack({"event": "piece"}, b"x" * 100)
            for body in (piece, piece[:-1], b"", piece + pack({"event": "end", "num_bytes": 101})):
                answer = await client.post("/v1/snapshots/import", content=body)
                assert answer.status_code == 422
                assert answer.json()["error"]["kind"] == "SnapshotRefusedError"
            assert await backend.list_snapshots() == []
        await app.state.sandboxes.close()

    asyncio.run(run())
    assert list(tmp_path.iterdir()) == [], "nothing stays in the spool"


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({}, "op"),
        ({"op": ["read"]}, "op"),
        ({"op": "fly"}, "op"),
        *(({"op": operation}, "op") for operation in ("freeze", "hold", "hello", "net.listen", "lend")),
        ({"op": "read"}, "path"),
        ({"op": "read", "path": "a", "limit_bytes": -1}, "limit_bytes"),
        ({"op": "read", "path": "a", "offset": 1 << 70}, "offset"),
        ({"op": "read", "path": "a", "more": [1]}, "more"),
        ({"op": "write", "files": [["a", 1]]}, "files"),
        ({"op": "write", "files": [["a"]]}, "files"),
        ({"op": "write", "files": [[1, 0]]}, "files"),
        ({"op": "write", "files": [["a", True]]}, "files"),
        ({"op": "list", "depth": True}, "depth"),
        ({"op": "command", "cmd": ["x"]}, "cmd"),
        ({"op": "command", "cmd": "x", "argv": ["x"]}, "argv"),
        ({"op": "command", "cmd": "x", "exact_env": True}, "exact_env"),
        ({"op": "command", "cmd": "x", "env": {"a": 1}}, "env"),
        ({"op": "command", "cmd": "x", "timeout_s": 0}, "timeout_s"),
        ({"op": "command", "cmd": "x", "timeout_s": 1e9, "background": True}, "timeout_s"),
        ({"op": "wait", "pid": "1"}, "pid"),
        ({"op": "tests", "paths": "x"}, "paths"),
    ],
)
def test_a_mistaken_call_names_its_field(fields: dict[str, Any], field: str) -> None:
    async def scenario(client: httpx.AsyncClient) -> None:
        sandbox = (await create(client)).json()["id"]
        answer = await client.post(f"/v1/sandboxes/{sandbox}/call", json=fields)
        assert (answer.status_code, answer.json()["error"]["field"]) == (400, field), answer.text

    ask(scenario)


def test_an_answer_that_no_frame_holds_is_the_agents_doing() -> None:
    async def run() -> None:
        backend = ScriptedBackend()
        async with served(build_app({"memory": backend}, TOKEN)) as url:
            client = RemoteBackend(url, TOKEN)
            sandbox = await client.create()
            (made,) = backend.live

            async def long_names(header: Any, payload: bytes = b"", on_output: Any = None) -> Any:
                return {"entries": [["x" * (32 << 20), "file", 1]]}, b""

            made.call = long_names
            with pytest.raises(ToolArgumentError, match="too large"):
                await sandbox.files.list()
            await client.close()

    asyncio.run(run())


@pytest.mark.slow
@given(st.binary(max_size=60))
def test_no_bytes_make_the_server_fail(body: bytes) -> None:
    async def scenario(client: httpx.AsyncClient) -> None:
        sandbox = (await create(client)).json()["id"]
        for method, path in (("PUT", "/v1/templates"), ("POST", f"/v1/sandboxes/{sandbox}/call")):
            for kind in (FRAMES, "application/json"):
                answer = await client.request(method, path, content=body, headers={"content-type": kind})
                assert answer.status_code in (200, 204, 400), answer.text

    ask(scenario)


# Long answers


def test_signs_of_life_come_while_a_command_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_answers, "BEAT_S", 0.02)

    async def run() -> list[str]:
        backend, unpacker, events = ScriptedBackend(), Unpacker(), list[str]()
        async with served(build_app({"memory": backend}, TOKEN)) as url, patient_client(url) as client:
            path = f"/v1/sandboxes/{(await create(client)).json()['id']}/call"
            (made,) = backend.live
            commands: Any = made.scripted
            asked = client.stream(
                "POST", path, json={"op": "command", "cmd": "wait"}, headers={"accept": FRAMES}
            )
            async with asked as answer:
                async for piece in answer.aiter_bytes():
                    events += [header["event"] for header, _ in unpacker.feed(piece)]
                    if len(events) >= 3:
                        commands.go_on.set()
        return events

    events = asyncio.run(run())
    assert events[-1] == "result"
    assert set(events[:-1]) == {"beat"}


def test_an_error_after_the_first_beat_comes_as_a_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_answers, "BEAT_S", 0.02)

    async def run() -> None:
        backend = ScriptedBackend()
        app = build_app({"memory": backend}, TOKEN)
        async with served(app) as url:
            client = RemoteBackend(url, TOKEN)
            backend.gate.clear()
            backend.failures = [CapacityError("full", field="pool.max_live")]
            creating = asyncio.ensure_future(client.create())
            await asyncio.sleep(0.1)
            backend.gate.set()
            with pytest.raises(CapacityError, match="full"):
                await creating
            await client.close()

    asyncio.run(run())


def test_output_that_nobody_takes_is_bounded_and_counted() -> None:
    async def run() -> None:
        buffer = OutputBuffer(pack, 100)
        buffer.put(1, b"a" * 60)
        buffer.put(1, b"b" * 30)
        buffer.put(2, b"c" * 30)
        buffer.put(1, b"d" * 5)
        frames = [frame for packed in buffer.pop_frames() for frame in Unpacker().feed(packed)]
        assert frames == [
            ({"event": "output", "fd": 1}, b"a" * 60 + b"b" * 30),
            ({"event": "output", "fd": 2}, b"c" * 10),
            ({"event": "dropped", "num_bytes": 25}, b""),
        ]
        assert buffer.pop_frames() == []
        buffer.put(1, b"e")
        assert len(buffer.pop_frames()) == 1
        buffer.finish()
        buffer.put(1, b"late")
        assert buffer.pop_frames() == []

    asyncio.run(run())


def test_a_client_that_takes_nothing_does_not_fill_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """The socket is full, the buffer is full, and the command goes on and ends."""
    monkeypatch.setattr(answers, "STALL_S", 0.5)

    async def run() -> None:
        backend = ScriptedBackend()
        app = build_app({"memory": backend}, TOKEN)
        buffers: list[OutputBuffer] = []
        original = OutputBuffer.__init__

        def noted(self: OutputBuffer, pack: Pack, limit_bytes: int = BUFFER_BYTES) -> None:
            original(self, pack, limit_bytes)
            buffers.append(self)

        monkeypatch.setattr(OutputBuffer, "__init__", noted)
        async with served(app) as url:
            client = RemoteBackend(url, TOKEN)
            sandbox = await client.create()
            host, _, port = url.removeprefix("http://").partition(":")
            reader, writer = await asyncio.open_connection(host, int(port), limit=1)
            body = json.dumps({"op": "command", "cmd": "flood 1000", "stream": True}).encode()
            head = (
                f"POST /v1/sandboxes/{sandbox.id}/call HTTP/1.1\r\nhost: localhost\r\n"
                f"authorization: Bearer {TOKEN}\r\ncontent-type: application/json\r\n"
                f"content-length: {len(body)}\r\n\r\n"
            )
            writer.write(head.encode() + body)
            (made,) = backend.live
            commands: Any = made.scripted
            await until(lambda: commands.num_started and not commands.running)
            assert buffers[0]._held_bytes <= BUFFER_BYTES  # pyright: ignore[reportPrivateUsage]
            await client.close()
            writer.close()
            del reader

    asyncio.run(run())


def test_a_fork_whose_client_left_leaves_no_copies() -> None:
    async def run() -> None:
        backend = ScriptedBackend()
        app = build_app({"memory": backend}, TOKEN)
        async with served(app) as url:
            client = RemoteBackend(url, TOKEN)
            sandbox = await client.create()
            (made,) = backend.live
            gate, begun, forked = asyncio.Event(), asyncio.Event(), list[Any]()
            background = app.state.sandboxes._background
            fork = made.fork

            async def slow_fork(count: int = 1) -> Any:
                begun.set()
                await gate.wait()
                forked.extend(await fork(count))
                return forked

            made.fork = slow_fork
            forking = asyncio.ensure_future(sandbox.fork(2))
            await begun.wait()
            forking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await forking
            await until(lambda: background)  # the server knows that the client has left
            gate.set()
            await until(lambda: not background)
            assert len(forked) == 2
            assert len(backend.live) == 1
            await client.close()

    asyncio.run(run())


# State


def test_metrics_tell_what_lives_waits_and_fails() -> None:
    async def run() -> str:
        pool = PooledBackend(ScriptedBackend(), 2, 0.05)
        async with asking(pool) as client:
            for _ in range(2):
                await create(client)
            assert (await create(client)).status_code == 503
            await client.get("/v1/sandboxes/none")
            return (await client.get("/metrics")).text

    lines = asyncio.run(run()).splitlines()
    for line in (
        '# TYPE etude_sandboxes_created_total counter',
        'etude_sandboxes_created_total{backend="backend-0"} 2.0',
        'etude_sandbox_create_failures_total{backend="backend-0",kind="CapacityError"} 1.0',
        'etude_sandbox_errors_total{kind="SandboxMissingError"} 1.0',
        'etude_sandbox_live{backend="backend-0"} 2.0',
        'etude_sandbox_places_held{backend="backend-0"} 2.0',
        'etude_sandbox_queue{backend="backend-0"} 0.0',
        'etude_sandbox_request_seconds_count{operation="create"} 3.0',
        'etude_sandbox_request_seconds_bucket{le="+Inf",operation="create"} 3.0',
        'etude_sandbox_requests_total{operation="create",status="503"} 1.0',
    ):  # fmt: skip
        assert line in lines, line


@given(st.lists(st.floats(0, 100), min_size=1, max_size=30))
def test_histograms_add_up(times_s: list[float]) -> None:
    metrics = Metrics()
    for time_s in times_s:
        metrics.observe("times", time_s, operation='a"b\n')
    lines = metrics.text({}).splitlines()
    counts = [float(line.rpartition(" ")[2]) for line in lines if "_bucket" in line]
    assert counts == sorted(counts)
    assert counts[-1] == len(times_s)
    assert counts[4] == sum(time_s <= 0.1 for time_s in times_s)
    assert all(r"a\"b\n" in line for line in lines if "{" in line)


def test_a_draining_server_says_so_and_makes_nothing_new() -> None:
    async def scenario(client: httpx.AsyncClient) -> None:
        sandbox = (await create(client, template={"files": {"a": "1"}})).json()["id"]
        client.state.draining = True  # type: ignore[attr-defined]
        health = await client.get("/health")
        assert (health.status_code, health.json()) == (503, {"status": "draining"})
        assert (await create(client)).json()["error"]["kind"] == "CapacityError"
        assert (await client.post(f"/v1/sandboxes/{sandbox}/fork")).status_code == 503
        assert (await call(client, sandbox, "read", path="a")).json() == {"payload": "1"}

    ask(scenario)


def test_time_to_live_is_bounded_by_the_server() -> None:
    async def scenario(client: httpx.AsyncClient) -> None:
        info: dict[str, Any] = {}
        for timeout_s in (None, 1000):
            info = (await create(client, timeout_s=timeout_s)).json()
            assert info["expires_s"] - info["created_s"] < 500
        await client.post(f"/v1/sandboxes/{info['id']}/timeout", json={"timeout_s": None})
        again = (await client.get(f"/v1/sandboxes/{info['id']}")).json()
        assert again["expires_s"] - time.time() < 51

    ask(scenario, limits=Limits(max_timeout_s=50.0))


def test_an_expired_sandbox_is_forgotten() -> None:
    async def scenario(client: httpx.AsyncClient) -> None:
        sandbox = (await create(client, timeout_s=0.02)).json()["id"]
        await asyncio.sleep(0.05)
        await client.get("/metrics")
        again = await client.post(f"/v1/sandboxes/{sandbox}/connect")
        assert again.json()["error"]["kind"] == "SandboxMissingError"

    ask(scenario)


def test_an_expired_sandbox_tells_its_agent_so_also_once_it_is_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_state, "_NUM_ENDED", 1)

    async def scenario(client: httpx.AsyncClient) -> None:
        state = client.state  # type: ignore[attr-defined]
        for _ in range(2):
            sandbox = (await create(client, template={"files": {"a": "1"}})).json()["id"]
            slow = asyncio.create_task(call(client, sandbox, "command", cmd="sleep 60", timeout_s=60))
            await until(lambda: all(one.is_in_use for one in backend._live.values()))
            await client.post(f"/v1/sandboxes/{sandbox}/timeout", json={"timeout_s": 0.01})
            await until(lambda: not backend._live)
            await slow
            await client.get("/metrics")
            assert state.get(sandbox) is None
            late = (await call(client, sandbox, "read", path="a")).json()
            assert late["error"]["kind"] == "SandboxKilledByAgentError"
        assert len(state._ended) == 1

    backend = open_local(tmp_path, "unisolated")
    ask(scenario, backend)


def test_sandboxes_that_ended_by_themselves_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_state, "PRUNE_EVERY", 5)

    async def scenario(client: httpx.AsyncClient) -> None:
        ended = [(await create(client, timeout_s=0.001)).json()["id"] for _ in range(4)]
        await asyncio.sleep(0.02)
        await create(client)
        state = client.state  # type: ignore[attr-defined]
        await until(lambda: [state.get(sandbox_id) for sandbox_id in ended] == [None] * 4)

    ask(scenario)


def test_several_backends_are_told_apart_by_name() -> None:
    first, second = MemoryBackend(), MemoryBackend()

    async def scenario(client: httpx.AsyncClient) -> None:
        made = (await create(client, backend="backend-1")).json()["id"]
        assert [sandbox.id for sandbox in second.live] == [made]
        assert not first.live
        assert (await client.get("/v1/sandboxes")).json() == []
        assert len((await client.get("/v1/sandboxes?backend=backend-1")).json()) == 1
        assert (await client.get(f"/v1/sandboxes/{made}")).status_code == 200
        outside = await first.create(Template({"a": "1"}))
        assert (await call(client, outside.id, "read", path="a")).json() == {"payload": "1"}

    ask(scenario, first, second)


# The process

PROGRAM = """
import sys
from pathlib import Path
from etude.sandbox.local.backend import LocalBackend
from etude.sandbox.server import read_token, serve
from tests.sandbox.serving import ScriptedBackend

name, port, directory, drain_s = sys.argv[1:]
state = Path(directory)
backend = LocalBackend(state) if name == "local" else ScriptedBackend()
serve({name: backend}, port=int(port), token=read_token(state / "token"), drain_s=float(drain_s),
      spool=state / "spool")
print("ended in order", flush=True)
"""


@contextlib.contextmanager
def server_process(
    tmp_path: Path, drain_s: float, name: str = "scripted"
) -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    """(process, address, token) of a server in a process of its own."""
    token_file = tmp_path / "token"
    token_file.write_text(TOKEN)
    token_file.chmod(0o600)
    root = Path(__file__).resolve().parents[2]
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, name, "0", str(tmp_path), str(drain_s)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=root,
        env={**os.environ, "PYTHONPATH": f"{root / 'src'}:{root}"},
        text=True,
    )
    assert process.stderr is not None
    try:
        said = next((line for line in process.stderr if "ready at http://" in line), None)
        assert said is not None, "the server ended"
        yield process, said.split()[-1], TOKEN
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_a_server_killed_in_the_middle_of_a_run_is_lost(tmp_path: Path) -> None:
    with server_process(tmp_path, 1.0) as (process, url, token):

        async def run() -> None:
            backend = RemoteBackend(url, token, backoff=Backoff(0.05, attempts=2))
            sandbox = await backend.create()
            command = await sandbox.commands.start("cat", on_output=lambda fd, data: None)
            running = asyncio.ensure_future(sandbox.commands.run("sleep 600", 600.0))
            await asyncio.sleep(0.2)
            process.kill()
            with pytest.raises(SandboxLostError):
                await asyncio.wait_for(running, 60)
            with pytest.raises(SandboxLostError):
                await asyncio.wait_for(command.wait(), 60)
            with pytest.raises(SandboxLostError):
                await sandbox.files.read("a")
            with pytest.raises(SandboxError, match="may still be running"):
                await backend.close()

        asyncio.run(run())


async def drains(url: str) -> None:
    """Waits until a server says that it drains."""
    async with patient_client(url) as client, asyncio.timeout(60):
        while (await client.get("/health")).status_code != 503:  # noqa: ASYNC110 - of another process
            await asyncio.sleep(0.02)


@pytest.mark.slow
def test_sigterm_drains_and_the_process_ends_in_order(tmp_path: Path) -> None:
    with server_process(tmp_path, 300.0) as (process, url, token):

        async def run() -> None:
            backend = RemoteBackend(url, token)
            sandbox = await backend.create()
            running = asyncio.ensure_future(sandbox.commands.run("sleep 0.5"))
            await asyncio.sleep(0.1)
            process.send_signal(signal.SIGTERM)
            await drains(url)
            with pytest.raises(CapacityError, match="shutting down"):
                await backend.create()
            assert (await running).exit_code == 0
            await backend.close()

        asyncio.run(run())
        assert process.stdout is not None
        assert process.wait(60) == 0
        assert "ended in order" in process.stdout.read()


@pytest.mark.slow
def test_the_drain_and_a_second_signal_are_bounded(tmp_path: Path) -> None:
    with server_process(tmp_path, 300.0) as (process, url, token):

        async def run() -> None:
            backend = RemoteBackend(url, token)
            await backend.create()
            await backend.disconnect()
            process.send_signal(signal.SIGTERM)
            await drains(url)

        asyncio.run(run())
        time.sleep(0.3)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


def test_missing_sandboxes_after_a_restart_are_told_as_such(tmp_path: Path) -> None:
    async def run() -> None:
        app = build_app({"memory": MemoryBackend()}, TOKEN)
        async with served(app) as url:
            backend = RemoteBackend(url, TOKEN)
            old = backend.adopt("memory-from-before")
            with pytest.raises(SandboxMissingError):
                await old.files.read("a")
            await backend.close()

    asyncio.run(run())


def skip_without_namespaces() -> None:
    problems = LocalBackend().doctor()
    if problems:
        pytest.skip(f"no namespaces here: {problems[0]}")


def processes_with(text: str) -> list[int]:
    """Processes of this machine whose command line holds a text."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdigit() and text.encode() in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
    return found


@pytest.mark.slow
def test_a_killed_server_leaves_no_process_and_its_spool_goes_with_the_next(tmp_path: Path) -> None:
    skip_without_namespaces()
    marker = f"31{os.getpid()}"
    with server_process(tmp_path, 1.0, "local") as (process, url, token):

        async def begin() -> None:
            backend = RemoteBackend(url, token, backoff=Backoff(attempts=1))
            sandbox = await backend.create(Template({"a": "1"}))
            await sandbox.commands.start(f"sleep {marker}")
            await until(lambda: processes_with(f"sleep\0{marker}\0"))
            await backend.disconnect()

        asyncio.run(begin())
        (left,) = (tmp_path / "spool").iterdir()
        (left / "half-an-upload").write_bytes(b"x")
        process.kill()
        process.wait()
        asyncio.run(until(lambda: not processes_with(f"sleep\0{marker}\0")))
    with server_process(tmp_path, 0.0, "local"):
        assert not left.exists()


@pytest.mark.slow
def test_a_flood_does_not_fill_the_memory_of_the_server(tmp_path: Path) -> None:
    skip_without_namespaces()
    num_bytes = 300 << 20
    with server_process(tmp_path, 1.0, "local") as (process, url, token):

        def most_bytes() -> int:
            status = Path(f"/proc/{process.pid}/status").read_text()
            return int(status.partition("VmHWM:")[2].split()[0]) << 10

        async def run() -> None:
            backend = RemoteBackend(url, token)
            sandbox = await backend.create()
            before_bytes = most_bytes()
            seen_bytes = 0

            def slow(fd: int, data: bytes) -> None:
                nonlocal seen_bytes
                seen_bytes += len(data)
                time.sleep(0.001)

            result = await sandbox.commands.run(f"head -c {num_bytes} /dev/zero", 300.0, on_output=slow)
            assert (result.exit_code, len(result.stdout)) == (0, 64 << 10)
            assert 0 < seen_bytes <= num_bytes
            assert most_bytes() - before_bytes < 64 << 20
            await backend.close()

        asyncio.run(run())


def draining_server(is_busy: Callable[[], Awaitable[bool]], drain_s: float) -> DrainingServer:
    config = uvicorn.Config(lambda scope: None, log_level="warning")
    return DrainingServer(config, "one", Draining("things", drain_s, None, is_busy))


@pytest.mark.parametrize("error", [SandboxLostError("the host is away"), ZeroDivisionError()])
def test_a_server_that_cannot_tell_what_it_holds_ends_all_the_same(error: Exception) -> None:
    async def fails() -> bool:
        raise error

    server = draining_server(fails, 0.2)
    with contextlib.suppress(ZeroDivisionError):
        asyncio.run(server._drain())
    assert server.should_exit


def test_a_server_whose_backend_does_not_answer_ends_all_the_same() -> None:
    async def hangs() -> bool:
        await asyncio.sleep(600)
        return True

    server = draining_server(hangs, 0.2)
    asyncio.run(server._drain())
    assert server.should_exit


def test_a_server_that_nobody_listens_to_drains(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever started it, and read what it said, is gone."""
    reading, writing = os.pipe()
    os.close(reading)
    asked: list[bool] = []

    async def is_busy() -> bool:
        asked.append(True)
        return len(asked) < 2

    with os.fdopen(writing, "w", buffering=1) as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        server = draining_server(is_busy, 60.0)
        asyncio.run(server._drain())
        monkeypatch.undo()
        with contextlib.suppress(OSError):
            stderr.close()
    assert server.should_exit and len(asked) == 2
