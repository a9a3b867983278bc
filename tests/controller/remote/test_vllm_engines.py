"""vLLM engines of a run: lost, restarted and updated like our own."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from etude.config import RunConfig
from etude.controller.arrangement import part_resources
from etude.controller.engines import make_snapshots
from etude.controller.local import LocalHandle
from etude.controller.remote.engine_part import EnginePart
from etude.errors import ResourceError
from etude.inference.vllm import FetchedSnapshots, ModelSnapshots, Replica, VllmSampler
from etude.model import LanguageModel
from etude.model.scoring import score_sequences
from etude.protocols import Handle
from etude.records import PolicyVersion, SampleChunk, WeightManifest
from etude.weights.manifest import digest_entries
from tests.controller.remote.building import Fleet, request, sample, until
from tests.fakes.vllm import FakeServer


class VllmFleet(Fleet):
    """A Fleet whose engines are vLLM, each behind a server of this process."""

    def __init__(self, directory: Path, num_engines: int = 1, *, from_store: bool = False) -> None:
        """`from_store`: weights come as our own engine's do, and are written for vLLM where they arrive."""
        self.servers: dict[str, list[FakeServer]] = {}
        self.fails_to_start = False
        self.root = directory
        self.from_store = from_store
        super().__init__(directory, num_engines)
        self.snapshots = self.make_snapshots(directory / "snapshots")

    def make_snapshots(self, root: Path) -> ModelSnapshots:
        return make_snapshots(root, self.tokenizer, self.model(0))

    def model(self, step: int) -> LanguageModel:
        """Weights of that step, large enough for versions to differ clearly."""
        config = self.config.model.model_copy(update={"initializer_range": 0.3})
        model = LanguageModel(config, self.tokenizer.vocab_size)
        model.initialise(step)
        return model

    def spawning(self, name: str) -> Any:
        async def spawn(avoid: frozenset[str]) -> Handle[Any]:
            server = FakeServer(fails_to_start=self.fails_to_start)
            self.servers.setdefault(name, []).append(server)
            fetched = FetchedSnapshots(self.weights.fetch, self.make_snapshots) if self.from_store else None
            sampler = VllmSampler(Replica(server, most_restarts=0, fetched=fetched), drain_s=0.0)
            part = EnginePart(self.config, self.tokenizer, self.weights.root, None, service=sampler)
            handle = LocalHandle(part, name=name)
            self.handles.setdefault(name, []).append(handle)
            return handle

        return spawn

    def publish(self, step: int) -> WeightManifest:
        weights = self.weights if self.from_store else self.snapshots
        return weights.publish(PolicyVersion("run", step), dict(self.model(step).named_parameters()))

    def server(self, name: str = "engine-0") -> FakeServer:
        """Of the engine's process at hand."""
        return self.servers[name][-1]

    async def sampling(self, name: str = "engine-0") -> None:
        """Returns when the engine has sampled a few tokens of a request that is not over."""
        await until(lambda: any(len(job.sampled) > 3 for job in self.jobs(name)))

    def jobs(self, name: str) -> list[Any]:
        engine = self.server(name).engine
        return [] if engine is None else list(engine.jobs.values())

    def check(self, prompt: NDArray[np.int32], chunks: list[SampleChunk]) -> None:
        """Every token has the log-probability that the version gives it which is named for it."""
        sampled = np.concatenate([chunk.tokens for chunk in chunks])
        place = len(prompt)
        for chunk in chunks:
            scores = score_sequences(self.model(chunk.version.step), [np.concatenate([prompt, sampled])])[0]
            expected = scores[place : place + len(chunk.tokens)]
            np.testing.assert_allclose(chunk.logprobs, expected, atol=1e-4)
            place += len(chunk.tokens)


PROMPT = np.arange(5, dtype=np.int32)


@pytest.mark.slow
@pytest.mark.parametrize("from_store", [False, True])
def test_weights_change_under_a_request_and_every_token_names_its_own(
    from_store: bool, tmp_path: Path
) -> None:
    async def run() -> None:
        made = VllmFleet(tmp_path, from_store=from_store)
        await made.fleet.start()
        try:
            first = await made.serve(0)
            made.fleet.open("s")
            second = made.publish(1)
            await made.fleet.stage(second)
            asked = asyncio.ensure_future(sample(made.fleet, request("s", max_tokens=60)))
            await made.sampling()
            await made.fleet.activate(second.version)
            chunks = await asked
            assert [chunk.version for chunk in chunks] == [first, second.version]
            assert digest_entries(second.tensors) == second.version.digest, "it is the publisher's own"
            made.check(PROMPT, chunks)
            routes = [chunk.routes for chunk in chunks if chunk.routes is not None]
            assert sum(len(part) for part in routes) == len(PROMPT) + 60 - 1
            scores = await made.fleet.score(PROMPT, second.version)
            expected = score_sequences(made.model(1), [PROMPT])[0]
            np.testing.assert_allclose(scores.logprobs, expected, atol=1e-4)
            await until(lambda: made.fleet.counters.decode_tokens == 60)
            assert made.fleet.counters.steps == 0, "vLLM's are its own"
        finally:
            await made.fleet.shutdown()

    asyncio.run(run())


@pytest.mark.slow
@pytest.mark.parametrize("from_store", [False, True])
def test_a_killed_server_is_replaced_and_serves_the_newest_version_only(
    from_store: bool, tmp_path: Path
) -> None:
    async def run() -> None:
        made = VllmFleet(tmp_path, from_store=from_store)
        await made.fleet.start()
        try:
            await made.serve(0)
            newest = await made.serve(1)
            made.fleet.open("s")
            asked = asyncio.ensure_future(sample(made.fleet, request("s", max_tokens=40)))
            await made.sampling()
            made.server().die()
            chunks = await asked
            assert {chunk.version for chunk in chunks} == {newest}
            assert sum(len(chunk.tokens) for chunk in chunks) == 40
            made.check(PROMPT, chunks)
            assert len(made.servers["engine-0"]) == 2
            assert made.journal.counts == {"lost": 1, "restarted": 1}
        finally:
            await made.fleet.shutdown()

    asyncio.run(run())


@pytest.mark.slow
def test_while_one_server_is_away_its_sessions_go_on_with_the_other(tmp_path: Path) -> None:
    async def run() -> None:
        made = VllmFleet(tmp_path, num_engines=2)
        await made.fleet.start()
        try:
            await made.serve(0)
            sessions = [f"s{number}" for number in range(4)]
            for session in sessions:
                made.fleet.open(session)
            going = [asyncio.ensure_future(sample(made.fleet, request(s, max_tokens=40))) for s in sessions]
            await made.sampling("engine-1")
            made.server("engine-1").die()
            for chunks in await asyncio.gather(*going):
                made.check(PROMPT, chunks)
        finally:
            await made.fleet.shutdown()

    asyncio.run(run())


def test_an_engine_that_computes_other_weights_than_it_was_given_is_replaced(tmp_path: Path) -> None:
    async def run() -> None:
        made = VllmFleet(tmp_path)
        await made.fleet.start()
        try:
            await made.serve(0)
            engine = made.server().engine
            assert engine is not None
            engine.faults.add("loads_nothing")
            newest = await made.serve(1)
            made.fleet.open("s")
            chunks = await sample(made.fleet, request("s"))
            assert {chunk.version for chunk in chunks} == {newest}
            made.check(PROMPT, chunks)
            assert made.journal.counts["lost"] == 1
        finally:
            await made.fleet.shutdown()

    asyncio.run(run())


def test_a_server_that_never_comes_up_is_told_at_once(tmp_path: Path) -> None:
    async def run() -> None:
        made = VllmFleet(tmp_path)
        made.fails_to_start = True
        await made.fleet.start()
        try:
            with pytest.raises(ResourceError, match="vLLM did not start"):
                await made.serve(0)
        finally:
            await made.fleet.shutdown()

    asyncio.run(run())


def config_of(*arguments: str, **sections: Any) -> RunConfig:
    vllm = {"python": "/opt/vllm/bin/python", "arguments": arguments}
    tree = {"executor": "ray", "device": "cuda", "engine": {"backend": "vllm", "vllm": vllm}}
    return RunConfig.model_validate({**tree, **sections})


@pytest.mark.parametrize(
    ("arguments", "num_gpus"),
    [
        ((), 1),
        (("--tensor-parallel-size", "8"), 8),
        (("-tp=4", "--pipeline_parallel_size=2", "--enforce-eager"), 8),
        (("-tp", "2", "--tensor-parallel-size", "4"), 4),
    ],
)
def test_a_replica_reserves_the_gpus_that_vllm_divides_it_over(
    arguments: tuple[str, ...], num_gpus: int
) -> None:
    parts = {one.part: one.num_gpus for one in part_resources(config_of(*arguments))}
    assert parts == {"trainer": 1.0, "engine-0": num_gpus}
    evaluated = config_of(*arguments, evaluation={"every_steps": 5})
    assert {one.part: one.num_gpus for one in part_resources(evaluated)}["evaluation"] == num_gpus


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match=r"arguments: tp must be 1 or more, received 'many'"):
        config_of("--tensor-parallel-size", "many")
    with pytest.raises(ValueError, match=r"arguments: a server must be a single replica.*received '2'"):
        config_of("-dp", "2")
    for part in ("engine", "evaluation"):
        with pytest.raises(ValueError, match=rf"cluster\.{part}\.gpus: must be at least 8.*received 1"):
            config_of("-tp", "8", cluster={part: {"gpus": 1}})
    with pytest.raises(ValueError, match=r"engine\.vllm\.url: must be empty.*several engines"):
        RunConfig.model_validate(
            {
                "executor": "ray",
                "cluster": {"engines": 2},
                "engine": {"backend": "vllm", "vllm": {"url": "http://127.0.0.1:1"}},
            }
        )
