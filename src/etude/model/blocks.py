"""Transformer blocks: attention and a feed-forward part, each with a pre-norm and a residual connection.

Tokens are flat, [T, ...], without padding; the attention object decides which rows attend to which.
"""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from etude.config import ModelConfig
from etude.model.feed_forward import DenseMlp, Experts, Pass, SharedExperts, recomputed_passes
from etude.model.rotary import attention_scale


class Block(nn.Module):
    """Base class of all blocks; a subclass defines the attention's projections."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.recompute = False
        """Activation checkpointing: only the input is kept, and the backward pass recomputes the rest."""
        self.eps = config.rms_norm_eps
        width = config.hidden_size
        self.route_layer = layer - (config.num_layers - config.num_moe_layers)
        """Index among the layers that route; negative for a dense one."""
        self.attention_norm = nn.Parameter(torch.ones(width))
        attended = self._add_projections(config)
        self.out = nn.Parameter(torch.empty(width, attended))
        self.experts_norm = nn.Parameter(torch.ones(width))
        """Norm before the feed-forward part, dense or routed."""
        self.experts: Experts | None = None
        self.mlp: DenseMlp | None = None
        if self.route_layer < 0:
            self.mlp = DenseMlp(width, config.intermediate_size)
        else:
            self.experts = (SharedExperts if config.is_latent else Experts)(config)

    def _add_projections(self, config: ModelConfig) -> int:
        """Creates the attention's parameters; returns the input width of `out`."""
        raise NotImplementedError

    def divide_heads(self, parts: int) -> None:
        """Sets the number of heads for weights that are one of `parts` equal runs of heads."""
        raise NotImplementedError

    def _attend(self, normed: Tensor, shared: Pass) -> Tensor:
        """normed [T, width] -> [T, attended]."""
        raise NotImplementedError

    def forward(self, hidden: Tensor, shared: Pass, wanted: Tensor | None) -> Tensor:
        """hidden [T, width] -> [T, width], or only the rows `wanted` [N] of it, [N, width]."""
        if not (self.recompute and torch.is_grad_enabled()):
            return self._compute(hidden, shared, wanted)
        passes = recomputed_passes(shared)
        return cast(
            Tensor,
            checkpoint(
                lambda rows: self._compute(rows, next(passes), wanted),
                hidden,
                use_reentrant=False,
                preserve_rng_state=False,
            ),
        )

    def _compute(self, hidden: Tensor, shared: Pass, wanted: Tensor | None) -> Tensor:
        ops = shared.ops
        attended = self._attend(ops.rms_norm(hidden, self.attention_norm, self.eps), shared)
        if wanted is not None:
            hidden, attended = hidden.index_select(0, wanted), attended.index_select(0, wanted)
        hidden = ops.linear_add(hidden, attended, self.out)
        normed = ops.rms_norm(hidden, self.experts_norm, self.eps)
        if self.experts is not None:
            return hidden + self.experts(self.route_layer, normed, shared)
        return hidden + cast(DenseMlp, self.mlp)(normed, ops)


class GroupedQueryBlock(Block):
    """Grouped-query attention (Ainslie et al. 2023) as in Llama; with biases on queries, keys and values for
    Qwen2, or with normalised queries and keys for Qwen3."""

    def _add_projections(self, config: ModelConfig) -> int:
        self.heads, self.kv_heads, self.dim = config.num_heads, config.num_kv_heads, config.head_dim
        rows = (self.heads + 2 * self.kv_heads) * self.dim
        self.qkv = nn.Parameter(torch.empty(rows, config.hidden_size))
        """Rows of the query, key and value projections, one after the other."""
        self.qkv_bias = nn.Parameter(torch.zeros(rows)) if config.has_qkv_bias else None
        normed = config.has_query_norm
        self.query_norm = nn.Parameter(torch.ones(self.dim)) if normed else None
        self.key_norm = nn.Parameter(torch.ones(self.dim)) if normed else None
        return self.heads * self.dim

    def divide_heads(self, parts: int) -> None:
        self.heads, self.kv_heads = self.heads // parts, self.kv_heads // parts

    def _attend(self, normed: Tensor, shared: Pass) -> Tensor:
        ops = shared.ops
        rows = ops.linear(ops.spread(normed), self.qkv)
        if self.qkv_bias is not None:
            rows = rows + self.qkv_bias
        rows = rows.view(len(normed), -1, self.dim)
        query_key, value = rows.split((self.heads + self.kv_heads, self.kv_heads), dim=1)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = query_key.split((self.heads, self.kv_heads), dim=1)
            query_key = torch.cat(
                (ops.rms_norm(query, self.query_norm, self.eps), ops.rms_norm(key, self.key_norm, self.eps)),
                dim=1,
            )
        query, key = ops.rotate(query_key, *shared.rotation).split((self.heads, self.kv_heads), dim=1)
        return shared.attention.attend(self.layer, query, key, value).reshape(len(normed), -1)


LATENT_NORM_EPS = 1e-6
"""Epsilon of the norms inside latent attention: fixed by the architecture, independent of `rms_norm_eps`."""


class LatentBlock(Block):
    """Multi-head latent attention in its absorbed form (DeepSeek-V2, 2024).

    A token's key is [compressed | rotary], one for all heads, and its value is the compressed part: this is
    what is cached. A head's key projection is applied to the query, and its value projection after attention,
    so nothing is expanded per cached token. Attention always divides scores by sqrt(key_dim); the query is
    scaled so that the result is the architecture's own scale.
    """

    def _add_projections(self, config: ModelConfig) -> int:
        width, heads = config.hidden_size, config.num_heads
        self.heads, self.rank, self.rope = heads, config.kv_lora_rank, config.qk_rope_head_dim
        self.nope = config.qk_nope_head_dim
        self.scale = attention_scale(config) * math.sqrt(config.key_dim)
        query_rows = heads * (self.nope + self.rope)
        self.has_query_rank = config.q_lora_rank > 0
        if self.has_query_rank:
            self.query_down = nn.Parameter(torch.empty(config.q_lora_rank, width))
            self.query_norm = nn.Parameter(torch.ones(config.q_lora_rank))
        self.query_up = nn.Parameter(torch.empty(query_rows, config.q_lora_rank or width))
        """Rows head by head: those without position, then the rotary ones in two halves."""
        self.compress = nn.Parameter(torch.empty(self.rank + self.rope, width))
        """Rows of the compressed keys and values, then of the rotary key in two halves."""
        self.compress_norm = nn.Parameter(torch.ones(self.rank))
        self.key_up = nn.Parameter(torch.empty(heads, self.nope, self.rank))
        self.value_up = nn.Parameter(torch.empty(heads, config.v_head_dim, self.rank))
        return heads * config.v_head_dim

    def divide_heads(self, parts: int) -> None:
        """See Block. Weights that all heads share are not divided."""
        self.heads //= parts

    def _attend(self, normed: Tensor, shared: Pass) -> Tensor:
        ops, count = shared.ops, len(normed)
        query = self._query(normed, shared)
        compressed, rotary = ops.linear(normed, self.compress).split((self.rank, self.rope), dim=-1)
        compressed = ops.rms_norm(compressed, self.compress_norm, LATENT_NORM_EPS)
        rotary = ops.rotate(rotary.unsqueeze(1), *shared.rotation)
        key = ops.spread(torch.cat((compressed.unsqueeze(1), rotary), dim=-1))
        attended = shared.attention.attend(self.layer, query, key, key[..., : self.rank])
        return ops.per_head(attended, self.value_up).reshape(count, -1)

    def _query(self, normed: Tensor, shared: Pass) -> Tensor:
        """normed [T, width] -> [T, heads, rank + rope], scaled."""
        ops = shared.ops
        if self.has_query_rank:
            normed = ops.rms_norm(ops.linear(normed, self.query_down), self.query_norm, LATENT_NORM_EPS)
        rows = ops.linear(ops.spread(normed), self.query_up).view(len(normed), self.heads, -1)
        plain, rotary = rows.split((self.nope, self.rope), dim=-1)
        absorbed = ops.per_head(plain, self.key_up.transpose(1, 2))
        return torch.cat((absorbed, ops.rotate(rotary, *shared.rotation)), dim=-1) * self.scale


def make_block(config: ModelConfig, layer: int) -> Block:
    """The block of the configured architecture for this layer."""
    return (LatentBlock if config.is_latent else GroupedQueryBlock)(config, layer)
