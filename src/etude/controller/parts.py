"""The parts of a run that sample and act: made in one place, for training, evaluation and use alike."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

from etude.config import RunConfig
from etude.controller.backends import open_checked_backend
from etude.controller.compute import choose_kernels
from etude.controller.corpus import make_renderer
from etude.environment.episodes import Environment, EpisodeLimits
from etude.inference import Engine, EngineService, NgramLookup, pages_for
from etude.observe.machine import available_cores
from etude.store.blobs import MemoryBlobs
from etude.tokens.renderer import Renderer
from etude.tokens.tokenizer import Tokenizer
from etude.weights import MemoryWeights


@dataclass(frozen=True, slots=True)
class Parts:
    """What a loop works with."""

    renderer: Renderer
    blobs: MemoryBlobs
    weights: MemoryWeights
    service: EngineService
    environment: Environment


@contextlib.asynccontextmanager
async def open_parts(
    config: RunConfig, tokenizer: Tokenizer, *, deterministic: bool = True
) -> AsyncIterator[Parts]:
    """Engine, sandboxes and environment of a run; everything is stopped on the way out.

    The engine has no weights yet. Raises ResourceError if sandboxes cannot be made here.
    """
    backend = open_checked_backend(config.sandbox.backend)
    renderer, blobs, weights = make_renderer(tokenizer), MemoryBlobs(), MemoryWeights()
    engine = Engine(
        config.model,
        tokenizer.vocab_size,
        config.engine.num_slots,
        config.agent.max_tokens + 1,
        config.engine.prefill_tokens,
        choose_kernels(config.engine.kernels, model=config.model),
        config.engine.native_threads or available_cores(),
        num_pages=pages_for(config.engine.cache_tokens),
        token_bytes=tokenizer.decode_bytes,
        drafts=NgramLookup(config.engine.speculative_tokens) if config.engine.speculative_tokens else None,
    )
    delay = config.engine.tool_delay_steps if deterministic else None
    environment = Environment(
        backend, renderer, EpisodeLimits.from_config(config), config.rl.reward, blobs.put
    )
    try:
        async with EngineService(engine, weights.fetch, delay) as service:
            yield Parts(renderer, blobs, weights, service, environment)
    finally:
        await backend.close()
