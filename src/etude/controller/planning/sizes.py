"""Sizes of a model, and of the activations that a training step keeps: counted on meta tensors, without
memory.

The model's own code runs on tensors that have shapes but no contents; the storages that autograd would keep
for the backward pass are added up.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from etude.config import AdapterConfig, ModelConfig
from etude.model import LanguageModel, build_model, fused
from etude.model.lora import adapted_names
from etude.model.ops import TorchOps
from etude.training.optimizer.optimizer import is_matrix


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Parameter counts and activation sizes of a model."""

    parameters: int
    active_parameters: int
    """Used by one token: with the chosen experts only, without the embedding's rows."""
    expert_parameters: int
    """Of routed experts."""
    matrix_parameters: int
    """Updated by Muon, if it is configured."""
    packed_parameters: int
    """Of the matrices that native kernels hold a packed copy of."""
    head_parameters: int
    """Of the output matrix, which gives logits."""
    adapter_parameters: int
    """0 without adapters."""
    attention_width: int
    """Sum over layers of query heads times (key width + value width): products per position attended to."""
    saved_bytes: int
    """Kept by one micro-batch for its backward pass; an upper bound for mixtures of experts in float32."""
    saved_tokens: int
    """Tokens of that micro-batch."""

    def forward_flops(self, context: float, *, with_head: bool = True) -> float:
        """Operations per token that attends to `context` others. `with_head`: with its logits."""
        weights = self.active_parameters - (0 if with_head else self.head_parameters)
        return 2.0 * weights + 2.0 * self.attention_width * context


def measure_sizes(
    config: ModelConfig,
    vocab_size: int,
    micro_batch_tokens: int,
    longest: int,
    *,
    dtype: torch.dtype = torch.float32,
    checkpointed: bool = False,
    adapter: AdapterConfig | None = None,
    on_cpu: bool = False,
) -> ModelSizes:
    """Counts a model of `config`. `longest`: tokens of each sequence in a micro-batch. `on_cpu`: whether
    norms and gates have hand-written gradients, which keep less."""
    # Grouped products do not support float32 on meta tensors.
    counted = torch.bfloat16 if config.num_moe_layers else dtype
    with torch.device("meta"):
        model = build_model(config, vocab_size).to(counted)
    if on_cpu:
        model.ops = _CpuOps()
    model.checkpoint_activations(checkpointed)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    sizes = {name: shape.numel() for name, shape in shapes.items()}
    experts = sum(size for name, size in sizes.items() if _is_routed(name, shapes[name], config))
    head = vocab_size * config.hidden_size
    embedding = 0 if config.tie_embeddings else head
    inactive = experts * (1 - config.experts_per_token / config.num_experts) if experts else 0
    adapted = _adapted(model, adapter)
    lengths = [longest] * max(1, micro_batch_tokens // longest)
    saved = _saved_bytes(model, lengths) * dtype.itemsize // counted.itemsize
    if dtype.itemsize < 4 and not checkpointed:  # AdaptedOps multiplies factors with a float32 copy
        saved += 4 * sum(lengths) * sum(shapes[name][1] for name in adapted if len(shapes[name]) == 2)
    return ModelSizes(
        parameters=sum(sizes.values()),
        active_parameters=round(sum(sizes.values()) - inactive - embedding),
        expert_parameters=experts,
        matrix_parameters=sum(size for name, size in sizes.items() if is_matrix(name, shapes[name])),
        packed_parameters=sum(size for name, size in sizes.items() if len(shapes[name]) > 1) - embedding,
        head_parameters=head,
        adapter_parameters=sum(_factor_size(shapes[name], adapter) for name in adapted) if adapter else 0,
        attention_width=config.num_layers * config.num_heads * (config.key_dim + config.value_dim),
        saved_bytes=saved,
        saved_tokens=sum(lengths),
    )


def _adapted(model: LanguageModel, adapter: AdapterConfig | None) -> list[str]:
    """Names of the weights that have adapters."""
    if adapter is None or not adapter.rank:
        return []
    return adapted_names({name: p for name, p in model.named_parameters() if p.ndim >= 2}, adapter.targets)


def _is_routed(name: str, shape: torch.Size, config: ModelConfig) -> bool:
    return config.num_moe_layers > 0 and len(shape) == 3 and shape[0] == config.num_experts


def _factor_size(shape: torch.Size, adapter: AdapterConfig) -> int:
    """left [.., rows, rank] and right [.., rank, columns]."""
    *stack, rows, columns = shape
    return math.prod(stack) * adapter.rank * (rows + columns)


class _CpuOps(TorchOps):
    """The operations of training on a CPU, for tensors on the meta device."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return fused.rms_norm(x, weight, eps)

    def silu_gate(self, gate: Tensor, up: Tensor) -> Tensor:
        return fused.silu_gate(gate, up)


class _KeptAttention:
    """Saves the same tensors as a fused kernel: queries, keys, values, the result and its normaliser."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """As `PackedAttention.attend`."""
        return _Kept.apply(query, key, value)  # type: ignore[no-any-return]


class _Kept(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        rows, heads, _ = query.shape
        result = query.new_empty(rows, heads, value.shape[-1])
        normaliser = torch.empty(rows, heads, dtype=torch.float32, device=query.device)
        ctx.save_for_backward(query, key, value, result, normaliser)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        raise AssertionError("nothing is computed here")


def _saved_bytes(model: LanguageModel, lengths: list[int]) -> int:
    """Bytes of all storages that autograd keeps for one micro-batch, without the weights."""
    own = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            kept[storage._cdata] = storage
        return tensor

    rows = sum(lengths)
    tokens = torch.zeros(rows, dtype=torch.int64, device="meta")
    wanted = torch.arange(rows - len(lengths), device="meta")
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden = model(tokens, tokens, _KeptAttention(), None, None, wanted=wanted)
        kept_result = model.logprobs(hidden, tokens[wanted], 1.0)
    del kept_result
    return sum(storage.nbytes() for storage in kept.values())
