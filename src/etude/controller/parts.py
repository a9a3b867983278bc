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
from etude.controller.engines import (
    LocalService,
    SampledModel,
    make_local_service,
    make_snapshots,
    served_adapter,
)
from etude.controller.harness import open_environment
from etude.controller.remote.fleet import EngineFleet
from etude.environment.episodes import EpisodeLimits
from etude.environment.runners import TimedPlayer
from etude.model import LanguageModel
from etude.model.loading import AnyModel
from etude.store.blobs import Blobs, open_blobs
from etude.tokens.renderer import Renderer
from etude.tokens.tokenizer import Tokenizer
from etude.weights import WeightPublisher, open_weights
from etude.weights.opening import WeightFetcher

Service = LocalService | EngineFleet
"""A Sampler and a WeightSink."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What a loop works with."""

    renderer: Renderer
    blobs: Blobs
    weights: WeightPublisher
    service: Service
    environment: TimedPlayer


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
    renderer, blobs = open_renderer(tokenizer, config.agent), open_blobs(routes)
    limits, backend = EpisodeLimits.from_config(config), open_run_backend(config.sandbox, owner)
    async with (
        open_environment(config, backend, tokenizer, limits, blobs.put) as environment,
        open_service(config, tokenizer, model, snapshots, deterministic=deterministic) as (weights, service),
    ):
        yield Parts(renderer, blobs, weights, service, environment)


@contextlib.asynccontextmanager
async def open_service(
    config: RunConfig,
    tokenizer: Tokenizer,
    model: AnyModel,
    snapshots: Path | None = None,
    *,
    deterministic: bool = True,
) -> AsyncIterator[tuple[WeightPublisher, LocalService]]:
    """Engine of a run, and what publishes to it; stopped on the way out. Arguments: see `open_parts`."""
    if isinstance(model, LanguageModel):  # a run that began with a checkpoint need not describe it
        config = config.model_copy(update={"model": model.config})
    is_foreign = bool(config.agent.harness.command)  # nobody can say when it asks again
    delay = config.engine.tool_delay_steps if deterministic and not is_foreign else None
    has_clusters = snapshots is not None and config.clusters.listen  # it is a run, and others sample for it
    with contextlib.ExitStack() as stack:
        fetch: WeightFetcher | None = None
        if config.engine.backend == "vllm" and not has_clusters:
            if snapshots is None:
                temporary = tempfile.TemporaryDirectory(prefix="etude-snapshots-")
                snapshots = Path(stack.enter_context(temporary))
            weights: WeightPublisher = make_snapshots(snapshots, tokenizer, model, served_adapter(config))
        else:
            in_parts = config.parallel.ranks > 1
            weights, fetch = stack.enter_context(open_weights(config.weights, in_parts=in_parts))
        async with make_local_service(config, tokenizer, SampledModel.of(model), fetch, delay) as service:
            yield weights, service
