"""Against vLLM itself, in an environment of its own: `python benchmarks/environments.py vllm` makes it."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from etude.agent.endpoint_messages import byte_tokenizer
from etude.inference.vllm import ManagedServer, Probe, Replica, SnapshotDirectory, VllmSampler
from etude.inference.vllm.servers import CPU_ARGUMENTS
from etude.model import LanguageModel, PackedAttention, RecordedRoutes, build_model
from etude.model.scoring import score_sequences
from tests.inference.vllm.builders import Reader, asynchronous, publish, tiny_config, tiny_model, tokens
from tests.inference.vllm.environment import ENVIRONMENT, vllm_python

pytestmark = pytest.mark.slow
_LONG = 500


@pytest.fixture(scope="session")
def python() -> Path:
    return vllm_python()


def sampler_of(python: Path, *arguments: str) -> VllmSampler:
    given = (*CPU_ARGUMENTS, "--dtype", "float32", *arguments)
    return VllmSampler(Replica(ManagedServer(python, given, ENVIRONMENT)))


def check_logprobs(models: dict[int, LanguageModel], reader: Reader) -> None:
    """Every sampled token has the log-probability that its own version gives it."""
    whole = np.array(reader.tokens, dtype=np.int32)
    scores = {step: score_sequences(model, [whole])[0] for step, model in models.items()}
    for place, version in enumerate(reader.versions):
        if version is not None:
            assert abs(reader.logprobs[place] - scores[version.step][place]) < 1e-4, (place, version)


@torch.no_grad()
def routes_of(model: LanguageModel, whole: list[int]) -> np.ndarray:
    recorder = RecordedRoutes.of(model.config)
    ids = torch.tensor(whole)
    model(ids, torch.arange(len(ids)), PackedAttention([len(ids)]), recorder)
    return recorder.take().numpy()


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
        check_logprobs(models, first)
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
        async with asyncio.timeout(300):
            # Those that stream tell of it.
            while not all(any(reader.sampled) for reader in readers[::4]):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await sampler.activate(manifests[1].version, "recompute")
        print("32 in flight", sampler.replica.times, sampler.replica.deviation)
        await asyncio.gather(*asked)
        assert sum(len({v for v in reader.versions if v is not None}) == 2 for reader in readers) >= 16
        for reader in readers:
            assert sum(reader.sampled) == _LONG
            check_logprobs(models, reader)
            assert {version.step for version in reader.kv_oldest if version is not None} <= {0, 1}
            assert len(reader.routes) == len(reader.tokens) - 1

        await sampler.stage(manifests[2])
        await sampler.activate(manifests[2].version)
        print("idle", sampler.replica.times, sampler.replica.deviation)
        await first.ask(sampler, tokens(20, 3).tolist())
        assert first.versions[-1] == manifests[2].version
        scores = await sampler.score(tokens(33, 5), manifests[2].version)
        expected_scores = score_sequences(models[2], [tokens(33, 5)])[0]
        np.testing.assert_allclose(scores.logprobs, expected_scores, atol=1e-4)


@asynchronous
async def test_a_wrong_update_is_refused_and_the_old_version_serves_again(
    python: Path, tmp_path: Path
) -> None:
    root, model = SnapshotDirectory(tmp_path), tiny_model(0, "qwen3")
    good = publish(root, model, 0)
    wrong = publish(root, tiny_model(1, "qwen3"), 1, Probe.of(tiny_model(2, "qwen3")))
    async with sampler_of(python) as sampler:
        await sampler.stage(good)
        await sampler.activate(good.version)
        await sampler.stage(wrong)
        with pytest.raises(Exception, match="the update failed"):
            await sampler.activate(wrong.version)
        assert sampler.current() == good.version
        reader = Reader("after")
        sampler.open("after")
        await reader.ask(sampler, tokens(30, 0).tolist())
        check_logprobs({0: model}, reader)

        # A server that dies comes back with the same weights.
        process = sampler.replica._server._process  # type: ignore[attr-defined]
        os.killpg(process.pid, 9)
        while sampler.current() is not None:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        await reader.ask(sampler, tokens(3, 1).tolist())
        assert sampler.replica.restarts == 2
        check_logprobs({0: model}, reader)


@asynchronous
async def test_a_stop_text_ends_a_message_with_the_token_that_completes_it(
    python: Path, tmp_path: Path
) -> None:
    tokenizer = byte_tokenizer()
    model = build_model(tiny_config("qwen3"), tokenizer.vocab_size)
    model.initialise(0)
    tokenizer.save(tmp_path / "tokenizer")
    beside = sorted((tmp_path / "tokenizer").iterdir())
    manifest = publish(SnapshotDirectory(tmp_path / "snapshots", beside=beside), model, 0)
    given = (*CPU_ARGUMENTS, "--dtype", "float32")
    replica = Replica(ManagedServer(python, given, ENVIRONMENT))
    async with VllmSampler(replica, has_tokenizer=True) as sampler:
        await sampler.stage(manifest)
        await sampler.activate(manifest.version)
        whole, cut = Reader("whole"), Reader("cut")
        for reader in (whole, cut):
            sampler.open(reader.id)
        await whole.ask(sampler, [65, 66, 67], max_tokens=60, rng_key=(7,))
        pieces = [tokenizer.decode_bytes([token]) for token in whole.tokens[3:]]
        place = next(at for at, piece in enumerate(pieces) if at > 4 and piece.isalnum())
        first = pieces.index(pieces[place])
        stop = pieces[place].decode()
        await cut.ask(sampler, [65, 66, 67], max_tokens=60, rng_key=(7,), stop_texts=(stop,))
        assert cut.chunks[-1].finish == "stop"
        assert cut.tokens == whole.tokens[: 3 + first + 1]
