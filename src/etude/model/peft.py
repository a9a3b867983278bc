"""Saves adapters in the format of the peft library and vLLM: adapter_config.json and safetensors.

If a weight of ours combines several of theirs (queries, keys and values; gate and up), each gets its rows of
the left factor and a copy of the right one: the same product. Experts become `target_parameters`, stacked as
in transformers. A PEFT directory holds factors only; for programs that need whole weights, save the model
itself within `Adapters.merged`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from etude.errors import CheckpointError
from etude.model.blocks import GroupedQueryBlock
from etude.model.language_model import LanguageModel, block_of
from etude.model.lora import Adapters

PEFT_PREFIX = "base_model.model."
"""Prefix of the names of an adapter's tensors."""
_NESTED = "gate_up_proj"
"""If two stacks of a module are adapted, peft wraps this one first: its factors are one level deeper."""
_PARTS = frozenset({"gate_proj", "up_proj", "down_proj"})
_SHARED = {"mlp": "mlp", "experts.shared": "mlp.shared_experts"}
"""Dense layers: ours -> theirs."""

Named = tuple[str, Tensor, Tensor]
"""Their name of a weight, or of a stack, and its A [..., rank, in] and B [..., out, rank]."""


def are_plain(factors: Iterable[Named], model: nn.Module) -> bool:
    """Whether these factors (see Adapters.factors) of `model` are all of single matrices that the format
    supports: vLLM can then serve them with their base."""
    try:
        return all(a.ndim == 2 for _, a, _ in _named(factors, model))
    except CheckpointError:
        return False


def save_peft(
    adapters: Adapters,
    model: nn.Module,
    directory: Path,
    base: str | None = None,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Writes the adapters of `model`, as `dtype`. `base`: directory or name of the model adapted by them.

    Raises CheckpointError for unsupported targets: latent attention, dense layers together with experts.
    """
    modules: dict[str, tuple[Tensor, Tensor]] = {}
    stacks: dict[str, tuple[Tensor, Tensor]] = {}
    for name, a, b in _named(adapters.factors(), model):
        (modules if a.ndim == 2 else stacks)[name] = (a, b)
    last_names = {name.rpartition(".")[2] for name in modules}
    if stacks and last_names & _PARTS:
        raise CheckpointError(
            "adapts dense layers beside stacked experts, which the peft library confuses",
            field="rl.adapter.targets",
            received=sorted(last_names & _PARTS),
            fix="use the merged model, or adapt attention only",
        )
    tensors: dict[str, Tensor] = {}
    for name, (a, b) in modules.items():
        _add(tensors, name, a.to(dtype), b.to(dtype))
    for name, (a, b) in stacks.items():
        module, _, parameter = name.rpartition(".")
        siblings = sum(other.rpartition(".")[0] == module for other in stacks)
        at = f"{module}.base_layer" if siblings > 1 and parameter == _NESTED else module
        # Rows of A by expert, then rank; columns of B by rank, then expert.
        _add(tensors, at, a.flatten(0, 1).to(dtype), b.permute(1, 2, 0).flatten(1).to(dtype))
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    config: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": adapters.config.rank,
        "lora_alpha": adapters.config.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": sorted(last_names),
        "target_parameters": sorted({".".join(name.split(".")[-2:]) for name in stacks}) or None,
    }
    (directory / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _add(tensors: dict[str, Tensor], name: str, a: Tensor, b: Tensor) -> None:
    tensors[f"{PEFT_PREFIX}{name}.lora_A.weight"] = a.cpu().contiguous().clone()
    tensors[f"{PEFT_PREFIX}{name}.lora_B.weight"] = b.cpu().contiguous().clone()


def _named(factors: Iterable[Named], model: nn.Module) -> Iterator[Named]:
    for name, left, right in factors:
        if isinstance(model, LanguageModel):
            yield from _of_ours(model, name, left, right)
        else:
            yield _of_transformers(model, name, left, right)


def _of_transformers(model: nn.Module, name: str, left: Tensor, right: Tensor) -> Named:
    theirs = name.removeprefix("inner.").removesuffix(".weight")
    module = model.get_submodule(name.rpartition(".")[0])
    if left.ndim == 3 and getattr(module, "is_transposed", False):  # [experts, in, out]
        return theirs, left.transpose(1, 2), right.transpose(1, 2)
    return theirs, right, left


def _of_ours(model: LanguageModel, name: str, left: Tensor, right: Tensor) -> Iterator[Named]:
    match = re.fullmatch(r"blocks\.(\d+)\.(?:(.+)\.)?(\w+)", name)
    assert match is not None, "all adapted weights are in blocks"
    layer, place, last = int(match[1]), match[2], match[3]
    prefix, block = f"model.layers.{layer}", block_of(model, layer)
    if place == "experts":  # [experts, in, out]
        theirs = {"gate_up": "gate_up_proj", "down": "down_proj"}[last]
        yield f"{prefix}.mlp.experts.{theirs}", left.transpose(1, 2), right.transpose(1, 2)
    elif last == "gate_up":
        for half, rows in zip(("gate", "up"), left.chunk(2), strict=True):
            yield f"{prefix}.{_SHARED[place]}.{half}_proj", right, rows
    elif last == "down":
        yield f"{prefix}.{_SHARED[place]}.down_proj", right, left
    elif last == "out":
        yield f"{prefix}.self_attn.o_proj", right, left
    elif last == "qkv" and isinstance(block, GroupedQueryBlock):
        sizes = [heads * block.dim for heads in (block.heads, block.kv_heads, block.kv_heads)]
        for letter, rows in zip("qkv", left.split(sizes), strict=True):
            yield f"{prefix}.self_attn.{letter}_proj", right, rows
    else:
        raise CheckpointError(
            "adapts latent attention, whose weights have another layout in checkpoints",
            field="rl.adapter.targets",
            received=name,
            fix="use the merged model, or adapt out and feed_forward only",
        )
