"""Conversion between Hugging Face's `config.json` and ModelConfig."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from etude.config import ModelConfig
from etude.errors import CheckpointError

_CLASSES = {
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "llama": "LlamaForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
}
_MODEL_TYPES = {name: name for name in _CLASSES} | {"mistral": "llama", "kimi_k2": "deepseek_v3"}
"""Their `model_type` -> our architecture."""

_ALL = {
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "max_positions": "max_position_embeddings",
    "rms_norm_eps": "rms_norm_eps",
    "initializer_range": "initializer_range",
    "tie_embeddings": "tie_word_embeddings",
}
_GROUPED_QUERY = {"num_kv_heads": "num_key_value_heads", "head_dim": "head_dim"}
_ROUTED = {
    "experts_per_token": "num_experts_per_tok",
    "expert_size": "moe_intermediate_size",
    "norm_topk_prob": "norm_topk_prob",
}
_LATENT = {
    name: name
    for name in (
        "intermediate_size",
        "q_lora_rank",
        "kv_lora_rank",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "v_head_dim",
        "n_shared_experts",
        "n_group",
        "topk_group",
        "routed_scaling_factor",
        "first_k_dense_replace",
        "rope_interleave",
    )
}
_DENSE = _ALL | _GROUPED_QUERY | {"intermediate_size": "intermediate_size"}
_NAMES: dict[str, dict[str, str]] = {
    "qwen3": _DENSE,
    "qwen2": _DENSE,
    "llama": _DENSE,
    "qwen3_moe": _ALL | _GROUPED_QUERY | _ROUTED | {"num_experts": "num_experts"},
    "deepseek_v3": _ALL | _ROUTED | _LATENT | {"num_experts": "n_routed_experts"},
}
"""Ours -> theirs."""
_ABSENT: dict[str, Any] = {
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "norm_topk_prob": None,
    "rope_interleave": True,
}
"""transformers' defaults for the fields that checkpoints may omit; None: it depends on the architecture."""
_LINEAR = {"rope_factor": "factor"}
_SCALINGS = {
    "linear": _LINEAR,
    "llama3": _LINEAR
    | {
        "rope_original_positions": "original_max_position_embeddings",
        "rope_fast_turns": "high_freq_factor",
        "rope_slow_turns": "low_freq_factor",
    },
    "yarn": _LINEAR
    | {
        "rope_original_positions": "original_max_position_embeddings",
        "rope_fast_turns": "beta_fast",
        "rope_slow_turns": "beta_slow",
        "yarn_mscale": "mscale",
        "yarn_mscale_all_dim": "mscale_all_dim",
        "yarn_attention_factor": "attention_factor",
        "yarn_truncate": "truncate",
    },
}
"""Ours -> theirs, by `rope_type`."""
_ONLY: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False, None),
    "use_sliding_window": (False, None),
    "decoder_sparse_step": (1,),
    "mlp_only_layers": ([], None),
    "moe_layer_freq": (1,),
    "scoring_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
    "partial_rotary_factor": (1, None),
}
"""Fields of which only these values, or their absence, are supported."""
_LLAMA_POSITIONS = 2048
_MISTRAL_WINDOW = 4096
"""transformers' defaults of `max_position_embeddings` and `sliding_window`."""


class ForeignModelError(CheckpointError):
    """A model that Étude does not implement; transformers and vLLM may support it."""


@dataclass(frozen=True, slots=True)
class CheckpointFields:
    """The contents of `config.json`."""

    config: ModelConfig
    vocab_size: int
    fp8_block: tuple[int, int] | None
    """Rows and columns that share one scale, if weights are stored in 8-bit floats."""
    num_mtp_layers: int
    """Number of multi-token-prediction layers stored after the last block."""


def write_fields(config: ModelConfig, vocab_size: int, dtype: torch.dtype, num_mtp_layers: int = 0) -> str:
    """The text of `config.json`."""
    values: dict[str, Any] = {
        "architectures": [_CLASSES[config.architecture]],
        "model_type": config.architecture,
        "vocab_size": vocab_size,
        "hidden_act": "silu",
    }
    if config.architecture != "qwen2":  # which has no such field: it always has the same biases as ours
        values["attention_bias"] = False
    values |= {theirs: getattr(config, ours) for ours, theirs in _NAMES[config.architecture].items()}
    if config.architecture == "qwen3_moe":
        values |= {"intermediate_size": config.expert_size, "decoder_sparse_step": 1, "mlp_only_layers": []}
    if config.is_latent:
        values |= {
            "q_lora_rank": config.q_lora_rank or None,
            "num_key_value_heads": config.num_heads,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "moe_layer_freq": 1,
        }
    if config.is_latent or num_mtp_layers:
        values["num_nextn_predict_layers"] = num_mtp_layers
    values |= _rope_values(config)
    name = str(dtype).removeprefix("torch.")
    values |= {"torch_dtype": name, "dtype": name}
    return json.dumps(values, indent=2) + "\n"


def read_fields(path: Path) -> CheckpointFields:
    """Reads `config.json`. Raises CheckpointError as `parse_fields` does, and for a missing or damaged
    file."""
    if not path.exists():
        fix = "name a Hugging Face directory"
        raise CheckpointError("is missing", field="config.json", received=str(path), fix=fix)
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(values, dict):
            raise ValueError("is not an object")
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"cannot be read: {error}", field="config.json", received=str(path), fix="fetch it again"
        ) from error
    return parse_fields(values)


def parse_fields(values: Mapping[str, Any]) -> CheckpointFields:
    """Converts the fields of a `config.json`.

    Raises ForeignModelError for a model that is not supported, CheckpointError for missing or invalid fields.
    """
    model_type = str(values.get("model_type"))
    architecture = _MODEL_TYPES.get(model_type)
    if architecture is None:
        raise ForeignModelError(
            "Étude does not implement this architecture",
            field="config.json: model_type",
            received=values.get("model_type"),
            fix=f'use one of {", ".join(_MODEL_TYPES)}, or engine.backend = "vllm"',
        )
    if architecture in ("llama", "qwen2"):
        values = _with_llama_defaults(values)
    _refuse_unsupported(values)
    if model_type == "mistral":
        _refuse_sliding_window(values)
    ours: dict[str, Any] = {"architecture": architecture}
    for name, theirs in _NAMES[architecture].items():
        ours[name] = _take(values, theirs)
    if ours.get("norm_topk_prob", "") is None:
        ours["norm_topk_prob"] = architecture == "deepseek_v3"
    ours |= _read_rope(values)
    if architecture == "deepseek_v3":
        ours["q_lora_rank"] = ours["q_lora_rank"] or 0
    vocab_size, mtp_layers = _take(values, "vocab_size"), values.get("num_nextn_predict_layers") or 0
    for name, value, least in (("vocab_size", vocab_size, 1), ("num_nextn_predict_layers", mtp_layers, 0)):
        if not isinstance(value, int) or value < least:
            raise CheckpointError("must be a count", field=f"config.json: {name}", received=value)
    return CheckpointFields(_build(ours), vocab_size, _fp8_block(values), mtp_layers)


def _with_llama_defaults(values: Mapping[str, Any]) -> dict[str, Any]:
    """`values` with transformers' defaults for fields that older Llama, Mistral and Qwen2 configs omit."""
    absent = {"max_position_embeddings": _LLAMA_POSITIONS, "rope_theta": 10_000.0}
    said = {name: value for name, value in values.items() if value is not None or name == "sliding_window"}
    full = {**absent, **said}
    heads, width = full.get("num_attention_heads"), full.get("hidden_size")
    full.setdefault("num_key_value_heads", heads)
    if "head_dim" not in full and isinstance(heads, int) and heads > 0 and isinstance(width, int):
        full["head_dim"] = width // heads
    return full


def _refuse_sliding_window(values: Mapping[str, Any]) -> None:
    """Raises ForeignModelError if Mistral's sliding window is shorter than its longest sequence."""
    window = values.get("sliding_window", _MISTRAL_WINDOW)
    if window is not None and window < values["max_position_embeddings"]:
        raise ForeignModelError(
            "sliding windows are not implemented",
            field="config.json: sliding_window",
            received=window,
            fix=f"set sliding_window to null and max_position_embeddings to {window}, which changes nothing "
            'for shorter texts; or use engine.backend = "vllm"',
        )


def _build(ours: dict[str, Any]) -> ModelConfig:
    try:
        return ModelConfig(**ours)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0]) if first["loc"] else "fields"
        theirs = _NAMES[ours["architecture"]].get(name, name)
        received = ours.get(name)
        raise CheckpointError(
            str(first["msg"]), field=f"config.json: {theirs}", received=received, fix="fetch it again"
        ) from error


def _take(values: Mapping[str, Any], name: str) -> Any:
    if name in values:
        return values[name]
    if name == "num_experts" and "num_local_experts" in values:
        return values["num_local_experts"]
    if name in _ABSENT:
        return _ABSENT[name]
    raise CheckpointError("is missing", field=f"config.json: {name}", fix="fetch config.json again")


def _refuse_unsupported(values: Mapping[str, Any]) -> None:
    for name, allowed in _ONLY.items():
        if name in values and values[name] not in allowed:
            raise _not_computed(name, values[name], f"use a checkpoint with {name}={allowed[0]!r}")
    given = values.get("layer_types") or []
    kinds = {str(kind) for kind in (given if isinstance(given, list) else [given])} - {"full_attention"}
    if kinds:
        raise _not_computed(
            "layer_types", sorted(kinds), "use a checkpoint with full attention in all layers"
        )


def _not_computed(name: str, received: object, fix: str) -> ForeignModelError:
    return ForeignModelError(
        "is not implemented",
        field=f"config.json: {name}",
        received=received,
        fix=f'{fix}, or engine.backend = "vllm"',
    )


def _rope_values(config: ModelConfig) -> dict[str, Any]:
    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_factor == 1.0:
        return {"rope_theta": config.rope_theta, "rope_parameters": parameters}
    scaling = {theirs: getattr(config, ours) for ours, theirs in _SCALINGS[config.rope_scaling].items()}
    for name in ("mscale", "mscale_all_dim", "attention_factor"):
        if not scaling.get(name):
            scaling.pop(name, None)
    parameters |= {"rope_type": config.rope_scaling} | scaling
    # transformers before version 5 reads the second name only.
    return {"rope_theta": config.rope_theta, "rope_parameters": parameters, "rope_scaling": parameters}


def _read_rope(values: Mapping[str, Any]) -> dict[str, Any]:
    """Reads `rope_parameters`, or `rope_theta` and `rope_scaling` of older checkpoints."""
    parameters = values.get("rope_parameters") or values.get("rope_scaling") or {}
    if not isinstance(parameters, dict):
        raise CheckpointError("must be an object", field="config.json: rope_parameters", received=parameters)
    theta = parameters.get("rope_theta", values.get("rope_theta"))
    if theta is None:
        raise CheckpointError("is missing", field="config.json: rope_theta", fix="fetch config.json again")
    ours: dict[str, Any] = {"rope_theta": theta}
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "default":
        return ours
    if kind not in _SCALINGS:
        raise _not_computed("rope_type", kind, f"use a checkpoint with default, {', '.join(_SCALINGS)}")
    ours["rope_scaling"] = kind
    names = _SCALINGS[kind]
    ours |= {name: parameters[theirs] for name, theirs in names.items() if parameters.get(theirs) is not None}
    ours.setdefault("rope_original_positions", values.get("max_position_embeddings"))
    required = names if kind == "llama3" else _LINEAR
    for name, theirs in required.items():
        if name not in ours:
            raise CheckpointError("is missing", field=f"config.json: rope_scaling.{theirs}")
    return ours


def _fp8_block(values: Mapping[str, Any]) -> tuple[int, int] | None:
    quantisation = values.get("quantization_config")
    if not quantisation:
        return None
    match quantisation:
        case {"quant_method": "fp8", "weight_block_size": [int(n), int(m)]} if min(n, m) > 0:
            return n, m
        case _:
            raise CheckpointError(
                "only 8-bit floats with one scale per block can be read",
                field="config.json: quantization_config",
                received=quantisation,
                fix="use the checkpoint in bfloat16",
            )
