"""A run's fleet with replicas that it borrows from a router: they come, sample its versions, and go."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from etude.config import ElasticConfig, RunConfig
from etude.controller.borrowed_engine import Needs
from etude.controller.elastic import ElasticPool, wants
from etude.controller.local import LocalHandle
from etude.controller.remote.engine_part import EnginePart
from etude.controller.remote.fleet import EngineFleet
from etude.controller.supervision import FaultJournal, NodeHealth
from etude.inference.exchange import Build
from etude.inference.router import HealthConfig
from etude.inference.router.server import Proxy, ReplicaAddress, build_app
from etude.inference.router.server.fake_replica import running_server
from etude.observe import RecordingObserver
from etude.observe.metrics import MemorySink, read_metrics
from etude.protocols import Handle
from etude.records import PolicyVersion, SampleChunk
from tests.controller.remote.building import FAST
from tests.controller.running import run_here, tiny_config
from tests.environment.recording.recording_builders import qwen_tokenizer
from tests.inference.server.lending import HOME, NUMERICS, RunStore, lendable, rollout
from tests.inference.server.serving import ADMIN, Served
from tests.model.builders import small_config


@pytest.fixture(scope="module")
def replicas() -> Iterator[list[Served]]:
    with lendable() as one, lendable() as other:
        yield [one, other]


@dataclass
class Run:
    """A run's engine in this process, and what it borrows."""

    config: RunConfig
    fleet: EngineFleet
    pool: ElasticPool
    proxy: Proxy
    router: httpx.AsyncClient
    store: RunStore
    metrics: MemorySink
    faults: dict[str, int]

    def events(self) -> list[str]:
        return [row["mode"] for row in self.metrics.rows if row["kind"] == "elastic"]

    async def serve(self, step: int) -> PolicyVersion:
        manifest = self.store.publish(step)
        await self.fleet.stage(manifest)
        await self.fleet.activate(manifest.version)
        return manifest.version

    async def hand(self, what: str, served: Served, **body: Any) -> httpx.Response:
        name = served.url.removeprefix("http://")
        answer = await self.router.post(f"/router/replicas/{name}/{what}", json=body)
        assert answer.status_code == 200, answer.text
        return answer

    async def sample(self, number: int, max_tokens: int = 8) -> list[SampleChunk]:
        session = f"session-{number}"
        self.fleet.open(session)
        try:
            asked = replace(rollout(session, max_tokens=max_tokens), rng_key=(7, number))
            return [chunk async for chunk in self.fleet.stream(asked)]
        finally:
            self.fleet.close(session)


async def until(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(60.0):
        while not holds():  # noqa: ASYNC110 (nobody tells of it)
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def running(
    replicas: list[Served], directory: Path, needs: Needs | None = None, **elastic: Any
) -> AsyncIterator[Run]:
    store = RunStore(directory / "weights")
    config = tiny_config(
        directory,
        executor="ray",
        engine={"num_slots": 8, "kernels": "eager"},
        model=small_config(max_positions=600).model_dump(),
        weights={"url": store.url},
    )
    proxy = Proxy(health=HealthConfig(interval_s=0.1), replica_token=ADMIN)
    app = build_app(proxy, [ReplicaAddress(served.url) for served in replicas])
    metrics, faults = MemorySink(), dict[str, int]()
    observer = RecordingObserver()
    journal = FaultJournal(metrics, observer, faults)

    async def spawn(avoid: frozenset[str]) -> Handle[Any]:
        return LocalHandle(EnginePart(config, qwen_tokenizer(), directory, None), name="engine-0")

    async with (
        running_server(app) as url,
        httpx.AsyncClient(base_url=url, trust_env=False, timeout=30.0) as router,
    ):
        settings = {"router": url, "poll_s": 0.05, "lease_s": 10.0, "most": 2, **elastic}
        config = config.model_copy(update={"elastic": ElasticConfig.model_validate(settings)})
        nodes = NodeHealth(FAST, journal)
        fleet = EngineFleet({"engine-0": spawn}, Build.here(config.model), FAST, journal, nodes)
        needs = needs or Needs(NUMERICS, qwen_tokenizer().digest, 512)
        pool = ElasticPool(config, needs, fleet, metrics, observer)
        run = Run(config, fleet, pool, proxy, router, store, metrics, faults)
        try:
            await fleet.start()
            await run.serve(0)
            async with pool:
                yield run
        finally:
            await fleet.shutdown()
            store.close()


def state_of(served: Served) -> str:
    assert served.state.loans is not None
    return str(served.state.loans.state)


def version_of(served: Served) -> str:
    return str(served.state.sink.current())


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


@pytest.mark.slow
def test_what_a_recalled_replica_had_sampled_is_kept_and_the_rest_is_sampled_elsewhere(
    replicas: list[Served], tmp_path: Path
) -> None:
    async def body() -> None:
        async with running(replicas[:1], tmp_path) as run:
            await run.hand("lend", replicas[0], pool="rollout")
            await until(lambda: run.pool.num_lent == 1)
            run.fleet.engine_away("engine-0")  # so that all go to the borrowed one
            version = run.fleet.current()
            assert version is not None
            going = [asyncio.ensure_future(run.sample(number, 400)) for number in range(4)]
            await asyncio.sleep(0.3)
            run.fleet.engine_ready("engine-0", version)
            await run.hand("recall", replicas[0])
            assert version_of(replicas[0]) == HOME
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
