"""Sandbox servers for tests: a real one on a loopback port, and a backend whose commands are scripted."""

from __future__ import annotations

import asyncio
import functools
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from etude.sandbox.calls import Answer
from etude.sandbox.errors import Unsupported
from etude.sandbox.inside.frames import Header
from etude.sandbox.interface import OnOutput, SandboxBackend
from etude.sandbox.template import Template
from etude.sandbox.types import Network, Resources
from etude_quickstart.memory_backend import MemoryBackend, MemorySandbox

pytest.importorskip("fastapi", reason="needs etude[serve]")
pytest.importorskip("httpx", reason="needs etude[serve]")

import uvicorn
from fastapi import FastAPI

from etude.sandbox import server
from etude.sandbox.remote import RemoteBackend
from etude.sandbox.server import Limits

TOKEN = "a-token-for-tests"


@functools.cache
def _spool() -> tempfile.TemporaryDirectory[str]:
    """Made when it is needed: a process that is killed on purpose leaves none."""
    return tempfile.TemporaryDirectory(prefix="etude-test-spool-")


def build_app(
    backends: Mapping[str, SandboxBackend],
    token: str | None,
    limits: Limits | None = None,
    peers: tuple[str, ...] = (),
    spool: Path | None = None,
) -> FastAPI:
    """The server's application, which writes nothing below the home directory."""
    return server.build_app(backends, token, limits, peers, spool or Path(_spool().name))


@asynccontextmanager
async def served(app: FastAPI, port: int = 0) -> AsyncIterator[str]:
    """The address of a running server on loopback; stopped, and its backends closed, at the end."""
    config = uvicorn.Config(app, host="127.0.0.1", port=port, log_level="error", timeout_graceful_shutdown=5)
    running_server = uvicorn.Server(config)
    running = asyncio.ensure_future(running_server.serve())
    try:
        async with asyncio.timeout(60):
            while not running_server.started:
                assert not running.done(), "the server did not start"
                await asyncio.sleep(0.005)
        port = running_server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        running_server.should_exit = True
        await running


@asynccontextmanager
async def remote(
    *backends: SandboxBackend, limits: Limits | None = None, peers: tuple[str, ...] = ()
) -> AsyncIterator[RemoteBackend]:
    """A client of a real server of the given backends, closed before the server stops."""
    named = {f"backend-{number}": backend for number, backend in enumerate(backends)}
    async with served(build_app(named, TOKEN, limits, peers)) as url:
        client = RemoteBackend(url, TOKEN)
        try:
            yield client
        finally:
            await client.close()


def ended(exit_code: int, out: bytes = b"") -> Answer:
    """How a command ended, as the program inside says it."""
    header = {"exit_code": exit_code, "timed_out": False, "memory_exceeded": False, "duration_s": 0.25}
    return {**header, "truncated": False, "sizes": [len(out), 0]}, out


class ScriptedCommand:
    """A command in the background that ends when it is told to."""

    def __init__(self, cmd: str, on_output: OnOutput | None) -> None:
        self.cmd = cmd
        self.on_output = on_output
        self.ended = asyncio.Event()
        self.exit_code = 0
        self.stdin = bytearray()

    def feed(self, content: bytes, close: bool) -> Answer:
        self.stdin += content
        if self.on_output is not None:
            self.on_output(1, content)
        if close:
            self.ended.set()
        return {}, b""

    def kill(self) -> Answer:
        was_running = not self.ended.is_set()
        if was_running:
            self.exit_code = -9
        self.ended.set()
        return {"killed": was_running}, b""


class ScriptedCommands:
    """Commands whose words have meanings: `echo X`, `sleep S`, `wait`, `flood N` (pieces of 64 KiB)."""

    def __init__(self) -> None:
        self.running: set[str] = set()
        self.cancelled: list[str] = []
        self.num_started: dict[str, int] = {}
        self.background: dict[int, ScriptedCommand] = {}
        self.go_on = asyncio.Event()
        """What `wait` waits for."""

    async def call(self, header: Header, payload: bytes, on_output: OnOutput | None) -> Answer:
        """See Sandbox.call."""
        if header["op"] == "processes":
            ends = [(c.ended.is_set(), c.exit_code) for c in self.background.values()]
            rows = zip(self.background.items(), ends, strict=True)
            return {
                "processes": [[pid, c.cmd, not end, code if end else None] for (pid, c), (end, code) in rows]
            }, b""
        if header["op"] == "command":
            if header.get("background"):
                return self._start(header["cmd"], on_output)
            return await self._run(header, payload, on_output)
        command = self.background.get(header["pid"])
        if command is None:
            return {"killed": False}, b""
        if header["op"] == "wait":
            await command.ended.wait()
            return ended(command.exit_code, bytes(command.stdin))
        if header["op"] == "stdin":
            return command.feed(payload, header["close"])
        return command.kill() if header["op"] == "kill" else ({}, b"")

    def _start(self, cmd: str, on_output: OnOutput | None) -> Answer:
        if cmd == "no such":
            raise Unsupported("scripted", field="cmd", received=cmd, fix="another")
        pid = 100 + len(self.background)
        self.background[pid] = ScriptedCommand(cmd, on_output)
        return {"pid": pid}, b""

    async def _run(self, header: Header, payload: bytes, on_output: OnOutput | None) -> Answer:
        cmd = header["cmd"]
        self.running.add(cmd)
        self.num_started[cmd] = self.num_started.get(cmd, 0) + 1
        word, _, rest = cmd.partition(" ")
        out = b""
        try:
            if word == "echo":
                text = rest + header["env"].get("SUFFIX", "") + (header["cwd"] or "")
                out = text.encode() + payload
                if on_output is not None:
                    on_output(1, out)
                    on_output(2, b"warning")
            elif word == "sleep":
                await asyncio.sleep(float(rest))
            elif word == "wait":
                await self.go_on.wait()
            elif word == "flood":
                for _ in range(int(rest)):
                    if on_output is not None:
                        on_output(1, b"x" * (64 << 10))
                    await asyncio.sleep(0)
            return ended(0, out)
        except asyncio.CancelledError:
            self.cancelled.append(cmd)
            raise
        finally:
            self.running.discard(cmd)


class ScriptedBackend(MemoryBackend):
    """The memory backend, with scripted commands and starts that can be held up or fail."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        self.gate.set()
        self.failures: list[Exception] = []
        self.num_created = 0
        self.num_begun = 0

    async def create(
        self,
        template: Template | None = None,
        resources: Resources | None = None,
        network: Network | None = None,
        timeout_s: float | None = None,
        snapshot: str | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> MemorySandbox:
        self.num_begun += 1
        await self.gate.wait()
        if self.failures:
            raise self.failures.pop()
        self.num_created += 1
        made = await super().create(template, resources, network, timeout_s, snapshot, metadata)
        scripted: Any = made
        commands = scripted.scripted = ScriptedCommands()
        files = made.call

        async def call(header: Header, payload: bytes = b"", on_output: OnOutput | None = None) -> Answer:
            if header["op"] in ("command", "processes", "wait", "stdin", "kill", "lookup"):
                return await commands.call(header, payload, on_output)
            return await files(header, payload, on_output)

        scripted.call = call
        return made


async def until(condition: Any, timeout_s: float = 60.0) -> None:
    """Waits until a condition holds."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.005)
