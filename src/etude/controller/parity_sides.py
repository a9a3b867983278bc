"""The two sides of a comparison, opened for one checkpoint and nothing else: no tasks, no sandboxes."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from etude.config import RunConfig
from etude.controller.compute import choose_place, choose_weight_dtype, place_model
from etude.controller.numerics import settle_numerics, use_numerics
from etude.controller.parity_report import ParityReport, compare, play
from etude.errors import ConfigError
from etude.inference import Engine, EngineService
from etude.inference.vllm import ModelSnapshots, SnapshotDirectory, VllmSampler, make_vllm_sampler
from etude.model import LanguageModel
from etude.model.loading import AnyModel
from etude.observe.machine import available_cores
from etude.records import PolicyVersion
from etude.weights import MemoryWeights, WeightPublisher

_VERSION = PolicyVersion("parity", 0)


async def measure_parity(
    model: AnyModel, config: RunConfig, prompts: Sequence[NDArray[np.int32]], num_tokens: int
) -> ParityReport:
    """Plays each prompt on to `num_tokens` tokens, and compares: `config` says how either side computes
    (`device`, `dtype`, `numerics`, `engine`), and otherwise nothing of it matters.

    The model's own arithmetic is exchanged for what `config` names. Raises ConfigError or ResourceError for
    what cannot be had, InfrastructureError if the engine fails.
    """
    if isinstance(model, LanguageModel):
        config = settle_numerics(config.model_copy(update={"model": model.config}))
    place = choose_place(config.device, config.dtype, config.engine.kernels, config.numerics)
    config = config.model_copy(update={"device": place.device, "dtype": place.dtype})
    async with _open(model, config, len(prompts), num_tokens + 1) as (weights, service):
        use_numerics(place_model(model, config), config)
        manifest = weights.publish(_VERSION, dict(model.named_parameters()))
        await service.stage(manifest)
        await service.activate(manifest.version)
        played = await play(service, prompts, num_tokens)
    return compare(model, played)


@contextlib.asynccontextmanager
async def _open(
    model: AnyModel, config: RunConfig, num_sessions: int, max_tokens: int
) -> AsyncIterator[tuple[WeightPublisher, EngineService | VllmSampler]]:
    own = model.config if isinstance(model, LanguageModel) else None
    if config.engine.backend == "vllm":
        sampler = make_vllm_sampler(
            config.engine.vllm, routed=model.num_experts > 0, dtype=config.dtype, max_tokens=max_tokens
        )
        with tempfile.TemporaryDirectory(prefix="etude-parity-") as directory:
            async with sampler:
                yield ModelSnapshots(SnapshotDirectory(Path(directory)), model), sampler
        return
    if own is None:
        raise ConfigError(
            "our engine samples from architectures that are defined here",
            field="engine.backend",
            received=config.engine.backend,
            fix="compare such a model with vLLM",
        )
    place = choose_place(config.device, config.dtype, config.engine.kernels, config.numerics)
    engine = Engine(
        own,
        model.vocab_size,
        num_sessions,
        max_tokens,
        config.engine.prefill_tokens,
        place.kernels,
        config.engine.native_threads or available_cores(),
        native_weights=choose_weight_dtype(config.engine.weight_dtype, place),
        device=place.device,
        cache_dtype=config.engine.cache_dtype,
    )
    weights = MemoryWeights()
    async with EngineService(engine, weights.fetch, None) as service:
        yield weights, service
