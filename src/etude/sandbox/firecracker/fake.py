"""A Firecracker without KVM: it speaks the real API and runs the guest's programs in a chamber.

For tests of everything above Firecracker; a program of its own, started as the real one is (`install` makes
`firecracker` and `jailer`). API, error bodies, ordering rules, the vsock handshake, the loss of vsock
connections at a snapshot, sparse diffs and the page-fault handshake are those of the real one. A guest's
"memory" is an archive of its files (see `fake_memory`): **files survive a snapshot here, processes do not**.

The root disk is expected to be a tar archive of `guest_files()`; the scratch disk is carried along unread.
"""

# ruff: noqa: ASYNC240
# A process of its own that serves one request at a time: blocking file operations hold up nobody.
from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import json
import re
import shutil
import signal
import sys
import tarfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from etude.sandbox.docker.fake_images import unpack_tree
from etude.sandbox.docker.http import pack_head, read_body, read_head
from etude.sandbox.firecracker.fake_guest import FakeGuest, FakeVsock
from etude.sandbox.firecracker.fake_memory import read_archive, to_pages, write_memory

VERSION = "1.13.1"
_AFTER_START = "The requested operation is not supported after starting the microVM."
_BEFORE_START = "The requested operation is not supported before starting the microVM."
_NOT_ALLOWED = "Loading a microVM snapshot not allowed after configuring boot-specific resources."
_PAUSE_FIRST = "Cannot create snapshot: save/restore unavailable while running"
_BAD_BODY = "An error occurred when deserializing the json body of a request"
_MIB = 1 << 20
_LAUNCH = """#!{python} -ISB
import sys
sys.path.insert(0, {source!r})
from etude.sandbox.firecracker.{module} import main
main(sys.argv[1:])
"""
_FIELDS: dict[str, set[str]] = {
    "/machine-config": {
        "vcpu_count", "mem_size_mib", "smt", "track_dirty_pages", "cpu_template", "huge_pages"
    },
    "/boot-source": {"kernel_image_path", "boot_args", "initrd_path"},
    "/vsock": {"guest_cid", "uds_path", "vsock_id"},
    "/entropy": {"rate_limiter"},
    "/balloon": {"amount_mib", "deflate_on_oom", "stats_polling_interval_s"},
    "/actions": {"action_type"},
    "/vm": {"state"},
    "/snapshot/create": {"snapshot_type", "snapshot_path", "mem_file_path"},
    "/snapshot/load": {
        "snapshot_path", "mem_file_path", "mem_backend", "enable_diff_snapshots", "track_dirty_pages",
        "resume_vm", "network_overrides",
    },
}  # fmt: skip
_DRIVE_FIELDS = {
    "drive_id", "path_on_host", "is_root_device", "is_read_only", "cache_type", "partuuid", "io_engine"
}  # fmt: skip


class Fault(Exception):
    """Firecracker answers with status 400 and this `fault_message`."""


def install(directory: Path) -> tuple[Path, Path]:
    """Writes the programs `firecracker` and `jailer` of the fake: their paths."""
    source = str(Path(__file__).resolve().parents[3])
    paths: list[Path] = []
    for name, module in (("firecracker", "fake"), ("jailer", "fake_jailer")):
        path = directory / name
        path.write_text(_LAUNCH.format(python=sys.executable, source=source, module=module), encoding="utf-8")
        path.chmod(0o755)
        paths.append(path)
    return paths[0], paths[1]


def write_rootfs(path: Path, files: dict[str, tuple[int, bytes]]) -> None:
    """A root disk for the fake: the given files (path -> mode, content) as a tar archive."""
    with tarfile.open(path, "w") as archive:
        for name, (mode, content) in files.items():
            row = tarfile.TarInfo(name.lstrip("/"))
            row.mode, row.size = mode, len(content)
            archive.addfile(row, io.BytesIO(content))


class FakeFirecracker:
    """One process's state. Paths are relative to the working directory, as the jail makes them."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.state: Literal["Not started", "Running", "Paused"] = "Not started"
        self.machine: dict[str, Any] = {"vcpu_count": 1, "mem_size_mib": 128, "track_dirty_pages": False}
        self.drives: dict[str, dict[str, Any]] = {}
        self.boot: dict[str, Any] | None = None
        self.vsock: dict[str, Any] | None = None
        self.configured = False
        self.guest: FakeGuest | None = None
        self._memory_holder: asyncio.subprocess.Process | None = None
        self._pages: list[bytes] | None = None
        self._tracked = False
        self._line: FakeVsock | None = None
        self._reset_pending = False

    async def handle(self, method: str, path: str, body: dict[str, Any]) -> tuple[int, object]:
        """Answers one request. Raises Fault."""
        if (method, path) == ("GET", "/"):
            return 200, {
                "id": self.name,
                "state": self.state,
                "vmm_version": VERSION,
                "app_name": "Firecracker",
            }
        if (method, path) == ("GET", "/version"):
            return 200, {"firecracker_version": VERSION}
        if (method, path) == ("GET", "/machine-config"):
            return 200, self.machine
        drive = re.fullmatch(r"/drives/([\w-]+)", path)
        handler = self._handlers().get((method, "/drives" if drive else path))
        if handler is None:
            raise Fault(f"Invalid request method and/or path: {method} {path}.")
        unknown = sorted(set(body) - (_DRIVE_FIELDS if drive else _FIELDS[path]))
        if unknown:
            raise Fault(f"{_BAD_BODY}: unknown field `{unknown[0]}`")
        if drive and body.get("drive_id") != drive[1]:
            raise Fault("The id from the path does not match the id from the body!")
        await handler(body)
        return 204, None

    def _handlers(self) -> dict[tuple[str, str], Callable[[dict[str, Any]], Awaitable[None]]]:
        return {
            ("PUT", "/machine-config"): self._put_machine,
            ("PUT", "/boot-source"): self._put_boot,
            ("PUT", "/drives"): self._put_drive,
            ("PUT", "/vsock"): self._put_vsock,
            ("PUT", "/entropy"): self._put_device,
            ("PUT", "/balloon"): self._put_device,
            ("PUT", "/actions"): self._act,
            ("PATCH", "/vm"): self._patch_vm,
            ("PUT", "/snapshot/create"): self._create_snapshot,
            ("PUT", "/snapshot/load"): self._load_snapshot,
        }

    def _before_start(self) -> None:
        if self.state != "Not started":
            raise Fault(_AFTER_START)
        self.configured = True

    async def _put_machine(self, body: dict[str, Any]) -> None:
        self._before_start()
        if not 1 <= body["vcpu_count"] <= 32:
            raise Fault("The vCPU number is invalid! The vCPU number can only be 1 or an even number.")
        if body["mem_size_mib"] < 1:
            raise Fault("The memory size (MiB) is invalid.")
        self.machine |= body

    async def _put_boot(self, body: dict[str, Any]) -> None:
        self._before_start()
        if not Path(body["kernel_image_path"]).is_file():
            raise Fault(
                "The kernel file cannot be opened: No such file or directory (os error 2) "
                + body["kernel_image_path"]
            )
        self.boot = body

    async def _put_drive(self, body: dict[str, Any]) -> None:
        self._before_start()
        if not Path(body["path_on_host"]).is_file():
            raise Fault(f"Unable to create the block device: No such file {body['path_on_host']}")
        self.drives[body["drive_id"]] = body

    async def _put_vsock(self, body: dict[str, Any]) -> None:
        self._before_start()
        if body["guest_cid"] < 3:
            raise Fault("The guest CID must be at least 3.")
        self.vsock = body

    async def _put_device(self, body: dict[str, Any]) -> None:
        self._before_start()

    async def _act(self, body: dict[str, Any]) -> None:
        if body["action_type"] != "InstanceStart":
            raise Fault(f"unknown variant `{body['action_type']}`")
        if self.state != "Not started":
            raise Fault(_AFTER_START)
        if self.boot is None:
            raise Fault("Start microvm error: Cannot start microvm without kernel configuration.")
        root = next((row for row in self.drives.values() if row["is_root_device"]), None)
        if root is None:
            raise Fault("Start microvm error: Cannot open root device")
        guest = Path("../guest")
        unpack_tree(Path(root["path_on_host"]).read_bytes(), guest)
        self._tracked = bool(self.machine.get("track_dirty_pages"))
        await self._run(guest, self.boot["boot_args"])
        self.state = "Running"

    async def _run(self, root: Path, boot_args: str) -> None:
        self.guest = FakeGuest(root.resolve(), boot_args)
        await self.guest.start()
        if self.vsock is not None:
            try:
                self._line = FakeVsock(self.guest.root)
                await self._line.listen(self.vsock["uds_path"])
            except OSError as error:
                raise Fault(
                    f"Cannot create vsock device: Error binding to the host-side Unix socket: {error}"
                ) from error

    async def _patch_vm(self, body: dict[str, Any]) -> None:
        if self.guest is None:
            raise Fault(_BEFORE_START)
        if body["state"] == "Paused":
            self.guest.signal_all(signal.SIGSTOP)
            self.state = "Paused"
        elif body["state"] == "Resumed":
            self.guest.signal_all(signal.SIGCONT)
            self.state = "Running"
            self._reset_vsock()
        else:
            raise Fault(f"unknown variant `{body['state']}`, expected `Paused` or `Resumed`")

    def _reset_vsock(self) -> None:
        """After a snapshot the guest's driver finds the reset event and closes all connections."""
        if self._reset_pending and self._line is not None:
            self._line.drop_all()
        self._reset_pending = False

    async def _create_snapshot(self, body: dict[str, Any]) -> None:
        if self.guest is None:
            raise Fault(_BEFORE_START)
        if self.state != "Paused":
            raise Fault(_PAUSE_FIRST)
        kind = body.get("snapshot_type", "Full")
        if kind not in ("Full", "Diff"):
            raise Fault(f"unknown variant `{kind}`, expected `Full` or `Diff`")
        pages = to_pages(self.guest.archive())
        before = self._pages if kind == "Diff" and self._tracked else None
        state = {
            "magic": "fake-vmstate",
            "machine": self.machine,
            "drives": self.drives,
            "vsock": self.vsock,
            "boot_args": self.guest.boot_args,
        }
        try:
            Path(body["mem_file_path"]).unlink(missing_ok=True)
            write_memory(Path(body["mem_file_path"]), pages, before, self.machine["mem_size_mib"] * _MIB)
            Path(body["snapshot_path"]).write_text(json.dumps(state), encoding="utf-8")
        except (OSError, ValueError) as error:
            raise Fault(f"Create snapshot error: Cannot create memory file: {error}") from error
        self._pages = pages
        self._reset_pending = True

    async def _load_snapshot(self, body: dict[str, Any]) -> None:
        if self.configured or self.state != "Not started":
            raise Fault(f"Load snapshot error: {_NOT_ALLOWED}")
        if ("mem_backend" in body) == ("mem_file_path" in body):
            raise Fault("too few arguments: either `mem_backend` or `mem_file_path` is required")
        try:
            state = json.loads(Path(body["snapshot_path"]).read_text(encoding="utf-8"))
            if state["magic"] != "fake-vmstate":
                raise ValueError("magic")
            self.machine, self.drives, self.vsock = state["machine"], state["drives"], state["vsock"]
            for row in self.drives.values():
                if not Path(row["path_on_host"]).is_file():
                    raise ValueError(f"no such file {row['path_on_host']}")
            archive = await self._load_memory(body)
            unpack_tree(archive, Path("../guest"))
        except (OSError, ValueError, KeyError, tarfile.TarError) as error:
            raise Fault(f"Load snapshot error: Failed to restore from snapshot: {error}") from error
        self._pages = to_pages(archive)
        self._tracked = bool(body.get("track_dirty_pages") or body.get("enable_diff_snapshots"))
        await self._run(Path("../guest"), state["boot_args"])
        self.state = "Running"
        if not body.get("resume_vm"):
            await self._patch_vm({"state": "Paused"})

    async def _load_memory(self, body: dict[str, Any]) -> bytes:
        backend = body.get("mem_backend") or {"backend_type": "File", "backend_path": body["mem_file_path"]}
        size = self.machine["mem_size_mib"] * _MIB
        path = Path(backend["backend_path"])
        if backend["backend_type"] == "File":
            if path.stat().st_size != size:
                raise ValueError("the memory file is not as long as the memory")
            return read_archive(path.read_bytes())
        source = str(Path(__file__).resolve().parents[3])
        code = "import sys; sys.path.insert(0, sys.argv[1]); "
        code += "from etude.sandbox.firecracker.fake_memory import main; main(sys.argv[2:])"
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-ISB", "-c", code, source, str(path), str(size), stdin=pipe, stdout=pipe
        )
        assert process.stdout is not None, "it is a pipe"
        self._memory_holder = process
        archive = await process.stdout.read()
        if not archive:
            raise ValueError("the page-fault handler failed")
        return archive


async def _serve(vmm: FakeFirecracker, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError, EOFError, ValueError):
        while True:
            head = await read_head(reader)
            data = b"".join([piece async for piece in read_body(reader, head, to_end=False)])
            method, target, _ = head.first
            try:
                status, body = await vmm.handle(method, urlsplit(target).path, json.loads(data or b"{}"))
            except Fault as fault:
                status, body = 400, {"fault_message": str(fault)}
            except (KeyError, TypeError, ValueError) as error:
                text = f"{_BAD_BODY}: {error!r}."
                status, body = 400, {"fault_message": text}
            answer = b"" if body is None else json.dumps(body).encode()
            fields = {"Server": "Firecracker API", "Connection": "keep-alive"}
            if body is not None:
                fields |= {"Content-Type": "application/json", "Content-Length": str(len(answer))}
            reason = {200: "OK", 204: "No Content", 400: "Bad Request"}[status]
            writer.write(pack_head(f"HTTP/1.1 {status} {reason}", fields) + answer)
            await writer.drain()
    writer.close()


async def _main(socket: str, name: str) -> None:
    vmm = FakeFirecracker(name)
    server = await asyncio.start_unix_server(lambda reader, writer: _serve(vmm, reader, writer), socket)
    async with server:
        await server.serve_forever()


def main(arguments: list[str]) -> None:
    """As the real program: `firecracker --api-sock PATH --id ID` or `firecracker --version`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--api-sock", default="/run/firecracker.socket")
    parser.add_argument("--id", default="anonymous-instance")
    parser.add_argument("--version", action="store_true")
    options = parser.parse_args(arguments)
    if options.version:
        print(f"Firecracker v{VERSION}")
        return
    shutil.rmtree("../guest", ignore_errors=True)
    asyncio.run(_main(options.api_sock, options.id))
