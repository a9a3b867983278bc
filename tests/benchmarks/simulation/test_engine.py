import asyncio

import numpy as np
import pytest
from benchmarks.simulation.rollout import SimulatedEngine, run_virtual

from etude.errors import SamplerError
from etude.records import PolicyVersion, SampleChunk, SampleRequest, SamplingParams, WeightManifest


def version(step: int) -> PolicyVersion:
    return PolicyVersion("run", step)


async def serve(engine: SimulatedEngine, step: int) -> None:
    await engine.stage(WeightManifest(version(step), (), "memory:"))
    await engine.activate(version(step))


def message(session_id: str, number: int) -> np.ndarray:
    return np.arange(100, dtype=np.int32)


async def sample(engine: SimulatedEngine, session_id: str, max_tokens: int = 1_000) -> list[SampleChunk]:
    request = SampleRequest(
        f"{session_id}:0", session_id, np.zeros(1, np.int32), SamplingParams(max_tokens=max_tokens),
        frozenset(), (0,),
    )  # fmt: skip
    return [chunk async for chunk in engine.stream(request)]


def test_messages_take_as_long_as_their_slots_need() -> None:
    async def run() -> list[float]:
        engine = SimulatedEngine(message, num_slots=2, tokens_per_s=20.0)
        await serve(engine, 0)
        times: list[float] = []

        async def one(name: str) -> None:
            engine.open(name)
            await sample(engine, name)
            times.append(asyncio.get_running_loop().time())

        await asyncio.gather(*(one(str(number)) for number in range(3)))
        assert engine.busy_slot_s == pytest.approx(30.0)
        return times

    assert run_virtual(run()) == pytest.approx([10.0, 10.0, 20.0])


def test_tokens_carry_the_version_that_was_in_service_when_they_were_sampled() -> None:
    async def run() -> list[SampleChunk]:
        engine = SimulatedEngine(message, num_slots=1, tokens_per_s=10.0)
        await serve(engine, 0)
        engine.open("s")
        sampling = asyncio.create_task(sample(engine, "s"))
        await asyncio.sleep(2.0)
        await serve(engine, 1)
        await asyncio.sleep(5.0)
        await serve(engine, 2)
        return await sampling

    chunks = run_virtual(run())
    assert [(chunk.version.step, len(chunk.tokens)) for chunk in chunks] == [(0, 20), (1, 50), (2, 30)]
    assert [chunk.finish for chunk in chunks] == [None, None, "stop"]
    assert np.array_equal(np.concatenate([chunk.tokens for chunk in chunks]), message("s", 0))


def test_messages_that_are_too_long_are_cut() -> None:
    async def run() -> list[SampleChunk]:
        engine = SimulatedEngine(message, 1, 10.0)
        await serve(engine, 0)
        engine.open("s")
        return await sample(engine, "s", max_tokens=7)

    (chunk,) = run_virtual(run())
    assert (len(chunk.tokens), chunk.finish) == (7, "length")


def test_nothing_is_sampled_without_weights_or_for_a_session_that_is_not_open() -> None:
    async def run() -> None:
        engine = SimulatedEngine(message, 1, 10.0)
        with pytest.raises(SamplerError, match="not open"):
            await sample(engine, "s")
        engine.open("s")
        with pytest.raises(SamplerError, match="no weights"):
            await sample(engine, "s")
        with pytest.raises(SamplerError, match="not staged"):
            await engine.activate(version(1))

    run_virtual(run())


def test_a_request_that_is_given_up_leaves_its_slot() -> None:
    async def run() -> float:
        engine = SimulatedEngine(message, 1, 10.0)
        await serve(engine, 0)
        engine.open("a")
        engine.open("b")
        first = asyncio.create_task(sample(engine, "a"))
        await asyncio.sleep(1.0)
        first.cancel()
        await sample(engine, "b")
        return asyncio.get_running_loop().time()

    assert run_virtual(run()) == pytest.approx(11.0)
