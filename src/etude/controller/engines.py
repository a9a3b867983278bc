"""The engine of a run, as its configuration says."""

from __future__ import annotations

from etude.config import RunConfig
from etude.controller.compute import choose_place, choose_weight_dtype
from etude.inference import Engine, choose_drafts, pages_for
from etude.observe.machine import available_cores
from etude.tokens.tokenizer import Tokenizer


def make_engine(config: RunConfig, tokenizer: Tokenizer) -> Engine:
    """The engine of a run, without weights."""
    place = choose_place(config.device, config.dtype, config.engine.kernels, config.numerics)
    return Engine(
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
        keep_spare=not config.colocated,
    )
