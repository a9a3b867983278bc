"""The feed-forward part of a block: one dense layer, or routed experts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from etude.config import ModelConfig
from etude.model.ops import Ops
from etude.protocols import Attention, Routes


class RouterStatistics:
    """Inputs of the load-balancing loss, per layer that routes."""

    # Not a dataclass: FSDP2 copies dataclasses with differentiable tensors when they are passed to a block,
    # and what the block then appends is lost.
    def __init__(self, probabilities: list[Tensor], shares: list[Tensor]) -> None:
        self.probabilities = probabilities
        """[experts] mean router probability, differentiable."""
        self.shares = shares
        """[experts] share of the assignments."""

    def balance_loss(self) -> Tensor:
        """Mean over layers of experts * sum(share * probability) (Switch Transformer, Fedus et al. 2021);
        0 if no layer routes."""
        losses = [
            len(share) * (share * probability).sum()
            for share, probability in zip(self.shares, self.probabilities, strict=True)
        ]
        return torch.stack(losses).mean() if losses else torch.zeros(())


@dataclass(frozen=True, slots=True)
class Pass:
    """Inputs that all blocks share in one forward pass."""

    ops: Ops
    rotation: tuple[Tensor, Tensor]
    """Cosine and signed sine of each row, [T, 1, rope_dim]."""
    attention: Attention[Tensor]
    routes: Routes[Tensor]
    statistics: RouterStatistics | None


class _CachedRoutes:
    """Selects each layer's routes once, and returns the same for further calls."""

    def __init__(self, routes: Routes[Tensor]) -> None:
        self._routes = routes
        self._chosen: dict[int, Tensor] = {}

    def select(self, layer: int, scores: Tensor) -> Tensor:
        if layer not in self._chosen:
            self._chosen[layer] = self._routes.select(layer, scores)
        return self._chosen[layer]


def recomputed_passes(shared: Pass) -> Iterator[Pass]:
    """Passes of a block that is recomputed: those after the first repeat its choice of experts and have no
    side effects, so that routes are consumed, and the router's statistics recorded, once."""
    routes = _CachedRoutes(shared.routes)
    yield replace(shared, routes=routes)
    while True:
        discarded = None if shared.statistics is None else RouterStatistics([], [])
        yield replace(shared, routes=routes, statistics=discarded)


class DenseMlp(nn.Module):
    """SwiGLU of one inner width."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(2 * inner, width))
        """Rows of the gate, then of the up projection."""
        self.down = nn.Parameter(torch.empty(width, inner))

    def forward(self, hidden: Tensor, ops: Ops) -> Tensor:
        """hidden [T, width] -> [T, width]."""
        return ops.total(self.partial(ops.spread(hidden), ops))

    def partial(self, hidden: Tensor, ops: Ops) -> Tensor:
        """hidden [T, width] after `spread` -> [T, width], this rank's term of the `total`."""
        gate, up = ops.linear(hidden, self.gate_up).chunk(2, dim=-1)
        return ops.linear(ops.silu_gate(gate, up), self.down)


class Experts(nn.Module):
    """A softmax router with top-k selection, and the experts of one block (Qwen3 technical report, 2025)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width, inner, count = config.hidden_size, config.expert_size, config.num_experts
        self.num_experts = count
        self.normalise = config.norm_topk_prob
        self.router = nn.Parameter(torch.empty(count, width))
        self.gate_up = nn.Parameter(torch.empty(count, width, 2 * inner))
        """[experts, width, 2 * inner]: the gate's columns, then the up projection's."""
        self.down = nn.Parameter(torch.empty(count, inner, width))

    def forward(self, layer: int, hidden: Tensor, shared: Pass) -> Tensor:
        """hidden [T, width] -> [T, width]; `layer` counts those that route."""
        probabilities = shared.ops.activate(shared.ops.router(hidden, self.router), "softmax")
        chosen = shared.routes.select(layer, probabilities.detach())
        self._count(probabilities, chosen, shared.statistics)
        gates = shared.ops.gates(probabilities, chosen, self.normalise, 1.0)
        return shared.ops.total(self._mix(shared.ops.spread(hidden), chosen, gates, shared.ops))

    def _mix(self, hidden: Tensor, chosen: Tensor, gates: Tensor, ops: Ops) -> Tensor:
        """hidden [T, width] after `spread` -> [T, width], this rank's term of the `total`."""
        return ops.experts(hidden, self.gate_up, self.down, chosen, ops.spread(gates))

    def _count(self, probabilities: Tensor, chosen: Tensor, statistics: RouterStatistics | None) -> None:
        if statistics is None:
            return
        flat = chosen.flatten()
        # Not bincount: on a GPU it synchronises with the device.
        counts = flat.new_zeros(self.num_experts).scatter_add_(0, flat, torch.ones_like(flat))
        statistics.probabilities.append(probabilities.mean(0))
        statistics.shares.append(counts / chosen.numel())


class SharedExperts(Experts):
    """A sigmoid router with a selection bias, expert groups, and shared experts that process every token.

    The bias affects which experts are chosen but not the gates: it balances the load without an auxiliary
    loss (DeepSeek-V3 technical report, 2024). It is not trained by gradients.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.scale = config.routed_scaling_factor
        self.num_groups, self.top_groups = config.n_group, config.topk_group
        self.score_bias = nn.Parameter(torch.zeros(config.num_experts), requires_grad=False)
        """[experts] float32, whatever the type of the other weights."""
        inner = config.n_shared_experts * config.expert_size
        self.shared = DenseMlp(config.hidden_size, inner) if inner else None

    def forward(self, layer: int, hidden: Tensor, shared: Pass) -> Tensor:
        scores = shared.ops.activate(shared.ops.router(hidden, self.router), "sigmoid")
        chosen = shared.routes.select(layer, self._selection_scores(scores.detach()))
        if shared.statistics is not None:
            self._count(scores / scores.sum(dim=-1, keepdim=True), chosen, shared.statistics)
        gates = shared.ops.gates(scores, chosen, self.normalise, self.scale)
        rows = shared.ops.spread(hidden)
        mixed = self._mix(rows, chosen, gates, shared.ops)
        if self.shared is not None:
            mixed = mixed + self.shared.partial(rows, shared.ops)
        return shared.ops.total(mixed)

    def _selection_scores(self, scores: Tensor) -> Tensor:
        """Biased scores [T, experts], -inf outside the best groups; a group is ranked by its two best."""
        biased = scores + self.score_bias
        if self.num_groups == 1:
            return biased
        grouped = biased.unflatten(-1, (self.num_groups, -1))
        best = grouped.topk(2, dim=-1).values.sum(-1).topk(self.top_groups, dim=-1).indices
        outside = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter_(1, best, False)
        return grouped.masked_fill(outside[..., None], float("-inf")).flatten(1)
