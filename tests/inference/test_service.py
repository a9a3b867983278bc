"""Many sessions share one engine: a schedule independent of tool times, failures that reach all callers."""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from torch import Tensor

from etude.errors import PrefixMissError, SamplerError, WeightUpdateError
from etude.inference import Answer, Engine, EngineService
from etude.inference.scoring import Scoring
from etude.model import LanguageModel
from etude.model.scoring import score_sequences
from etude.records import PolicyVersion, SampleRequest, Scores, WeightManifest
from etude.weights import MemoryWeights
from tests.inference.builders import Client, empty_engine, prompt, serve, small_engine, version
from tests.inference.invariants import check_engine
from tests.model.builders import VOCAB, small_model

_LIMIT_S = 60.0
"""No test waits longer: a schedule that hangs is a failure."""


def run(body: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(body, _LIMIT_S))


async def until(condition: Callable[[], bool]) -> None:
    """Lets the service's loop run, one step at a time."""
    while not condition():  # noqa: ASYNC110 (the engine announces no single steps)
        await asyncio.sleep(0)


def service_of(engine: Engine, delay_steps: int | None = 4) -> EngineService:
    return EngineService(engine, MemoryWeights().fetch, delay_steps)


async def ask(service: EngineService, client: Client, suffix: list[int], **options: Any) -> None:
    """One message; where the prefix is gone, sends everything again."""
    try:
        await stream(service, client, client.request(suffix, **options))
    except PrefixMissError:
        client.miss()
        await stream(service, client, client.request([], **options))


async def stream(service: EngineService, client: Client, request: SampleRequest) -> None:
    async for chunk in service.stream(request):
        client.take(chunk)


async def session(service: EngineService, client: Client, number: int, tool_s: Callable[[], float]) -> None:
    service.open(client.name)
    try:
        for turn in range(2 + number % 3):
            await ask(service, client, prompt(3 + number, turn), max_tokens=3 + (number + turn) % 5)
            await asyncio.sleep(tool_s())
    finally:
        service.close(client.name)


@dataclass
class Played:
    tokens: list[list[int]]
    logprobs: list[list[float]]
    work: tuple[int, int, int]


async def play(delay_steps: int | None, num_sessions: int, tool_s: Callable[[], float]) -> Played:
    """Eight sessions at once; what they got, and how the engine's steps were cut."""
    model = small_model(1)
    engine = small_engine(model, num_sessions=num_sessions, prefill_tokens=7)
    clients = [Client(f"s{i}", i) for i in range(8)]
    async with service_of(engine, delay_steps) as service, asyncio.TaskGroup() as group:
        for number, client in enumerate(clients):
            group.create_task(session(service, client, number, tool_s))
    for client in clients:
        client.check(model)
    counters = engine.counters
    return Played(
        [client.tokens for client in clients],
        [client.logprobs for client in clients],
        (counters.steps, counters.decode_tokens, counters.prefill_tokens),
    )


@pytest.mark.parametrize("num_sessions", [8, 3])
def test_tools_of_any_speed_give_the_same_bits_and_the_same_steps(num_sessions: int) -> None:
    randoms = [random.Random(seed) for seed in (1, 2)]
    slow = [
        run(play(4, num_sessions, lambda source=source: source.choice([0.0, 0.0, 0.003, 0.01])))
        for source in randoms
    ]
    instant = run(play(4, num_sessions, lambda: 0.0))
    assert slow[0] == slow[1] == instant


@pytest.mark.slow
@pytest.mark.parametrize("delay_steps", [None, 0])
def test_other_delays_serve_every_session_right(delay_steps: int | None) -> None:
    source = random.Random(3)
    played = run(play(delay_steps, 3, lambda: source.choice([0.0, 0.004])))
    fixed = run(play(4, 8, lambda: 0.0))
    assert played.tokens == fixed.tokens, "the company changes last bits, the noise is the session's own"


def test_sessions_decode_while_others_are_away() -> None:
    """With a delay of 4, who leaves at step 6 is waited for at 12: the next multiple at least 4 away."""

    async def body() -> None:
        engine = small_engine(max_tokens=100)
        async with service_of(engine) as service:
            quick, long = Client("quick", 0), Client("long", 1)
            service.open("quick")
            service.open("long")
            running = asyncio.create_task(ask(service, long, prompt(3, 1), max_tokens=20))
            await ask(service, quick, prompt(3, 0), max_tokens=2)
            due = engine.counters.steps + 6
            while engine.counters.steps < due:  # noqa: ASYNC110 - the engine tells nobody
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.05)
            assert engine.counters.steps == due
            assert not running.done()
            service.close("quick")
            await running
            service.close("long")

    run(body())


def test_nothing_is_served_before_the_first_activation() -> None:
    async def body() -> None:
        async with service_of(empty_engine()) as service:
            assert service.current() is None
            client = Client("s", 0)
            service.open("s")
            with pytest.raises(SamplerError, match="no weights"):
                await ask(service, client, [1, 2, 3])
            with pytest.raises(SamplerError, match="no weights"):
                await service.score(np.array([1, 2], dtype=np.int32), version(0))

    run(body())


def test_weights_come_through_stage_and_activate_between_two_steps() -> None:
    async def body() -> None:
        old, new = small_model(1), small_model(2)
        weights = MemoryWeights()
        engine = Engine(old.config, VOCAB, 4, 100)
        async with EngineService(engine, weights.fetch, 4) as service:
            client = Client("s", 0)
            service.open("s")
            first = weights.publish(version(0), dict(old.named_parameters()))
            await service.stage(first)
            assert service.current() is None
            await service.activate(first.version)
            running = asyncio.create_task(ask(service, client, prompt(4, 0), max_tokens=40))
            await until(lambda: engine.counters.steps >= 10)
            second = weights.publish(version(1), dict(new.named_parameters()))
            await service.stage(second)
            await service.activate(second.version, "recompute")
            await running
            assert service.current() == second.version
        steps = [client.versions[position].step for position in sorted(client.versions)]
        assert steps == sorted(steps)
        assert {0, 1} == set(steps)
        tokens = np.array(client.tokens, dtype=np.int32)
        later = [position for position, v in client.versions.items() if v.step == 1]
        np.testing.assert_allclose(
            np.array(client.logprobs)[later], score_sequences(new, [tokens])[0][later], atol=1e-5
        )

    run(body())


def test_weights_are_staged_one_after_another_however_often_one_is_cancelled() -> None:
    async def body() -> None:
        weights, engine = MemoryWeights(), small_engine(small_model(1))
        manifests = [weights.publish(version(n), dict(small_model(n).named_parameters())) for n in (2, 3)]
        begun: list[int] = []
        is_begun, may_end = threading.Event(), threading.Event()

        def fetch(manifest: WeightManifest) -> Mapping[str, Tensor]:
            begun.append(manifest.version.step)
            is_begun.set()
            assert may_end.wait(_LIMIT_S)
            return weights.fetch(manifest)

        async with EngineService(engine, fetch, None) as service:
            first = asyncio.create_task(service.stage(manifests[0]))
            await until(is_begun.is_set)
            for _ in range(3):
                first.cancel()
                await asyncio.sleep(0)
                await asyncio.sleep(0)
            is_begun.clear()
            second = asyncio.create_task(service.stage(manifests[1]))
            for _ in range(20):
                await asyncio.sleep(0)
            assert not first.done()
            assert begun == [2]
            may_end.set()
            await second
            assert first.cancelled()
            await service.activate(manifests[1].version)

    run(body())


def test_forgotten_weights_are_refused_and_the_old_go_on_serving() -> None:
    async def body() -> None:
        weights = MemoryWeights(keep=1)
        engine = small_engine(small_model(1))
        async with EngineService(engine, weights.fetch, 4) as service:
            forgotten = weights.publish(version(1), dict(small_model(2).named_parameters()))
            weights.publish(version(2), dict(small_model(3).named_parameters()))
            with pytest.raises(WeightUpdateError, match="no longer in memory"):
                await service.stage(forgotten)
            current = service.current()
            assert current is not None
            assert current.step == 0
            client = Client("s", 0)
            service.open("s")
            await ask(service, client, prompt(4, 0))
            client.check(engine.model)

    run(body())


def test_score_serves_exactly_the_version_in_service() -> None:
    async def body() -> None:
        model = small_model(1)
        async with service_of(small_engine(model)) as service:
            tokens = np.array(prompt(9, 0), dtype=np.int32)
            current = service.current()
            assert current is not None
            scores = await service.score(tokens, current)
            np.testing.assert_allclose(scores.logprobs, score_sequences(model, [tokens])[0], atol=1e-5)
            assert scores.version == current
            with pytest.raises(SamplerError, match="not served"):
                await service.score(tokens, PolicyVersion("run", 0, "0" * 64))

    run(body())


class _SlowScores(Engine):
    """Scores when it is told to."""

    may_score: threading.Event
    scoring: threading.Event
    stepped_meanwhile = False

    def begin_score(self, tokens: NDArray[np.int32]) -> Scoring:
        scoring = super().begin_score(tokens)
        advance = scoring.advance

        def wait_and_advance() -> None:
            self.scoring.set()
            steps = self.counters.steps
            assert self.may_score.wait(_LIMIT_S)
            self.stepped_meanwhile |= self.counters.steps != steps
            advance()

        scoring.advance = wait_and_advance
        return scoring


def _slow_scores(model: LanguageModel) -> _SlowScores:
    engine = _SlowScores(model.config, VOCAB, 4, 100)
    serve(engine, model, 0)
    engine.may_score, engine.scoring = threading.Event(), threading.Event()
    return engine


async def _stream_once(service: EngineService, client: Client, request: SampleRequest) -> None:
    await stream(service, client, request)
    service.close(client.name)


@pytest.mark.parametrize("delay_steps", [4, None])
def test_scoring_has_the_engine_for_itself_and_leaves_the_loop_free(delay_steps: int | None) -> None:
    """While it scores, others come, abort and wait; the tokens are those of a run without scoring."""

    async def body() -> None:
        model = small_model(1)
        engine = _slow_scores(model)
        async with service_of(engine, delay_steps) as service:
            tokens, current = np.array(prompt(9, 0), dtype=np.int32), service.current()
            assert current is not None
            clients = [Client(f"s{number}", number) for number in range(3)]
            for client in clients:
                service.open(client.name)
            scored = asyncio.create_task(service.score(tokens, current))
            await until(engine.scoring.is_set)
            requests = [client.request(prompt(5, 0), max_tokens=8) for client in clients]
            pairs = zip(clients, requests, strict=True)
            streams = [asyncio.create_task(_stream_once(service, *pair)) for pair in pairs]
            for _ in range(20):
                await asyncio.sleep(0)
            service.abort(requests[0].id)
            assert not scored.done()
            engine.may_score.set()
            scores = await scored
            await asyncio.gather(*streams)
            assert scores.version == current
            np.testing.assert_allclose(scores.logprobs, score_sequences(model, [tokens])[0], atol=1e-5)
        assert not engine.stepped_meanwhile
        assert [client.finish for client in clients] == ["abort", "length", "length"]
        for client in clients[1:]:
            client.check(model)

    run(body())


def test_a_score_that_is_given_up_lets_the_engine_go_on() -> None:
    async def body() -> None:
        engine = _slow_scores(small_model(1))
        async with service_of(engine, None) as service:
            current = service.current()
            assert current is not None
            scored = asyncio.create_task(service.score(np.array([1, 2], dtype=np.int32), current))
            await until(engine.scoring.is_set)
            scored.cancel()
            engine.may_score.set()
            with pytest.raises(asyncio.CancelledError):
                await scored
            client = Client("s", 0)
            service.open("s")
            await ask(service, client, prompt(4, 0))
            client.check(engine.model)

    run(body())


class _Diary(Engine):
    """Writes down what it computes: `step`, or `part` of a score."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.diary: list[str] = []

    def step(self, most_steps: int = 1) -> list[Answer]:
        self.diary.append("step")
        return super().step(most_steps)

    def begin_score(self, tokens: NDArray[np.int32]) -> Scoring:
        scoring = super().begin_score(tokens)
        advance = scoring.advance

        def note_and_advance() -> None:
            self.diary.append("part")
            advance()

        scoring.advance = note_and_advance
        return scoring


async def _score_beside_streams(engine: _Diary, delay_steps: int | None, num_scores: int) -> list[Scores]:
    """Scores of 96 tokens each, asked for while two sessions stream."""
    async with service_of(engine, delay_steps) as service:
        clients = [Client(f"s{number}", number) for number in range(2)]
        for client in clients:
            service.open(client.name)
        requests = [client.request(prompt(5, 0), max_tokens=60, streaming=True) for client in clients]
        pairs = zip(clients, requests, strict=True)
        streams = [asyncio.create_task(_stream_once(service, *pair)) for pair in pairs]
        await until(lambda: engine.counters.steps >= 3)
        current = service.current()
        assert current is not None
        tokens = np.array(prompt(96, 1), dtype=np.int32)
        scores = await asyncio.gather(*(service.score(tokens, current) for _ in range(num_scores)))
        await asyncio.gather(*streams)
        for client in clients:
            client.check(engine.model)
    check_engine(engine)
    return scores


def _diary_engine(model: LanguageModel) -> _Diary:
    """Parts of 16 tokens."""
    engine = _Diary(model.config, VOCAB, 4, 100, 16, num_pages=40)
    serve(engine, model, 0)
    return engine


def test_a_long_score_holds_up_a_running_stream_by_one_part_per_step() -> None:
    engine = _diary_engine(small_model(1))
    scores = run(_score_beside_streams(engine, None, 2))
    last = max(number for number, entry in enumerate(engine.diary) if entry == "part")
    assert engine.diary.count("part") == 12
    assert engine.diary[-1] == "step", "both scores were over before the streams"
    assert all(pair != ("part", "part") for pair in itertools.pairwise(engine.diary[: last + 1]))
    alone = small_engine(small_model(1), prefill_tokens=16).score(np.array(prompt(96, 1), dtype=np.int32))
    for one in scores:
        np.testing.assert_array_equal(one.logprobs, alone.logprobs)


def test_under_a_schedule_no_step_comes_between_the_parts_of_a_score() -> None:
    engines = [_diary_engine(small_model(1)) for _ in range(2)]
    for engine in engines:
        run(_score_beside_streams(engine, 4, 1))
    assert "part," * 6 in ",".join(engines[0].diary) + ","
    assert engines[0].diary == engines[1].diary


def test_an_idle_engine_scores_without_waiting_for_steps() -> None:
    async def body() -> None:
        engine = _diary_engine(small_model(1))
        async with service_of(engine, None) as service:
            service.open("away")
            await service.score(np.array(prompt(96, 1), dtype=np.int32), version_of(service))
            assert engine.diary == ["part"] * 6

    run(body())


def version_of(service: EngineService) -> PolicyVersion:
    current = service.current()
    assert current is not None
    return current


def test_weights_come_after_the_scores_that_were_asked_for_before() -> None:
    async def body() -> None:
        model, later, weights = small_model(1), small_model(2), MemoryWeights()
        engine = _diary_engine(model)
        tokens = np.array(prompt(96, 1), dtype=np.int32)
        async with EngineService(engine, weights.fetch, None) as service:
            manifest = weights.publish(version(1), dict(later.named_parameters()))
            await service.stage(manifest)
            before = asyncio.create_task(service.score(tokens, version_of(service)))
            await until(lambda: "part" in engine.diary)
            swapped = asyncio.create_task(service.activate(manifest.version))
            await asyncio.sleep(0)
            after = asyncio.create_task(service.score(tokens, manifest.version))
            for scored, of in ((await before, model), (await after, later)):
                np.testing.assert_allclose(scored.logprobs, score_sequences(of, [tokens])[0], atol=1e-5)
            await swapped
            assert (await after).version == manifest.version

    run(body())


def test_a_stopped_service_ends_scores_that_are_under_way() -> None:
    async def body() -> None:
        engine = _diary_engine(small_model(1))
        tokens = np.array(prompt(96, 1), dtype=np.int32)
        async with service_of(engine, None) as service:
            scored = asyncio.create_task(service.score(tokens, version_of(service)))
            await until(lambda: "part" in engine.diary)
        with pytest.raises(SamplerError, match="stopped"):
            await scored
        assert engine.num_free_pages == engine.num_pages

    run(body())


class _FailingEngine(Engine):
    """Fails at its third step, as a real one does for want of memory."""

    def step(self, most_steps: int = 1) -> list[Answer]:
        if self.counters.steps == 2:
            raise MemoryError("no memory for the third step")
        return super().step(most_steps)


def test_a_failed_engine_reaches_every_session_as_a_sampler_error() -> None:
    async def body() -> None:
        model = small_model(1)
        engine = _FailingEngine(model.config, VOCAB, 2, 100)
        weights = MemoryWeights()
        failures: list[SamplerError] = []

        async def one(service: EngineService, name: str) -> None:
            service.open(name)
            try:
                await ask(service, Client(name, 0), prompt(4, 0), max_tokens=30)
            except SamplerError as error:
                failures.append(error)
            finally:
                service.close(name)

        with pytest.raises(MemoryError, match="third step"):
            async with EngineService(engine, weights.fetch, 4) as service:
                manifest = weights.publish(version(0), dict(model.named_parameters()))
                await service.stage(manifest)
                await service.activate(manifest.version)
                await asyncio.gather(*(one(service, f"s{i}") for i in range(4)))
                assert len(failures) == 4, "two were running, two waited for a slot"
                await one(service, "late")
        assert len(failures) == 5
        assert all("no memory" in str(error) for error in failures)

    run(body())


def test_a_stopped_service_ends_waiting_streams_and_refuses_new_ones() -> None:
    async def body() -> None:
        client = Client("s", 0)
        async with service_of(small_engine(max_tokens=100)) as service:
            service.open("s")
            service.open("t")
            running = asyncio.create_task(ask(service, client, prompt(4, 0), max_tokens=90))
            await asyncio.sleep(0.01)
        with pytest.raises(SamplerError, match="stopped"):
            await running
        with pytest.raises(SamplerError, match="stopped"):
            await ask(service, Client("t", 0), [1, 2])

    run(body())


@pytest.mark.parametrize("delay_steps", [4, None])
@pytest.mark.parametrize("begun", [True, False])
def test_an_abort_ends_the_stream_and_the_session_goes_on(delay_steps: int | None, begun: bool) -> None:
    async def body() -> None:
        model = small_model(1)
        engine = small_engine(model)
        async with service_of(engine, delay_steps) as service:
            client = Client("s", 0)
            service.open("s")
            request = client.request(prompt(4, 0), max_tokens=60)
            running = asyncio.create_task(stream(service, client, request))
            await asyncio.sleep(0)
            await until(lambda: not begun or engine.counters.steps >= 3)
            service.abort(request.id)
            service.abort("unknown")
            await running
            assert client.finish == "abort"
            assert (len(client.tokens) > 4) == begun
            await ask(service, client, prompt(2, 1))
            client.check(model)
            service.close("s")

    run(body())


@pytest.mark.parametrize("begun", [True, False])
def test_a_cancelled_session_leaves_nothing_behind(begun: bool) -> None:
    """As an agent's runner does it: cancelled in the middle of a stream, it aborts and closes."""

    async def body() -> None:
        engine = small_engine()
        async with service_of(engine) as service:
            client, other = Client("s", 0), Client("other", 1)
            service.open("s")
            service.open("other")
            request = client.request(prompt(4, 0), max_tokens=60)
            running = asyncio.create_task(stream(service, client, request))
            await asyncio.sleep(0)
            waiting = asyncio.create_task(ask(service, other, prompt(4, 1)))
            await until(lambda: not begun or engine.counters.steps >= 3)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            service.abort(request.id)
            service.close("s")
            await waiting
            other.check(engine.model)
            service.close("other")
            await until(lambda: engine.num_live_sessions == 0)

    run(body())


@pytest.mark.parametrize("begun", [True, False])
def test_closing_a_session_in_flight_ends_its_stream_and_holds_up_nobody(begun: bool) -> None:
    async def body() -> None:
        engine = small_engine()
        async with service_of(engine) as service:
            client, other = Client("s", 0), Client("other", 1)
            service.open("s")
            service.open("other")
            running = asyncio.create_task(ask(service, client, prompt(4, 0), max_tokens=60))
            await asyncio.sleep(0)
            other_running = asyncio.create_task(ask(service, other, prompt(4, 1), max_tokens=20))
            await until(lambda: not begun or engine.counters.steps >= 3)
            service.close("s")
            await running
            assert client.finish == "abort"
            await other_running
            service.close("other")
            with pytest.raises(SamplerError, match="not open"):
                await ask(service, client, [1])

    run(body())


def test_sessions_must_be_opened_once_and_sample_one_message_at_a_time() -> None:
    async def body() -> None:
        async with service_of(small_engine()) as service:
            client = Client("s", 0)
            with pytest.raises(SamplerError, match="not open"):
                await ask(service, client, [1, 2])
            service.open("s")
            with pytest.raises(SamplerError, match="open already"):
                service.open("s")
            running = asyncio.create_task(ask(service, Client("s", 0), prompt(4, 0), max_tokens=30))
            await asyncio.sleep(0)
            with pytest.raises(SamplerError, match="open already"):
                service.open("s")
            with pytest.raises(SamplerError, match="in flight"):
                await ask(service, client, [1, 2])
            await running
            service.close("s")
            service.close("s")
            service.close("unknown")

    run(body())


def test_a_refused_request_leaves_its_session_open() -> None:
    async def body() -> None:
        engine = small_engine(max_tokens=40)
        async with service_of(engine) as service:
            client = Client("s", 0)
            service.open("s")
            with pytest.raises(SamplerError, match="too long"):
                await ask(service, Client("s", 0), prompt(50, 0))
            await ask(service, client, prompt(5, 0))
            client.check(engine.model)
            service.close("s")

    run(body())
