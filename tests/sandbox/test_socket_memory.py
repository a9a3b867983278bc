"""Socket buffers count as memory of their sandbox, whatever happens to the sockets; busy programs survive."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from etude.errors import AgentError
from etude.sandbox.inside.socket_memory import TCP_BUFFER_BYTES
from etude.sandbox.interface import Sandbox
from etude.sandbox.local.cgroups import ControlGroups
from etude.sandbox.local.doctor import find_problems
from etude.sandbox.types import CommandResult, Resources
from tests.sandbox.backends import with_backend, with_sandbox

SOURCE = str(Path(__file__).parents[2] / "src")
MEASURE = """
import json, os, socket
from etude.sandbox.inside import kernel
from etude.sandbox.inside.socket_memory import SocketMemory, limit_buffers
uid, gid = os.geteuid(), os.getegid()
kernel.unshare(kernel.NEWUSER | kernel.NEWNET)
kernel.write_maps(0, uid, gid)
kernel.raise_loopback()
limit_buffers()
memory = SocketMemory()
seen = {}
def look(what):
    seen[what] = [memory.used_bytes(), memory.max_bytes()]
def fill(one):
    one.setblocking(False)
    sent = 0
    try:
        while True:
            sent += one.send(bytes(60000))
    except BlockingIOError:
        return sent
look("empty")
"""
DISCONNECTED = """
receiver = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
receiver.connect(("127.0.0.1", 9))
sender.bind(("127.0.0.1", 9))
sender.connect(receiver.getsockname())
for _ in range(100):
    sender.send(bytes(10000))
look("full")
import ctypes
assert ctypes.CDLL(None).connect(receiver.fileno(), bytes(16), 16) == 0
look("let go")
"""
BOMB = """
import os, socket, time
block = bytes(65536)
for _ in range(8):
    if os.fork() == 0:
        held = []
        listener = socket.create_server(("127.0.0.1", 0))
        for _ in range(60):
            one = {pair}
            held.append(one)
            one[0].setblocking(False)
            try:
                while True:
                    one[0].send(block)
            except BlockingIOError:
                pass
        print("full", flush=True)
        time.sleep(300)
        os._exit(0)
time.sleep(60)
print("alive")
"""
PAIRS = ("socket.socketpair()", "(socket.create_connection(listener.getsockname()), listener.accept()[0])")
needs_namespaces = pytest.mark.skipif(bool(find_problems()), reason="; ".join(find_problems()))


def measured(body: str) -> dict[str, tuple[int, int]]:
    """What `look` saw: (held bytes, most bytes), in a network namespace of its own."""
    program = MEASURE + body + "\nprint(json.dumps(seen))\n"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": SOURCE},
        capture_output=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr.decode()
    found: dict[str, Any] = json.loads(done.stdout)
    return {what: (held, most) for what, (held, most) in found.items()}


def run_inside(code: str) -> CommandResult:
    """Result of a Python program in a new sandbox."""

    async def scenario(sandbox: Sandbox) -> CommandResult:
        return await sandbox.commands.run("python3 -S p.py", timeout_s=60.0)

    return with_sandbox("local", {"p.py": code}, scenario)


@needs_namespaces
def test_without_sockets_hardly_anything_is_held() -> None:
    held, most = measured("")["empty"]
    assert 0 <= held <= most < 2 * (2 * TCP_BUFFER_BYTES + (1 << 20))


@needs_namespaces
@pytest.mark.parametrize("family", ["AF_INET", "AF_INET6", "AF_UNIX"])
def test_unread_data_counts(family: str) -> None:
    if family == "AF_UNIX":
        pair = "one, two = socket.socketpair()"
    else:
        host = "127.0.0.1" if family == "AF_INET" else "::1"
        pair = (
            f"listener = socket.create_server(('{host}', 0), family=socket.{family})\n"
            "one = socket.create_connection(listener.getsockname()[:2]); two, _ = listener.accept()"
        )
    seen = measured(f"{pair}\nlook('idle')\nsent = fill(one)\nlook('full')\nseen['sent'] = [sent, sent]")
    sent, (held, most) = seen["sent"][0], seen["full"]
    assert seen["idle"][0] < 100_000 + seen["empty"][0]
    assert sent - 60_000 <= held - seen["idle"][0]
    assert held <= most
    assert sent <= 2 * TCP_BUFFER_BYTES


@needs_namespaces
def test_what_a_closed_socket_has_sent_counts_as_long_as_its_peer_is_there() -> None:
    body = "\n".join((
        "one, two = socket.socketpair()", "sent = fill(one)", "one.close()", "look('closed')",
        "two.close()", "look('gone')", "seen['sent'] = [sent, sent]",
    ))  # fmt: skip
    seen = measured(body)
    assert seen["closed"][0] >= seen["sent"][0]
    assert seen["gone"] == seen["empty"]


@needs_namespaces
def test_a_socket_that_lets_go_of_its_address_still_counts() -> None:
    seen = measured(DISCONNECTED)
    assert seen["full"][0] > 100_000
    assert seen["let go"][0] >= seen["full"][0]


@needs_namespaces
@pytest.mark.parametrize("pair", PAIRS, ids=["local", "tcp"])
def test_sockets_of_many_processes_end_with_their_sandboxs_memory(pair: str) -> None:
    resources = Resources(memory_bytes=64 << 20, num_processes=32, disk_bytes=8 << 20)

    async def scenario(backend: Any) -> str:
        sandbox = await backend.create(None, resources)
        await sandbox.files.write("p.py", BOMB.format(pair=pair))
        try:
            result = await sandbox.commands.run("python3 -S p.py", timeout_s=120.0)
        except AgentError as error:
            return error.message
        return result.stdout + result.stderr

    said = with_backend("local", scenario)
    assert "alive" not in said
    assert "memory" in said or "kill" in said


@needs_namespaces
def test_many_idle_and_some_busy_sockets_are_left_alone() -> None:
    code = """
import socket, time
listener = socket.create_server(("127.0.0.1", 0), backlog=200)
held = [socket.create_connection(listener.getsockname()) for _ in range(60)]
held += [listener.accept()[0] for _ in range(60)]
for one in held[:60]:
    one.sendall(bytes(30000))
held += socket.socketpair()
time.sleep(0.5)
print("alive")
"""
    assert run_inside(code).stdout == "alive\n"


@needs_namespaces
def test_a_wish_for_larger_buffers_changes_nothing_and_other_options_do() -> None:
    code = """
import socket
one, two = socket.socketpair()
before = one.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
    one.setsockopt(socket.SOL_SOCKET, option, 4 * before)
print(one.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) == before)
tcp = socket.socket()
tcp.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
tcp.setsockopt(socket.IPPROTO_TCP, 7, 3)
print(tcp.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE), tcp.getsockopt(socket.IPPROTO_TCP, 7))
for protocol in (132, 136, 262):
    try:
        socket.socket(socket.AF_INET, socket.SOCK_STREAM, protocol)
    except OSError as error:
        print(error.errno)
"""
    assert run_inside(code).stdout.split() == ["True", "1", "3", "93", "93", "93"]


@needs_namespaces
def test_a_sandbox_sees_nothing_above_its_own_control_group() -> None:
    async def scenario(backend: Any) -> list[str]:
        sandboxes = [await backend.create() for _ in range(2)]
        program = "sleep 0.3; cut -d: -f3 /proc/self/cgroup"
        return [(await sandbox.commands.run(program)).stdout for sandbox in sandboxes]

    first, second = (set(text.split()) - {"/"} for text in with_backend("local", scenario))
    assert not any(".." in path or "etude" in path or path.count("/") > 1 for path in first | second)
    assert not first & second


@needs_namespaces
def test_a_sandbox_has_its_own_limit_of_pending_signals() -> None:
    code = "import resource; print(resource.getrlimit(resource.RLIMIT_SIGPENDING)[1])"
    assert 0 < int(run_inside(code).stdout) <= 512


def test_a_fork_server_has_a_group_of_its_own_in_version_2(tmp_path: Path) -> None:
    (tmp_path / "server").mkdir()
    members = tmp_path / "server" / "cgroup.procs"
    members.write_text("")
    with subprocess.Popen(["sleep", "60"]) as process:
        ControlGroups({"unified": tmp_path}).admit_fork_server(process.pid)
        process.kill()
    assert members.read_text() == str(process.pid)
