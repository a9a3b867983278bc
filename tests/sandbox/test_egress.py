"""Network egress: names on the allow-list are reachable through the proxy, and nothing else is."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from etude.errors import SandboxError
from etude.sandbox.channel import Channel
from etude.sandbox.interface import Sandbox
from etude.sandbox.local.backend import ForkServerBackend, LocalBackend
from etude.sandbox.machine import MachineSandbox
from etude.sandbox.network.proxy import OWN_URL
from etude.sandbox.template import Template
from etude.sandbox.types import CommandResult, Network, Resources
from tests.sandbox.scenes import becomes_true, on_backend, open_descriptors

BIG = os.urandom(24 << 20)
BIG_SUM = hashlib.sha256(BIG).hexdigest()
ROOMY = Resources(disk_bytes=128 << 20, file_bytes=64 << 20, memory_bytes=512 << 20)
FETCH = """
import hashlib, sys, urllib.request
data = open(sys.argv[2], "rb") if len(sys.argv) > 2 else None
headers = {"Content-Length": str(__import__("os").path.getsize(sys.argv[2]))} if data else {}
request = urllib.request.Request(sys.argv[1], data, headers)
try:
    body = urllib.request.urlopen(request, timeout=60).read()
    print(hashlib.sha256(body).hexdigest() if len(body) > 100 else body.decode())
except Exception as error:
    print(type(error).__name__, getattr(error, "code", ""), error)
"""


class Upstream:
    """An HTTP server on this machine's loopback."""

    def __init__(self) -> None:
        self.port = 0
        self.requests: list[str] = []
        self.num_open = 0
        self.received_bytes = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_open += 1
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            self.requests.append(head.split("\r\n")[0])
            path = head.split()[1]
            body = b"small"
            if head.startswith("POST"):
                length = int(head.lower().partition("content-length:")[2].split()[0])
                state = hashlib.sha256()
                while self.received_bytes < length and (data := await reader.read(1 << 16)):
                    self.received_bytes += len(data)
                    state.update(data)
                body = state.hexdigest().encode()
            elif path.endswith("/big"):
                body = BIG
            elif path.endswith("/endless"):
                writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
                while True:
                    writer.write(bytes(1 << 16))
                    await writer.drain()
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            return
        finally:
            self.num_open -= 1
            writer.close()


@asynccontextmanager
async def upstream(backend: ForkServerBackend) -> AsyncIterator[Upstream]:
    """A server that the operator lets sandboxes reach."""
    server = Upstream()
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    server.port = listening.sockets[0].getsockname()[1]
    backend.allow_private = (f"127.0.0.1:{server.port}",)
    try:
        yield server
    finally:
        listening.close()


Scene = Callable[[Sandbox, Upstream], Awaitable[None]]


def online(state: Path, scene: Scene) -> None:
    """A scene in a sandbox that may reach the server, and nothing else."""

    async def scenario(backend: ForkServerBackend) -> None:
        async with upstream(backend) as server:
            network = Network((f"127.0.0.1:{server.port}",))
            await scene(await backend.create(Template({"fetch.py": FETCH}), ROOMY, network), server)

    on_backend(state, scenario)


async def fetch(sandbox: Sandbox, url: str, data: str = "", timeout_s: float = 120.0) -> CommandResult:
    """urllib does not proxy for loopback names by itself: `no_proxy` is taken back."""
    env = {"no_proxy": "", "NO_PROXY": ""}
    return await sandbox.commands.run(f"python3 fetch.py {url} {data}", timeout_s, env)


def log_of(state: Path) -> list[dict[str, object]]:
    """What has been written by now: a request is logged when it is over, which its client may know before."""
    log = state / "network.jsonl"
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def test_an_images_own_variables_stay_beside_those_of_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    boot = LocalBackend.boot

    async def boot_with_variables(self: LocalBackend, sandbox: MachineSandbox) -> Channel:
        sandbox.environment |= {"FROM_IMAGE": "kept", "http_proxy": "lost"}
        return await boot(self, sandbox)

    async def scene(s: Sandbox, server: Upstream) -> None:
        shown = await s.commands.run("echo $FROM_IMAGE $http_proxy")
        assert shown.stdout == "kept http://127.0.0.1:3128\n"

    monkeypatch.setattr(LocalBackend, "boot", boot_with_variables)
    online(tmp_path, scene)


def test_what_the_list_names_is_reached_and_logged(tmp_path: Path) -> None:
    async def scene(s: Sandbox, server: Upstream) -> None:
        assert (await fetch(s, f"http://127.0.0.1:{server.port}/x?secret=1")).stdout == "small\n"
        assert len(server.requests) == 1
        shown = await s.commands.run("env | grep -ci proxy; cat /proc/net/tcp | grep -c ':0C38 00000000'")
        assert shown.stdout == "8\n1\n"
        behind = await s.commands.start("echo $http_proxy")
        assert (await behind.wait()).stdout == "http://127.0.0.1:3128\n"
        assert await becomes_true(lambda: bool(log_of(tmp_path)))
        (row,) = log_of(tmp_path)
        assert (row["host"], row["port"], row["decision"], row["sandbox"]) == (
            "127.0.0.1",
            server.port,
            "allowed",
            s.id,
        )
        assert "secret" not in json.dumps(row)

    online(tmp_path, scene)


def test_everything_else_is_refused(tmp_path: Path) -> None:
    async def scene(s: Sandbox, server: Upstream) -> None:
        for url in (
            f"http://127.0.0.1:{server.port + 1}/", f"http://localhost:{server.port}/", "http://example.org/",
            f"http://0.0.0.0:{server.port}/", "http://169.254.169.254/latest", f"http://[::1]:{server.port}/",
            f"http://127.1:{server.port}/", "https://127.0.0.1/", "http://10.0.0.1/",
        ):  # fmt: skip
            told = (await fetch(s, url)).stdout
            assert "Error" in told, (url, told)
        # Without the proxy there is no way at all.
        direct = f"exec 3<>/dev/tcp/127.0.0.1/{server.port}"
        assert (await s.commands.run(f"bash -c '{direct}'")).exit_code != 0
        assert server.requests == []
        assert {row["decision"] for row in log_of(tmp_path)} == {"refused"}

    online(tmp_path, scene)


def test_without_a_network_there_is_neither_listener_nor_environment(tmp_path: Path) -> None:
    async def scenario(backend: ForkServerBackend) -> None:
        s = await backend.create(Template())
        shown = await s.commands.run("env | grep -ci proxy; wc -l < /proc/net/tcp")
        assert shown.stdout == "0\n1\n"
        assert not (tmp_path / "network.jsonl").exists()

    on_backend(tmp_path, scenario)


@pytest.mark.slow
def test_large_bodies_cross_whole_in_both_directions_at_once(tmp_path: Path) -> None:
    async def scene(s: Sandbox, server: Upstream) -> None:
        url = f"http://127.0.0.1:{server.port}"
        (tmp_path / "body").write_bytes(BIG)
        await s.files.upload(tmp_path / "body", "body")
        results = await asyncio.gather(
            fetch(s, f"{url}/big"), fetch(s, f"{url}/upload", "body"), s.files.read("body", len(BIG))
        )
        assert [results[0].stdout.strip(), results[1].stdout.strip()] == [BIG_SUM, BIG_SUM]
        assert results[2] == BIG

    online(tmp_path, scene)


@pytest.mark.slow
def test_many_connections_at_once_do_not_mix(tmp_path: Path) -> None:
    many = (
        "import threading, urllib.request, sys\n"
        "said = []\n"
        "def get(n): said.append(urllib.request.urlopen(sys.argv[1] + '/' + 'big' * (n % 8 == 0)).read())\n"
        "threads = [threading.Thread(target=get, args=(n,)) for n in range(24)]\n"
        "[t.start() for t in threads]; [t.join() for t in threads]\n"
        "print(sorted((len(b), said.count(b)) for b in set(said)))\n"
    )

    async def scene(s: Sandbox, server: Upstream) -> None:
        await s.files.write("many.py", many)
        env = {"no_proxy": "", "NO_PROXY": ""}
        told = await s.commands.run(f"python3 many.py http://127.0.0.1:{server.port}", 300.0, env)
        assert told.stdout == f"[(5, 21), ({len(BIG)}, 3)]\n", told

    online(tmp_path, scene)


def test_a_program_that_says_it_has_no_more_to_say_still_hears_the_answer(tmp_path: Path) -> None:
    half = (
        "import socket, sys\n"
        "s = socket.create_connection(('127.0.0.1', 3128))\n"
        "request = 'GET http://127.0.0.1:%s/x HTTP/1.1\\r\\nHost: 127.0.0.1:%s\\r\\n\\r\\n'\n"
        "s.sendall((request % (sys.argv[1], sys.argv[1])).encode())\n"
        "s.shutdown(socket.SHUT_WR)\n"
        "data = b''\n"
        "while piece := s.recv(1000): data += piece\n"
        "print(data.split(b'\\r\\n')[0], data[-5:])\n"
    )

    async def scene(s: Sandbox, server: Upstream) -> None:
        await s.files.write("half.py", half)
        told = await s.commands.run(f"python3 half.py {server.port}")
        assert told.stdout == "b'HTTP/1.1 200 OK' b'small'\n", told

    online(tmp_path, scene)


def test_a_slow_reader_inside_holds_up_nobody_and_fills_no_memory(tmp_path: Path) -> None:
    slow = (
        "import socket, sys, time\n"
        "s = socket.create_connection(('127.0.0.1', 3128))\n"
        "request = 'GET http://127.0.0.1:%s/endless HTTP/1.1\\r\\nHost: 127.0.0.1:%s\\r\\n\\r\\n'\n"
        "s.sendall((request % (sys.argv[1], sys.argv[1])).encode())\n"
        "s.recv(10); time.sleep(600)\n"
    )

    async def scene(s: Sandbox, server: Upstream) -> None:
        await s.files.write("slow.py", slow)
        commands = [await s.commands.start(f"python3 slow.py {server.port}") for _ in range(3)]
        assert await becomes_true(lambda: server.num_open == 3)
        assert (await fetch(s, f"http://127.0.0.1:{server.port}/x")).stdout == "small\n"
        assert (await s.commands.run("echo on")).stdout == "on\n"
        for command in commands:
            await command.kill()
        assert await becomes_true(lambda: server.num_open == 0), "the server hears that nobody reads"

    online(tmp_path, scene)


def test_a_kill_in_mid_stream_ends_the_connections_outside(tmp_path: Path) -> None:
    async def scenario(backend: ForkServerBackend) -> None:
        async with upstream(backend) as server:
            network = Network((f"127.0.0.1:{server.port}",))

            async def once() -> None:
                sandbox = await backend.create(Template({"fetch.py": FETCH}), ROOMY, network)
                task = asyncio.create_task(fetch(sandbox, f"http://127.0.0.1:{server.port}/endless"))
                assert await becomes_true(lambda: server.num_open == 1)
                await asyncio.sleep(0.05)
                await sandbox.kill()
                await asyncio.gather(task, return_exceptions=True)
                assert await becomes_true(lambda: server.num_open == 0)

            await once()
            before = open_descriptors()
            for _ in range(3):
                await once()
            assert await becomes_true(lambda: open_descriptors() <= before)

    on_backend(tmp_path, scenario)


@pytest.mark.slow
def test_the_way_out_survives_naps_and_goes_to_copies(tmp_path: Path) -> None:
    async def scene(s: Sandbox, server: Upstream) -> None:
        url = f"http://127.0.0.1:{server.port}/x"
        for _ in range(2):
            await s.pause("filesystem")
            await s.resume()
            assert (await fetch(s, url)).stdout == "small\n"
        (copy,) = await s.fork()
        assert not isinstance(copy, Exception)
        assert (await fetch(copy, url)).stdout == "small\n"
        both = {s.id, copy.id}
        assert await becomes_true(lambda: {row["sandbox"] for row in log_of(tmp_path)} == both)

    online(tmp_path, scene)


def test_a_log_that_cannot_be_opened_makes_no_sandbox(tmp_path: Path) -> None:
    (tmp_path / "network.jsonl").mkdir()

    async def scenario(backend: ForkServerBackend) -> None:
        with pytest.raises(SandboxError, match="log cannot be written"):
            await backend.create(Template(), None, Network(("example.org",)))
        assert await backend.list() == []

    on_backend(tmp_path, scenario)


def test_the_owners_server_is_reached_at_the_proxys_own_address_by_whom_the_rules_allow(
    tmp_path: Path,
) -> None:
    async def scenario(backend: ForkServerBackend) -> None:
        async with upstream(backend) as server:
            backend.allow_private, backend.own_server = (), f"127.0.0.1:{server.port}"
            template = Template({"fetch.py": FETCH})
            allowed = await backend.create(template, ROOMY, Network((backend.own_server,)))
            elsewhere = await backend.create(template, ROOMY, Network(("example.com",)))
            offline = await backend.create(template, ROOMY)
            answers = [
                await s.commands.run(f"python3 fetch.py {OWN_URL}/s/1") for s in (allowed, elsewhere, offline)
            ]
            assert [answer.stdout.split()[0] for answer in answers] == ["small", "HTTPError", "URLError"]
            assert server.requests == ["GET /s/1 HTTP/1.1"]

    on_backend(tmp_path, scenario)


def test_without_a_server_of_the_owners_a_path_alone_is_no_request(tmp_path: Path) -> None:
    async def scene(s: Sandbox, server: Upstream) -> None:
        answer = await s.commands.run(f"python3 fetch.py {OWN_URL}/")
        assert answer.stdout.startswith("HTTPError 400") and not server.requests

    online(tmp_path, scene)
