"""Against vLLM itself, in an environment of its own: `python benchmarks/environments.py vllm` makes it."""

from __future__ import annotations

import asyncio
import copy
from pathlib import Path

import numpy as np
import pytest
import torch

from etude.agent.endpoint_messages import byte_tokenizer
from etude.config import AdapterConfig
from etude.inference.vllm import ManagedServer, Probe, Replica, SnapshotDirectory, VllmSampler
from etude.inference.vllm.publishing import ModelSnapshots
from etude.inference.vllm.servers import ADAPTERS, CPU_ARGUMENTS
from etude.model import LanguageModel, PackedAttention, RecordedRoutes, build_model
from etude.model.lora import pairs_of, sum_of
from etude.model.scoring import score_sequences
from etude.records import PolicyVersion, WeightManifest
from tests.inference.vllm.builders import (
    Reader,
    adapted_model,
    asynchronous,
    move_adapters,
    publish,
    tiny_config,
    tiny_model,
    tokens,
)
from tests.inference.vllm.environment import ENVIRONMENT, vllm_python

pytestmark = [pytest.mark.slow, pytest.mark.foreign]
_LONG = 500


@pytest.fixture(scope="session")
def python() -> Path:
    return vllm_python()


def sampler_of(python: Path) -> VllmSampler:
    given = (*CPU_ARGUMENTS, "--dtype", "float32")
    return VllmSampler(Replica(ManagedServer(python, given, ENVIRONMENT)))


def find_wrong_logprobs(models: dict[int, LanguageModel], reader: Reader) -> list[int]:
    """The sampled tokens whose log-probability is not the one that their own version gives them."""
    whole = np.array(reader.tokens, dtype=np.int32)
    scores = {step: score_sequences(model, [whole])[0] for step, model in models.items()}
    return [
        place
        for place, version in enumerate(reader.versions)
        if version is not None and abs(reader.logprobs[place] - scores[version.step][place]) >= 1e-4
    ]


@torch.no_grad()
def routes_of(model: LanguageModel, whole: list[int]) -> np.ndarray:
    recorder = RecordedRoutes.of(model.config)
    ids = torch.tensor(whole)
    model(ids, torch.arange(len(ids)), PackedAttention([len(ids)]), recorder)
    return recorder.pop_routes().numpy()


@asynchronous
async def test_sessions_go_on_through_updates_with_true_versions_logprobs_and_routes(
    python: Path, tmp_path: Path
) -> None:
    root, models = SnapshotDirectory(tmp_path), {step: tiny_model(step) for step in range(3)}
    manifests = [publish(root, model, step) for step, model in models.items()]
    async with sampler_of(python) as sampler:
        await sampler.stage(manifests[0])
        assert sampler.current() is None
        await sampler.activate(manifests[0].version)
        assert sampler.current() == manifests[0].version
        first = Reader("first")
        sampler.open("first")
        await first.ask(sampler, tokens(70, 0).tolist(), top_logprobs=3)
        await first.ask(sampler, tokens(50, 1).tolist(), temperature=0.0)
        assert find_wrong_logprobs(models, first) == []
        expected = routes_of(models[0], first.tokens)
        assert sorted(first.routes) == list(range(len(first.tokens) - 1))
        for position, row in first.routes.items():
            assert {tuple(sorted(r)) for r in row} == {tuple(sorted(r)) for r in expected[position]}

        readers = [Reader(f"session {number:02}") for number in range(32)]
        for reader in readers:
            sampler.open(reader.id)
        await sampler.stage(manifests[1])
        asked = [
            asyncio.create_task(
                reader.ask(sampler, tokens(40, n).tolist(), max_tokens=_LONG, streaming=n % 4 == 0)
            )
            for n, reader in enumerate(readers)
        ]
        async with asyncio.timeout(900):
            # Those that stream tell of it.
            while not all(any(reader.sampled) for reader in readers[::4]):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await sampler.activate(manifests[1].version, "recompute")
        print("32 in flight", sampler.replica.times)
        await asyncio.gather(*asked)
        assert sum(len({v for v in reader.versions if v is not None}) == 2 for reader in readers) >= 16
        for reader in readers:
            assert sum(reader.sampled) == _LONG
            assert {version.step for version in reader.kv_oldest if version is not None} <= {0, 1}
            assert len(reader.routes) == len(reader.tokens) - 1
        # In 32,000 choices of experts one may be a tie in float32, which two engines break each in its way:
        # all tokens of that session may then differ. A wrongly named version differs in every session.
        wrong = {reader.id: places for reader in readers if (places := find_wrong_logprobs(models, reader))}
        assert len(wrong) <= 1, wrong

        await sampler.stage(manifests[2])
        await sampler.activate(manifests[2].version)
        print("idle", sampler.replica.times)
        await first.ask(sampler, tokens(20, 3).tolist())
        assert first.versions[-1] == manifests[2].version
        scores = await sampler.score(tokens(33, 5), manifests[2].version)
        expected_scores = score_sequences(models[2], [tokens(33, 5)])[0]
        np.testing.assert_allclose(scores.logprobs, expected_scores, atol=1e-4)

        client, directory = await sampler.replica.client(), manifests[2].url.removeprefix("file://")
        again = await client.call_workers("etude_load", directory)
        assert again["changed"] is False, "the same weights, experts packed once more"


@asynchronous
async def test_adapters_change_under_their_requests_and_are_never_summed(
    python: Path, tmp_path: Path
) -> None:
    config = AdapterConfig(rank=4)
    model, adapters = adapted_model(tiny_model(0, "qwen3"), config, 1)
    weights = ModelSnapshots(SnapshotDirectory(tmp_path), tiny_model(0, "qwen3"), config)
    manifests, models = list[WeightManifest](), dict[int, LanguageModel]()
    for step in range(2):
        tensors = {**dict(model.named_parameters()), **adapters.published()}
        manifests.append(weights.publish(PolicyVersion("run", step), tensors))
        models[step] = copy.deepcopy(model)
        with torch.no_grad():
            pairs = pairs_of(adapters.published())
            for name, weight in models[step].named_parameters():
                weight.copy_(sum_of(weight, pairs[name]) if name in pairs else weight)
        models[step].adapt = lambda ops: ops
        move_adapters(adapters)
    async with sampler_of(python) as sampler:
        await sampler.stage(manifests[0])
        await sampler.activate(manifests[0].version)
        assert sampler.replica.abilities is not None
        assert sampler.replica.abilities.adapters == ADAPTERS
        before, reader = Reader("before"), Reader("during")
        for one in (before, reader):
            sampler.open(one.id)
        await before.ask(sampler, tokens(70, 0).tolist())
        await sampler.stage(manifests[1])  # before the request, which is not to end meanwhile
        asked = asyncio.create_task(
            reader.ask(sampler, tokens(40, 1).tolist(), max_tokens=_LONG, streaming=True)
        )
        async with asyncio.timeout(900):
            while not any(reader.sampled):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await sampler.activate(manifests[1].version, "recompute")
        await asked
        await before.ask(sampler, tokens(20, 2).tolist())
        assert len({v for v in reader.versions if v is not None}) == 2, "it went on"
        # What it said before the keys were computed anew, it said with the old keys.
        assert find_wrong_logprobs(models, reader) == []
        assert before.versions[-1] == manifests[1].version
        wrong = find_wrong_logprobs(models, before)
        assert wrong == [], wrong


@asynchronous
async def test_a_wrong_update_is_refused_and_the_old_version_serves_again(
    python: Path, tmp_path: Path
) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.save(tmp_path / "tokenizer")
    beside = sorted((tmp_path / "tokenizer").iterdir())
    root = SnapshotDirectory(tmp_path / "snapshots", beside=beside)
    models = [build_model(tiny_config("qwen3"), tokenizer.vocab_size) for _ in range(3)]
    for seed, model in enumerate(models):
        model.initialise(seed)
    good = publish(root, models[0], 0)
    wrong = publish(root, models[1], 1, Probe.of(models[2]))
    async with sampler_of(python) as sampler:
        await sampler.stage(good)
        await sampler.activate(good.version)

        after = Reader("after")
        sampler.open(after.id)
        await sampler.stage(wrong)
        with pytest.raises(Exception, match="the update failed"):
            await sampler.activate(wrong.version)
        assert sampler.current() == good.version
        await after.ask(sampler, tokens(30, 0).tolist())
        assert find_wrong_logprobs({0: models[0]}, after) == []
