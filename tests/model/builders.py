"""Small models and sequences for tests of the core."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from etude.config import ModelConfig
from etude.model import DraftLayers, LanguageModel, PackedAttention

VOCAB = 64
LATENT: dict[str, Any] = {
    "architecture": "deepseek_v3",
    "num_heads": 6,
    "q_lora_rank": 12,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 9,
    "num_experts": 12,
    "experts_per_token": 3,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "n_shared_experts": 2,
    "intermediate_size": 40,
    "rope_factor": 4.0,
    "rope_original_positions": 32,
    "yarn_mscale": 1.0,
    "yarn_mscale_all_dim": 0.7,
}
"""Latent attention with everything that DeepSeek-V3 has."""
PLAIN_LATENT: dict[str, Any] = {
    "architecture": "deepseek_v3",
    "num_heads": 9,
    "kv_lora_rank": 48,
    "n_shared_experts": 0,
    "first_k_dense_replace": 0,
    "norm_topk_prob": False,
}
"""Latent attention with as little as it can have; a run's heads do not fit in one piece of work."""


def small_config(**changes: Any) -> ModelConfig:
    """Two layers of width 32; weights so large that logits differ clearly."""
    values: dict[str, Any] = {
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 16,
        "num_experts": 4,
        "experts_per_token": 2,
        "expert_size": 16,
        "max_positions": 128,
        "initializer_range": 0.2,
    }
    return ModelConfig(**(values | changes))


def small_model(seed: int = 0, **changes: Any) -> LanguageModel:
    """A model with random weights, norms included."""
    model = LanguageModel(small_config(**changes), VOCAB)
    model.initialise(seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5, generator=generator)
    return model


def draft_layers(model: LanguageModel, count: int = 1, seed: int = 0) -> DraftLayers:
    """Draft layers with random weights: they guess wrong nearly always."""
    drafts = DraftLayers(model.config, count)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in drafts.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.2, generator=generator)
    return drafts


def random_tokens(length: int, seed: int = 0) -> NDArray[np.int32]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).astype(np.int32)


@torch.no_grad()
def fresh_routes(model: LanguageModel, tokens: NDArray[np.int32]) -> NDArray[np.uint8]:
    """Routes [T, layers, top_k] of one forward pass over the whole sequence."""
    recorder = model.recorder()
    ids = torch.from_numpy(tokens.astype(np.int64))
    model(ids, torch.arange(len(ids)), PackedAttention([len(ids)]), recorder)
    return recorder.pop_routes().numpy()
