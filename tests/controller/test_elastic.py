"""A run's fleet with replicas that it borrows from a router: they come, sample its versions, and go."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from etude.config import ElasticConfig
from etude.controller.borrowed_engine import Needs
from etude.controller.elastic import wants
from etude.errors import StoreError
from etude.inference import Answer, Engine, EngineService
from etude.inference.router.borrowing import Borrower
from etude.inference.server.loans import Fetch
from etude.kit.retry import Backoff
from etude.observe.metrics import read_metrics
from tests.controller.borrowing import Run, running, state_of, until, version_of
from tests.controller.running import run_here, tiny_config
from tests.environment.recording.recording_builders import qwen_tokenizer
from tests.inference.server.lending import HOME, NUMERICS, lendable
from tests.inference.server.serving import Served


@pytest.fixture(scope="module")
def replicas() -> Iterator[list[Served]]:
    with lendable() as one, lendable() as other:
        yield [one, other]


def test_borrowed_replicas_sample_the_runs_versions_and_go_home(
    replicas: list[Served], tmp_path: Path
) -> None:
    async def body() -> None:
        async with running(replicas, tmp_path) as run:
            for served in replicas:
                await run.hand("lend", served, pool="rollout")
            await until(lambda: run.pool.num_lent == 2)
            assert run.events().count("joined") == 2
            for step in (1, 2):
                version = await run.serve(step)
                answers = await asyncio.gather(*(run.sample(number) for number in range(12)))
                assert {chunk.version for chunks in answers for chunk in chunks} == {version}
            assert run.faults == {}
            await run.hand("recall", replicas[0])
            assert version_of(replicas[0]) == HOME
            await until(lambda: run.pool.num_lent == 1)
            await until(lambda: "left" in run.events())
        for served in replicas:
            await until(lambda served=served: state_of(served) == "home")
            assert version_of(served) == HOME

    asyncio.run(body())


def num_decoded(served: Served) -> int:
    """Tokens that the replica's engine has sampled."""
    service = served.state.sampler
    assert isinstance(service, EngineService)
    return service.engine.counters.decode_tokens


@pytest.mark.slow
@pytest.mark.parametrize("is_recalled", [True, False])
def test_what_a_replica_had_sampled_when_it_went_is_kept_and_the_rest_is_sampled_elsewhere(
    replicas: list[Served], tmp_path: Path, is_recalled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, is_away = Engine.step, threading.Event()

    def slow(engine: Engine, most_steps: int = 1) -> list[Answer]:
        return step(engine, most_steps if is_away.wait(0.05) else 1)

    async def body() -> None:
        async with running(replicas[:1], tmp_path) as run:
            await run.hand("lend", replicas[0], pool="rollout")
            await until(lambda: run.pool.num_lent == 1)
            run.fleet.engine_away("engine-0")  # so that all go to the borrowed one
            version = run.fleet.current()
            assert version is not None
            before = num_decoded(replicas[0])
            monkeypatch.setattr(Engine, "step", slow)
            going = [asyncio.ensure_future(run.sample(number, 400)) for number in range(4)]
            await until(lambda: num_decoded(replicas[0]) >= before + 40)  # all of them have begun
            run.fleet.engine_ready("engine-0", version)
            if is_recalled:
                await run.hand("recall", replicas[0])
                assert version_of(replicas[0]) == HOME
            else:
                run.pool._held[replicas[0].url.removeprefix("http://")].over.set()
            is_away.set()
            cut = await asyncio.gather(*going)
            for number, chunks in enumerate(cut):
                (whole,) = await run.sample(number, 400)
                assert {chunk.version for chunk in [*chunks, whole]} == {version}
                assert [chunk.finish for chunk in chunks] == [None, "length"]
                assert len(chunks[0].tokens) > 0
                tokens = np.concatenate([chunk.tokens for chunk in chunks])
                assert tokens.tolist() == whole.tokens.tolist(), "as one engine would have"

    asyncio.run(body())


@pytest.mark.slow
def test_a_run_goes_on_when_the_replica_dies_and_when_the_router_does(
    replicas: list[Served], tmp_path: Path
) -> None:
    async def body() -> None:
        with lendable() as mortal:
            async with running([mortal, replicas[1]], tmp_path, lease_s=2.0) as run:
                for served in (mortal, replicas[1]):
                    await run.hand("lend", served, pool="rollout")
                await until(lambda: run.pool.num_lent == 2)
                going = [asyncio.ensure_future(run.sample(number, 60)) for number in range(8)]
                mortal.server.force_exit = mortal.server.should_exit = True
                answers = await asyncio.gather(*going)
                assert all(sum(len(chunk.tokens) for chunk in chunks) == 60 for chunks in answers)
                await until(lambda: run.pool.num_lent == 1)
                version = await run.serve(1)
                assert {chunk.version for chunk in await run.sample(50)} == {version}

                run.proxy.loans = None  # a router that knows of nothing any more
                await until(lambda: run.pool.num_lent == 0)
                await until(lambda: state_of(replicas[1]) == "home")
                assert "does not lend" in run.events()
                assert {chunk.version for chunk in await run.sample(51)} == {version}
                assert run.faults == {}

    asyncio.run(body())


def test_a_replica_that_computes_otherwise_is_given_back_and_not_asked_for_again(
    replicas: list[Served], tmp_path: Path
) -> None:
    others = {**NUMERICS, "kernels": "native"}

    async def body() -> None:
        needs = Needs(others, qwen_tokenizer().digest, 512)
        async with running(replicas[:1], tmp_path, needs) as run:
            await run.hand("lend", replicas[0], pool="rollout")
            await until(lambda: "refused" in run.events())
            await until(lambda: state_of(replicas[0]) == "home")
            await asyncio.sleep(0.3)
            assert state_of(replicas[0]) == "home"
            assert run.events().count("refused") == 1

    asyncio.run(body())


def test_a_replica_that_fails_is_left_alone_for_a_while_and_longer_each_time(
    replicas: list[Served], tmp_path: Path
) -> None:
    now_s = [1000.0]
    desk = replicas[0].state.loans
    assert desk is not None
    open_store = desk._open_store

    def fail(url: str) -> Fetch:
        raise StoreError("the store cannot be read", field="url", received=url)

    async def body() -> None:
        desk._open_store = fail
        async with running(replicas[:1], tmp_path, clock=lambda: now_s[0]) as run:
            await run.hand("lend", replicas[0], pool="rollout")
            for number, pause_s in enumerate((2.0, 4.0, 8.0), start=1):
                await until(lambda wanted=number: run.events().count("failed") == wanted)
                await until(lambda: state_of(replicas[0]) == "home")
                before = _borrower(run)
                await until(lambda one=before: _borrower(run) is not one)
                assert _borrower(run).refused == [replicas[0].url.removeprefix("http://")]
                assert run.events().count("failed") == number
                now_s[0] += pause_s + 0.1
            await until(lambda: run.events().count("failed") == 4)
            desk._open_store = open_store
            now_s[0] += 16.1
            await until(lambda: run.pool.num_lent == 1)

    try:
        asyncio.run(body())
    finally:
        desk._open_store = open_store


def test_a_search_for_replicas_that_fails_is_said_and_goes_on(
    replicas: list[Served], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    async def body() -> None:
        async with running(replicas[:1], tmp_path) as run:
            with monkeypatch.context() as disk:
                disk.setattr(run.pool, "_adjust", fail)
                await until(lambda: run.events() == ["does not lend"])
                await run.hand("lend", replicas[0], pool="rollout")
            await until(lambda: run.pool.num_lent == 1)

    asyncio.run(body())
    assert state_of(replicas[0]) == "home"


def test_a_defect_with_one_replica_is_told_and_it_is_tried_again(
    replicas: list[Served], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("etude.controller.elastic._PAUSE", Backoff(base_s=0.05))

    async def fail(*_: Any) -> None:
        raise ArithmeticError("a defect")

    async def body() -> None:
        async with running(replicas[:1], tmp_path) as run:
            with monkeypatch.context() as defect:
                defect.setattr(run.fleet, "join", fail)
                await run.hand("lend", replicas[0], pool="rollout")
                await until(lambda: "failed" in run.events())
            await until(lambda: run.pool.num_lent == 1)

    asyncio.run(body())
    assert state_of(replicas[0]) == "home"


def test_a_replica_of_another_version_that_says_other_things_of_itself_is_refused(
    replicas: list[Served], tmp_path: Path
) -> None:
    desk = replicas[0].state.loans
    assert desk is not None
    about, desk._about = desk._about, {**desk._about, "build": {"machine": "a"}}

    async def body() -> None:
        async with running(replicas[:1], tmp_path) as run:
            await run.hand("lend", replicas[0], pool="rollout")
            await until(lambda: "refused" in run.events())
            await until(lambda: state_of(replicas[0]) == "home")

    try:
        asyncio.run(body())
    finally:
        desk._about = about


def _borrower(run: Run) -> Borrower:
    assert run.proxy.loans is not None
    (one,) = run.proxy.loans.book.borrowers.values()
    return one


def test_replicas_are_wanted_in_their_hours_and_under_load_alone() -> None:
    night = ElasticConfig(hours="22:00-06:00")
    assert [night.open_at(hour * 3600.0) for hour in (21, 22, 3, 6)] == [False, True, True, False]
    assert ElasticConfig().open_at(0.0)
    loaded = ElasticConfig(busy_tokens=100.0, idle_tokens=10.0)
    wanted, seen = False, []
    for load in (50.0, 101.0, 50.0, 9.0, 50.0):
        wanted = wants(loaded, wanted, load)
        seen.append(wanted)
    assert seen == [False, True, True, False, False]
    assert wants(ElasticConfig(), False, 0.0)


@pytest.mark.parametrize(
    ("elastic", "message"),
    [
        ({"router": "h:1"}, "router"),
        ({"hours": "22-6"}, "hours"),
        ({"idle_tokens": 5.0}, "idle_tokens"),
        ({"lease_s": 1.0}, "lease_s"),
        ({"router": "http://h:1"}, r"weights\.url"),
    ],
)
def test_impossible_settings_are_refused(tmp_path: Path, elastic: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny_config(tmp_path, elastic=elastic)


@pytest.mark.parametrize(
    ("message", "sections"),
    [
        (r"engine\.backend", {"engine": {"backend": "vllm"}}),
        (r"rl\.stream\.source", {"rl": {"stream": {"source": "runs/other"}}}),
        ("colocated", {"colocated": True}),
    ],
)
def test_what_leaves_nothing_to_borrow_for_is_refused(
    tmp_path: Path, message: str, sections: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match=message):
        tiny_config(tmp_path, weights={"url": "w"}, elastic={"router": "http://h:1"}, **sections)


@pytest.mark.slow
def test_a_run_of_one_process_trains_while_its_router_does_not_answer(tmp_path: Path) -> None:
    config = tiny_config(
        tmp_path,
        weights={"url": str(tmp_path / "weights")},
        elastic={"router": "http://127.0.0.1:9", "poll_s": 0.05},
        rl={"max_staleness": 1},
    )
    run, report = run_here(config)
    assert (report["rl_steps"], report["faults"]) == (2, {})
    assert run.environment["reproducible"] is False
    rows = [row for row in read_metrics(run.metrics_file) if row["kind"] == "elastic"]
    assert [row["mode"] for row in rows] == ["does not lend"]
