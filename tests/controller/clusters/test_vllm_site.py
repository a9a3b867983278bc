"""A cluster that samples with vLLM, for a run with any sampling backend."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from etude.config import RunConfig
from etude.controller.clusters.joining import open_resources
from etude.controller.engines import SampledModel
from etude.controller.models import resolve_model
from etude.errors import ConfigError
from etude.model.loading import load_any_model
from etude.model.scoring import score_sequences
from etude.records import PolicyVersion, SampleRequest, SamplingParams
from etude.tokens.tokenizer import Tokenizer
from etude.weights import open_publisher
from tests.controller.running import tiny_config
from tests.controller.test_vllm_run import checkpoint, fake_vllm, glm_model, small_model


def config_of(directory: Path, initial: Path, url: str = "http://127.0.0.1:1", **sections: Any) -> RunConfig:
    return resolve_model(
        tiny_config(
            directory,
            initial_checkpoint=str(initial),
            dtype="float32",
            engine={"backend": "vllm", "vllm": {"url": url}},
            sandbox={"backend": "unisolated"},
            weights={"url": str(directory / "store"), "dtype": "bfloat16"},
            **sections,
        )
    )


def test_weights_of_the_store_are_sampled_under_their_own_version(tmp_path: Path) -> None:
    initial = checkpoint(tmp_path / "initial", small_model)
    model, tokenizer = load_any_model(initial), Tokenizer.load(initial)
    prompt = np.arange(9, dtype=np.int32)

    async def run(config: RunConfig) -> None:
        with open_publisher(config.weights) as publisher:
            manifest = publisher.publish(PolicyVersion("run", 3), dict(model.named_parameters()))
        async with open_resources(
            config, tokenizer, SampledModel.configured(config, tokenizer), "frankfurt"
        ) as resources:
            resources.check()
            await resources.sink.stage(manifest)
            await resources.sink.activate(manifest.version)
            resources.sampler.open("s")
            params = SamplingParams(max_tokens=6)
            request = SampleRequest("r", "s", prompt, params, frozenset(), (1,))
            chunks = [chunk async for chunk in resources.sampler.stream(request)]
        assert {chunk.version for chunk in chunks} == {manifest.version}
        tokens = np.concatenate([prompt, *(chunk.tokens for chunk in chunks)])
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.to(torch.bfloat16))  # as they travelled
        expected = score_sequences(model, [tokens])[0][len(prompt) :]  # type: ignore[arg-type]
        np.testing.assert_allclose(np.concatenate([c.logprobs for c in chunks]), expected, atol=1e-4)

    with fake_vllm(initial) as url:
        asyncio.run(run(config_of(tmp_path, initial, url)))


def test_clusters_sample_from_architectures_that_are_ours(tmp_path: Path) -> None:
    clusters: dict[str, Any] = {"clusters": {"listen": "127.0.0.1:0", "token": "env:TOKEN"}}
    ours = checkpoint(tmp_path / "ours", small_model)
    assert config_of(tmp_path, ours, **clusters).engine.backend == "vllm"
    foreign = checkpoint(tmp_path / "foreign", glm_model)
    with pytest.raises(ConfigError, match=r"clusters\.listen"):
        config_of(tmp_path, foreign, **clusters)
