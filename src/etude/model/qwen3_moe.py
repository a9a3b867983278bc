"""Qwen3 mixture of experts: one definition for the trainer and the engine.

RMSNorm, rotary embeddings, grouped-query attention with normalised queries and keys, SwiGLU experts, a
softmax router over the top k with renormalised gates (Qwen3 technical report, 2025). Tokens come flat,
[T, ...], without padding; who may see whom is the attention object's business.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from etude.config import ModelConfig
from etude.model.permute import dispatch, permute
from etude.model.routes import NativeRoutes
from etude.protocols import Attention, Routes

_FEW_TOKENS = 32
"""Up to so many tokens, computing all experts costs less than sorting tokens by expert (measured)."""


@dataclass(slots=True)
class RouterStatistics:
    """What the load-balancing loss needs, per layer."""

    probabilities: list[Tensor]
    """[experts] mean router probability, differentiable."""
    shares: list[Tensor]
    """[experts] share of the assignments."""

    def balance_loss(self) -> Tensor:
        """Mean over layers of experts * sum(share * probability) (Switch Transformer, Fedus et al. 2021)."""
        losses = [
            len(share) * (share * probability).sum()
            for share, probability in zip(self.shares, self.probabilities, strict=True)
        ]
        return torch.stack(losses).mean()


class Experts(nn.Module):
    """The router and the experts of one block."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width, inner, count = config.hidden_size, config.expert_size, config.num_experts
        self.top_k = config.experts_per_token
        self.num_experts = count
        self.router = nn.Parameter(torch.empty(count, width))
        self.gate_up = nn.Parameter(torch.empty(count, width, 2 * inner))
        """[experts, width, 2 * inner]: the gate's columns, then the up projection's."""
        self.down = nn.Parameter(torch.empty(count, inner, width))

    def forward(
        self, layer: int, hidden: Tensor, routes: Routes[Tensor], statistics: RouterStatistics | None
    ) -> Tensor:
        """hidden [T, width] -> [T, width]."""
        probabilities = F.linear(hidden.float(), self.router.float()).softmax(dim=-1)
        chosen = routes.select(layer, probabilities.detach())
        gates = probabilities.gather(-1, chosen)
        gates = gates / gates.sum(dim=-1, keepdim=True)
        if not torch.is_grad_enabled() and len(hidden) <= _FEW_TOKENS:
            return self._mix_all(hidden, chosen, gates)
        flat = chosen.flatten()
        order = flat.argsort(stable=True)
        counts = torch.bincount(flat, minlength=self.num_experts)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(len(order), device=order.device)
        if statistics is not None:
            statistics.probabilities.append(probabilities.mean(0))
            statistics.shares.append(counts / len(flat))
        ends = counts.cumsum(0).to(torch.int32)
        mixed = self._mix(dispatch(hidden, order, inverse, self.top_k), ends)
        mixed = permute(mixed, inverse, order).view(len(hidden), self.top_k, -1)
        return torch.bmm(gates.unsqueeze(1), mixed).squeeze(1)

    def _mix_all(self, hidden: Tensor, chosen: Tensor, gates: Tensor) -> Tensor:
        """Every expert on every token, gated to 0 where not chosen: fewer operations for few tokens."""
        gate, up = torch.matmul(hidden, self.gate_up).chunk(2, dim=-1)
        mixed = torch.bmm(F.silu(gate) * up, self.down)
        weights = gates.new_zeros((len(hidden), self.num_experts)).scatter_(1, chosen, gates)
        return (mixed * weights.t().unsqueeze(-1)).sum(0)

    def _mix(self, rows: Tensor, ends: Tensor) -> Tensor:
        """rows [N, width] ordered by expert; `ends[e]` is one past expert e's last row."""
        gate, up = F.grouped_mm(rows, self.gate_up, offs=ends).chunk(2, dim=-1)
        return F.grouped_mm(F.silu(gate) * up, self.down, offs=ends)


class Block(nn.Module):
    """Attention and experts, each behind a norm and beside a residual."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.eps = config.rms_norm_eps
        width = config.hidden_size
        self.attention_norm = nn.Parameter(torch.ones(width))
        self.qkv = nn.Parameter(torch.empty((self.heads + 2 * self.kv_heads) * self.dim, width))
        """Rows of the query, key and value projections, one after the other."""
        self.query_norm = nn.Parameter(torch.ones(self.dim))
        self.key_norm = nn.Parameter(torch.ones(self.dim))
        self.out = nn.Parameter(torch.empty(width, self.heads * self.dim))
        self.experts_norm = nn.Parameter(torch.ones(width))
        self.experts = Experts(config)

    def forward(
        self,
        layer: int,
        hidden: Tensor,
        rotation: tuple[Tensor, Tensor],
        attention: Attention[Tensor],
        routes: Routes[Tensor],
        statistics: RouterStatistics | None,
        wanted: Tensor | None,
    ) -> Tensor:
        """hidden [T, width] -> [T, width], or only the rows `wanted` [N] of it, [N, width]."""
        normed = F.rms_norm(hidden, self.attention_norm.shape, self.attention_norm, self.eps)
        rows = F.linear(normed, self.qkv).view(len(hidden), -1, self.dim)
        rotated = self.heads + self.kv_heads
        query_key = self._rotate(self._normalise(rows[:, :rotated]), rotation)
        query, key = query_key.split((self.heads, self.kv_heads), dim=1)
        attended = attention.attend(layer, query, key, rows[:, rotated:]).reshape(len(hidden), -1)
        if wanted is not None:
            hidden, attended = hidden.index_select(0, wanted), attended.index_select(0, wanted)
        hidden = torch.addmm(hidden, attended, self.out.t())
        normed = F.rms_norm(hidden, self.experts_norm.shape, self.experts_norm, self.eps)
        return hidden + self.experts(layer, normed, routes, statistics)

    def _normalise(self, query_key: Tensor) -> Tensor:
        query, key = query_key.split((self.heads, self.kv_heads), dim=1)
        shape = (self.dim,)
        return torch.cat(
            (
                F.rms_norm(query, shape, self.query_norm, self.eps),
                F.rms_norm(key, shape, self.key_norm, self.eps),
            ),
            dim=1,
        )

    @staticmethod
    def _rotate(query_key: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        """Rotary embedding in Hugging Face's half-split layout; the sine carries the sign."""
        cosine, signed_sine = rotation
        swapped = query_key.roll(query_key.shape[-1] // 2, dims=-1)
        return torch.addcmul(query_key * cosine, swapped, signed_sine)


class Qwen3Moe(nn.Module):
    """The whole model, with the output head tied to the embedding."""

    def __init__(self, config: ModelConfig, vocab_size: int) -> None:
        super().__init__()
        self.config = config
        self.vocab_size = vocab_size
        self.embedding = nn.Parameter(torch.empty(vocab_size, config.hidden_size))
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.final_norm = nn.Parameter(torch.ones(config.hidden_size))
        cosine, signed_sine = _rotary_tables(config)
        self.register_buffer("cosine", cosine, persistent=False)
        self.register_buffer("signed_sine", signed_sine, persistent=False)
        self.native_routes = NativeRoutes(config.experts_per_token)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        attention: Attention[Tensor],
        routes: Routes[Tensor] | None = None,
        statistics: RouterStatistics | None = None,
        wanted: Tensor | None = None,
    ) -> Tensor:
        """tokens [T], positions [T] -> final hidden states [T, width], after the last norm.

        `wanted` [N]: only these rows are returned, [N, width], and what follows the last attention is
        computed for them alone: `routes` and `statistics` then see N rows in the last layer.
        """
        hidden = F.embedding(tokens, self.embedding)
        rotation = (self.cosine[positions], self.signed_sine[positions])  # type: ignore[index]
        chosen_by = routes if routes is not None else self.native_routes
        last = len(self.blocks) - 1
        for layer, block in enumerate(self.blocks):
            rows = wanted if layer == last else None
            hidden = block(layer, hidden, rotation, attention, chosen_by, statistics, rows)
        return F.rms_norm(hidden, self.final_norm.shape, self.final_norm, self.config.rms_norm_eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [N, width] -> logits [N, vocabulary] in float32."""
        return F.linear(hidden.float(), self.embedding.float())

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Draws new weights: normal matrices, unit norms, output projections scaled by depth."""
        generator = torch.Generator().manual_seed(seed)
        std = self.config.initializer_range
        residual = std / (2 * self.config.num_layers) ** 0.5
        for name, parameter in self.named_parameters():
            if parameter.ndim == 1:
                parameter.fill_(1.0)
            else:
                scale = residual if name.endswith((".out", ".down")) else std
                parameter.normal_(0.0, scale, generator=generator)


def _rotary_tables(config: ModelConfig) -> tuple[Tensor, Tensor]:
    """Cosine and signed sine, [positions, 1, head_dim] each."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    angles = torch.outer(
        torch.arange(config.max_positions, dtype=torch.float64), config.rope_theta**-exponents
    )
    sine = angles.sin()
    cosine = torch.cat((angles.cos(), angles.cos()), dim=-1)
    signed_sine = torch.cat((-sine, sine), dim=-1)
    return cosine.float()[:, None], signed_sine.float()[:, None]
