"""The load generator against fakes: its requests, timing and counts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from typing import Any

import numpy as np
import pytest
from benchmarks.load import (
    LoadSession,
    LoadTurn,
    LogNormal,
    TurnRecord,
    WorkloadShape,
    run_load,
    summarise,
    synthetic_sessions,
)
from benchmarks.load.http_target import HttpTarget
from benchmarks.load.runner import LoadError
from benchmarks.sampler_target import SamplerTarget
from fastapi import FastAPI, Response

from etude.errors import ConfigError
from tests.fakes.replica import FakeReplica, fake_replica, running_server
from tests.fakes.scripted import ScriptedSampler

SHAPE = WorkloadShape(
    num_sessions=6,
    turns=LogNormal(3, 3),
    prompt_tokens=(10, 20),
    observation_tokens=(3, 6),
    output_tokens=LogNormal(5, 12),
)
SESSIONS = synthetic_sessions(SHAPE)


def run(body: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(body, 60.0))


async def load(
    replica: FakeReplica, api: Any = "chat", **options: Any
) -> tuple[list[TurnRecord], FakeReplica]:
    async with fake_replica(replica) as url:
        target = HttpTarget(url, "fake", api)
        try:
            await target.calibrate()
            replica.requests.clear()
            return await run_load(target, SESSIONS, **options), replica
        finally:
            await target.close()


@pytest.mark.parametrize("api", ["chat", "completions"])
def test_a_server_gets_growing_prefixes_and_is_timed(api: str) -> None:
    records, replica = run(load(FakeReplica(token_s=0.002, prefill_token_s=0.0005), api))
    report = summarise(records)
    assert report.turns == 18
    assert report.errors == {}
    assert report.output_tokens == sum(session.output_tokens for session in SESSIONS)
    assert report.cache_hit_rate is not None and report.cache_hit_rate > 0.3
    assert 0.002 <= report.inter_token.p50 < report.latency.p50
    assert report.first_token.p50 >= 0.0005 * 3
    longest = max(replica.requests, key=lambda body: len(json.dumps(body)))
    if api == "chat":
        roles = [message["role"] for message in longest["messages"]]
        assert roles == ["user", "assistant", "user", "assistant", "user"]
        others = [b for b in replica.requests if b["messages"] == longest["messages"][:3]]
        assert len(others) == 1, "a later turn begins with the whole earlier one"


def test_words_are_calibrated_by_the_servers_own_counts() -> None:
    async def body() -> None:
        async with fake_replica(FakeReplica()) as url:
            target = HttpTarget(url + "/v1", "fake")
            assert await target.calibrate() == 1.0
            await target.close()

    run(body())


def test_concurrency_bounds_the_sessions_at_a_time() -> None:
    most = 0

    class Target:
        running = 0

        async def turn(self, session: LoadSession, record: TurnRecord, clock: Any) -> None:
            nonlocal most
            self.running += 1
            most = max(most, self.running)
            await asyncio.sleep(0.001)
            self.running -= 1

        async def end(self, session: LoadSession) -> None:
            pass

    run(run_load(Target(), SESSIONS, concurrency=2))
    assert most == 2
    run(run_load(Target(), SESSIONS))
    assert most == len(SESSIONS)


def test_errors_are_counted_by_their_code_and_end_their_session() -> None:
    records, _ = run(load(FakeReplica()))
    assert summarise(records).errors == {}

    async def failing(fault: dict[str, Any], limit_s: float = 60.0) -> dict[str, int]:
        replica = FakeReplica()
        async with fake_replica(replica) as url:
            target = HttpTarget(url, "fake")
            for name, value in fault.items():
                setattr(replica, name, value)
            records = await run_load(target, SESSIONS, turn_limit_s=limit_s)
            await target.close()
            assert len(records) == len(SESSIONS)
            return summarise(records).errors

    assert run(failing({"refuse": True})) == {"503 draining": 6}
    assert run(failing({"cut_after": 1})) == {"RemoteProtocolError": 6}
    assert run(failing({"token_s": 60.0}, 0.5)) == {"timeout": 6}


def saying(*events: str) -> FastAPI:
    """A server that answers every request with these events."""
    app = FastAPI()

    async def answer() -> Response:
        body = "".join(f"data: {event}\n\n" for event in events)
        return Response(body.encode(), media_type="text/event-stream")

    app.add_api_route("/v1/chat/completions", answer, methods=["POST"])
    return app


async def load_on(app: FastAPI) -> list[TurnRecord]:
    async with running_server(app) as url:
        target = HttpTarget(url, "fake")
        try:
            return await run_load(target, SESSIONS)
        finally:
            await target.close()


@pytest.mark.parametrize(
    ("event", "errors"),
    [
        ('{"error": "the model is overloaded"}', {"error": 6}),
        ('{"error": {"message": "overloaded", "code": 529}}', {"529": 6}),
        ("[1]", {"malformed": 6}),
    ],
)
def test_errors_are_counted_in_whatever_form_a_server_tells_them(event: str, errors: dict[str, int]) -> None:
    assert summarise(run(load_on(saying(event)))).errors == errors


def test_text_with_line_separators_is_no_error() -> None:
    event = {"choices": [{"delta": {"content": "a\u2028b\u0085c"}}], "error": None}
    records = run(load_on(saying(json.dumps(event, ensure_ascii=False), "[DONE]")))
    assert summarise(records).errors == {}
    assert {record.output_tokens for record in records} == {1}


def test_a_server_that_does_not_count_its_input_is_not_calibrated_by() -> None:
    async def body() -> None:
        event = {"choices": [{"delta": {"content": "a"}}]}
        async with running_server(saying(json.dumps(event), "[DONE]")) as url:
            target = HttpTarget(url, "fake")
            with pytest.raises(LoadError, match=r"usage: .*how many tokens"):
                await target.calibrate()
            await target.close()

    run(body())


@pytest.mark.parametrize("url", ["localhost:8000", "http://host:port", "http://[::1", "ftp://host"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="not a server address"):
        HttpTarget(url, "fake")


def test_nobody_there_is_an_error_of_each_session() -> None:
    async def body() -> dict[str, int]:
        async with fake_replica(FakeReplica()) as url:
            pass
        target = HttpTarget(url, "fake")
        records = await run_load(target, SESSIONS)
        await target.close()
        return summarise(records).errors

    assert run(body()) == {"ConnectError": 6}


def test_a_sampler_gets_the_same_sessions_in_tokens() -> None:
    async def body() -> None:
        sampler = ScriptedSampler(lambda _, context: np.full(4, 7, dtype=np.int32), chunk_tokens=1)
        records = await run_load(SamplerTarget(sampler, vocab_size=50), SESSIONS)
        report = summarise(records)
        assert report.errors == {}
        assert report.turns == 18
        assert report.output_tokens == sum(r.output_tokens for r in records) > 18
        assert report.cache_hit_rate is not None and report.cache_hit_rate > 0.5
        assert not sampler.open_sessions
        assert all(request.streaming for request in sampler.requests)

    run(body())


def test_a_sampler_that_forgets_is_sent_everything_again() -> None:
    async def body() -> None:
        sampler = ScriptedSampler(lambda _, context: np.full(4, 7, dtype=np.int32))
        target = SamplerTarget(sampler, vocab_size=50)
        session = LoadSession("s", (LoadTurn(10, 4), LoadTurn(5, 4)))
        first, second = TurnRecord("s", 0, 0.0), TurnRecord("s", 1, 0.0)
        await target.turn(session, first, lambda: 0.0)
        sampler.drop_prefix("s")
        await target.turn(session, second, lambda: 0.0)
        assert (second.prompt_tokens, second.cached_tokens, second.output_tokens) == (19, 0, 4)
        assert len(sampler.requests[-1].suffix) == 19

    run(body())


def test_recorded_inputs_are_sent_as_they_were() -> None:
    async def body() -> None:
        sampler = ScriptedSampler(lambda _, context: np.full(2, 7, dtype=np.int32))
        inputs = (np.array([3, 1, 4], dtype=np.int32), np.array([1, 5], dtype=np.int32))
        session = LoadSession("s", (LoadTurn(3, 2), LoadTurn(2, 2)), inputs)
        await run_load(SamplerTarget(sampler, vocab_size=50), [session])
        assert [request.suffix.tolist() for request in sampler.requests] == [[3, 1, 4], [1, 5]]

    run(body())


def test_gaps_of_several_tokens_are_shared_out() -> None:
    record = TurnRecord("s", 0, 0.0)
    for now_s, tokens in ((1.0, 1), (3.0, 4), (3.5, 0), (4.0, 1)):
        record.add_piece(now_s, tokens)
    assert record.gaps_s() == [0.5, 0.5, 0.5, 0.5, 1.0]
    assert record.first_token_s == 1.0


def test_a_report_of_nothing_says_so() -> None:
    report = summarise([])
    assert (report.turns, report.output_tokens_per_s, report.cache_hit_rate) == (0, 0.0, None)
    assert report.to_json()["latency"]["p99"] is None


def test_a_load_is_open_or_closed() -> None:
    class Nothing:
        async def turn(self, session: LoadSession, record: TurnRecord, clock: Any) -> None: ...
        async def end(self, session: LoadSession) -> None: ...

    with pytest.raises(ConfigError, match="not both"):
        run(run_load(Nothing(), SESSIONS, concurrency=1, arrivals_per_s=1.0))
