"""Streams: chunk by chunk if requested, ended by the consumer, a deadline or the engine."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch

from etude.errors import SamplerError
from etude.inference import Answer, Engine, EngineService
from etude.inference.engine import Kernels
from etude.model import LanguageModel, PackedAttention
from etude.protocols import KvPolicy
from etude.records import PolicyVersion, SampleChunk
from etude.weights import MemoryWeights
from tests.inference.builders import ALL_KERNELS, Client, drain, prompt, serve, small_engine
from tests.inference.invariants import check_engine
from tests.inference.test_service import ask, run, service_of, stream, until
from tests.model.builders import VOCAB, small_model


async def _chunks(
    service: EngineService, client: Client, suffix: list[int], **options: Any
) -> list[SampleChunk]:
    chunks: list[SampleChunk] = []
    async for chunk in service.stream(client.request(suffix, **options)):
        client.take(chunk)
        chunks.append(chunk)
    return chunks


@pytest.mark.parametrize("delay_steps", [4, None])
def test_a_streaming_request_gets_every_token_as_it_is_sampled(delay_steps: int | None) -> None:
    async def body() -> None:
        model = small_model(1)
        engine = small_engine(model)
        async with service_of(engine, delay_steps) as service:
            client, whole = Client("s", 3), Client("whole", 3)
            service.open("s")
            service.open("whole")
            chunks, (at_once,) = await asyncio.gather(
                _chunks(service, client, prompt(8, 0), max_tokens=7, streaming=True),
                _chunks(service, whole, prompt(8, 0), max_tokens=7),
            )
            assert [len(chunk.tokens) for chunk in chunks] == [1] * 7
            assert [chunk.finish for chunk in chunks] == [None] * 6 + ["length"]
            assert [chunk.routes is None for chunk in chunks] == [True] * 6 + [False]
            assert client.tokens == whole.tokens
            assert chunks[-1].prefix_digest == at_once.prefix_digest
            client.check(model)

    run(body())


def test_streams_span_versions_and_each_chunk_says_which() -> None:
    async def body() -> None:
        old, new = small_model(1), small_model(2)
        engine = small_engine(old)
        async with service_of(engine) as service:
            client = Client("s", 0)
            service.open("s")
            running = asyncio.create_task(
                _chunks(service, client, prompt(4, 0), max_tokens=20, streaming=True)
            )
            await until(lambda: len(client.tokens) >= 10)
            serve(engine, new, 1)
            chunks = await running
            steps = [chunk.version.step for chunk in chunks]
            assert steps == sorted(steps)
            assert set(steps) == {0, 1}
            assert all(len(chunk.tokens) == 1 for chunk in chunks)
            assert {chunk.kv_oldest.step for chunk in chunks} == {0}

    run(body())


@pytest.mark.parametrize("delay_steps", [4, None])
@pytest.mark.parametrize("streaming", [True, False])
def test_who_stops_listening_ends_the_request_and_nothing_else(
    delay_steps: int | None, streaming: bool
) -> None:
    async def body() -> None:
        model = small_model(1)
        engine = small_engine(model)
        async with service_of(engine, delay_steps) as service:
            client, other = Client("s", 0), Client("other", 1)
            service.open("s")
            service.open("other")
            request = client.request(prompt(4, 0), max_tokens=80, streaming=streaming)
            running = asyncio.create_task(stream(service, Client("s", 0), request))
            going_on = asyncio.create_task(ask(service, other, prompt(4, 1), max_tokens=30))
            await until(lambda: engine.counters.steps >= 3)
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running
            service.close("s")
            await going_on
            other.check(model)
            service.close("other")
            await until(lambda: engine.num_live_sessions == 0)
            check_engine(engine)

    run(body())


def test_a_stream_left_in_the_middle_gives_its_session_back() -> None:
    async def body() -> None:
        model = small_model(1)
        engine = small_engine(model)
        async with service_of(engine, None) as service:
            client = Client("s", 0)
            service.open("s")
            request = client.request(prompt(4, 0), max_tokens=80, streaming=True)
            async with contextlib.aclosing(service.stream(request)) as chunks:  # type: ignore[type-var]
                async for _ in chunks:
                    break
            fresh = Client("s", 1)
            await ask(service, fresh, prompt(5, 1))
            fresh.check(model)

    run(body())


@pytest.mark.parametrize("delay_steps", [4, None])
def test_a_deadline_ends_the_message_with_what_there_is(delay_steps: int | None) -> None:
    async def body() -> None:
        model = small_model(1, max_positions=4096)
        engine = small_engine(model, max_tokens=4000)
        async with service_of(engine, delay_steps) as service:
            client = Client("s", 0)
            service.open("s")
            request = client.request(prompt(4, 0), max_tokens=3900, deadline_s=20.0)
            running = asyncio.create_task(stream(service, client, request))
            await until(lambda: engine.counters.steps >= 3)
            loop = asyncio.get_running_loop()
            clock = loop.time
            loop.time = lambda: clock() + 20.0  # type: ignore[method-assign]
            await running
            assert client.finish == "abort"
            assert 4 < len(client.tokens) < 3900
            await ask(service, client, prompt(2, 1))
            client.check(model)

    run(body())


@pytest.mark.parametrize("kernels", ALL_KERNELS)
def test_raw_logprobs_and_alternatives_come_to_whom_they_were_asked_by(kernels: Kernels) -> None:
    model = small_model(4)
    engine = small_engine(model, kernels=kernels)
    asking, other = Client("asking", 0), Client("other", 1)
    options = {"temperature": 0.5, "top_k": 3, "raw_logprobs": True, "top_logprobs": 5}
    asking.ask(engine, prompt(10, 0), max_tokens=8, **options)
    other.ask(engine, prompt(12, 1), max_tokens=8)
    answers = {answer.request.session_id: answer.chunks[0] for answer in drain(engine, [asking, other])}
    chunk, plain = answers["asking"], answers["other"]
    assert plain.raw_logprobs is plain.top_tokens is plain.top_logprobs is None
    assert chunk.raw_logprobs is not None
    assert chunk.top_tokens is not None
    assert chunk.top_logprobs is not None
    assert chunk.top_tokens.shape == chunk.top_logprobs.shape == (8, 5)
    raw = _distributions(model, asking.tokens)[9:17]
    processed = _cut(raw / 0.5, 3)
    for place, token in enumerate(chunk.tokens.tolist()):
        assert chunk.raw_logprobs[place] == pytest.approx(float(raw[place, token]), abs=1e-4)
        assert chunk.logprobs[place] == pytest.approx(float(processed[place, token]), abs=1e-4)
        best = raw[place].topk(3).indices.tolist()
        assert chunk.top_tokens[place].tolist() == [*best, -1, -1]
        np.testing.assert_allclose(chunk.top_logprobs[place, :3], processed[place, best], atol=1e-4)
        assert token in best


def test_alternatives_stay_with_their_tokens_when_they_stream() -> None:
    model = small_model(4)
    engine = small_engine(model)
    chunks: dict[bool, list[SampleChunk]] = {}
    for streaming in (True, False):
        client = Client("s", 0)
        engine.close("s")
        client.ask(engine, prompt(10, 0), max_tokens=5, top_logprobs=2, streaming=streaming)
        chunks[streaming] = [chunk for answer in drain(engine, [client]) for chunk in answer.chunks]
    (whole,) = chunks[False]
    assert [chunk.top_tokens is not None and len(chunk.top_tokens) for chunk in chunks[True]] == [1] * 5
    streamed = np.concatenate([chunk.top_tokens for chunk in chunks[True] if chunk.top_tokens is not None])
    assert whole.top_tokens is not None
    np.testing.assert_array_equal(streamed, whole.top_tokens)


@pytest.mark.slow
def test_steps_wait_for_staging_only_where_the_schedule_must_be_reproducible() -> None:
    """A fetch that takes long: the loop stays free, and only an interactive engine goes on meanwhile."""

    async def body(delay_steps: int | None) -> None:
        model = small_model(1)
        engine, weights = small_engine(model), MemoryWeights()
        fetching, go_on = threading.Event(), threading.Event()
        step = engine.step

        def fetch(manifest: Any) -> Any:
            fetching.set()
            assert go_on.wait(60)
            return weights.fetch(manifest)

        def held(most_steps: int = 1) -> list[Answer]:
            assert delay_steps is not None or engine.counters.steps < 3 or fetching.wait(60)
            return step(most_steps)

        engine.step = held  # type: ignore[method-assign]

        async with EngineService(engine, fetch, delay_steps) as service:
            client = Client("s", 0)
            service.open("s")
            running = asyncio.create_task(ask(service, client, prompt(4, 0), max_tokens=80))
            await until(lambda: engine.counters.steps >= 3)
            manifest = weights.publish(_next(engine), dict(small_model(2).named_parameters()))
            staging = asyncio.create_task(service.stage(manifest))
            await until(fetching.is_set)
            before = engine.counters.steps
            if delay_steps is None:
                await until(lambda: engine.counters.steps > before)
            else:
                await asyncio.sleep(0.05)
                assert engine.counters.steps == before
            assert service.current() is not None
            assert service.current().step == 0  # type: ignore[union-attr]
            go_on.set()
            await staging
            await service.activate(manifest.version)
            await running
            assert {v.step for v in client.versions.values()} <= {0, 1}
            assert service.times.stage_s > 0
            assert 0 < service.times.longest_swap_s <= service.times.swap_s

    run(body(4))
    run(body(None))


class _SlowEngine(Engine):
    """Its steps take long; notes who touches it meanwhile."""

    stepping = False
    slow = True
    turned: threading.Semaphore
    """Told of each turn of the loop: the first steps wait for some."""

    def step(self, most_steps: int = 1) -> list[Answer]:
        self.stepping = True
        if self.counters.steps < 3:
            assert all(self.turned.acquire(timeout=60) for _ in range(7))
        elif self.slow:
            time.sleep(0.1)
        try:
            return super().step(most_steps)
        finally:
            self.stepping = False

    def abort(self, request_id: str) -> Answer | None:
        assert not self.stepping
        return super().abort(request_id)

    def close(self, session_id: str) -> None:
        assert not self.stepping
        super().close(session_id)

    def activate(self, version: PolicyVersion, kv: KvPolicy = "keep") -> None:
        assert not self.stepping
        super().activate(version, kv)


@pytest.mark.slow
def test_the_loop_goes_on_during_a_long_step_and_nobody_touches_the_engine_meanwhile() -> None:
    async def body() -> None:
        model, weights = small_model(1, max_positions=200), MemoryWeights()
        engine = _SlowEngine(model.config, VOCAB, 4, 200)
        engine.turned = threading.Semaphore(0)
        serve(engine, model, 0)
        async with EngineService(engine, weights.fetch, None) as service:
            clients = [Client(f"s{i}", i) for i in range(4)]
            for client in clients:
                service.open(client.name)
            requests = [client.request(prompt(5, 0), max_tokens=150) for client in clients]
            running = [
                asyncio.create_task(stream(service, *pair)) for pair in zip(clients, requests, strict=True)
            ]
            while engine.counters.steps < 3:
                await asyncio.sleep(0.001)
                engine.turned.release()
            await until(lambda: engine.stepping)
            assert service.load.running == 4
            service.abort(requests[0].id)
            service.close("s1")
            running[2].cancel()
            later = small_model(2, max_positions=200)
            manifest = weights.publish(_next(engine), dict(later.named_parameters()))
            await service.stage(manifest)
            await until(lambda: engine.stepping)
            await service.activate(manifest.version)
            engine.slow = False
            await asyncio.wait(running)
            assert [client.finish for client in clients] == ["abort", "abort", None, "length"]
            assert {v.step for v in clients[3].versions.values()} == {0, 1}
            again = Client("s2", 9)
            await ask(service, again, prompt(3, 3), max_tokens=2)
            again.check(later)
            with pytest.raises(SamplerError, match="not open"):
                await ask(service, Client("s1", 9), prompt(3, 3))
            for name in ("s0", "s2", "s3"):
                service.close(name)
            await until(lambda: engine.num_live_sessions == 0)
            check_engine(engine)

    run(body())


def test_weights_that_hold_nan_are_refused_and_the_old_go_on() -> None:
    async def body() -> None:
        weights = MemoryWeights()
        model = small_model(1)
        engine = small_engine(model)
        async with EngineService(engine, weights.fetch, 4) as service:
            broken = {name: p.detach().clone() for name, p in small_model(2).named_parameters()}
            broken["final_norm"][3] = float("nan")
            manifest = weights.publish(_next(engine), broken)
            with pytest.raises(Exception, match=r"final_norm.*not finite"):
                await service.stage(manifest)
            with pytest.raises(Exception, match="not staged"):
                await service.activate(manifest.version)
            client = Client("s", 0)
            service.open("s")
            await ask(service, client, prompt(4, 0))
            client.check(model)

    run(body())


def test_a_cancelled_staging_ends_whole_and_holds_up_nobody() -> None:
    async def body() -> None:
        weights, model = MemoryWeights(), small_model(1)
        engine = small_engine(model)
        async with EngineService(engine, weights.fetch, 4) as service:
            manifest = weights.publish(_next(engine), dict(small_model(2).named_parameters()))
            staging = asyncio.create_task(service.stage(manifest))
            await asyncio.sleep(0)
            staging.cancel()
            with pytest.raises(asyncio.CancelledError):
                await staging
            client = Client("s", 0)
            service.open("s")
            await ask(service, client, prompt(4, 0))
            client.check(model)
            await service.stage(manifest)
            await service.activate(manifest.version)
            assert service.current() == manifest.version

    run(body())


def _next(engine: Any) -> Any:
    current = engine.current()
    return type(current)(current.lineage, current.step + 1)


@torch.no_grad()
def _distributions(model: LanguageModel, tokens: list[int]) -> torch.Tensor:
    """Log-probabilities [T, vocabulary] of what follows each token."""
    ids = torch.tensor(tokens)
    return model.logits(model(ids, torch.arange(len(ids)), PackedAttention([len(ids)]))).log_softmax(-1)


def _cut(logits: torch.Tensor, top_k: int) -> torch.Tensor:
    best = logits.topk(top_k, dim=-1)
    return torch.full_like(logits, float("-inf")).scatter(-1, best.indices, best.values).log_softmax(-1)
