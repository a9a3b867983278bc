"""The parts of a run that sample and act: made in one place, for training, evaluation and use alike."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from etude.agent import open_renderer
from etude.config import RunConfig
from etude.controller.backends import open_run_backend
from etude.controller.engines import SampledModel, make_engine, make_snapshots, make_vllm, served_adapter
from etude.controller.harness import open_environment
from etude.controller.remote.fleet import EngineFleet
from etude.environment.episodes import EpisodeLimits
from etude.environment.runners import TimedPlayer
from etude.inference import EngineService
from etude.inference.vllm import VllmSampler
from etude.model import LanguageModel
from etude.model.loading import AnyModel
from etude.records import PolicyVersion
from etude.store.blobs import Blobs, open_blobs
from etude.tokens.renderer import Renderer
from etude.tokens.tokenizer import Tokenizer
from etude.weights import WeightPublisher, open_weights

Service = EngineService | VllmSampler | EngineFleet
"""A Sampler and a WeightSink."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What a loop works with."""

    renderer: Renderer
    blobs: Blobs
    weights: WeightPublisher
    service: Service
    environment: TimedPlayer

    async def serve(self, model: AnyModel, name: str) -> None:
        """Brings a model into service as step 0 of `name`."""
        manifest = self.weights.publish(PolicyVersion(name, 0), dict(model.named_parameters()))
        await self.service.stage(manifest)
        await self.service.activate(manifest.version)


@contextlib.asynccontextmanager
async def open_parts(
    config: RunConfig,
    tokenizer: Tokenizer,
    model: AnyModel,
    *,
    snapshots: Path | None = None,
    routes: Path | None = None,
    deterministic: bool = True,
    owner: str | None = None,
) -> AsyncIterator[Parts]:
    """Engine, sandboxes and environment of a run; everything is stopped on the way out.

    `model`: says what will be published; nothing is in service yet. `snapshots`: where vLLM finds what is
    published, a temporary directory unless named. `routes`: where expert routes are kept for good; in memory,
    until they are trained on, unless named. `owner`: see open_run_backend. Raises ResourceError if sandboxes
    cannot be made here.
    """
    if isinstance(model, LanguageModel):  # a run that began with a checkpoint need not describe it
        config = config.model_copy(update={"model": model.config})
    backend = open_run_backend(config.sandbox, owner)
    renderer = open_renderer(tokenizer, config.agent)
    blobs = open_blobs(routes)
    limits = EpisodeLimits.from_config(config)
    if config.engine.backend == "vllm":
        opening = _open_vllm(config, tokenizer, model, snapshots)
    else:
        opening = _open_engine(config, tokenizer, deterministic)
    try:
        async with (
            open_environment(config, backend, tokenizer, limits, blobs.put) as environment,
            opening as (weights, service),
        ):
            yield Parts(renderer, blobs, weights, service, environment)
    finally:
        await backend.close()


@contextlib.asynccontextmanager
async def _open_engine(
    config: RunConfig, tokenizer: Tokenizer, deterministic: bool
) -> AsyncIterator[tuple[WeightPublisher, Service]]:
    engine = make_engine(config, tokenizer, SampledModel.configured(config, tokenizer))
    is_foreign = bool(config.agent.harness.command)  # nobody can say when it asks again
    delay = config.engine.tool_delay_steps if deterministic and not is_foreign else None
    with open_weights(config.weights, in_parts=config.parallel.ranks > 1) as (weights, fetch):
        async with EngineService(engine, fetch, delay) as service:
            yield weights, service


@contextlib.asynccontextmanager
async def _open_vllm(
    config: RunConfig, tokenizer: Tokenizer, model: AnyModel, snapshots: Path | None
) -> AsyncIterator[tuple[WeightPublisher, Service]]:
    sampled = SampledModel.of(model)
    with contextlib.ExitStack() as stack:
        if snapshots is not None and config.clusters.listen:  # it is a run, and others sample for it
            in_parts = config.parallel.ranks > 1
            weights, fetch = stack.enter_context(open_weights(config.weights, in_parts=in_parts))
        else:
            if snapshots is None:
                temporary = tempfile.TemporaryDirectory(prefix="etude-snapshots-")
                snapshots = Path(stack.enter_context(temporary))
            weights, fetch = make_snapshots(snapshots, tokenizer, model, served_adapter(config)), None
        async with make_vllm(config, tokenizer, sampled, fetch) as sampler:
            yield weights, sampler
