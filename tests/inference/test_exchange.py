from __future__ import annotations

import asyncio

import numpy as np
import pytest

from etude.errors import SamplerError
from etude.inference import EngineService
from etude.inference.exchange import Event, Exchange
from etude.records import SampleChunk, SampleRequest, SamplingParams
from etude.weights import MemoryWeights
from tests.inference.builders import small_engine
from tests.inference.server.serving import PlayedSampler
from tests.model.builders import small_model


def asked(session: str, max_tokens: int = 9) -> SampleRequest:
    return SampleRequest(
        f"{session}:0",
        session,
        np.arange(4, dtype=np.int32),
        SamplingParams(max_tokens=max_tokens),
        frozenset(),
        (1,),
        streaming=True,
    )


def played(pause_s: float = 0.0) -> PlayedSampler:
    return PlayedSampler(tokens=lambda context: np.arange(9, dtype=np.int32), pause_s=pause_s)


async def gathered(exchange: Exchange, ends: int) -> list[Event]:
    events: list[Event] = []
    while sum(not isinstance(item, SampleChunk) for _, item in events) < ends:
        events += await exchange.poll()
    return events


def test_requests_of_many_sessions_share_batches() -> None:
    async def run() -> None:
        exchange = Exchange(played())
        names = [f"s{number}" for number in range(5)]
        exchange.exchange([("open", name) for name in names])
        exchange.exchange([("stream", asked(name)) for name in names])
        events = await gathered(exchange, 5)
        for name in names:
            own = [item for request, item in events if request == f"{name}:0"]
            assert own[-1] is None
            chunks = [item for item in own if isinstance(item, SampleChunk)]
            assert np.concatenate([chunk.tokens for chunk in chunks]).tolist() == list(range(9))

    asyncio.run(run())


def test_errors_end_a_request_and_defects_are_told_too() -> None:
    async def run() -> None:
        sampler = played()
        sampler.failures = ["before"]
        exchange = Exchange(sampler)
        exchange.exchange([("open", "s"), ("stream", asked("s"))])
        ((_, error),) = await gathered(exchange, 1)
        assert isinstance(error, SamplerError)
        sampler.tokens = None  # what plays answers now fails an assertion of its own
        exchange.exchange([("stream", asked("s"))])
        ((_, error),) = await gathered(exchange, 1)
        assert isinstance(error, SamplerError)
        assert "AssertionError" in str(error)

    asyncio.run(run())


def test_the_end_aborts_what_runs_and_closes_the_sessions() -> None:
    async def run() -> None:
        sampler = played(pause_s=0.01)
        exchange = Exchange(sampler)
        exchange.exchange([("open", "s"), ("open", "t"), ("stream", asked("s"))])
        first = await exchange.poll()
        assert isinstance(first[0][1], SampleChunk)
        await exchange.end(within_s=0.05)
        assert sampler.aborted == ["s:0"]
        assert sorted(sampler.closed) == ["s", "t"]

    asyncio.run(run())


def test_what_does_not_end_in_time_is_cut_off_and_said_to_be() -> None:
    async def run() -> None:
        exchange = Exchange(played(pause_s=60.0))
        exchange.exchange([("open", "s"), ("stream", asked("s"))])
        assert isinstance((await exchange.poll())[0][1], SampleChunk)
        await exchange.end(within_s=0.01)
        ((_, error),) = await gathered(exchange, 1)
        assert isinstance(error, SamplerError)
        assert "was ended" in str(error)

    asyncio.run(run())


@pytest.mark.slow
def test_an_abort_does_not_overtake_its_request() -> None:
    most = 4000  # many seconds' worth: it cannot end before it is aborted
    engine = small_engine(small_model(max_positions=most + 100), max_tokens=most + 100)
    service = EngineService(engine, MemoryWeights().fetch, None)

    async def run() -> None:
        async with service as sampler:
            for number in range(20):
                exchange, request = Exchange(sampler), asked(f"s{number}", max_tokens=most)
                exchange.exchange([("open", request.session_id), ("stream", request)])
                if number % 2:
                    exchange.exchange([("abort", request.id)])
                    events = await gathered(exchange, 1)
                else:
                    await exchange.end(within_s=60.0)
                    events = await exchange.poll()
                chunks = [item for _, item in events if isinstance(item, SampleChunk)]
                assert chunks[-1].finish == "abort"
                assert sum(len(chunk.tokens) for chunk in chunks) < most

    asyncio.run(run())


def test_unknown_commands_are_refused() -> None:
    with pytest.raises(SamplerError, match="shout"):
        Exchange(played()).exchange([("shout", "s")])  # type: ignore[list-item]
