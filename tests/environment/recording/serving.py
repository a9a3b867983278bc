"""A real server on loopback, for clients that block."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import uvicorn

from etude.environment.recording import Recordings
from etude.environment.recording.server import build_app
from etude.records import SampleChunk, SampleRequest
from tests.environment.recording.recording_builders import TOKEN, TellingSampler

START_S = 20.0


@dataclass
class SlowSampler(TellingSampler):
    """Waits before each chunk, so that a client can leave in the middle."""

    pause_s: float = 0.0

    async def stream(self, request: SampleRequest) -> AsyncIterator[SampleChunk]:
        async for chunk in super().stream(request):
            yield chunk
            await asyncio.sleep(self.pause_s)


@dataclass
class Served:
    """A server that runs."""

    url: str
    recordings: Recordings
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def control(self, token: str = TOKEN) -> httpx.Client:
        """A client of whoever trains."""
        headers = {"authorization": f"Bearer {token}"} if token else {}
        return httpx.Client(base_url=self.url, headers=headers, timeout=20, verify=False)

    def create(self, **spec: Any) -> dict[str, Any]:
        """A new session."""
        body = {"run": "r", "task": "t", "index": next(self.numbers), **spec}
        with self.control() as client:
            answer = client.post("/sessions", json=body)
            assert answer.status_code == 201, answer.text
            return answer.json()


@contextlib.contextmanager
def serving(recordings: Recordings) -> Iterator[Served]:
    """Serves on a free port, in a thread of its own."""
    listener = socket.socket(proto=socket.IPPROTO_TCP)  # by which asyncio knows to send at once
    listener.bind(("127.0.0.1", 0))
    config = uvicorn.Config(build_app(recordings), log_level="error", timeout_graceful_shutdown=5)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])), daemon=True)
    thread.start()
    end_s = time.monotonic() + START_S
    while not server.started:
        assert thread.is_alive() and time.monotonic() < end_s, "the server did not start"
        time.sleep(0.01)
    try:
        yield Served(f"http://127.0.0.1:{listener.getsockname()[1]}", recordings)
    finally:
        server.should_exit = True
        thread.join(START_S)
        listener.close()


def wait_for(condition: Any, limit_s: float = 10.0) -> None:
    """Waits until a condition holds."""
    end_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end_s, "the condition never held"
        time.sleep(0.02)
