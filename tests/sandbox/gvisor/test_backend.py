"""The real runsc: starts, isolation, limits, checkpoints with memory and connections, forks, its end."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from etude.errors import SandboxError
from etude.sandbox.errors import DiskFullError, SandboxKilledByAgentError, SandboxStateError, Unsupported
from etude.sandbox.gvisor.backend import GvisorBackend
from etude.sandbox.machine import MachineSandbox
from etude.sandbox.template import Template
from etude.sandbox.types import Network, Resources
from tests.sandbox.gvisor.gvisors import leftovers, needs_runsc, with_gvisor, with_sandbox

pytestmark = [pytest.mark.foreign, needs_runsc]
SERVER = """
import socket
state = bytearray(b"x" * (8 << 20))
inner = socket.create_server(("127.0.0.1", 0))
client = socket.create_connection(inner.getsockname())
kept, _ = inner.accept()
listener = socket.create_server(("127.0.0.1", 5555))
count = 0
while True:
    asker, _ = listener.accept()
    count += 1
    client.sendall(b"%d" % count)
    asker.sendall(b"%s %d" % (kept.recv(100), len(state)))
    asker.close()
"""
ASK = "import socket; print(socket.create_connection(('127.0.0.1', 5555)).recv(100).decode())"
FILES: dict[str, bytes | str] = {
    "server.py": SERVER,
    "ask.py": ASK,
    "t.py": "def test_a():\n    assert 1 + 1 == 2\n\ndef test_b():\n    assert 3 == 4\n",
}


async def ask(sandbox: MachineSandbox) -> str:
    """What the background server answers over its one old connection: how often it was asked, its memory."""
    done = await sandbox.commands.run("python3 ask.py")
    return done.stdout.strip() or done.stderr


async def serving(sandbox: MachineSandbox) -> None:
    """Starts the server and waits until it listens."""
    await sandbox.commands.start("python3 server.py")
    async with asyncio.timeout(60.0):
        while (await ask(sandbox)).startswith("Traceback"):
            pass


def eventually(holds: Callable[[], bool], timeout_s: float = 60.0) -> bool:
    end_s = time.monotonic() + timeout_s
    while not holds() and time.monotonic() < end_s:
        time.sleep(0.02)
    return holds()


def test_commands_tests_and_diffs_work() -> None:
    async def scenario(s: MachineSandbox) -> None:
        report = await s.run_tests(["t.py"], 60.0)
        assert report.passed == ("test_a",)
        assert [(failure.name, failure.message) for failure in report.failed] == [("test_b", "3 != 4")]
        await s.files.write("new/x", "1")
        await s.files.remove("t.py")
        assert (await s.commands.run("echo 2 >> new/x; mv new/x new/y; stat -c %U new/y")).stdout == "agent\n"
        assert await s.diff() == {"new/y": b"12\n", "t.py": None}
        assert (await s.commands.run("exit 3")).exit_code == 3
        assert (await s.commands.run("sleep 60", timeout_s=0.3)).timed_out

    with_sandbox(scenario, FILES)


@pytest.mark.slow
def test_a_large_template_crosses_whole() -> None:
    files: dict[str, bytes | str] = {f"d{i % 7}/e/f{i}": os.urandom(9000) for i in range(900)}

    async def scenario(s: MachineSandbox) -> None:
        found = await s.commands.run("find . -type f -user agent | wc -l; find . -type d -user agent | wc -l")
        assert found.stdout.split() == ["900", "15"]
        assert await s.diff() == {}
        assert await s.files.read("d3/e/f3") == files["d3/e/f3"]

    with_sandbox(scenario, files)


def uid_map(backend: GvisorBackend) -> list[str]:
    """(id inside, id on the host, how many) of the only container's gVisor kernel."""
    (pid,) = [int(path.read_text()) for path in backend.state.glob("gvisor/*/gvisor-*/pid")]
    return Path(f"/proc/{pid}/uid_map").read_text().split()


ISOLATION = [
    ("id -u; id -g", "1000\n1000\n"),
    ("ls -d /home /root/.ssh /root/.cache /var/log /work /sys/fs/cgroup/memory 2>/dev/null | wc -l", "0\n"),
    ("ls /proc | grep -c '^[0-9]*$' | xargs test 10 -gt && echo few", "few\n"),
    ("kill -9 1 2>/dev/null; echo $?", "1\n"),
    ("cat /proc/1/mem 2>/dev/null | wc -c", "0\n"),
    ("touch /usr/x /etc/x /opt/etude/x /x /var/lib/etude/base/x 2>/dev/null; echo $?", "1\n"),
    ("head -c 9 /dev/zero >/proc/1/fd/2; readlink /proc/1/fd/1 /proc/1/fd/2", "/dev/null\n/dev/null\n"),
    ("unshare -r true 2>/dev/null; echo $?", "1\n"),
    ("ulimit -n; ulimit -Hn; ulimit -p", "256\n256\n64\n"),
    ("grep CapEff /proc/self/status", "CapEff:\t0000000000000000\n"),
    ("ls -l /bin >/dev/null; echo $?", "0\n"),
    ("python3 -c \"import socket; print(socket.socket().connect_ex(('192.0.2.1', 80)))\"", "113\n"),
    ('python3 -c "import threading as t; x = t.Thread(target=print); x.start(); x.join()"', "\n"),
]


def test_the_host_is_out_of_reach() -> None:
    async def scenario(s: MachineSandbox) -> list[tuple[str, str]]:
        return [(command, (await s.commands.run(command)).stdout) for command, _ in ISOLATION]

    assert with_sandbox(scenario, FILES) == ISOLATION


def test_no_process_of_a_sandbox_is_root_to_the_host() -> None:
    async def scenario(backend: GvisorBackend) -> list[str]:
        await backend.create(Template(FILES))
        return uid_map(backend)

    inside, host, count = with_gvisor(scenario)
    # A map of one id: the sandbox's root is that user to the host.
    assert (inside, count) == ("0", "1")
    assert host != "0"


@pytest.mark.slow
def test_disk_files_and_processes_are_bounded() -> None:
    resources = Resources(disk_bytes=8 << 20, file_bytes=4 << 20, num_processes=12)

    async def scenario(s: MachineSandbox) -> None:
        with pytest.raises(DiskFullError):
            await s.files.write("big", bytes(5 << 20))
        await s.files.remove("big")
        filled = await s.commands.run("for i in 1 2 3; do head -c 3m /dev/zero > f$i || echo full; done")
        assert filled.stdout == "full\n"
        await s.commands.run("rm f*")
        bomb = await s.commands.run("for i in $(seq 30); do sleep 60 & done; echo out", timeout_s=60)
        assert "fork" in bomb.stderr
        assert (await s.commands.run("echo again")).stdout == "again\n"

    with_sandbox(scenario, FILES, resources)


def test_memory_is_bounded_and_the_sandbox_goes_on() -> None:
    async def scenario(s: MachineSandbox) -> None:
        hungry = "python3 -c 'import time; a = bytearray(b\"x\") * (400 << 20); time.sleep(60)'"
        assert (await s.commands.run(hungry, timeout_s=120)).exit_code == -signal.SIGKILL
        six = "for i in 1 2 3 4 5 6; do python3 -c pass & done; wait; echo done"
        many = await s.commands.run(six, timeout_s=60)
        assert many.stdout == "done\n"

    with_sandbox(scenario, FILES, Resources(memory_bytes=128 << 20))


MESSAGES = """
import ctypes
libc, message = ctypes.CDLL(None), ctypes.create_string_buffer(b"x" * 8200)
while True:
    queue = libc.msgget(0, 0o1600)
    while libc.msgsnd(queue, message, 8192, 0o4000) == 0:
        pass
"""


@pytest.mark.slow
def test_what_the_kernel_holds_for_the_agent_is_bounded_too() -> None:
    async def scenario(s: MachineSandbox) -> None:
        try:
            filling = await s.commands.run("python3 messages.py", timeout_s=200)
        except SandboxKilledByAgentError:
            return  # it was quicker than who looks: then its whole sandbox ends, and nothing of the host's
        assert (filling.exit_code, filling.timed_out) == (-signal.SIGKILL, False)

    with_sandbox(scenario, {"messages.py": MESSAGES}, Resources(memory_bytes=64 << 20, disk_bytes=8 << 20))


def test_processor_time_is_bounded_for_what_a_command_starts_too() -> None:
    async def scenario(s: MachineSandbox) -> None:
        burn = "python3 -c 'while True: pass'"
        burned = await s.commands.run(f"{burn}; echo $?; {burn}; echo $?", timeout_s=120)
        assert (burned.stdout, burned.timed_out) == ("137\n137\n", False)
        assert burned.duration_s < 60.0

    with_sandbox(scenario, FILES, Resources(cpu_s=1))


@pytest.mark.slow
def test_a_sandbox_whose_files_alone_exceed_its_memory_is_ended() -> None:
    async def scenario(s: MachineSandbox) -> None:
        fill = "for d in /tmp /workspace /dev/shm; do head -c 15m /dev/zero >$d/full; done"
        await s.commands.run(fill)
        with pytest.raises(SandboxKilledByAgentError, match="files exceed"):
            for _ in range(300):
                await s.commands.run("sleep 0.2")
        assert (await s.get_info()).state == "lost"

    with_sandbox(scenario, FILES, Resources(memory_bytes=4 << 20, disk_bytes=16 << 20))


def test_memory_processes_and_connections_survive_three_cycles() -> None:
    async def scenario(s: MachineSandbox) -> None:
        await serving(s)
        before = int((await ask(s)).split()[0])
        for cycle in range(1, 4):
            await s.pause()
            with pytest.raises(SandboxStateError):
                await s.files.read("t.py")
            await s.resume()
            assert await ask(s) == f"{before + cycle} {8 << 20}"
            await s.files.write(f"cycle-{cycle}", "x")
        assert len(await s.diff()) == 3
        assert [process.running for process in await s.commands.list()] == [True]

    with_sandbox(scenario, FILES)


def test_forks_go_their_own_ways_with_names_and_entropy_of_their_own() -> None:
    async def scenario(s: MachineSandbox) -> None:
        await serving(s)
        before = int((await ask(s)).split()[0])
        copies = [copy for copy in await s.fork(4) if isinstance(copy, MachineSandbox)]
        assert len(copies) == 4
        for copy in copies:
            assert await ask(copy) == f"{before + 1} {8 << 20}"
        assert await ask(s) == f"{before + 1} {8 << 20}"
        identities = set[str]()
        for sandbox in (s, *copies):
            told = await sandbox.commands.run(
                "hostname; cat /etc/machine-id; head -c 16 /dev/urandom | base64"
            )
            identities.update(told.stdout.split())
        assert len(identities) == 15
        await copies[0].files.write("only", "here")
        assert await copies[1].diff() == {}

    with_sandbox(scenario, FILES)


@pytest.mark.slow
def test_a_snapshot_outlives_its_sandbox_and_the_clock_goes_on() -> None:
    async def scenario(backend: GvisorBackend) -> None:
        source = await backend.create(Template(FILES), Resources(memory_bytes=256 << 20), metadata={"a": "b"})
        await source.files.write("t.py", "changed")
        snapshot = await source.create_snapshot(name="kept")
        await source.kill()
        copy = await backend.create(snapshot=snapshot.id)
        assert await copy.diff() == {"t.py": b"changed"}
        info = await copy.get_info()
        assert (info.parent, info.resources.memory_bytes, info.metadata) == (
            snapshot.id,
            256 << 20,
            {"a": "b"},
        )
        before_s = time.time()
        told_s = float((await copy.commands.run("date +%s.%N")).stdout)
        assert before_s - 2.0 < told_s < time.time() + 2.0
        assert [kept.name for kept in await backend.list_snapshots()] == ["kept"]

    with_gvisor(scenario)


@pytest.mark.slow
def test_a_command_that_runs_during_a_snapshot_is_answered_once_and_not_mistaken() -> None:
    async def scenario(s: MachineSandbox) -> None:
        running = asyncio.create_task(s.commands.run("sleep 1; echo slow"))
        await asyncio.sleep(0.1)
        (copy,) = await s.fork()
        assert isinstance(copy, MachineSandbox)
        for _ in range(20):
            assert (await copy.commands.run("echo quick")).stdout == "quick\n"
            await asyncio.sleep(0.05)
        assert (await running).stdout == "slow\n"

    with_sandbox(scenario, FILES)


PROXIED = """
import os, socket, urllib.parse
proxy = urllib.parse.urlsplit(os.environ["HTTPS_PROXY"])
line = socket.create_connection((proxy.hostname, proxy.port))
line.sendall(b"CONNECT other.example.org:443 HTTP/1.1\\r\\nHost: other.example.org:443\\r\\n\\r\\n")
print(line.recv(1000).split()[1].decode())
"""


def test_the_way_out_is_the_egress_proxy_before_and_after_a_copy() -> None:
    async def scenario(backend: GvisorBackend) -> list[str]:
        network = Network(("allowed.example.org:443",))
        source = await backend.create(Template({"ask.py": PROXIED}), network=network)
        (copy,) = await source.fork()
        assert isinstance(copy, MachineSandbox)
        return [(await sandbox.commands.run("python3 ask.py")).stdout for sandbox in (source, copy)]

    assert with_gvisor(scenario) == ["403\n", "403\n"]


def test_a_snapshot_of_files_alone_is_refused() -> None:
    async def scenario(s: MachineSandbox) -> None:
        with pytest.raises(Unsupported, match="local"):
            await s.create_snapshot("filesystem")
        with pytest.raises(Unsupported, match="local"):
            await s.pause("filesystem")

    with_sandbox(scenario)


@pytest.mark.slow
def test_kill_leaves_no_process_directory_mount_or_group() -> None:
    async def scenario(backend: GvisorBackend) -> None:
        sandboxes = await asyncio.gather(*(backend.create(Template(FILES)) for _ in range(2)))
        await sandboxes[0].commands.start("setsid sleep 9999")
        for sandbox in sandboxes:
            await sandbox.kill()
            assert not list(backend.state.glob(f"gvisor/*/{sandbox.id}-*"))
        assert not [found for found in leftovers(backend.state) if "runsc" in found]

    with_gvisor(scenario)


@pytest.mark.slow
def test_a_killed_kernel_is_a_lost_sandbox() -> None:
    async def scenario(backend: GvisorBackend) -> None:
        sandbox = await backend.create(Template(FILES))
        (pid,) = [int(path.read_text()) for path in backend.state.glob(f"gvisor/*/{sandbox.id}-*/pid")]
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(SandboxError):
            await sandbox.commands.run("sleep 5")
        await sandbox.kill()

    with_gvisor(scenario)


OWNER = """
import asyncio, sys
from pathlib import Path
from etude.sandbox.gvisor.backend import GvisorBackend
from etude.sandbox.template import Template

async def main():
    backend = GvisorBackend(Path(sys.argv[1]))
    for _ in range(2):
        sandbox = await backend.create(Template({"a": "a"}))
        await sandbox.commands.start("sleep 999")
    print("ready", flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def test_an_owner_that_is_killed_leaves_no_process_and_its_files_to_the_next(tmp_path: Path) -> None:
    state = tmp_path / "state"
    command = [sys.executable, "-c", OWNER, str(state)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        try:
            assert owner.stdout.readline() == b"ready\n"
        finally:
            owner.kill()
            owner.wait()
    assert eventually(
        lambda: not [found for found in leftovers(state) if "runsc" in found or "guard" in found]
    )

    async def next_owner() -> None:
        backend = GvisorBackend(state)
        await (await backend.create()).kill()
        await backend.close()

    asyncio.run(next_owner())
    assert leftovers(state) == []


PLAIN_USER = """
import asyncio, sys
from pathlib import Path
from etude.sandbox.gvisor.backend import GvisorBackend
from etude.sandbox.template import Template

async def main():
    backend = GvisorBackend(Path(sys.argv[1]))
    sandbox = await backend.create(Template({"t.py": "def test_a(): pass"}))
    await sandbox.commands.run("sleep 999 & echo kept > kept; until pgrep sleep; do :; done")
    await sandbox.pause()
    await sandbox.resume()
    (copy,) = await sandbox.fork()
    told = await copy.commands.run("id -u; cat kept; pgrep -c sleep")
    report = await copy.run_tests(["t.py"], 60.0)
    print(*told.stdout.split(), report.passed)
    await backend.close()

asyncio.run(main())
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="every other test runs as a plain user already")
def test_a_plain_user_has_all_of_it_too(tmp_path: Path) -> None:
    interpreter, root = "/usr/bin/python3", Path(__file__).parents[3]
    libraries = [Path(path) for path in sys.path if path.endswith("site-packages")]
    paths = [root / "src", *libraries]
    if not Path(interpreter).exists() or not all(_open_to_all(path) for path in paths):
        pytest.skip("no Python 3.11 or no sources that a plain user may read")
    command = [interpreter, "-B", "-c", PLAIN_USER]
    env = {"PYTHONPATH": ":".join(map(str, paths)), "PATH": "/usr/bin:/bin"}
    probe = subprocess.run(
        [interpreter, "-c", "import blake3, pydantic"], env=env, capture_output=True, check=False
    )
    if probe.returncode != 0:
        pytest.skip("the system's Python cannot use this environment's libraries")
    state = Path("/tmp", f"etude-gvisor-plain-{os.getpid()}")
    state.mkdir()
    os.chown(state, 65534, 65534)
    try:
        done = subprocess.run(
            [*command, str(state)],
            env=env,
            user=65534,
            group=65534,
            extra_groups=[],
            cwd="/",
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.stdout == "1000 kept 1 ('test_a',)\n", done.stderr
        assert leftovers(state) == []
    finally:
        subprocess.run(["rm", "-rf", str(state)], check=True)


def _open_to_all(path: Path) -> bool:
    return all(folder.stat().st_mode & 0o005 == 0o005 for folder in (path, *path.parents))


def test_capabilities_say_what_is_refused() -> None:
    able = dataclasses.asdict(GvisorBackend(Path("/nonexistent")).capabilities())
    assert able["snapshots"] == able["pause"] == frozenset({"full"})
    assert able["fork"] == "full"
    assert able["images"] is False
