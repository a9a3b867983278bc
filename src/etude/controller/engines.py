"""Makes the engine of a run from its configuration."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path

import torch

from etude.config import AdapterConfig, RunConfig
from etude.controller.compute import choose_place, choose_weight_dtype
from etude.errors import ConfigError
from etude.inference import Engine, EngineService, choose_drafts, pages_for
from etude.inference.vllm import (
    FetchedSnapshots,
    ModelSnapshots,
    SnapshotDirectory,
    VllmSampler,
    make_vllm_sampler,
)
from etude.model import LanguageModel
from etude.model.huggingface import check_memory
from etude.model.loading import AnyModel, load_any_model, read_vocab_size
from etude.observe.machine import available_cores
from etude.protocols import WeightSink
from etude.records import PolicyVersion
from etude.tokens.tokenizer import TOKENIZER_FILE, Tokenizer
from etude.weights import WeightPublisher
from etude.weights.opening import WeightFetcher

LocalService = EngineService | VllmSampler
"""One engine of this process: a Sampler and a WeightSink. An async context manager."""


@dataclass(frozen=True, slots=True)
class SampledModel:
    """Properties of a model that an engine needs before it gets weights."""

    is_routed: bool
    """Whether it is a mixture of experts."""
    dtype: str
    """Number format for vLLM: its default for float32 weights, half precision, differs from the trainer."""
    vocab_size: int
    """Rows of its embedding: a checkpoint may have more than its tokenizer has tokens."""
    is_own: bool = True
    """Whether the section `model` describes it; otherwise it is foreign, and `initial_checkpoint` does."""

    @staticmethod
    def of(model: AnyModel, dtype: str = "") -> SampledModel:
        """The properties of a loaded model, or of one made from it in another `dtype`."""
        own = str(next(model.parameters()).dtype).removeprefix("torch.")
        is_own = isinstance(model, LanguageModel)
        return SampledModel(model.num_experts > 0, dtype or own, model.vocab_size, is_own)

    @staticmethod
    def configured(config: RunConfig, tokenizer: Tokenizer) -> SampledModel:
        """The properties of the model of a resolved configuration; reads the vocabulary's size from the
        initial checkpoint, if there is one. Raises CheckpointError."""
        given, vocab_size = config.initial_checkpoint, tokenizer.vocab_size
        if given is not None and (Path(given) / "config.json").is_file():
            vocab_size = read_vocab_size(Path(given))
        return SampledModel(config.model.num_experts > 0, config.dtype, vocab_size)


def served_adapter(config: RunConfig) -> AdapterConfig | None:
    """Adapter that vLLM serves besides the base; None without one, and for a server started by others."""
    return config.rl.adapter if config.rl.adapter.rank and not config.engine.vllm.url else None


def make_snapshots(
    root: Path, tokenizer: Tokenizer, model: AnyModel, adapter: AdapterConfig | None = None
) -> ModelSnapshots:
    """A publisher that writes weights for vLLM below `root`. `adapter`: see ModelSnapshots."""
    if isinstance(model, LanguageModel) and model.unread is not None:
        check_memory(model)
        model = copy.deepcopy(model).to_empty(device="cpu")
        model.reset_rotation()
    beside = root / "tokenizer"
    tokenizer.save(beside)
    versions = SnapshotDirectory(root / "versions", beside=[beside / TOKENIZER_FILE])
    return ModelSnapshots(versions, model, adapter)


def _make_model(config: RunConfig, model: SampledModel) -> AnyModel:
    dtype = torch.bfloat16 if model.dtype == "bfloat16" else torch.float32
    if model.is_own:
        return LanguageModel(config.model, model.vocab_size).cast(dtype)
    assert config.initial_checkpoint is not None, "a foreign model has a directory"
    return load_any_model(Path(config.initial_checkpoint), dtype)


def check_engine(config: RunConfig) -> None:
    """Raises ConfigError for settings that `make_engine` would refuse, as far as the configuration shows."""
    held, longest = config.engine.cache_tokens, config.agent.max_tokens + 1
    if held and (pages_for(held) or 0) < (pages_for(longest) or 0):
        raise ConfigError(
            "is too small for one session of agent.max_tokens",
            field="engine.cache_tokens",
            received=held,
            fix=f"set it to {longest} or more, or to 0",
        )
    if config.initial_checkpoint is None:
        choose_drafts(config.engine.drafts, config.engine.speculative_tokens, None)


def make_local_service(
    config: RunConfig,
    tokenizer: Tokenizer,
    model: SampledModel,
    fetch: WeightFetcher | None,
    delay_steps: int | None,
    *,
    is_supervised: bool = False,
) -> LocalService:
    """The configured engine, which starts when its context is entered. `fetch`: returns the checked tensors
    of a manifest; None, for vLLM only: manifests are of `make_snapshots`, in directories that vLLM can read.
    `delay_steps`: see EngineService. `is_supervised`: see make_vllm_sampler."""
    if config.engine.backend != "vllm":
        assert fetch is not None, "Étude's engine has to fetch its weights"
        return EngineService(make_engine(config, model), fetch, delay_steps)

    def make(root: Path) -> ModelSnapshots:
        return make_snapshots(root, tokenizer, _make_model(config, model), served_adapter(config))

    return make_vllm_sampler(
        config.engine.vllm,
        routed=model.is_routed,
        dtype=model.dtype,
        max_tokens=config.agent.max_tokens + 1,
        fetched=None if fetch is None else FetchedSnapshots(fetch, make),
        is_supervised=is_supervised,
    )


def make_engine(config: RunConfig, model: SampledModel) -> Engine:
    """The engine of a run, without weights."""
    place = choose_place(config.device, config.dtype, config.engine.kernels, config.numerics)
    return Engine(
        config.model,
        model.vocab_size,
        config.engine.num_slots,
        config.agent.max_tokens + 1,
        config.engine.prefill_tokens,
        place.kernels,
        config.engine.native_threads or available_cores(),
        num_pages=pages_for(config.engine.cache_tokens),
        native_weights=choose_weight_dtype(config.engine.weight_dtype, place),
        device=place.device,
        drafts=choose_drafts(
            config.engine.drafts, config.engine.speculative_tokens, config.initial_checkpoint
        ),
        cache_dtype=config.engine.cache_dtype,
        keep_spare=not config.colocated,
    )


async def serve_model(weights: WeightPublisher, service: WeightSink, model: AnyModel, name: str) -> None:
    """Publishes and activates a model as step 0 of `name`."""
    manifest = weights.publish(PolicyVersion(name, 0), dict(model.named_parameters()))
    await service.stage(manifest)
    await service.activate(manifest.version)
