"""Event streams: attribution of an early end, and a client that does not read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from etude.serving import answers
from etude.serving.answers import EventStream, Sending


async def _failing() -> AsyncGenerator[bytes]:
    yield b"data: 1\n\n"
    raise ConnectionResetError("the sampler's connection")


async def _endless() -> AsyncGenerator[bytes]:
    while True:
        yield b"data: 1\n\n"


async def _never() -> Any:
    await asyncio.Event().wait()


def _serve(pieces: AsyncGenerator[bytes], send: Any) -> list[int]:
    """The statuses with which the request ended."""
    ended: list[int] = []
    stream = EventStream(
        Sending(pieces, lambda error: (503, {"error": str(error)}, {}), lambda _: b"error", ended.append)
    )
    asyncio.run(asyncio.wait_for(stream({"type": "http"}, _never, send), 3))
    return ended


def test_a_connection_that_the_answer_is_made_with_is_not_the_clients() -> None:
    sent: list[bytes] = []

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))

    assert _serve(_failing(), send) == [200]
    assert sent[-2:] == [b"error", b""]


def test_a_client_that_reads_nothing_does_not_hold_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "STALL_S", 0.05, raising=False)

    async def send(message: Any) -> None:
        if message.get("body"):
            await _never()

    assert _serve(_endless(), send) == [499]
