"""A session that waits for tools moves to an engine with free capacity: two engines in one process."""

import asyncio
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from typing import Any

from etude.errors import PrefixMissError
from etude.inference import EngineService
from etude.inference.router import RoutedSampler
from etude.weights import MemoryWeights
from tests.inference.builders import Client, prompt, small_engine
from tests.model.builders import small_model

_LONG = 60
"""Tokens of a message that keeps an engine busy."""


def run(body: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(body, 60.0))


async def ask(sampler: Any, client: Client, suffix: list[int], max_tokens: int) -> None:
    """One message; where the prefix is not held, sends everything, as an agent's runner does."""
    try:
        async for chunk in sampler.stream(client.request(suffix, max_tokens=max_tokens)):
            client.take(chunk)
    except PrefixMissError:
        client.miss()
        async for chunk in sampler.stream(client.request([], max_tokens=max_tokens)):
            client.take(chunk)


def test_a_waiting_session_moves_to_the_free_replica_and_its_tokens_are_the_same() -> None:
    async def body() -> None:
        async with AsyncExitStack() as stack:
            services = {
                name: await stack.enter_async_context(
                    EngineService(small_engine(small_model(1), num_sessions=8), MemoryWeights().fetch, 4)
                )
                for name in "ab"
            }
            routed = RoutedSampler(services)
            moving, alone = Client("moving", 1), Client("moving", 1)
            routed.open("moving")
            await ask(routed, moving, prompt(6, 0), 5)
            home = routed._open["moving"]  # type: ignore[reportPrivateUsage]
            other = services["b" if home == "a" else "a"]
            before = other.engine.counters.decode_tokens
            busy = [Client(f"busy{n}", 10 + n) for n in range(6)]
            for client in busy:
                services[home].open(client.name)
                routed.router.replicas[home].work += 10_000  # as requests in flight there would
            async with asyncio.TaskGroup() as group:
                for client in busy:
                    group.create_task(ask(services[home], client, prompt(4, 1), _LONG))
                await asyncio.sleep(0)
                await ask(routed, moving, prompt(4, 1), 5)
            assert moving.misses == 1, "its new replica held nothing of it"
            assert other.engine.counters.decode_tokens > before
            routed.close("moving")
            services["a"].open("moving")
            await ask(services["a"], alone, prompt(6, 0), 5)
            await ask(services["a"], alone, prompt(4, 1), 5)
            assert moving.tokens == alone.tokens, "sampling noise is the session's, not the replica's"

    run(body())
