"""Sessions forked from the middle of another: when they are admitted, and which prefix they share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from etude.errors import SamplerError
from etude.inference import EngineService
from etude.weights import MemoryWeights
from tests.inference.builders import Client, prompt, small_engine
from tests.inference.invariants import check_engine
from tests.model.builders import small_model

PREFIX = 40
"""Tokens that the siblings share: two pages and a half."""


def run(body: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(body, 60.0))


async def message(service: EngineService, client: Client, suffix: list[int], max_tokens: int) -> int | None:
    """One message; how many tokens of its input were cached."""
    cached = None
    async for chunk in service.stream(client.request(suffix, max_tokens=max_tokens)):
        cached = chunk.cached_tokens if cached is None else cached
        client.take(chunk)
    return cached


async def alone(service: EngineService, client: Client) -> None:
    """A session that has nothing to do with the fork."""
    service.open(client.name)
    for turn in range(6):
        await message(service, client, prompt(5, turn), 7)
    service.close(client.name)


async def forked(service: EngineService, clients: list[Client], copy_s: Callable[[], float]) -> list[Any]:
    """A session, whose siblings are opened once their copies are there, before it is closed."""
    first, *siblings = clients
    service.open(first.name)
    await message(service, first, prompt(PREFIX, 1), 5)
    await asyncio.sleep(copy_s())
    for sibling in siblings:
        service.open(sibling.name, first.name)
    service.close(first.name)

    async def go_on(sibling: Client) -> int | None:
        cached = await message(service, sibling, prompt(PREFIX, 1), 6)
        service.close(sibling.name)
        return cached

    return await asyncio.gather(*(go_on(one) for one in siblings))


async def play(copy_s: Callable[[], float]) -> tuple[Any, ...]:
    engine = small_engine(small_model(1), num_sessions=8, prefill_tokens=7)
    others = [Client(f"other{n}", 20 + n) for n in range(2)]
    clients = [Client(f"forked{n}", n) for n in range(4)]
    async with EngineService(engine, MemoryWeights().fetch, 4) as service, asyncio.TaskGroup() as group:
        fork = group.create_task(forked(service, clients, copy_s))
        for other in others:
            group.create_task(alone(service, other))
    counters = engine.counters
    check_engine(engine)
    return (
        [(one.tokens, one.logprobs) for one in (*clients, *others)],
        (counters.steps, counters.decode_tokens, counters.prefill_tokens, counters.cached_tokens),
        fork.result(),
    )


@pytest.mark.slow
def test_copies_of_any_speed_give_the_same_bits_and_the_same_steps() -> None:
    instant = run(play(lambda: 0.0))
    for wait_s in (0.001, 0.004, 0.03):
        assert run(play(lambda wait_s=wait_s: wait_s)) == instant


def test_siblings_find_the_prefix_in_the_cache() -> None:
    _, (*_, cached), hits = run(play(lambda: 0.0))
    assert len(hits) == 3 and all(hit >= PREFIX // 16 * 16 for hit in hits)
    assert all(hit < PREFIX for hit in hits), "the last token is computed in any case: it is sampled from"
    assert cached >= sum(hits)


@pytest.mark.parametrize("delay_steps", [4, None])
def test_beside_a_session_that_is_not_away_it_is_opened_as_any_other(delay_steps: int | None) -> None:
    async def body() -> None:
        engine = small_engine(small_model(1))
        async with EngineService(engine, MemoryWeights().fetch, delay_steps) as service:
            service.open("new", "unknown")
            client = Client("new", 1)
            await message(service, client, prompt(4, 0), 3)
            assert len(client.tokens) == 7
            service.open("second", "new")
            for taken in ("new", "second"):
                with pytest.raises(SamplerError, match="open already"):
                    service.open(taken, "new")
            service.close("second")
            service.close("new")

    run(body())
