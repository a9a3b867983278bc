"""Small models of architectures that are not defined here, made by transformers with random weights."""

from __future__ import annotations

from typing import Any

import transformers

from etude.model.transformers_model import TransformersModel

_COMMON: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "initializer_range": 0.15,
    "pad_token_id": 0,
}
_OWN: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "gemma3_text": {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "glm4_moe": {
        "num_hidden_layers": 3,
        "moe_intermediate_size": 32,
        "num_experts_per_tok": 2,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "use_qk_norm": True,
        "num_nextn_predict_layers": 0,
    },
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16},
    "qwen2_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
    },
    "llama4_text": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "interleave_moe_layer_step": 1,
        "intermediate_size_mlp": 64,
    },
    "afmoe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "num_dense_layers": 1,
        "num_shared_experts": 1,
    },
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2},
    "gemma4_text": {"moe_intermediate_size": 32, "hidden_size_per_layer_input": 0},
}
KINDS = tuple(kind for kind in _OWN if kind != "gemma4_text")
ROUTED = ("mixtral", "glm4_moe", "gpt_oss", "qwen2_moe", "llama4_text", "afmoe", "hunyuan_v1_moe")
"""Those that are mixtures of experts."""


def tiny_config(kind: str, **changes: Any) -> Any:
    """A configuration of transformers' of this `model_type`."""
    return transformers.AutoConfig.for_model(kind, **{**_COMMON, **_OWN[kind], **changes})


def tiny_model(kind: str, seed: int = 0, **changes: Any) -> TransformersModel:
    """A model of this `model_type`."""
    return TransformersModel.from_config(tiny_config(kind, **changes), seed)
