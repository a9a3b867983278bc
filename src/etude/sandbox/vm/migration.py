"""Moves a running guest to another host that shares no disk with this one.

    source                                          target
    offer: image, hardware, versions          ->    prepare: an empty machine, two listening addresses
                                              <-    ticket: where disk and memory go
    mirror the disk (NBD) until it is in step ->    takes writes of its own disk
    hold the program inside
    memory by pre-copy, guest still runs      ->
    stop; last of disk, last of memory        ->    whole
                                                    adopt: runs, greets the program

The guest stands still only for the last line but one. On any failure the target leaves nothing behind, and
only then the source's guest goes on. What travels is neither encrypted nor authenticated: between hosts, on a
network of your own only.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import shutil
import socket
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from etude.errors import SandboxError
from etude.sandbox.vm.qemu import Hardware
from etude.sandbox.vm.qmp import Event, Qmp, QmpError
from etude.sandbox.vm.state import Machine

MIRROR_S = 600.0
MEMORY_S = 600.0
ADOPT_S = 60.0
CONNECT_S = 10.0
PREPARED_S = 300.0
"""How long a target waits for a machine that was announced."""
_DOWNTIME_MS = 100
_BANDWIDTH_BYTES = 1 << 30
_EXPORT, _JOB, _FAR = "own", "move", "far"

Step = Callable[[str], Awaitable[None]]


@dataclass(frozen=True)
class Offer:
    """What a machine needs where it goes."""

    image: str
    """Digest of the guest image."""
    hardware: Hardware
    version: str
    """Of the backend and of QEMU: both ends must be of the same one."""
    machine: Mapping[str, str]
    """Processor, kernel: under KVM they must be the same."""


@dataclass(frozen=True)
class Ticket:
    """Where a moving machine is expected. Plain data: `dataclasses.asdict` and `Ticket(**...)` carry it."""

    id: str
    disk: Mapping[str, str]
    """Address of the disk's NBD export: `type` unix and `path`, or `type` inet, `host` and `port`."""
    memory: Mapping[str, str]
    """Address for the memory, likewise."""


class Incoming:
    """The target's end of one move: a machine that waits for its disk and its memory."""

    def __init__(self, machine: Machine, host: str | None) -> None:
        self.machine = machine
        self.ticket: Ticket | None = None
        self._host = host
        self._directory: Path | None = None
        self._since = 0
        self._accepting: asyncio.Task[None] | None = None

    async def open(self) -> Ticket:
        """Listens for disk and memory. Raises SandboxError; `close` is still due."""
        if self._host is None:
            self._directory = Path(tempfile.mkdtemp(prefix="etude-vm-"))
        disk, disk_address = self._listen("disk")
        memory, memory_address = self._listen("memory")
        qmp = self.machine.qemu.qmp
        with disk:
            await qmp.execute("getfd", {"fdname": "disk"}, descriptor=disk.fileno())
        await qmp.execute("nbd-server-start", {"addr": {"type": "fd", "data": {"str": "disk"}}})
        await qmp.execute(
            "block-export-add",
            {"type": "nbd", "id": _EXPORT, "node-name": "own", "name": _EXPORT, "writable": True},
        )
        await self.machine.qemu.report_migration()
        self._since = qmp.mark
        memory.setblocking(False)
        self._accepting = asyncio.ensure_future(self._accept(memory, qmp))
        self.ticket = Ticket(secrets.token_hex(8), disk_address, memory_address)
        return self.ticket

    async def finish(self) -> None:
        """Waits until the whole machine is here; it stands still. Raises SandboxError."""
        if self._accepting is not None:
            async with asyncio.timeout(ADOPT_S):
                await self._accepting
        await self.machine.qemu.migrated(self._since, ADOPT_S)
        await self.machine.qemu.execute("nbd-server-stop")
        self._remove_sockets()

    async def close(self) -> None:
        """Gives up: ends the machine, removes all that was made for it. Idempotent."""
        if self._accepting is not None:
            self._accepting.cancel()
            await asyncio.gather(self._accepting, return_exceptions=True)
        await self.machine.close()
        self._remove_sockets()

    async def _accept(self, listener: socket.socket, qmp: Qmp) -> None:
        """Hands the first connection to QEMU, which reads the machine's memory from it."""
        with listener:
            connection, _ = await asyncio.get_running_loop().sock_accept(listener)
        with connection:
            connection.setblocking(True)
            await qmp.execute("getfd", {"fdname": "memory"}, descriptor=connection.fileno())
        await qmp.execute("migrate-incoming", {"uri": "fd:memory"})

    def _listen(self, name: str) -> tuple[socket.socket, dict[str, str]]:
        if self._directory is not None:
            listener = socket.socket(socket.AF_UNIX)
            path = str(self._directory / name)
            listener.bind(path)
            listener.listen(4)
            return listener, {"type": "unix", "path": path}
        assert self._host is not None, "without a directory there is a host"
        try:
            listener = socket.create_server((self._host, 0))
        except OSError as error:
            raise SandboxError(
                f"cannot listen for a migration: {error}", field="migration_host", received=self._host
            ) from error
        return listener, {"type": "inet", "host": self._host, "port": str(listener.getsockname()[1])}

    def _remove_sockets(self) -> None:
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)


async def mirror_disk(machine: Machine, ticket: Ticket) -> None:
    """Brings the target's disk in step with this one's, and keeps it so. Raises SandboxError."""
    qemu = machine.qemu
    await _lend_connection(machine, ticket.disk, "disk")
    server = {"type": "fd", "str": "disk"}
    await qemu.qmp.execute(
        "blockdev-add", {"driver": "nbd", "node-name": _FAR, "export": _EXPORT, "server": server}
    )
    since = qemu.qmp.mark
    await qemu.qmp.execute(
        "blockdev-mirror",
        {"job-id": _JOB, "device": "own", "target": _FAR, "sync": "full"},
    )
    await _job_event(machine, since, "BLOCK_JOB_READY", MIRROR_S)


async def send_memory(machine: Machine, ticket: Ticket, step: Step) -> None:
    """Sends the memory of a held machine, stops it, sends the rest. Raises SandboxError."""
    qemu = machine.qemu
    names = ("events", "pause-before-switchover")
    await qemu.execute(
        "migrate-set-capabilities", capabilities=[{"capability": name, "state": True} for name in names]
    )
    await qemu.execute("migrate-set-parameters", downtime_limit=_DOWNTIME_MS, max_bandwidth=_BANDWIDTH_BYTES)
    since = qemu.qmp.mark
    await _lend_connection(machine, ticket.memory, "memory")
    await qemu.execute("migrate", uri="fd:memory")
    await qemu.migrated(since, MEMORY_S, "pre-switchover")
    await step("migrate: stopped")
    # The guest stands still now: with the end of the mirror its disk is whole over there.
    await qemu.execute("block-job-cancel", device=_JOB)
    await _job_event(machine, since, "BLOCK_JOB_COMPLETED", MIRROR_S)
    await qemu.execute("blockdev-del", node_name=_FAR)
    await qemu.execute("migrate-continue", state="pre-switchover")
    await qemu.migrated(since, MEMORY_S)
    await step("migrate: sent")


async def _lend_connection(machine: Machine, address: Mapping[str, str], name: str) -> None:
    """Connects to a target and gives the socket to QEMU, which cannot reach the address itself."""
    is_unix = address.get("type") == "unix"
    sock = socket.socket(socket.AF_UNIX if is_unix else socket.AF_INET)
    with sock:
        sock.setblocking(False)
        try:
            place = address["path"] if is_unix else (address["host"], int(address["port"]))
            async with asyncio.timeout(CONNECT_S):
                await asyncio.get_running_loop().sock_connect(sock, place)
        except (OSError, TimeoutError, KeyError, ValueError) as error:
            raise SandboxError(
                f"the target is not reached: {error}", field="target", received=dict(address)
            ) from error
        sock.setblocking(True)
        await machine.qemu.qmp.execute("getfd", {"fdname": name}, descriptor=sock.fileno())


async def take_back(machine: Machine) -> None:
    """After a move that failed: the source's machine is whole and its own again; it stands still or runs."""
    qmp = machine.qemu.qmp
    with contextlib.suppress(QmpError):
        await qmp.execute("migrate_cancel")
    for _ in range(600):
        status = (await qmp.execute("query-migrate")).get("status", "none")
        if status not in ("setup", "active", "cancelling", "device", "pre-switchover", "wait-unplug"):
            break
        await asyncio.sleep(0.02)
    with contextlib.suppress(QmpError):
        await qmp.execute("block-job-cancel", {"device": _JOB, "force": True})
    for _ in range(600):
        try:
            await qmp.execute("blockdev-del", {"node-name": _FAR})
            break
        except QmpError:
            nodes = {node["node-name"] for node in await qmp.execute("query-named-block-nodes")}
            if _FAR not in nodes:
                break
            await asyncio.sleep(0.02)


async def _job_event(machine: Machine, since: int, name: str, deadline_s: float) -> None:
    ends = {name, "BLOCK_JOB_COMPLETED", "BLOCK_JOB_CANCELLED"}

    def matches(event: Event) -> bool:
        return event["event"] in ends and event["data"].get("device") == _JOB

    event = await machine.qemu.qmp.event(matches, deadline_s, since, name)
    error: Any = event["data"].get("error")
    if event["event"] != name or error is not None:
        raise SandboxError(
            f"the disk was not copied: {error or event['event']}", field="sandbox", received=machine.name
        )
