"""The parts of a run that sample and act: made in one place, for training, evaluation and use alike."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

from etude.config import RunConfig
from etude.controller.backends import open_checked_backend
from etude.controller.compute import choose_place, choose_weight_dtype
from etude.controller.corpus import make_renderer
from etude.environment.episodes import Environment, EpisodeLimits
from etude.inference import Engine, EngineService, choose_drafts, pages_for
from etude.inference.vllm import ModelSnapshots, SnapshotDirectory, VllmSampler, make_vllm_sampler
from etude.model import LanguageModel
from etude.model.loading import AnyModel
from etude.observe.machine import available_cores
from etude.records import PolicyVersion
from etude.store.blobs import KeptBlobs, MemoryBlobs
from etude.tokens.renderer import Renderer
from etude.tokens.tokenizer import TOKENIZER_FILE, Tokenizer
from etude.weights import MemoryWeights, WeightPublisher

Service = EngineService | VllmSampler
"""A Sampler and a WeightSink."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What a loop works with."""

    renderer: Renderer
    blobs: MemoryBlobs | KeptBlobs
    weights: WeightPublisher
    service: Service
    environment: Environment

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
) -> AsyncIterator[Parts]:
    """Engine, sandboxes and environment of a run; everything is stopped on the way out.

    `model`: says what will be published; nothing is in service yet. `snapshots`: where vLLM finds what is
    published, a temporary directory unless named. `routes`: where expert routes are kept for good; in memory,
    until they are trained on, unless named. Raises ResourceError if sandboxes cannot be made here.
    """
    if isinstance(model, LanguageModel):  # a run that began with a checkpoint need not describe it
        config = config.model_copy(update={"model": model.config})
    backend = open_checked_backend(config.sandbox.backend)
    renderer = make_renderer(tokenizer)
    blobs = MemoryBlobs() if routes is None else KeptBlobs(routes)
    environment = Environment(
        backend, renderer, EpisodeLimits.from_config(config), config.rl.reward, blobs.put
    )
    if config.engine.backend == "vllm":
        opening = _open_vllm(config, tokenizer, model, snapshots)
    else:
        opening = _open_engine(config, tokenizer, deterministic)
    try:
        async with opening as (weights, service):
            yield Parts(renderer, blobs, weights, service, environment)
    finally:
        await backend.close()


@contextlib.asynccontextmanager
async def _open_engine(
    config: RunConfig, tokenizer: Tokenizer, deterministic: bool
) -> AsyncIterator[tuple[WeightPublisher, Service]]:
    weights = MemoryWeights()
    place = choose_place(config.device, config.dtype, config.engine.kernels, config.numerics)
    engine = Engine(
        config.model,
        tokenizer.vocab_size,
        config.engine.num_slots,
        config.agent.max_tokens + 1,
        config.engine.prefill_tokens,
        place.kernels,
        config.engine.native_threads or available_cores(),
        num_pages=pages_for(config.engine.cache_tokens),
        token_bytes=tokenizer.decode_bytes,
        native_weights=choose_weight_dtype(config.engine.weight_dtype, place),
        device=place.device,
        drafts=choose_drafts(
            config.engine.drafts, config.engine.speculative_tokens, config.initial_checkpoint
        ),
        cache_dtype=config.engine.cache_dtype,
    )
    delay = config.engine.tool_delay_steps if deterministic else None
    async with EngineService(engine, weights.fetch, delay) as service:
        yield weights, service


@contextlib.asynccontextmanager
async def _open_vllm(
    config: RunConfig, tokenizer: Tokenizer, model: AnyModel, snapshots: Path | None
) -> AsyncIterator[tuple[WeightPublisher, Service]]:
    own = model.config if isinstance(model, LanguageModel) else None
    vllm = config.engine.vllm
    if own is None:  # nobody could replay them
        vllm = vllm.model_copy(update={"record_routes": False})
    sampler = make_vllm_sampler(
        vllm,
        own,
        # vLLM's own choice for float32 weights is half precision: far from what the trainer computes.
        dtype=str(next(model.parameters()).dtype).removeprefix("torch."),
        max_tokens=config.agent.max_tokens + 1,
        has_tokenizer=True,
    )
    with contextlib.ExitStack() as stack:
        if snapshots is None:
            snapshots = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="etude-snapshots-")))
        beside = snapshots / "tokenizer"
        tokenizer.save(beside)
        directory = SnapshotDirectory(snapshots / "versions", beside=[beside / TOKENIZER_FILE])
        async with sampler:
            yield ModelSnapshots(directory, model), sampler
