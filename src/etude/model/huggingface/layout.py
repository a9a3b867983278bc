"""Correspondence between Hugging Face's tensors and a model's parameters, and their memory layouts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from etude.config import ModelConfig
from etude.model.blocks import Block, GroupedQueryBlock, LatentBlock
from etude.model.drafting import DraftLayer, DraftLayers
from etude.model.feed_forward import DenseMlp, Experts, SharedExperts
from etude.model.language_model import LanguageModel


def _whole(tensor: Tensor) -> Tensor:
    return tensor


@dataclass(frozen=True, slots=True)
class Entry:
    """One Hugging Face tensor as views of a model's parameters."""

    shape: tuple[int, ...]
    parts: tuple[tuple[Callable[[Tensor], Tensor], Tensor], ...]
    """(function that selects a view of their tensor, view of ours of the same shape); they cover both."""

    @staticmethod
    def same(view: Tensor) -> Entry:
        """An entry whose tensor has the layout of this view of ours."""
        return Entry(tuple(view.shape), ((_whole, view),))

    @property
    def dtype(self) -> torch.dtype:
        """Type of the model's values."""
        return self.parts[0][1].dtype

    @property
    def num_bytes(self) -> int:
        """Size of the tensor."""
        return sum(view.numel() for _, view in self.parts) * self.dtype.itemsize

    def write(self, tensor: Tensor) -> None:
        """Copies their tensor into the model."""
        tensor = tensor.contiguous()
        for select, view in self.parts:
            view.copy_(select(tensor))

    def read(self) -> Tensor:
        """Their tensor, from the model."""
        tensor = torch.empty(self.shape, dtype=self.dtype)
        for select, view in self.parts:
            select(tensor).copy_(view)
        return tensor


def entries(model: LanguageModel) -> dict[str, Entry]:
    """Every tensor of a checkpoint of this model, by Hugging Face's names."""
    found = {
        "model.embed_tokens.weight": Entry.same(model.embedding.data),
        "model.norm.weight": Entry.same(model.final_norm.data),
    }
    if model.output_embedding is not None:
        found["lm_head.weight"] = Entry.same(model.output_embedding.data)
    for layer, block in enumerate(model.blocks):
        for name, entry in _block(cast(Block, block), model.config):
            found[f"model.layers.{layer}.{name}"] = entry
    return found


def draft_entries(drafts: DraftLayers, first_layer: int) -> dict[str, Entry]:
    """Every tensor of the draft layers, which checkpoints number from `first_layer` on."""
    found: dict[str, Entry] = {}
    for index, module in enumerate(drafts.layers):
        layer, prefix = cast(DraftLayer, module), f"model.layers.{first_layer + index}"
        found[f"{prefix}.enorm.weight"] = Entry.same(layer.embedding_norm.data)
        found[f"{prefix}.hnorm.weight"] = Entry.same(layer.hidden_norm.data)
        found[f"{prefix}.eh_proj.weight"] = Entry.same(layer.projection.data)
        found[f"{prefix}.shared_head.norm.weight"] = Entry.same(layer.final_norm.data)
        for name, entry in _block(layer.block, drafts.config):
            found[f"{prefix}.{name}"] = entry
    return found


def _block(block: Block, config: ModelConfig) -> Iterator[tuple[str, Entry]]:
    yield "input_layernorm.weight", Entry.same(block.attention_norm.data)
    yield "post_attention_layernorm.weight", Entry.same(block.experts_norm.data)
    yield "self_attn.o_proj.weight", Entry.same(block.out.data)
    if isinstance(block, GroupedQueryBlock):
        yield from _grouped_query(block)
    elif isinstance(block, LatentBlock):
        yield from _latent(block, config.rope_interleave)
    if block.experts is not None:
        yield from _experts(block.experts, config.expert_size)
    elif block.mlp is not None:
        yield from _dense("mlp", block.mlp)


def _grouped_query(block: GroupedQueryBlock) -> Iterator[tuple[str, Entry]]:
    sizes = [heads * block.dim for heads in (block.heads, block.kv_heads, block.kv_heads)]
    for kind, parameter in (("weight", block.qkv), ("bias", block.qkv_bias)):
        if parameter is not None:
            for name, view in zip("qkv", parameter.data.split(sizes), strict=True):
                yield f"self_attn.{name}_proj.{kind}", Entry.same(view)
    for name, norm in (("q", block.query_norm), ("k", block.key_norm)):
        if norm is not None:
            yield f"self_attn.{name}_norm.weight", Entry.same(norm.data)


def _latent(block: LatentBlock, interleaved: bool) -> Iterator[tuple[str, Entry]]:
    heads, nope, rope, rank = block.heads, block.nope, block.rope, block.rank
    query = _rotary_entry(block.query_up.data, heads, nope, rope, interleaved)
    if block.has_query_rank:
        yield "self_attn.q_a_proj.weight", Entry.same(block.query_down.data)
        yield "self_attn.q_a_layernorm.weight", Entry.same(block.query_norm.data)
        yield "self_attn.q_b_proj.weight", query
    else:
        yield "self_attn.q_proj.weight", query
    yield (
        "self_attn.kv_a_proj_with_mqa.weight",
        _rotary_entry(block.compress.data, 1, rank, rope, interleaved),
    )
    yield "self_attn.kv_a_layernorm.weight", Entry.same(block.compress_norm.data)
    rows = nope + block.value_up.shape[1]
    parts = (
        (lambda tensor: tensor.view(heads, rows, rank)[:, :nope], block.key_up.data),
        (lambda tensor: tensor.view(heads, rows, rank)[:, nope:], block.value_up.data),
    )
    yield "self_attn.kv_b_proj.weight", Entry((heads * rows, rank), parts)


def _rotary_entry(ours: Tensor, heads: int, plain: int, rope: int, interleaved: bool) -> Entry:
    """A projection of `heads` times (`plain` rows, then `rope` rotary ones), which are interleaved in theirs
    if `interleaved`, and in two halves in ours."""
    if not interleaved:
        return Entry.same(ours)
    by_head = ours.view(heads, plain + rope, -1)
    halves = by_head[:, plain:].unflatten(1, (2, rope // 2)).transpose(1, 2)

    def rotary(tensor: Tensor) -> Tensor:
        return tensor.view(heads, plain + rope, -1)[:, plain:].unflatten(1, (rope // 2, 2))

    def rest(tensor: Tensor) -> Tensor:
        return tensor.view(heads, plain + rope, -1)[:, :plain]

    return Entry(tuple(ours.shape), ((rest, by_head[:, :plain]), (rotary, halves)))


def _experts(experts: Experts, inner: int) -> Iterator[tuple[str, Entry]]:
    yield "mlp.gate.weight", Entry.same(experts.router.data)
    for index in range(experts.num_experts):
        gate, up = experts.gate_up.data[index].t().split(inner)
        yield f"mlp.experts.{index}.gate_proj.weight", Entry.same(gate)
        yield f"mlp.experts.{index}.up_proj.weight", Entry.same(up)
        yield f"mlp.experts.{index}.down_proj.weight", Entry.same(experts.down.data[index].t())
    if isinstance(experts, SharedExperts):
        yield "mlp.gate.e_score_correction_bias", Entry.same(experts.score_bias.data)
        if experts.shared is not None:
            yield from _dense("mlp.shared_experts", experts.shared)


def _dense(prefix: str, mlp: DenseMlp) -> Iterator[tuple[str, Entry]]:
    gate, up = mlp.gate_up.data.chunk(2)
    yield f"{prefix}.gate_proj.weight", Entry.same(gate)
    yield f"{prefix}.up_proj.weight", Entry.same(up)
    yield f"{prefix}.down_proj.weight", Entry.same(mlp.down.data)
