"""A replica lent to a run: whose weights it serves when, and how it is returned."""

from __future__ import annotations

import asyncio
import itertools
import pickle
import threading
import time
from collections.abc import Coroutine, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from fastapi import FastAPI, Response
from fastapi.responses import JSONResponse
from torch import Tensor

from etude.controller.remote.engines import EngineProcess
from etude.errors import PartLostError, SamplerError, WeightUpdateError
from etude.inference import Answer, Engine, EngineService, wire
from etude.inference.exchange import Event
from etude.inference.loan_client import LoanEndedError, LoanHandle
from etude.inference.server.checkpoints import checkpoint_manifest
from etude.inference.server.loans import fetch_from_store
from etude.model.huggingface import save_model
from etude.model.scoring import score_sequences
from etude.protocols import KvPolicy
from etude.records import PolicyVersion, SampleChunk, WeightManifest
from etude.weights.documents import manifest_document, version_document
from tests.fakes.replica import running_server
from tests.inference.server.lending import (
    HOME,
    RunStore,
    borrow,
    desk_of,
    lendable,
    make_model,
    rollout,
    standing,
    tensors_of,
    until_renewed,
)
from tests.inference.server.serving import ADMIN, Served, wait_for


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with lendable() as running:
        yield running


@pytest.fixture
def store(tmp_path: Path) -> Iterator[RunStore]:
    one = RunStore(tmp_path / "weights")
    yield one
    one.close()


def ask(served: Served, **options: Any) -> httpx.Response:
    with served.http() as http:
        return http.post("/v1/completions", json={"prompt": "def ", "max_tokens": 3, "seed": 1, **options})


async def serve(handle: LoanHandle, store: RunStore, step: int) -> PolicyVersion:
    manifest = store.publish(step)
    await handle.call(EngineProcess.stage, manifest)
    await handle.call(EngineProcess.activate, manifest.version, "recompute")
    return manifest.version


async def events_of(handle: LoanHandle, ends: int, client: str = "") -> list[Event]:
    found: list[Event] = []
    while sum(not isinstance(item, SampleChunk) for _, item in found) < ends:
        found += await handle.call(EngineProcess.poll, client)
    return found


def chunks_of(events: list[Event], request: str) -> list[SampleChunk]:
    return [item for name, item in events if name == request and isinstance(item, SampleChunk)]


def num_decoded(served: Served) -> int:
    assert isinstance(served.state.sampler, EngineService)
    return served.state.sampler.counters.decode_tokens


def test_a_lent_replica_samples_with_the_runs_weights_bit_for_bit_and_comes_home(
    served: Served, store: RunStore
) -> None:
    before = ask(served).json()

    async def run() -> None:
        handle = borrow(served, store.url)
        assert ask(served).status_code == 503
        about = await handle.call(EngineProcess.begin)
        assert about["max_context_tokens"] == 599
        version = await serve(handle, store, 1)
        await handle.call(EngineProcess.exchange, [("open", "a"), ("stream", rollout("a"))])
        (chunk,) = chunks_of(await events_of(handle, 1), "a:0")
        assert chunk.version == chunk.kv_oldest == version
        tokens = np.concatenate([rollout("a").suffix, chunk.tokens])
        model = make_model(0)
        model.load_state_dict({**model.state_dict(), **tensors_of(1)})
        wanted = score_sequences(model, [tokens])[0][-len(chunk.tokens) :]
        np.testing.assert_allclose(chunk.logprobs, wanted, atol=2e-5)
        scores = await handle.call(EngineProcess.score, tokens, version)
        assert scores.version == version
        with pytest.raises(SamplerError, match="does not serve"):
            await handle.call(EngineProcess.score, tokens, PolicyVersion("tiny", 0))
        second = await serve(handle, store, 2)
        more = rollout("a", 1, suffix=np.arange(3, dtype=np.int32), prefix_digest=chunk.prefix_digest)
        await handle.call(EngineProcess.exchange, [("stream", more)])
        assert {one.version for one in chunks_of(await events_of(handle, 1), "a:1")} == {second}
        usage = await handle.call(EngineProcess.pulse)
        assert usage["decode_tokens"] >= 14
        assert ask(served).status_code == 503
        await handle.stop()

    asyncio.run(run())
    after = ask(served).json()
    assert standing(served)["state"] == "home"
    assert after["system_fingerprint"] == HOME
    assert after["choices"] == before["choices"], "the weights are those from before"
    past = desk_of(served)._last_loan
    assert past is not None
    assert past.fetch is None, "the run's weights are let go"


def test_a_recall_ends_rollouts_at_once_and_tells_their_tokens_so_far(
    served: Served, store: RunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Engine.step

    def slow(engine: Engine, most_steps: int = 1) -> list[Answer]:
        time.sleep(0.05)
        return step(engine, 1)

    async def run() -> None:
        handle = borrow(served, store.url)
        await handle.call(EngineProcess.begin)
        await serve(handle, store, 1)
        monkeypatch.setattr(Engine, "step", slow)
        before = num_decoded(served)
        asked = [rollout(name, max_tokens=500) for name in ("a", "bb")]
        await handle.call(EngineProcess.exchange, [("open", "a"), ("open", "bb")])
        await handle.call(EngineProcess.exchange, [("stream", one) for one in asked])
        await asyncio.to_thread(wait_for, lambda: num_decoded(served) >= before + 10)
        with served.http(ADMIN) as http:
            answer = await asyncio.to_thread(http.delete, "/admin/loan")
        assert answer.json()["version"] == HOME
        assert ask(served).status_code == 200
        events = await events_of(handle, 2)
        for one in asked:
            (chunk,) = chunks_of(events, one.id)
            assert chunk.finish == "abort"
            assert 0 < len(chunk.tokens) < 500
        with pytest.raises(LoanEndedError):
            await handle.call(EngineProcess.poll)
        with pytest.raises(LoanEndedError):
            await handle.call(EngineProcess.exchange, [("stream", asked[0])])
        await handle.stop()

    asyncio.run(run())


def test_a_borrower_that_lives_keeps_the_replica(
    served: Served, store: RunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("etude.inference.loan_client._RENEWALS", 600.0)

    async def run() -> None:
        handle = borrow(served, store.url, lease_s=60.0)
        await handle.call(EngineProcess.begin)
        await until_renewed(served, 3)
        await handle.stop()
        with pytest.raises(PartLostError, match="the loan was ended"):
            await handle.call(EngineProcess.pulse)

    asyncio.run(run())
    assert standing(served)["state"] == "home"


def test_a_renewal_that_is_not_answered_does_not_keep_the_next_ones_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("etude.inference.loan_client._RENEWALS", 600.0)
    app, pulses, is_renewed = FastAPI(), itertools.count(1), asyncio.Event()

    @app.post("/loan/begin")
    async def _begin() -> Response:
        return Response(wire.pack({"lease_s": 60.0}))

    @app.post("/loan/poll")
    async def _poll() -> None:
        await asyncio.Event().wait()

    @app.post("/loan/pulse")
    async def _pulse() -> Response:
        if next(pulses) == 1:
            await asyncio.Event().wait()
        is_renewed.set()
        return Response(wire.pack({}))

    async def run() -> None:
        async with running_server(app) as url:
            handle = LoanHandle(url, "token", "store")
            polled = asyncio.create_task(handle.call(EngineProcess.poll))
            await handle.call(EngineProcess.begin)
            renewed = asyncio.create_task(is_renewed.wait())
            await asyncio.wait((polled, renewed), return_when=asyncio.FIRST_COMPLETED)
            handle.kill()
            await asyncio.gather(polled, return_exceptions=True)
            assert renewed.done(), "as long as it takes to give up a call that is not answered, none came"

    asyncio.run(run())


def test_an_answer_of_something_in_between_does_not_end_the_renewals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("etude.inference.loan_client._RENEWALS", 6000.0)
    app, pulses, is_renewed = FastAPI(), itertools.count(), asyncio.Event()
    strange = (Response("<html>back soon</html>"), JSONResponse({"detail": "no"}, 422), JSONResponse([1]))

    @app.post("/loan/begin")
    async def _begin() -> Response:
        return Response(wire.pack({"lease_s": 60.0}))

    @app.post("/loan/pulse")
    async def _pulse() -> Response:
        number = next(pulses)
        if number < len(strange):
            return strange[number]
        is_renewed.set()
        return Response(wire.pack({}))

    async def run() -> None:
        async with running_server(app) as url:
            handle = LoanHandle(url, "token", "store")
            await handle.call(EngineProcess.begin)
            async with asyncio.timeout(60):
                await is_renewed.wait()
            handle.kill()

    asyncio.run(run())


@pytest.mark.parametrize("first", ["kill", "cancel"])
def test_whoever_is_cancelled_while_the_replica_is_let_go_is_cancelled(first: str) -> None:
    class Waiting(LoanHandle):
        async def _do(self, method: str, *arguments: Any, within_s: float | None = None) -> Any:
            await asyncio.Event().wait()

    async def run() -> None:
        handle = Waiting("http://127.0.0.1:9", "token", "store")
        waiting = asyncio.ensure_future(handle.call(EngineProcess.poll))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        for end in (handle.kill, waiting.cancel) if first == "kill" else (waiting.cancel, handle.kill):
            end()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(run())


def test_a_borrower_that_falls_silent_loses_the_replica(served: Served, store: RunStore) -> None:
    borrow(served, store.url, lease_s=0.3).kill()
    wait_for(lambda: standing(served)["state"] == "home")
    assert ask(served).json()["system_fingerprint"] == HOME


@pytest.mark.slow
def test_users_under_way_get_all_their_tokens_from_their_own_version_before_the_runs_is_served(
    served: Served, store: RunStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, is_lent = Engine.step, threading.Event()

    def held(engine: Engine, most_steps: int = 1) -> list[Answer]:
        assert is_lent.wait(60)
        return step(engine, most_steps)

    monkeypatch.setattr(Engine, "step", held)
    answers: list[httpx.Response] = []
    asking = threading.Thread(
        target=lambda: answers.append(ask(served, max_tokens=150, temperature=0.9, stop=["\u0000"]))
    )
    asking.start()
    wait_for(lambda: served.state.live)

    async def run() -> None:
        handle = borrow(served, store.url)
        assert served.state.live, "the user is still there"
        is_lent.set()
        await handle.call(EngineProcess.begin)
        await serve(handle, store, 1)
        assert not served.state.live
        await handle.stop()

    asyncio.run(run())
    asking.join()
    assert answers[0].json()["system_fingerprint"] == HOME


def test_a_recall_does_not_wait_for_weights_that_are_being_fetched(store: RunStore) -> None:
    fetching, go_on = threading.Event(), threading.Event()

    def open_slowly(url: str) -> Any:
        fetch = fetch_from_store(url)

        def slow(manifest: Any) -> Any:
            fetching.set()
            assert go_on.wait(120)
            return fetch(manifest)

        return slow

    with lendable(open_slowly) as served:

        async def run() -> None:
            handle = borrow(served, store.url)
            await handle.call(EngineProcess.begin)
            staging = asyncio.ensure_future(handle.call(EngineProcess.stage, store.publish(1)))
            assert await asyncio.to_thread(fetching.wait, 60)
            with served.http(ADMIN) as http:
                answer = await asyncio.to_thread(http.delete, "/admin/loan")
            assert answer.json()["state"] == "home"
            assert ask(served).json()["system_fingerprint"] == HOME
            with pytest.raises(LoanEndedError):
                await staging
            go_on.set()
            again = borrow(served, store.url)
            await again.call(EngineProcess.begin)
            version = await serve(again, store, 2)
            await again.call(EngineProcess.exchange, [("open", "a"), ("stream", rollout("a"))])
            assert chunks_of(await events_of(again, 1), "a:0")[0].version == version
            await again.stop()
            await handle.stop()

        asyncio.run(run())


def test_what_an_administrator_puts_into_service_meanwhile_is_what_it_comes_home_to(
    store: RunStore, tmp_path: Path
) -> None:
    save_model(make_model(3), tmp_path / "next")
    manifest = checkpoint_manifest(tmp_path / "next", PolicyVersion("tiny", 1))
    with lendable() as served:

        async def run() -> None:
            handle = borrow(served, store.url)
            await handle.call(EngineProcess.begin)
            version = await serve(handle, store, 1)
            with served.http(ADMIN) as http:
                body = {"manifest": manifest_document(manifest)}
                answer = await asyncio.to_thread(lambda: http.post("/admin/weights", json=body))
                assert answer.status_code == 200, answer.text
                assert answer.json()["version"] is None, "users get nothing while it is lent"
            await handle.call(EngineProcess.exchange, [("open", "a"), ("stream", rollout("a"))])
            assert chunks_of(await events_of(handle, 1), "a:0")[0].version == version
            await handle.stop()

        asyncio.run(run())
        assert ask(served).json()["system_fingerprint"] == "tiny@1"


def test_bad_weights_of_the_run_are_refused_and_change_nothing(served: Served, store: RunStore) -> None:
    async def run() -> None:
        handle = borrow(served, store.url)
        await handle.call(EngineProcess.begin)
        with pytest.raises(SamplerError, match="no version of the run"):
            await handle.call(EngineProcess.exchange, [("open", "a")])
        manifest = store.publish(1)
        Path(store.url).joinpath("commits").rename(Path(store.url) / "gone")
        with pytest.raises(WeightUpdateError):
            bad = type(manifest)(PolicyVersion("run", 1, "digest"), manifest.tensors, manifest.url)
            await handle.call(EngineProcess.stage, bad)
        with pytest.raises(WeightUpdateError):
            await handle.call(EngineProcess.activate, manifest.version, "recompute")
        Path(store.url).joinpath("gone").rename(Path(store.url) / "commits")
        await handle.stop()

    asyncio.run(run())
    assert ask(served).json()["system_fingerprint"] == HOME


def test_several_processes_of_a_run_share_a_replica(served: Served, store: RunStore) -> None:
    async def run() -> None:
        handle = borrow(served, store.url)
        await handle.call(EngineProcess.begin)
        await serve(handle, store, 1)
        other: LoanHandle = pickle.loads(pickle.dumps(handle))
        await handle.call(EngineProcess.exchange, [("open", "a"), ("stream", rollout("a"))])
        await other.call(EngineProcess.exchange, [("open", "b"), ("stream", rollout("b"))], "worker")
        assert chunks_of(await events_of(other, 1, "worker"), "b:0")
        assert chunks_of(await events_of(handle, 1), "a:0")
        other.kill()
        await handle.stop()

    asyncio.run(run())


def test_who_has_no_right_gets_nothing(served: Served, store: RunStore) -> None:
    with served.http() as http:
        assert http.post("/admin/loan", json={"borrower": "x"}).status_code == 401
        assert http.post("/loan/pulse").status_code == 410
    with served.http(ADMIN) as http:
        assert http.post("/loan/pulse").status_code == 410
        assert http.post("/admin/loan", json={"borrower": "x", "lease_s": 0}).status_code == 400
        assert http.post("/admin/loan", json={"lease_s": 1.0}).status_code == 400
        token = http.post("/admin/loan", json={"borrower": "x", "lease_s": 9}).json()["token"]
        assert http.post("/admin/loan", json={"borrower": "y", "lease_s": 9}).status_code == 409
        assert http.get("/ready").json()["loan"] == "lent"
    with served.http(token) as http:
        assert http.delete("/admin/loan").status_code == 403
        assert http.post("/loan/exchange", content=b"damaged").status_code == 422
        assert http.post("/loan/begin", json={"store": 1}).status_code == 422
        assert http.post("/loan/shout").status_code == 404
        assert http.post("/loan/begin", content=wire.pack([1])).status_code == 422
        assert wire.unpack(http.post("/loan/end").content)["state"] == "home"


def test_what_was_staged_while_the_replica_was_lent_can_be_put_into_service_at_home(
    store: RunStore, tmp_path: Path
) -> None:
    manifests: list[WeightManifest] = []
    for number in (1, 2):
        directory = tmp_path / str(number)
        save_model(make_model(number), directory)
        manifests.append(checkpoint_manifest(directory, PolicyVersion("tiny", number)))

    def post(served: Served, what: str, manifest: WeightManifest) -> None:
        body = {"manifest": manifest_document(manifest), "version": version_document(manifest.version)}
        del body["version" if what == "stage" else "manifest"]
        with served.http(ADMIN) as http:
            answer = http.post(f"/admin/weights/{what}", json=body)
        assert answer.status_code == 200, answer.text

    async def use(handle: LoanHandle, step: int) -> None:
        await handle.call(EngineProcess.begin)
        await serve(handle, store, step)

    with lendable() as served:
        handle = borrow(served, store.url)
        post(served, "stage", manifests[0])
        asyncio.run(finish(handle, use(handle, 1)))
        post(served, "activate", manifests[0])
        assert ask(served).json()["system_fingerprint"] == "tiny@1"

        post(served, "stage", manifests[1])
        handle = borrow(served, store.url)
        asyncio.run(finish(handle, use(handle, 2)))
        post(served, "activate", manifests[1])
        assert ask(served).json()["system_fingerprint"] == "tiny@2"


async def finish(handle: LoanHandle, use: Coroutine[Any, Any, None]) -> None:
    await use
    await handle.stop()


def test_a_swap_that_fails_half_way_is_undone_before_users_come_back(store: RunStore) -> None:
    with lendable() as served:
        engine = desk_of(served)._engine
        activate = engine.activate
        failing = [True]

        async def fail_late(version: PolicyVersion, kv: KvPolicy = "keep") -> None:
            await activate(version, kv)
            if failing:
                failing.pop()
                raise SamplerError("the engine stumbled when it had swapped")

        async def run() -> None:
            handle = borrow(served, store.url)
            await handle.call(EngineProcess.begin)
            engine.activate = fail_late  # type: ignore[method-assign]
            with pytest.raises(SamplerError, match="stumbled"):
                await serve(handle, store, 1)
            with pytest.raises(SamplerError, match="no version of the run"):
                await handle.call(EngineProcess.exchange, [("open", "a")])
            await handle.stop()

        asyncio.run(run())
        assert ask(served).json()["system_fingerprint"] == HOME


def test_weights_that_do_not_come_back_let_nobody_in_until_an_administrator_sends_others(
    store: RunStore, tmp_path: Path
) -> None:
    save_model(make_model(3), tmp_path / "next")
    manifest = checkpoint_manifest(tmp_path / "next", PolicyVersion("tiny", 1))
    with lendable() as served:
        engine = desk_of(served)._engine
        stage = engine.stage

        async def refuse_home(manifest: WeightManifest, tensors: Mapping[str, Tensor] | None = None) -> None:
            if str(manifest.version) == HOME:
                raise WeightUpdateError("no memory for it")
            await stage(manifest, tensors)

        async def run() -> None:
            handle = borrow(served, store.url)
            await handle.call(EngineProcess.begin)
            await serve(handle, store, 1)
            engine.stage = refuse_home  # type: ignore[method-assign]
            ending = asyncio.ensure_future(handle.stop())
            await asyncio.to_thread(wait_for, lambda: standing(served)["trouble"])
            assert ask(served).status_code == 503
            with served.http(ADMIN) as http:
                body = {"manifest": manifest_document(manifest)}
                answer = await asyncio.to_thread(lambda: http.post("/admin/weights", json=body))
                assert answer.status_code == 200, answer.text
            await ending

        asyncio.run(run())
        wait_for(lambda: standing(served)["state"] == "home")
        assert ask(served).json()["system_fingerprint"] == "tiny@1"
