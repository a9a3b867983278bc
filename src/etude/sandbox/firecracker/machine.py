"""One microVM: its process, its API, its line. What the backend does with it is in `backend`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

from etude.errors import SandboxError
from etude.sandbox.docker.http import connect_unix
from etude.sandbox.docker.line import Line
from etude.sandbox.errors import SandboxLostError
from etude.sandbox.firecracker.api import FirecrackerApi
from etude.sandbox.firecracker.guest_files import VSOCK_PORT
from etude.sandbox.firecracker.jailer import API_SOCKET, PAGE_SOCKET, VSOCK, Cell
from etude.sandbox.guarded import GuardedProcess
from etude.sandbox.types import Resources

SOCKET_S = 60.0
"""From the start of the process until it answers its API."""
_POLL_S = 0.01
_SOURCE = str(Path(__file__).resolve().parents[3])
_HANDLER = """
import sys
sys.path.insert(0, sys.argv[1])
from etude.sandbox.firecracker.uffd import main
main(sys.argv[2:])
"""


class MicroVm:
    """A Firecracker process in its cell. `close` frees all of it, whatever state it is in."""

    def __init__(self, cell: Cell, on_lost: Callable[[str], None]) -> None:
        """`on_lost` is called if the process, its page-fault handler or its line ends unasked."""
        self.cell = cell
        self.api = FirecrackerApi(cell.path(API_SOCKET))
        self.line = Line(self._on_end)
        self.base: Path | None = None
        """The memory file over which the next diff is laid; None: the next snapshot must be full."""
        self._on_lost = on_lost
        self._process: GuardedProcess | None = None
        self._handler: GuardedProcess | None = None
        self._watch: asyncio.Task[None] | None = None
        self._lost: str | None = None

    def check(self) -> None:
        """Raises SandboxLostError if the machine ended by itself while it was being started."""
        if self._lost is not None:
            raise SandboxLostError(
                f"{self._lost}; {self.log()}",
                field="sandbox",
                received=self.cell.name,
                fix="make another one",
            )

    def _on_end(self, reason: str) -> None:
        self._lost = reason
        self._on_lost(reason)

    async def launch(self, resources: Resources) -> None:
        """Starts the process and waits for its API. Raises SandboxError."""
        self._process = await GuardedProcess.spawn(self.cell.command(resources), cwd=self.cell.root)
        end_s = time.monotonic() + SOCKET_S
        while True:
            try:
                await self.api.describe()
                return
            except SandboxError as error:
                if self._process.returncode is not None:
                    raise self._ended() from error
                if time.monotonic() > end_s:
                    raise SandboxError(
                        f"firecracker does not answer: {error.message}; it said: {self._process.log()}",
                        field="sandbox",
                        received=self.cell.name,
                    ) from error
            await asyncio.sleep(_POLL_S)

    async def serve_pages(self, memory: Path) -> None:
        """Starts a page-fault handler for the memory file; it listens when this returns."""
        listener = socket.socket(socket.AF_UNIX)
        directory = os.open(self.cell.root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            listener.bind(f"/proc/self/fd/{directory}/{PAGE_SOCKET}")
            listener.listen(1)
            self.cell.own(PAGE_SOCKET)
            command = [sys.executable, "-I", "-S", "-B", "-c", _HANDLER, _SOURCE]
            command += [str(listener.fileno()), str(memory)]
            self._handler = await GuardedProcess.spawn(command, pass_fds=(listener.fileno(),))
        finally:
            os.close(directory)
            listener.close()

    async def connect(self, deadline_s: float) -> None:
        """Connects the line to the guest's relay, as soon as that listens. Raises SandboxError."""
        end_s = time.monotonic() + deadline_s
        while True:
            try:
                async with asyncio.timeout(max(0.01, end_s - time.monotonic())):
                    reader, writer = await dial(self.cell.path(VSOCK), VSOCK_PORT)
                break
            except (OSError, EOFError, TimeoutError) as error:
                if self._process is None or self._process.returncode is not None:
                    raise self._ended() from error
                if time.monotonic() > end_s:
                    raise SandboxError(
                        f"the guest does not answer within {deadline_s:g} s; its console: {self.log()}",
                        field="sandbox",
                        received=self.cell.name,
                    ) from error
            await asyncio.sleep(_POLL_S)
        await self.line.connect(reader, writer)
        if self._watch is None:
            self._watch = asyncio.create_task(self._watch_processes())

    def log(self) -> str:
        """The end of what Firecracker and the guest's console said."""
        return "" if self._process is None else self._process.log().strip()

    async def close(self) -> None:
        """Ends the processes and removes every file. Idempotent."""
        if self._watch is not None:
            self._watch.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watch
            self._watch = None
        await self.line.close()
        for process in (self._process, self._handler):
            if process is not None:
                await process.kill()
        await asyncio.to_thread(self.cell.remove)

    async def _watch_processes(self) -> None:
        """A guest whose page-fault handler is gone hangs: both count."""
        running = [process for process in (self._process, self._handler) if process is not None]
        ends = [asyncio.create_task(process.wait()) for process in running]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for end in ends:
                end.cancel()
        self._on_end("its hypervisor or its page-fault handler ended")

    def _ended(self) -> SandboxLostError:
        return SandboxLostError(
            f"firecracker ended: {self.log()}",
            field="sandbox",
            received=self.cell.name,
            fix="run the doctor command for a diagnosis",
        )


async def dial(path: Path, port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection to a port of the guest through Firecracker's socket.

    Raises OSError, or EOFError where nobody in the guest listens.
    """
    reader, writer = await connect_unix(path)
    try:
        writer.write(f"CONNECT {port}\n".encode())
        await writer.drain()
        answer = await reader.readline()
        if not answer.startswith(b"OK "):
            raise EOFError(f"nobody listens at port {port} of the guest")
    except BaseException:
        writer.close()
        raise
    return reader, writer
