"""Several hosts on one machine: network namespaces on a bridge, each with a sandbox server of its own.

    bridge  ── veth ── host 0: `etude sandbox serve`, its own state directory, token, temporary directory
      ├────── veth ── host 1 ...
      └────── veth ── client: the fleet; a thread of this process that has entered the namespace

Networks, processes and directories are separate; processor, memory and kernel are one. A server is entered
with nsenter, since `ip netns exec` hides the control groups below a fresh /sys.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import pytest

pytest.importorskip("fastapi", reason="needs etude[serve]")
pytest.importorskip("httpx", reason="needs etude[serve]")

import httpx

from etude.kit.leftovers import is_owner_alive, owner_tag
from etude.sandbox.fleet.fleet import Fleet
from etude.sandbox.fleet.host import HostSpec
from etude.sandbox.fleet.hosts import Capacity, Policy
from etude.sandbox.fleet.registry import FleetConfig
from etude.sandbox.fleet.servers import RemoteProbe
from etude.sandbox.remote import RemoteBackend
from etude.sandbox.types import Resources

Result = TypeVar("Result")

PREFIX = "etude-hosts-"
PORT = 8642
START_S = 60.0
DRAIN_S = 5.0
STOP_S = 60.0
RESOURCES = Resources(memory_bytes=128 << 20, disk_bytes=16 << 20, cpus=0.25)
CAPACITY = Capacity(cpus=8, memory_bytes=8 << 30, disk_bytes=4 << 30)
_numbers = itertools.count()
_CLONE_NEWNET = 0x40000000
_GROUPS = ("memory", "pids", "cpu", "unified")
_SERVE = "from etude.cli import main; main()"


def obstacle() -> str | None:
    """Why this machine cannot play several hosts; None if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for program in ("ip", "nsenter"):
        if shutil.which(program) is None:
            return f"needs the program {program}"
    name = f"{PREFIX}{owner_tag()}-trial"
    try:
        ip("netns", "add", name)
        ip("-n", name, "link", "add", "bridge", "type", "bridge")
    except subprocess.CalledProcessError as error:
        return f"no network namespaces with bridges here: {error.stderr.strip()}"
    finally:
        remove_namespace(name)
    return None


def ip(*arguments: str) -> str:
    """What the program ip says. Raises CalledProcessError."""
    done = subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=60)
    return done.stdout


def namespaces(prefix: str) -> list[str]:
    """Names of the network namespaces that begin so."""
    return [row.split()[0] for row in ip("netns", "list").splitlines() if row.startswith(prefix)]


def remove_namespace(name: str) -> None:
    """Ends what runs in a namespace, then removes it; its interfaces go with it."""
    if name not in namespaces(name):
        return
    for pid in ip("netns", "pids", name).split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    ip("netns", "delete", name)


@dataclass(eq=False)
class ServerHost:
    """One host: a namespace with an address, and a server in it that can be killed and started again."""

    name: str
    namespace: str
    address: str
    link: str
    """The bridge's end of its cable, in the namespace `bridge`."""
    bridge: str
    directory: Path
    peers: list[str] = field(default_factory=list)
    process: subprocess.Popen[bytes] | None = None
    tags: list[str] = field(default_factory=list)
    """Owner's tags of its servers, the dead ones too."""
    family: dict[int, int] = field(default_factory=dict)
    """Every process seen below its servers: id -> start time."""

    @property
    def url(self) -> str:
        """The server's address."""
        return f"http://{self.address}:{PORT}"

    @property
    def token(self) -> str:
        """The server's token."""
        return (self.directory / "token").read_text().strip()

    def launch(self) -> None:
        """Starts the server; `wait_until_ready` says when it answers."""
        (self.directory / "tmp").mkdir(exist_ok=True)
        # Its default state directory is the one that is named: whatever it writes is found below.
        environment = {
            **os.environ,
            "TMPDIR": str(self.directory / "tmp"),
            "XDG_STATE_HOME": str(self.directory),
            "OMP_NUM_THREADS": "1",
        }
        command = ["nsenter", f"--net=/run/netns/{self.namespace}", sys.executable, "-c", _SERVE]
        command += ["sandbox", "serve", "--backend", "local", "--host", self.address, "--port", str(PORT)]
        command += ["--state", str(self.directory / "etude"), "--token-file", str(self.directory / "token")]
        for peer in self.peers:
            command += ["--peer", peer]
        with (self.directory / "log").open("ab") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
            )
        started = _start_ticks(self.process.pid)
        self.tags.append(f"{self.process.pid}-{started}")

    async def wait_until_ready(self) -> None:
        """Returns when the server answers. From a namespace that reaches it."""
        assert self.process is not None
        async with httpx.AsyncClient(trust_env=False) as client, asyncio.timeout(START_S):
            while True:
                assert self.process.poll() is None, (self.directory / "log").read_text()
                with contextlib.suppress(httpx.HTTPError):
                    if (await client.get(f"{self.url}/health", timeout=10.0)).status_code == 200:
                        return
                await asyncio.sleep(0.02)

    def remember(self) -> None:
        """Notes every process that the server has below it, or in its control groups."""
        if self.process is not None and self.process.poll() is None:
            self.family |= _descendants(self.process.pid)
        for group in self.groups():
            for file in group.glob("**/cgroup.procs"):
                for pid in map(int, file.read_text().split()):
                    if (ticks := _start_ticks(pid)) is not None:
                        self.family[pid] = ticks

    def groups(self) -> list[Path]:
        """Control groups of its servers."""
        root = Path("/sys/fs/cgroup")
        return [
            group for kind in _GROUPS for tag in self.tags for group in (root / kind).glob(f"etude-{tag}-*")
        ]

    def survivors(self) -> list[str]:
        """Processes of its servers that still run."""
        alive = [pid for pid, ticks in self.family.items() if _start_ticks(pid) == ticks]
        return [f"{pid}: {command_line(pid)}" for pid in alive]

    def litter(self) -> list[str]:
        """What its servers left on disk, but for token, logs and empty directories."""
        kept = {self.directory / name for name in ("token", "log", "etude/network.jsonl")}
        return [
            str(path.relative_to(self.directory))
            for path in self.directory.rglob("*")
            if path not in kept
            and not (path.is_dir() and path.name in ("etude", "moving", "spool", "snapshots", "tmp"))
        ]

    def clear(self) -> None:
        """Its servers have ended: what comes next has nothing of them."""
        self.tags.clear()
        self.family.clear()
        shutil.rmtree(self.directory)
        self.directory.mkdir()

    def kill(self) -> None:
        """As a crash does: no signal handler runs."""
        assert self.process is not None
        self.remember()
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        """Asks the server to end, a second time if it waits for its sandboxes. Raises TimeoutExpired."""
        process, self.process = self.process, None
        if process is None:
            return
        self.family |= _descendants(process.pid) if process.poll() is None else {}
        process.terminate()
        try:
            process.wait(DRAIN_S)
        except subprocess.TimeoutExpired:
            process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise

    def cut(self) -> None:
        """Pulls the cable at the bridge: what the host or its clients send is lost, nobody is told."""
        ip("-n", self.bridge, "link", "set", self.link, "down")

    def mend(self) -> None:
        """Plugs the cable in again."""
        ip("-n", self.bridge, "link", "set", self.link, "up")


@dataclass(frozen=True)
class Network:
    """Hosts, and a client that reaches them."""

    hosts: list[ServerHost]
    client: str
    """Namespace of the client."""

    def run(self, scenario: Callable[[], Awaitable[Result]]) -> Result:
        """Runs a scenario in an event loop of a thread that is on the client's network."""

        async def awaited() -> Result:
            return await scenario()

        with ThreadPoolExecutor(1, "client", enter_namespace, (self.client,)) as executor:
            return executor.submit(lambda: asyncio.run(awaited())).result()


def enter_namespace(namespace: str) -> None:
    """Moves this thread, and the threads and processes that it starts, into a network namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}") as file:  # noqa: PTH123 - a namespace is no file to read
        if libc.setns(file.fileno(), _CLONE_NEWNET) != 0:
            code = ctypes.get_errno()
            raise OSError(code, f"setns: {os.strerror(code)}")


@contextlib.contextmanager
def network(num_hosts: int = 4) -> Iterator[Network]:
    """Namespaces of hosts and a client on one bridge, removed at the end with what runs in them.

    What a killed former run left is removed first.
    """
    for name in namespaces(PREFIX):
        if not is_owner_alive(name.removeprefix(PREFIX)):
            remove_namespace(name)
    root = Path(tempfile.gettempdir())
    for left in root.glob(f"{PREFIX}*"):
        if not is_owner_alive(left.name.removeprefix(PREFIX)):
            shutil.rmtree(left)
    base = f"{PREFIX}{owner_tag()}-{next(_numbers)}"
    directory = Path(tempfile.mkdtemp(prefix=f"{base}-", dir=root))
    hosts: list[ServerHost] = []
    try:
        ip("netns", "add", f"{base}-bridge")
        ip("-n", f"{base}-bridge", "link", "add", "bridge", "type", "bridge")
        ip("-n", f"{base}-bridge", "link", "set", "bridge", "up")
        for number in range(num_hosts):
            name = f"host-{number}"
            address = _join(base, name, number + 1)
            (directory / name).mkdir()
            link = f"link{number + 1}"
            hosts.append(
                ServerHost(name, f"{base}-{name}", address, link, f"{base}-bridge", directory / name)
            )
        for host in hosts:
            host.peers = [other.url for other in hosts if other is not host]
        _join(base, "client", num_hosts + 1)
        yield Network(hosts, f"{base}-client")
    finally:
        with contextlib.ExitStack() as stack:
            stack.callback(shutil.rmtree, directory)
            for part in ("bridge", "client", *(host.name for host in hosts)):
                stack.callback(remove_namespace, f"{base}-{part}")
            for host in hosts:
                stack.callback(host.stop)


def _join(base: str, name: str, number: int) -> str:
    """Makes a namespace with a cable to the bridge; its address."""
    namespace, bridge, address = f"{base}-{name}", f"{base}-bridge", f"10.9.0.{number}"
    ip("netns", "add", namespace)
    end = ["peer", "name", f"link{number}", "netns", bridge]
    ip("link", "add", "eth0", "netns", namespace, "type", "veth", *end)
    ip("-n", bridge, "link", "set", f"link{number}", "master", "bridge")
    ip("-n", bridge, "link", "set", f"link{number}", "up")
    ip("-n", namespace, "addr", "add", f"{address}/24", "dev", "eth0")
    ip("-n", namespace, "link", "set", "eth0", "up")
    ip("-n", namespace, "link", "set", "lo", "up")
    return address


@contextlib.asynccontextmanager
async def fleet_over(hosts: list[ServerHost], config: FleetConfig) -> AsyncIterator[Fleet]:
    """Servers on all hosts, started, and a fleet over them; closed, and the servers stopped, at the end."""
    for host in hosts:
        host.launch()
    fleet: Fleet | None = None
    try:
        await asyncio.gather(*(host.wait_until_ready() for host in hosts))
        backends = {host.name: RemoteBackend(host.url, host.token) for host in hosts}
        specs = {
            name: HostSpec(backend, CAPACITY, RemoteProbe(backend)) for name, backend in backends.items()
        }
        fleet = Fleet(specs, config)
        yield fleet
    finally:
        for host in hosts:
            host.remember()
        try:
            if fleet is not None:
                await fleet.close()
        finally:
            await asyncio.gather(*(asyncio.to_thread(host.stop) for host in hosts))


def fleet_config(heartbeat_timeout_s: float, heartbeat_s: float = 1.0) -> FleetConfig:
    """Of a machine whose other work counts as every host's: that must not close them all."""
    policy = Policy(max_pressure=1e6, max_cpu_pressure=1e6)
    return FleetConfig(heartbeat_s, heartbeat_timeout_s, policy=policy)


# Processes


def _stat(pid: int) -> list[bytes] | None:
    """Fields of /proc/PID/stat from the state on; None for what is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else fields


def _start_ticks(pid: int) -> int | None:
    fields = _stat(pid)
    return None if fields is None else int(fields[19])


def _descendants(pid: int) -> dict[int, int]:
    """A process and all below it: id -> start time."""
    rows = {
        int(entry.name): fields
        for entry in Path("/proc").iterdir()
        if entry.name.isdigit() and (fields := _stat(int(entry.name))) is not None
    }
    found = {pid}
    grew = True
    while grew:
        more = {child for child, fields in rows.items() if int(fields[1]) in found} - found
        found |= more
        grew = bool(more)
    return {member: int(rows[member][19]) for member in found if member in rows}


def command_line(pid: int) -> str:
    """What a process was started with; empty once it has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return ""
