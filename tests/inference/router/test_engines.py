"""Two real engines behind one sampler: the same run twice, a swap of weights, an engine that dies."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import numpy as np
import pytest

from etude.errors import SamplerError
from etude.inference import EngineService
from etude.inference.router import RoutedSampler
from etude.weights import MemoryWeights
from tests.inference.builders import Client, prompt, small_engine, version
from tests.model.builders import small_model


def run(body: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(body, 60.0))


@asynccontextmanager
async def two_engines(weights: MemoryWeights | None = None) -> AsyncIterator[RoutedSampler]:
    async with AsyncExitStack() as stack:
        services: dict[str, EngineService] = {}
        for name in "ab":
            engine = small_engine(small_model(1), num_sessions=8, prefill_tokens=16)
            service = EngineService(engine, (weights or MemoryWeights()).fetch, 4)
            services[name] = await stack.enter_async_context(service)
        yield RoutedSampler(services)


async def ask(routed: RoutedSampler, client: Client, suffix: list[int], **options: Any) -> None:
    try:
        await stream(routed, client, client.request(suffix, **options))
    except SamplerError:
        # The prefix is on another engine, or went with one that died: all is sent again.
        client.miss()
        await stream(routed, client, client.request([], **options))


async def stream(routed: RoutedSampler, client: Client, request: Any) -> None:
    async for chunk in routed.stream(request):
        client.take(chunk)


async def session(routed: RoutedSampler, client: Client, number: int) -> None:
    routed.open(client.name)
    try:
        for turn in range(3):
            await ask(routed, client, prompt(5 + number, turn), max_tokens=3 + (number + turn) % 5)
    finally:
        routed.close(client.name)


async def play() -> tuple[list[list[int]], list[list[float]], list[int]]:
    clients = [Client(f"s{n}", n) for n in range(8)]
    async with two_engines() as routed:
        async with asyncio.TaskGroup() as group:
            for number, client in enumerate(clients):
                group.create_task(session(routed, client, number))
        busy = [routed.router.replicas[name].running for name in "ab"]
        used = [routed._replicas[name].engine.counters.decode_tokens for name in "ab"]  # type: ignore[attr-defined]
    assert busy == [0, 0]
    for client in clients:
        client.check(small_model(1))
    return [c.tokens for c in clients], [c.logprobs for c in clients], used


def test_sessions_over_two_engines_are_right_and_the_same_twice() -> None:
    first, second = run(play()), run(play())
    assert first == second
    assert min(first[2]) > 0, "both engines worked"


def test_new_weights_reach_both_engines_between_two_answers() -> None:
    async def body() -> None:
        weights = MemoryWeights()
        manifest = weights.publish(version(1), dict(small_model(2).named_parameters()))
        clients = [Client(f"s{n}", n) for n in range(4)]
        async with two_engines(weights) as routed:
            for client in clients:
                routed.open(client.name)
            await asyncio.gather(*(ask(routed, client, prompt(6, 0)) for client in clients))
            for name, engine in routed._replicas.items():
                await engine.stage(manifest)  # type: ignore[attr-defined]
                await engine.activate(manifest.version)  # type: ignore[attr-defined]
                routed.set_version(name, manifest.version)
            await asyncio.gather(*(ask(routed, client, prompt(4, 1)) for client in clients))
            for client in clients:
                routed.close(client.name)
            steps = {one.step for client in clients for one in client.versions.values()}
            assert steps == {0, 1}

    run(body())


def test_sessions_of_an_engine_that_stops_go_on_with_the_other() -> None:
    async def body() -> None:
        clients = [Client(f"s{n}", n) for n in range(8)]
        async with two_engines() as routed:
            dying = routed._replicas["a"]
            async with asyncio.TaskGroup() as group:
                for number, client in enumerate(clients):
                    group.create_task(session(routed, client, number))
                while dying.engine.counters.decode_tokens < 20:  # type: ignore[attr-defined] # noqa: ASYNC110
                    await asyncio.sleep(0)
                await dying.__aexit__()  # type: ignore[attr-defined]
            assert not routed.router.replicas["a"].ready
            assert all(r.running == r.work == 0 for r in routed.router.replicas.values())
            await dying.__aenter__()  # type: ignore[attr-defined] (its own end expects it so)
        for client in clients:
            client.check(small_model(1))
            assert sum(client.sampled) == sum(3 + (int(client.name[1:]) + turn) % 5 for turn in range(3))

    run(body())


def test_scores_come_from_an_engine_with_the_version() -> None:
    async def body() -> None:
        async with two_engines() as routed:
            current = routed._replicas["a"].current()
            assert current is not None
            tokens = np.array(prompt(9, 0), dtype=np.int32)
            scores = await routed.score(tokens, current)
            assert scores.version == current
            with pytest.raises(SamplerError):
                await routed.score(tokens, version(7))

    run(body())
