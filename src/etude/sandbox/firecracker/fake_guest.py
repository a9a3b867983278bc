"""The fake's guest: files and processes in a chamber, and the line to them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
from pathlib import Path

from etude.sandbox.docker.chamber import make_root
from etude.sandbox.docker.fake_images import chamber_command, pack_tree
from etude.sandbox.docker.http import connect_unix
from etude.sandbox.firecracker.guest_files import DIRECTORY
from etude.sandbox.inside.processes import DescendantProcesses


class FakeGuest:
    """The guest: a directory and the relay's process in a chamber."""

    def __init__(self, root: Path, boot_args: str) -> None:
        self.root = root
        self.boot_args = boot_args
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Runs what `init` would."""
        make_root(str(self.root))
        place, *arguments = self.boot_args.partition(" -- ")[2].split()
        port = place.removeprefix("vsock:")
        python = ["python3", "-I", "-S", "-B"]
        (self.root / f"run/vsock-{port}").unlink(missing_ok=True)
        argv = [*python, f"{DIRECTORY}/relay.py", f"unix:/run/vsock-{port}"]
        argv += [*python, f"{DIRECTORY}/guest.pyz", *arguments]
        self._process = await asyncio.create_subprocess_exec(*chamber_command(self.root, "localhost", argv))

    def signal_all(self, number: signal.Signals) -> None:
        """Of all processes of the guest."""
        for pid in DescendantProcesses().table():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def archive(self) -> bytes:
        """Its files, without sockets."""
        return pack_tree(self.root)


class FakeVsock:
    """The host's end of vsock: who asks its socket for a port reaches that port of the guest."""

    def __init__(self, guest: Path) -> None:
        """`guest`: the root of its files."""
        self._guest = guest
        self._connections: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    async def listen(self, path: str) -> None:
        """Raises OSError where there can be no such socket."""
        self._server = await asyncio.start_unix_server(self._connect, path)

    def drop_all(self) -> None:
        """Breaks all connections."""
        for writer in self._connections:
            writer.transport.abort()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None, "servers run in tasks"
        self._tasks.add(task)
        self._connections.add(writer)
        try:
            line = await reader.readline()
            match = re.fullmatch(rb"CONNECT (\d+)\n", line)
            if match is None:
                return
            port = int(match[1])
            inner = await connect_unix(self._guest / f"run/vsock-{port}")
            writer.write(b"OK 1073741824\n")
            async with asyncio.TaskGroup() as group:
                group.create_task(_copy(reader, inner[1]))
                group.create_task(_copy(inner[0], writer))
        except (OSError, ExceptionGroup):
            return
        finally:
            self._connections.discard(writer)
            self._tasks.discard(task)
            writer.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
        await writer.drain()
    # A closed half ends the whole: raise, so that the other direction ends too.
    writer.close()
    raise ConnectionResetError
