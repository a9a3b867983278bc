"""Environment servers for tests: on a loopback port, and lines to them that break."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from etude.agent import ToolLimits, core_registry
from etude.environment.sessions import EnvironmentSession, SessionServices
from etude.environment.verdicts import Grader
from etude.kit.retry import Backoff
from etude.records import Task, ToolCall, ToolResult
from etude.sandbox.interface import SandboxBackend
from etude_quickstart.memory_backend import MemoryBackend
from tests.environment.playing import TASK

pytest.importorskip("fastapi", reason="needs etude[serve]")
pytest.importorskip("httpx", reason="needs etude[serve]")

import httpx
import uvicorn

from etude.environment.remote import RemoteEnvironment
from etude.environment.server import HostLimits, SessionHost, build_app

TOKEN, OTHER_TOKEN = "a-token-for-tests", "another-token"
TOKENS = {TOKEN: "one", OTHER_TOKEN: "two"}


def new_services(backend: SandboxBackend | None = None, **settings: Any) -> SessionServices:
    """A site over a backend, in memory unless given."""
    backend = backend or MemoryBackend()
    settings.setdefault("limits", ToolLimits(provider_backoff_s=0.001))
    return SessionServices(
        backend, Grader(backend), settings.pop("tools", None) or core_registry(), **settings
    )


def new_host(
    services: SessionServices | None = None, limits: HostLimits | None = None, **more: Any
) -> SessionHost:
    """A host with one task."""
    more.setdefault("tasks", {"tally": TASK})
    return SessionHost(services or new_services(), limits, **more)


@asynccontextmanager
async def served(host: SessionHost, tokens: dict[str, str] | None = None) -> AsyncIterator[str]:
    """The address of a running server on loopback; stopped, and its host closed, at the end."""
    app = build_app(host, TOKENS if tokens is None else tokens)
    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error", timeout_graceful_shutdown=2)
    server = uvicorn.Server(config)
    running = asyncio.ensure_future(server.serve())
    try:
        async with asyncio.timeout(60):
            while not server.started:
                assert not running.done(), "the server did not start"
                await asyncio.sleep(0.005)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        await running


@asynccontextmanager
async def remote(
    host: SessionHost | None = None, token: str | None = TOKEN, **more: Any
) -> AsyncIterator[RemoteEnvironment]:
    """A client of a server of its own."""
    async with served(host or new_host()) as url:
        client = RemoteEnvironment(url, token, backoff=Backoff(0.01, attempts=4, most_s=0.02), **more)
        try:
            yield client
        finally:
            await client.close()


@asynccontextmanager
async def asking(host: SessionHost, tokens: dict[str, str] | None = None) -> AsyncIterator[httpx.AsyncClient]:
    """A plain HTTP client of an application in this process; the host is closed at the end."""
    app = build_app(host, TOKENS if tokens is None else tokens)
    headers = {"authorization": f"Bearer {TOKEN}"}
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=headers) as client:
        client.app = app  # type: ignore[attr-defined]
        yield client
    await host.close()


class DroppingTransport(httpx.AsyncHTTPTransport):
    """A line that loses the next answers to paths that end so, after the server has given them."""

    def __init__(self, ending: str, times: int) -> None:
        super().__init__()
        self.ending = ending
        self.left = times
        self.num_sent = 0

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        response = await super().handle_async_request(request)
        if request.url.path.endswith(self.ending):
            self.num_sent += 1
            if self.left:
                self.left -= 1
                await response.aread()
                await response.aclose()
                raise httpx.ReadError("the line broke on purpose")
        return response


class Seen:
    """What a turn's listeners were told."""

    def __init__(self) -> None:
        self.calls: list[int] = []
        self.results: list[int] = []

    def on_call(self, position: int, call: ToolCall) -> None:
        self.calls.append(position)

    def on_result(self, position: int, call: ToolCall, result: ToolResult) -> None:
        self.results.append(position)


async def turn(workspace: Any, *calls: ToolCall, seen: Seen | None = None) -> list[str]:
    """Runs one turn; the outputs."""
    seen = seen or Seen()
    return [result.output for result in await workspace.run_calls(calls, {}, seen.on_call, seen.on_result)]


def begin(services: SessionServices | None = None, task: Task = TASK) -> EnvironmentSession:
    """A session in this process."""
    return EnvironmentSession.begin(services or new_services(), task)


async def until(condition: Any, timeout_s: float = 60.0) -> None:
    """Waits until a condition holds."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - what is waited for has no event
            await asyncio.sleep(0.005)
