"""Small models, snapshots and sessions for the tests of the vLLM backend."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from etude.config import AdapterConfig, ModelConfig
from etude.inference.vllm import Probe, SnapshotDirectory, VllmSampler
from etude.model import LanguageModel, build_model
from etude.model.huggingface import save_model
from etude.model.loading import AnyModel
from etude.model.lora import Adapters
from etude.records import PolicyVersion, SampleChunk, SampleRequest, SamplingParams, WeightManifest

VOCAB = 256


def tiny_config(architecture: str = "qwen3_moe", **changes: Any) -> ModelConfig:
    """Sizes that vLLM's kernels take; weights so large that versions differ clearly."""
    values: dict[str, Any] = {
        "architecture": architecture,
        "hidden_size": 64,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 32,
        "intermediate_size": 128,
        "num_experts": 8,
        "experts_per_token": 2,
        "expert_size": 48,
        "max_positions": 1024,
        "initializer_range": 0.15,
    }
    return ModelConfig(**(values | changes))


def tiny_model(seed: int, architecture: str = "qwen3_moe", **changes: Any) -> LanguageModel:
    model = build_model(tiny_config(architecture, **changes), VOCAB)
    model.initialise(seed)
    return model


def adapted_model(model: AnyModel, config: AdapterConfig, seed: int) -> tuple[AnyModel, Adapters]:
    """A model with adapters that have moved."""
    adapters = Adapters(model, config)
    move_adapters(adapters, seed)
    return model, adapters


@torch.no_grad()
def move_adapters(adapters: Adapters, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in adapters.parameters():
        parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)


def publish(
    root: SnapshotDirectory, model: LanguageModel, step: int, probe: Probe | None = None
) -> WeightManifest:
    def write(directory: Path) -> None:
        save_model(model, directory)

    return root.publish(PolicyVersion("run", step), write, probe or Probe.of(model))


def tokens(length: int, seed: int) -> NDArray[np.int32]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).astype(np.int32)


@dataclass
class Reader:
    """One session, and where each of its tokens came from."""

    id: str
    tokens: list[int] = field(default_factory=list[int])
    sampled: list[bool] = field(default_factory=list[bool])
    logprobs: list[float] = field(default_factory=list[float])
    versions: list[PolicyVersion | None] = field(default_factory=list[PolicyVersion | None])
    kv_oldest: list[PolicyVersion | None] = field(default_factory=list[PolicyVersion | None])
    routes: dict[int, NDArray[Any]] = field(default_factory=dict[int, NDArray[Any]])
    chunks: list[SampleChunk] = field(default_factory=list[SampleChunk])
    digest: str | None = None
    count: int = 0

    def request(self, suffix: Sequence[int], **options: Any) -> SampleRequest:
        names = tuple(SamplingParams.__dataclass_fields__)
        params = {name: options.pop(name) for name in tuple(options) if name in names}
        self.count += 1
        given = list(suffix) if self.digest is not None else [*self.tokens, *suffix]
        self._take(suffix, [False] * len(suffix), [0.0] * len(suffix), None, None)
        values: dict[str, Any] = {
            "id": f"{self.id}:{self.count}",
            "session_id": self.id,
            "suffix": np.array(given, dtype=np.int32),
            "params": SamplingParams(**({"max_tokens": 8} | params)),
            "stop_tokens": frozenset(),
            "rng_key": (1, len(self.id)),
            "prefix_digest": self.digest,
        }
        return SampleRequest(**(values | options))

    async def ask(self, sampler: VllmSampler, suffix: Sequence[int], **options: Any) -> list[SampleChunk]:
        request = self.request(suffix, **options)
        self.chunks = []
        async for chunk in sampler.stream(request):
            self.chunks.append(chunk)
            count = len(chunk.tokens)
            self._take(
                chunk.tokens.tolist(), [True] * count, chunk.logprobs.tolist(), chunk.version, chunk.kv_oldest
            )
            if chunk.routes is not None:
                self.routes.update(enumerate(chunk.routes, chunk.routes_start))
            if chunk.finish is not None:
                self.digest = chunk.prefix_digest
        return self.chunks

    def _take(
        self,
        given: Sequence[int],
        sampled: list[bool],
        logprobs: list[float],
        version: PolicyVersion | None,
        oldest: PolicyVersion | None,
    ) -> None:
        self.tokens += list(given)
        self.sampled += sampled
        self.logprobs += logprobs
        self.versions += [version] * len(given)
        self.kv_oldest += [oldest] * len(given)


def asynchronous(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Lets an async test run in an event loop of its own."""

    @functools.wraps(test)
    def run(*arguments: Any, **options: Any) -> None:
        asyncio.run(test(*arguments, **options))

    return run
