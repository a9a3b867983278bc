"""A real server on loopback, for clients that block."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
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

START_S = 60.0


@dataclass
class SlowSampler(TellingSampler):
    """Waits in mid-answer, so that a client can leave there."""

    pause_s: float = 0.0
    """After each chunk."""
    most_chunks: float = math.inf
    """An answer that has as many waits until it is aborted, or until this is more."""
    num_waiting: int = 0
    """Answers that have waited for that."""

    async def stream(self, request: SampleRequest) -> AsyncIterator[SampleChunk]:
        num_chunks = 0
        async for chunk in super().stream(request):
            yield chunk
            await asyncio.sleep(self.pause_s)
            num_chunks += 1
            self.num_waiting += num_chunks == self.most_chunks
            while num_chunks >= self.most_chunks and request.id not in self.inner._aborted:  # noqa: ASYNC110
                await asyncio.sleep(0.005)


@dataclass
class Served:
    """A server that runs."""

    url: str
    recordings: Recordings
    numbers: Iterator[int] = field(default_factory=itertools.count)

    def control(self, token: str = TOKEN) -> httpx.Client:
        """A client of whoever trains."""
        headers = {"authorization": f"Bearer {token}"} if token else {}
        return httpx.Client(base_url=self.url, headers=headers, timeout=60, verify=False)

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


def wait_for(condition: Any, limit_s: float = 60.0) -> None:
    """Waits until a condition holds."""
    end_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end_s, "the condition never held"
        time.sleep(0.02)
