"""The proxy in front of fake replicas: answers pass through, failures are retried or reported."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import pytest
from fastapi import FastAPI
from fastapi.responses import Response
from hypothesis import given
from hypothesis import strategies as st

from etude.config.routing import HealthCheckConfig, RouterConfig, RouterLimitsConfig
from etude.errors import ConfigError
from etude.inference.router.pools import Lender, Move
from etude.inference.router.server import Proxy, ReplicaAddress, build_app
from etude.inference.router.server.events import EventGuard
from etude.inference.router.server.hints import read_hints
from etude.inference.router.types import ReplicaState
from etude.serving.client import Client
from tests.fakes.replica import FakeReplica, fake_replica, running_server

_LIMIT_S = 60.0
HEALTH = HealthCheckConfig(interval_s=0.05, timeout_s=30.0, backoff_s=0.05)


def run(body: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(body, _LIMIT_S))


@dataclass
class Setting:
    proxy: Proxy
    url: str
    http: httpx.AsyncClient
    replicas: list[FakeReplica]
    urls: list[str]

    def chat(self, session: str = "s", stream: bool = False, **fields: Any) -> Any:
        body = {"model": "fake", "messages": [{"role": "user", "content": "a b c"}], "max_tokens": 5}
        headers = {"x-session-id": session}
        return self.http.post(
            "/v1/chat/completions", json={**body, "stream": stream, **fields}, headers=headers
        )

    async def ready(self, count: int) -> None:
        """Waits until so many replicas are ready."""
        while sum(r.ready for r in self.proxy.router.replicas.values()) != count:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@asynccontextmanager
async def setting(
    replicas: Sequence[FakeReplica], lender: Lender | None = None, **options: Any
) -> AsyncIterator[Setting]:
    token, health = options.pop("admin_token", None), options.pop("health", HEALTH)
    async with AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(fake_replica(replica)) for replica in replicas]
        proxy = Proxy(RouterConfig(health=health, **options))
        proxy.lender = lender or proxy.lender
        app = build_app(proxy, [ReplicaAddress(url) for url in urls], token)
        url = await stack.enter_async_context(running_server(app))
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=60.0))
        one = Setting(proxy, url, http, list(replicas), urls)
        await one.ready(sum(replica.version is not None for replica in replicas))
        yield one


def events(text: str) -> list[Any]:
    lines = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


# ---- passing through ----------------------------------------------------------------------------


def test_openais_client_reads_answers_through_the_router() -> None:
    async def body() -> None:
        async with setting([FakeReplica(), FakeReplica()]) as one:
            client = openai.AsyncOpenAI(base_url=one.url + "/v1", api_key="k", max_retries=0)
            messages: Any = [{"role": "user", "content": "one two"}]
            whole = await client.chat.completions.create(model="fake", messages=messages, max_tokens=4)
            stream = await client.chat.completions.create(
                model="fake", messages=messages, max_tokens=4, stream=True
            )
            text = "".join([c.choices[0].delta.content or "" async for c in stream if c.choices])
            assert text == whole.choices[0].message.content
            assert [model.id async for model in client.models.list()] == ["fake"]
            await client.close()

    run(body())


def test_a_session_goes_to_one_replica_and_finds_its_prefix() -> None:
    async def body() -> None:
        async with setting([FakeReplica(), FakeReplica(), FakeReplica()]) as one:
            for session in ("s", "t", "u"):
                seen = {(await one.chat(session)).headers["x-etude-replica"] for _ in range(6)}
                assert len(seen) == 1
            cached = (await one.chat("s")).json()["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert cached > 0
            assert [len(replica.requests) for replica in one.replicas].count(0) == 0
            assert one.proxy.router.num_in_flight == 0

    run(body())


def test_streams_come_as_they_are_made_and_end_with_done() -> None:
    async def body() -> None:
        async with setting([FakeReplica(token_s=0.05)]) as one:
            request = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 10, "stream": True}
            async with one.http.stream("POST", "/v1/chat/completions", json=request) as response:
                parts = []
                async for part in response.aiter_text():
                    assert parts or one.replicas[0].running, "the first comes before the last is made"
                    parts.append(part)
            found = events("".join(parts))
            assert found[-1] == "[DONE]"
            assert len(found) == 12
            assert one.proxy.router.num_in_flight == 0

    run(body())


def test_a_client_that_leaves_stops_the_replicas_work() -> None:
    async def body() -> None:
        async with setting([FakeReplica(token_s=0.02)]) as one:
            request = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1000, "stream": True}
            async with one.http.stream("POST", "/v1/chat/completions", json=request) as response:
                async for _ in response.aiter_text():
                    break
            waiting = asyncio.ensure_future(one.chat(max_tokens=1000))
            while len(one.replicas[0].requests) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            waiting.cancel()
            while one.proxy.router.num_in_flight or one.replicas[0].running > 1:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            assert one.replicas[0].num_cut_streams == 1

    run(body())


def test_errors_of_a_replica_reach_the_client_as_they_are() -> None:
    async def body() -> None:
        async with setting([FakeReplica()]) as one:
            response = await one.http.get("/v1/nowhere")
            assert response.status_code == 404
            assert response.json() == {"detail": "Not Found"}

    run(body())


@pytest.mark.parametrize("stream", [False, True])
def test_the_side_channel_is_fetched_from_the_replica_that_answered(stream: bool) -> None:
    async def body() -> None:
        async with setting([FakeReplica(), FakeReplica(), FakeReplica()]) as one:
            body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2, "stream": stream}
            for number in range(6):
                headers = {"x-session-id": f"s{number}", "x-etude-extensions": "tokens"}
                answer = await one.http.post("/v1/chat/completions", json=body, headers=headers)
                path = answer.headers["x-etude-side-channel"]
                frames = await one.http.get(path)
                assert (frames.status_code, frames.text) == (200, path.rpartition("/")[2])
            assert sum(bool(replica.side_channel) for replica in one.replicas) == 3

    run(body())


def test_pins_arms_and_lent_replicas_work_over_http() -> None:
    window = {"lender": "serve", "borrower": "rollout", "count": 1, "start": "00:00", "end": "23:59"}

    async def body() -> None:
        versions = [FakeReplica(version=f"run@{n}") for n in (1, 1, 2)]
        async with setting(versions, lending={"windows": [window]}, arms={"run@1": 1.0, "run@2": 0.0}) as one:
            while not any(r.pool == "rollout" for r in one.proxy.router.replicas.values()):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            pools = {r.name: r.pool for r in one.proxy.router.replicas.values()}
            lent = next(name for name, pool in pools.items() if pool == "rollout")
            version = one.proxy.router.replicas[lent].version
            assert version is not None
            body = {"messages": [], "max_tokens": 1}
            headers = {"x-etude-pool": "rollout", "x-etude-version": version}
            answer = await one.http.post("/v1/chat/completions", json=body, headers=headers)
            assert answer.headers["x-etude-replica"] == lent
            none = await one.http.post(
                "/v1/chat/completions", json=body, headers={"x-etude-version": "run@9"}
            )
            assert (none.status_code, none.json()["error"]["param"]) == (503, "version")
            served = {(await one.chat(f"s{n}")).headers["x-etude-replica"] for n in range(8)}
            assert {one.proxy.router.replicas[name].version for name in served} == {"run@1"}
            assert lent not in served

    run(body())


def test_shares_and_pools_are_changed_while_the_router_runs() -> None:
    async def body() -> None:
        async with setting([FakeReplica(version="run@1"), FakeReplica(version="run@2")]) as one:
            names = {r.version: r.name for r in one.proxy.router.replicas.values()}
            put = await one.http.put("/router/arms", json={"run@2": 1, "run@1": 0})
            assert put.json() == (await one.http.get("/router/arms")).json() == {"run@1": 0.0, "run@2": 1.0}
            served = {(await one.chat(f"s{n}")).headers["x-etude-replica"] for n in range(6)}
            assert served == {names["run@2"]}
            await one.http.put("/router/arms", json={})
            moved = await one.http.patch(f"/router/replicas/{names['run@2']}", json={"pool": "rollout"})
            assert (moved.json()["pool"], moved.json()["home"]) == ("rollout", "rollout")
            served = {(await one.chat(f"t{n}")).headers["x-etude-replica"] for n in range(6)}
            assert served == {names["run@1"]}
            lent = await one.http.post(
                "/v1/completions", json={"prompt": "a", "max_tokens": 1}, headers={"x-etude-pool": "rollout"}
            )
            assert lent.headers["x-etude-replica"] == names["run@2"]

    run(body())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "path", "body", "status", "param"),
    [
        ("PUT", "/router/arms", {"run@1": -1}, 400, "run@1"),
        ("PUT", "/router/arms", {"run@1": "half"}, 400, "run@1"),
        ("PUT", "/router/arms", [1], 400, "body"),
        ("PATCH", "/router/replicas/nobody", {"pool": "a"}, 404, "name"),
        ("POST", "/router/replicas", {"url": "http://127.0.0.1:1", "pol": "a"}, 400, "pol"),
        ("POST", "/router/replicas", {"pool": "a"}, 400, "url"),
    ],
)
def test_tables_are_not_changed_by_what_makes_no_sense(
    method: str, path: str, body: Any, status: int, param: str
) -> None:
    async def ask() -> None:
        async with setting([FakeReplica()], arms={"fake@0": 1.0}) as one:
            answer = await one.http.request(method, path, json=body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)
            assert one.proxy.router.arms == {"fake@0": 1.0} and len(one.proxy.addresses) == 1

    run(ask())


def test_tokenisation_goes_through_and_unknown_paths_are_told_as_openai_tells_them() -> None:
    async def body() -> None:
        async with setting([FakeReplica()]) as one:
            found = await one.http.post("/tokenize", json={"prompt": "a b c"})
            assert found.json()["count"] == 3
            for method, path, status in (("GET", "/nothing", 404), ("PUT", "/v1/models", 405)):
                answer = await one.http.request(method, path)
                assert answer.status_code == status
                assert f"{method} {path}" in answer.json()["error"]["message"]

    run(body())


def test_a_router_begins_without_replicas_and_takes_them_as_they_come() -> None:
    async def body() -> None:
        async with setting([]) as one, fake_replica(FakeReplica()) as url:
            assert (await one.chat()).status_code == 503
            await one.http.post("/router/replicas", json={"url": url})
            await one.ready(1)
            assert (await one.chat()).status_code == 200

    run(body())


# ---- failures -----------------------------------------------------------------------------------


def test_a_pin_that_a_replica_no_longer_serves_is_tried_elsewhere() -> None:
    async def body() -> None:
        health = HealthCheckConfig(interval_s=60.0, timeout_s=30.0)
        async with setting([FakeReplica(), FakeReplica()], health=health) as one:
            one.replicas[0].version = "fake@1"  # since the last probe
            pin = {"x-etude-version": "fake@0"}
            fields = {"prompt": "a", "max_tokens": 1}
            for _ in range(4):
                answer = await one.http.post("/v1/completions", json=fields, headers=pin)
                assert answer.status_code == 200
            one.replicas[1].version = "fake@1"
            refused = await one.http.post("/v1/completions", json=fields, headers=pin)
            assert (refused.status_code, refused.json()["error"]["code"]) == (409, "version_not_served")
            ready = [replica.ready for replica in one.proxy.router.replicas.values()]
            assert ready == [True, True], "they answer other requests"

    run(body())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fault", [{"refuse": True}, {"cut_after": 0}])
def test_a_replica_that_fails_before_it_answers_is_not_noticed_by_the_client(
    stream: bool, fault: dict[str, Any]
) -> None:
    async def body() -> None:
        async with setting([FakeReplica(), FakeReplica()]) as one:
            home = (await one.chat("s")).headers["x-etude-replica"]
            dead = next(r for r, url in zip(one.replicas, one.urls, strict=True) if url.endswith(home))
            for name, value in fault.items():
                setattr(dead, name, value)
            response = await one.chat("s", stream)
            assert response.status_code == 200
            assert response.headers["x-etude-replica"] != home
            assert "w" in response.text

    run(body())


def _unreadable() -> Response:
    return Response(
        b"no gzip at all", headers={"content-encoding": "gzip", "content-type": "application/json"}
    )


def test_a_probe_whose_answer_cannot_be_read_is_a_failure() -> None:
    async def body() -> None:
        app = FastAPI()
        app.add_api_route("/ready", _unreadable, methods=["GET"])
        async with setting([FakeReplica()]) as one, running_server(app) as url:
            name = one.proxy.join(ReplicaAddress(url))
            while one.proxy.router.replicas[name].state is not ReplicaState.EJECTED:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            assert "DecodingError" in one.proxy.router.replicas[name].cause

    run(body())


def test_an_answer_that_cannot_be_read_is_asked_for_elsewhere() -> None:
    async def body() -> None:
        app = FastAPI()
        app.add_api_route("/ready", lambda: {"version": "fake@0"}, methods=["GET"])
        app.add_api_route("/v1/chat/completions", _unreadable, methods=["POST"])
        async with setting([FakeReplica()]) as one, running_server(app) as url:
            one.proxy.join(ReplicaAddress(url))
            await one.ready(2)
            answers = [await one.chat(f"s{number}") for number in range(4)]
            assert {answer.status_code for answer in answers} == {200}
            assert one.proxy.router.num_in_flight == 0

    run(body())


def test_a_defect_in_the_rules_of_lending_does_not_end_the_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("etude.inference.router.server.health._AGAIN_S", 0.0)

    class Defective(Lender):
        def moves(self, *_: Any, **__: Any) -> list[Move]:
            raise ArithmeticError("as never should be")

    async def body() -> None:
        async with setting([], lender=Defective()) as one:
            await asyncio.sleep(0.1)
            async with fake_replica(FakeReplica()) as url:
                one.proxy.join(ReplicaAddress(url))
                await one.ready(1)

    run(body())


def test_a_stream_that_is_cut_ends_with_an_error_event() -> None:
    async def body() -> None:
        async with setting([FakeReplica(cut_after=3)]) as one:
            response = await one.chat(stream=True)
            *words, error = events(response.text)
            assert len(words) == 3
            assert error["error"]["code"] == "replica_lost"
            client = openai.AsyncOpenAI(base_url=one.url + "/v1", api_key="k", max_retries=0)
            messages: Any = [{"role": "user", "content": "one two"}]
            stream = await client.chat.completions.create(model="fake", messages=messages, stream=True)
            with pytest.raises(openai.APIError, match="cut"):
                async for _ in stream:
                    pass
            await client.close()
            assert one.proxy.router.num_in_flight == 0

    run(body())


def test_a_replica_that_is_gone_is_ejected_and_its_requests_go_elsewhere() -> None:
    async def body() -> None:
        async with setting([FakeReplica()]) as one:
            async with fake_replica(FakeReplica()) as url:
                name = one.proxy.join(ReplicaAddress(url))
                await one.ready(2)
            answers = [await one.chat(f"s{n}") for n in range(8)]
            assert {answer.status_code for answer in answers} == {200}
            await one.ready(1)
            assert not one.proxy.router.replicas[name].ready
            port = httpx.URL(url).port
            assert port is not None
            async with fake_replica(FakeReplica(), port):
                await one.ready(2)
                seen = {(await one.chat(f"t{n}")).headers["x-etude-replica"] for n in range(8)}
                assert name in seen, "it comes back and takes load"

    run(body())


def test_without_replicas_the_client_is_told_to_wait() -> None:
    async def body() -> None:
        async with setting([FakeReplica(version=None)]) as one:
            response = await one.chat()
            assert response.status_code == 503
            assert response.headers["retry-after"] == "1"
            assert response.json()["error"]["code"] == "no_replica"
            assert (await one.http.get("/ready")).status_code == 503
            assert (await one.http.get("/health")).status_code == 200

    run(body())


def test_a_replica_that_says_nothing_in_time_is_told() -> None:
    async def body() -> None:
        async with setting(
            [FakeReplica(token_s=600.0)], limits=RouterLimitsConfig.model_construct(answer_s=0.1)
        ) as one:
            response = await one.chat()
            assert response.status_code == 504
            assert response.json()["error"]["code"] == "replica_slow"

    run(body())


def test_when_all_replicas_refuse_the_refusal_is_handed_on() -> None:
    async def body() -> None:
        async with setting([FakeReplica(), FakeReplica()]) as one:
            for replica in one.replicas:
                replica.refuse = True
            response = await one.chat()
            assert response.status_code == 503
            assert "error" in response.json()

    run(body())


def test_hedging_asks_a_second_replica_only_when_it_is_on() -> None:
    async def body(after_s: float) -> list[int]:
        slow = [FakeReplica(token_s=600.0 if after_s else 0.3) for _ in range(2)]
        async with setting(slow, limits={"hedge_after_s": after_s}) as one:
            asking = asyncio.ensure_future(one.chat(max_tokens=1))
            while not any(replica.requests for replica in slow):  # noqa: ASYNC110
                await asyncio.sleep(0)
            for other in slow:
                if not other.requests:
                    other.token_s = 0.0
            assert (await asking).status_code == 200
            while one.proxy.router.num_in_flight:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            return sorted(len(replica.requests) for replica in one.replicas)

    assert run(body(0.0)) == [0, 1]
    assert run(body(0.05)) == [1, 1]


@pytest.mark.parametrize("hedge_after_s", [0.0, 1e-9])
def test_a_client_that_leaves_at_any_moment_leaves_nothing_in_flight(hedge_after_s: float) -> None:
    async def events_of_one() -> AsyncIterator[bytes]:
        yield b"data: {}\n\n"
        await asyncio.Event().wait()

    async def answer(_: httpx.Request) -> httpx.Response:
        return httpx.Response(200, headers={"content-type": "text/event-stream"}, content=events_of_one())

    async def leave_after(turns: int) -> bool:
        """Whether the answer had begun."""
        proxy = Proxy(RouterConfig(limits=RouterLimitsConfig(hedge_after_s=hedge_after_s)))
        proxy.http = Client("", transport=httpx.MockTransport(answer), refusal=None)
        for port in (1, 2):
            proxy.members.record_probe(proxy.join(ReplicaAddress(f"http://replica:{port}")), 0.0, "fake@0")
        opening = asyncio.ensure_future(proxy.open(read_hints({}, b"{}"), "POST", "/v1/completions", [], b""))
        for _ in range(turns):
            await asyncio.sleep(0)
        begun = opening.done()
        opening.cancel()
        with suppress(asyncio.CancelledError):
            await proxy.discard(await opening)
        assert proxy.router.num_in_flight == 0, f"after {turns} turns of the loop"
        await proxy.close()
        return begun

    async def body() -> None:
        turns = 0
        while not await leave_after(turns):
            turns += 1

    run(body())


# ---- bad input ----------------------------------------------------------------------------------


def test_large_bodies_and_foreign_names_are_refused() -> None:
    async def body() -> None:
        async with setting([FakeReplica()], limits={"body_bytes": 100}) as one:
            large = await one.http.post("/v1/completions", content=b"x" * 200)
            assert large.status_code == 413
            assert large.json()["error"]["param"] == "body"
            foreign = await one.http.get("/v1/models", headers={"host": "evil.example.org"})
            assert foreign.status_code == 401
            assert one.replicas[0].requests == []

    run(body())


def test_replicas_are_managed_with_the_admin_token_only() -> None:
    async def body() -> None:
        async with setting([FakeReplica(), FakeReplica()], admin_token="secret-of-admin") as one:
            assert (await one.http.get("/router/replicas")).status_code == 401
            headers = {"authorization": "Bearer secret-of-admin"}
            rows = (await one.http.get("/router/replicas", headers=headers)).json()["replicas"]
            assert {row["state"] for row in rows} == {"ready"}
            bad = await one.http.post("/router/replicas", json={"url": "nowhere"}, headers=headers)
            assert (bad.status_code, bad.json()["error"]["param"]) == (400, "replica")
            gone = await one.http.delete(f"/router/replicas/{rows[0]['name']}", headers=headers)
            assert gone.status_code == 202
            while rows[0]["name"] in one.proxy.router.replicas:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            left = (await one.http.delete("/router/replicas/nobody", headers=headers)).status_code
            assert left == 404
            again = await one.http.post("/router/replicas", json={"url": rows[0]["url"]}, headers=headers)
            assert again.status_code == 201
            await one.ready(2)
            text = (await one.http.get("/metrics")).text
            assert "etude_router_replica_ready" in text
            assert "etude_sandbox" not in text

    run(body())


def test_a_replica_that_is_named_twice_is_refused_before_anything_runs() -> None:
    address = ReplicaAddress("http://127.0.0.1:8661")
    with pytest.raises(ConfigError, match="already exists"):
        build_app(Proxy(), [address, address])


def test_an_address_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="address"):
        ReplicaAddress("localhost:80")


@pytest.mark.parametrize("raw", [b"", b"{", b"[1]", b'{"messages": 3, "max_tokens": "x"}', b"\xff"])
def test_bodies_of_any_kind_give_hints(raw: bytes) -> None:
    hints = read_hints({}, raw)
    assert hints.session is None
    assert hints.max_tokens == 4096


def test_a_conversation_without_a_name_is_known_by_its_opening() -> None:
    opening = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    first = read_hints({}, json.dumps({"messages": opening}).encode())
    later = read_hints({}, json.dumps({"messages": [*opening, {"role": "assistant"}]}).encode())
    other = read_hints({}, json.dumps({"messages": [opening[0], {"role": "user", "content": "v"}]}).encode())
    assert first.session == later.session != other.session
    assert first.id != later.id
    assert read_hints({"x-session-id": "mine"}, b"{}").session == "mine"
    assert read_hints({}, b'{"prompt": [1, 2, 3], "prompt_cache_key": "k"}').prompt_tokens == 3


@given(cuts=st.lists(st.integers(0, 400), max_size=12), end=st.integers(0, 400))
def test_the_guard_hands_on_whole_events_whatever_the_pieces(cuts: list[int], end: int) -> None:
    data = b"".join(b'data: {"n": %d}\n\n' % n for n in range(12)) + b": comment\r\n\r\ndata: [DONE]\n\n"
    stream = data[:end]
    places = sorted({0, *(min(cut, len(stream)) for cut in cuts), len(stream)})
    guard = EventGuard()
    handed = b""
    for start, stop in itertools.pairwise(places):
        handed += guard.feed(stream[start:stop])
        assert handed == b"" or handed.endswith((b"\n\n", b"\r\n\r\n"))
    assert stream.startswith(handed)
    assert len(stream) - len(handed) < len(b'data: {"n": 11}\n\n')
    assert guard.ended == (handed == data)
    assert guard.num_events == handed.count(b'data: {"n"')
