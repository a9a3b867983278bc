"""Opens the parts of a run that sample and act: for training, evaluation and use alike."""

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
from etude.environment.runners import TimedEpisodeRunner
from etude.model import LanguageModel
from etude.model.loading import AnyModel
from etude.store.blobs import Blobs, open_blobs
from etude.tokens.renderer import Renderer
from etude.tokens.tokenizer import Tokenizer
from etude.weights import WeightPublisher, open_weights
from etude.weights.opening import WeightFetcher


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts that a loop works with."""

    renderer: Renderer
    blobs: Blobs
    weights: WeightPublisher
    service: LocalService | EngineFleet
    """A Sampler and a WeightSink."""
    environment: TimedEpisodeRunner


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
    """Opens engine, sandboxes and environment of a run; stops them at exit.

    `model`: has the shapes of the weights to come; none are in service yet. `snapshots`: directory through
    which vLLM gets weights; None: a temporary one. `routes`: where expert routes are stored permanently;
    None: in memory, until they are trained on. `owner`: see open_run_backend. Raises ResourceError if
    sandboxes are not available.
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
    """Opens a run's engine and its publisher; stops them at exit. Arguments: see `open_parts`."""
    if isinstance(model, LanguageModel):  # the configuration need not describe an initial checkpoint
        config = config.model_copy(update={"model": model.config})
    is_foreign = bool(config.agent.harness.command)  # which sends requests at any time
    delay = config.engine.tool_delay_steps if deterministic and not is_foreign else None
    has_clusters = snapshots is not None and config.clusters.listen  # a run, with other samplers
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
