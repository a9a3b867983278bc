"""Small random checkpoints of every architecture, as transformers makes and computes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from etude.model import LanguageModel, PackedAttention, RecordedRoutes

VOCAB = 120
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
    "initializer_range": 0.15,
}
_GROUPED = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
_LATENT = {
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "moe_intermediate_size": 16,
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "bos_token_id": None,
    "eos_token_id": None,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 5000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
}
_MOE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}

VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("Qwen3", _GROUPED),
    "dense_tied": ("Qwen3", _GROUPED | {"tie_word_embeddings": True}),
    "dense_yarn": ("Qwen3", _GROUPED | {"rope_parameters": _YARN}),
    "biased": ("Qwen2", _GROUPED),
    "biased_tied_yarn": ("Qwen2", _GROUPED | {"rope_parameters": _YARN, "tie_word_embeddings": True}),
    "llama": ("Llama", _GROUPED | {"num_attention_heads": 8, "num_key_value_heads": 1}),
    "llama_scaled": ("Llama", _GROUPED | {"rope_parameters": _LLAMA3, "tie_word_embeddings": True}),
    "llama_linear": (
        "Llama",
        _GROUPED | {"rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0}},
    ),
    "mistral": ("Mistral", _GROUPED | {"sliding_window": None}),
    "moe": ("Qwen3Moe", _GROUPED | _MOE),
    "moe_tied": ("Qwen3Moe", _GROUPED | _MOE | {"tie_word_embeddings": True}),
    "moe_unnormalised": ("Qwen3Moe", _GROUPED | _MOE | {"norm_topk_prob": False}),
    "moe_wide": ("Qwen3Moe", _GROUPED | _MOE | {"num_experts": 300, "num_hidden_layers": 1}),
    "latent": ("DeepseekV3", _LATENT),
    "latent_direct": ("DeepseekV3", _LATENT | {"q_lora_rank": None, "tie_word_embeddings": True}),
    "latent_halves": (
        "DeepseekV3",
        _LATENT | {"rope_interleave": False, "norm_topk_prob": False, "rms_norm_eps": 0.3},
    ),
    "latent_yarn": (
        "DeepseekV3",
        _LATENT | {"rope_parameters": _YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
    "latent_mscale": (
        "DeepseekV3",
        _LATENT | {"rope_parameters": _YARN | {"mscale": 0.7, "mscale_all_dim": 1.3}},
    ),
    "latent_kimi": (
        "DeepseekV3",
        _LATENT
        | {
            "n_group": 1,
            "topk_group": 1,
            "n_routed_experts": 384,
            "rope_parameters": _YARN | {"beta_fast": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
    "latent_dense": ("DeepseekV3", _LATENT | {"first_k_dense_replace": 3}),
}
"""Name -> transformers' class prefix and what its configuration says."""
ROUTED = [name for name in VARIANTS if name.startswith(("moe", "latent")) and name != "latent_dense"]


def reference_model(variant: str, seed: int = 0, **changes: Any) -> Any:
    """A transformers model of the variant, in float32, with random norms and router biases."""
    import transformers

    prefix, values = VARIANTS[variant]
    config = getattr(transformers, f"{prefix}Config")(**(_SIZES | values | changes))
    torch.manual_seed(seed)
    model = getattr(transformers, f"{prefix}ForCausalLM")(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5, generator=generator)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.uniform_(-0.3, 0.3, generator=generator)
    return model


def reference_checkpoint(directory: Path, variant: str, seed: int = 0, **changes: Any) -> Any:
    """Writes the variant to `directory` as transformers does and returns its model."""
    model = reference_model(variant, seed, **changes)
    model.save_pretrained(directory)
    return model


def tokens_of(length: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, VOCAB, length))


@torch.no_grad()
def our_logits(model: LanguageModel, tokens: Tensor, routes: Any = None) -> Tensor:
    """tokens [T] -> logits [T, vocabulary]."""
    hidden = model(tokens, torch.arange(len(tokens)), PackedAttention([len(tokens)]), routes)
    return model.logits(hidden)


def our_routes(model: LanguageModel, tokens: Tensor) -> NDArray[np.integer[Any]]:
    """[T, layers, top_k] of one pass over all tokens."""
    recorder = RecordedRoutes.of(model.config)
    our_logits(model, tokens, recorder)
    return recorder.pop_routes(len(tokens)).numpy()


@torch.no_grad()
def their_logits_and_routes(model: Any, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """tokens [T] -> logits [T, vocabulary] float32 and the experts that its routers chose [T, layers, k]."""
    chosen: list[Tensor] = []

    def keep(_module: nn.Module, _inputs: Any, outputs: tuple[Tensor, ...]) -> None:
        chosen.append(outputs[2])

    routers = [module for module in model.modules() if type(module).__name__.lower().endswith("topkrouter")]
    hooks = [router.register_forward_hook(keep) for router in routers]
    logits = model(tokens[None]).logits[0].float()
    for hook in hooks:
        hook.remove()
    return logits, torch.stack(chosen, dim=1) if chosen else torch.zeros((len(tokens), 0, 0))
