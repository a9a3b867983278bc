"""In a reproducible schedule, actions between steps happen at the same steps whatever the tools' times."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from etude.inference import EngineService
from etude.protocols import PacedSampler
from etude.weights import MemoryWeights
from tests.inference.builders import Client, prompt, small_engine, version
from tests.model.builders import small_model


def run(body: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(body, 60.0))


class Notes:
    """Implements Pace: notes what it is told and at which step, and acts in its turn."""

    def __init__(self, service: EngineService, act: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self.told: list[tuple[int, str]] = []
        self._service, self._act = service, act

    def on_session_ended(self, session_id: str) -> None:
        self.told.append((self._service.engine.counters.steps, session_id))

    async def before_next_step(self) -> None:
        before = self._service.engine.counters.steps
        self.told.append((before, "turn"))
        await self._act()
        assert self._service.engine.counters.steps == before, "no step is taken in a turn"

    def on_schedule_ended(self) -> None:
        self.told.append((-1, "stopped"))


async def session(service: EngineService, number: int, tool_s: Callable[[], float]) -> list[int]:
    client = Client(f"s{number}", number)
    service.open(client.name)
    for turn in range(1 + number % 3):
        async for chunk in service.stream(client.request(prompt(3 + number, turn), max_tokens=3 + number)):
            client.take(chunk)
        await asyncio.sleep(tool_s())
    service.close(client.name)
    return client.tokens


async def play(tool_s: Callable[[], float], act_s: Callable[[], float]) -> Any:
    async def act() -> None:
        await asyncio.sleep(act_s())

    service = EngineService(small_engine(small_model(1), num_sessions=8), MemoryWeights().fetch, 4)
    notes = Notes(service, act)
    async with service:
        assert service.set_pace(notes)
        tokens = await asyncio.gather(*(session(service, number, tool_s) for number in range(6)))
        while sum(name.startswith("s") for _, name in notes.told) < 6:  # noqa: ASYNC110
            await asyncio.sleep(0)
        service.set_pace(None)
    return tokens, notes.told


def test_sessions_end_at_the_same_steps_however_long_tools_and_turns_take() -> None:
    source = random.Random(1)
    instant = run(play(lambda: 0.0, lambda: 0.0))
    slow = run(play(lambda: source.choice([0.0, 0.004]), lambda: source.choice([0.0, 0.01])))
    assert instant == slow
    assert {name for _, name in instant[1]} == {*(f"s{n}" for n in range(6)), "turn"}


def test_weights_exchanged_in_a_turn_come_into_service_at_the_same_token() -> None:
    async def play_with_update(tool_s: float) -> list[list[int]]:
        weights = MemoryWeights()
        manifest = weights.publish(version(1), dict(small_model(2).named_parameters()))
        service = EngineService(small_engine(small_model(1), num_sessions=8), weights.fetch, 4)

        async def exchange() -> None:
            if service.current() != manifest.version:
                await service.stage(manifest)
                await service.activate(manifest.version)

        async with service:
            service.set_pace(Notes(service, exchange))
            tokens = await asyncio.gather(*(session(service, n, lambda: tool_s) for n in range(6)))
            assert service.current() == manifest.version
        return tokens

    assert run(play_with_update(0.0)) == run(play_with_update(0.003))


def test_an_engine_that_stops_says_so() -> None:
    async def body() -> Notes:
        service = EngineService(small_engine(small_model(1)), MemoryWeights().fetch, 4)

        async def nothing() -> None: ...

        notes = Notes(service, nothing)
        async with service:
            service.set_pace(notes)
        return notes

    assert run(body()).told == [(-1, "stopped")]


@pytest.mark.parametrize(("delay_steps", "paced"), [(4, True), (0, True), (None, False)])
def test_only_a_reproducible_schedule_can_be_paced(delay_steps: int | None, paced: bool) -> None:
    service = EngineService(small_engine(small_model(1)), MemoryWeights().fetch, delay_steps)
    assert isinstance(service, PacedSampler)

    async def nothing() -> None: ...

    assert service.set_pace(Notes(service, nothing)) is paced
