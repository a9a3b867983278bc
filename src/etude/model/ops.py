"""Interface of the arithmetic operations of all architectures, with exchangeable implementations.

A model computes with `model.ops`. `TorchOps` is the fast implementation; a batch-invariant one has a fixed
order of every sum. Operations per row and element (residual sums, reshapes, gathers) are the module's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from etude.model import fused, products
from etude.model.attention import PackedAttention
from etude.model.experts import mix_by_expert
from etude.model.kernels.native import training
from etude.model.logprobs import checkpointed_logprobs, head_logprobs
from etude.model.permute import dispatch, permute
from etude.model.rows import PackedRows
from etude.protocols import Attention

_FEW_TOKENS = 32
"""Up to this number of tokens, computing all experts costs less than sorting tokens by expert (measured),"""
_FEW_WEIGHTS = 250_000
"""if the experts' gate and up projections have at most this many weights in total; larger ones are best read
only for the tokens that chose them (measured, at widths 128 and 512 with 8 to 128 experts)."""
_ROWS_PER_EXPERT = 16
"""With fewer rows per expert on average, a separate product for each costs more than it saves."""


class Ops(Protocol):
    """The operations of a block, on T rows; all differentiable.

    Methods with a body are defined by it: a class that inherits from Ops need not override them.

    With tensor parallelism, ranks divide every layer's heads, inner widths and the vocabulary; each computes
    with its parts of the weights, and `embed`, `spread` and `total` communicate. Results of whole weights are
    the same on each rank.
    """

    def embed(self, tokens: Tensor, table: Tensor) -> Tensor:
        """tokens [T], table [vocabulary, width] -> rows [T, width]."""
        return F.embedding(tokens, table)

    def spread(self, x: Tensor) -> Tensor:
        """The identity on a replicated x before products with parts of weights; sums gradients over ranks."""
        return x

    def total(self, x: Tensor) -> Tensor:
        """The sum over ranks of x, which was computed with parts of weights."""
        return x

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [T, in], weight [out, in] -> [T, out]."""
        ...

    def linear_add(self, residual: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """residual [T, out] + the total of linear(x [T, in], weight [out, in])."""
        return residual + self.linear(x, weight)

    def per_head(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [T, heads, in], weight [heads, out, in] (any strides) -> [T, heads, out]."""
        parts = zip(x.unbind(1), weight.unbind(0), strict=True)
        return torch.stack([self.linear(rows.contiguous(), w.contiguous()) for rows, w in parts], dim=1)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMS norm over the last dimension of x [..., n], weight [n]."""
        ...

    def rotate(self, x: Tensor, cosine: Tensor, signed_sine: Tensor) -> Tensor:
        """Rotary embedding in the half-split layout: x [T, heads, n], tables [T, 1, n]; the sine carries the
        sign."""
        ...

    def silu_gate(self, gate: Tensor, up: Tensor) -> Tensor:
        """silu(gate) * up."""
        ...

    def router(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [T, width], weight [experts, width] -> scores [T, experts] in float32, before `activate`."""
        ...

    def activate(self, scores: Tensor, activation: Literal["softmax", "sigmoid"]) -> Tensor:
        """Router scores [T, experts] -> probabilities or sigmoids, from which gates are made; float32."""
        return scores.softmax(dim=-1) if activation == "softmax" else scores.sigmoid()

    def gates(self, activated: Tensor, chosen: Tensor, normalise: bool, scale: float) -> Tensor:
        """activated [T, experts], chosen [T, k] -> gates [T, k], with sum 1 if `normalise`, times `scale`."""
        gates = activated.gather(-1, chosen)
        if normalise:
            gates = gates / gates.sum(dim=-1, keepdim=True)
        return gates if scale == 1.0 else gates * scale

    def experts(self, x: Tensor, gate_up: Tensor, down: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """x [T, width], gate_up [experts, width, 2 * inner], down [experts, inner, width], chosen [T, k] and
        their weights [T, k] float32 -> [T, width]."""
        ...

    def logits(self, hidden: Tensor, head: Tensor) -> Tensor:
        """hidden [N, width], head [vocabulary, width] -> [N, vocabulary] in float32."""
        ...

    def log_softmax(self, logits: Tensor) -> Tensor:
        """Log-softmax over the last dimension of [N, vocabulary]."""
        return logits.log_softmax(dim=-1)

    def logprobs(
        self, hidden: Tensor, head: Tensor, tokens: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """hidden [N, width], head [vocabulary, width], tokens [N] -> log-probability of each and entropy
        (detached) [N], of logits divided by `temperature`; never materialises all logits."""
        return checkpointed_logprobs(
            lambda rows: self.logits(rows, head), self.log_softmax, hidden, tokens, temperature, len(head)
        )

    def packed_attention(self, attention: PackedAttention) -> Attention[Tensor]:
        """The implementation of attention over a packed batch that replaces the reference `attention`."""
        return attention

    @property
    def cuts_rows(self) -> bool:
        """Whether `split_rows` needs the rows of whole sequences, one after the other."""
        return False

    def split_rows(
        self,
        rows: PackedRows,
        lengths: Sequence[int],
        compute: Callable[[PackedRows], tuple[Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        """`compute`d values [N] and [N] of the `wanted` rows; `lengths`: of the sequences, in packed order.

        With context parallelism, each rank computes some of the rows, and all get the whole result.
        """
        return compute(rows)


def _is_trained_on_cpu(x: Tensor) -> bool:
    """Whether to use `fused` gradients: autograd's take twice as many passes over memory."""
    return torch.is_grad_enabled() and x.device.type == "cpu"


class TorchOps(Ops):
    """PyTorch's operators: fastest, and free to sum in an order that depends on the batch."""

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        if torch.is_grad_enabled() and training.multiplies(x, weight):
            return products.linear(x, weight)
        return F.linear(x, weight)

    def linear_add(self, residual: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        if torch.is_grad_enabled() and training.multiplies(x, weight):
            return products.linear(x, weight, residual)
        return torch.addmm(residual, x, weight.t())

    def per_head(self, x: Tensor, weight: Tensor) -> Tensor:
        return torch.bmm(x.transpose(0, 1), weight.transpose(1, 2)).transpose(0, 1)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if _is_trained_on_cpu(x):
            return fused.rms_norm(x, weight, eps)
        return F.rms_norm(x, weight.shape, weight, eps)

    def rotate(self, x: Tensor, cosine: Tensor, signed_sine: Tensor) -> Tensor:
        if _is_trained_on_cpu(x):
            return fused.rotate(x, cosine, signed_sine)
        swapped = x.roll(x.shape[-1] // 2, dims=-1)
        return torch.addcmul(x * cosine, swapped, signed_sine)

    def silu_gate(self, gate: Tensor, up: Tensor) -> Tensor:
        if _is_trained_on_cpu(gate):
            return fused.silu_gate(gate, up)
        return F.silu(gate) * up

    def router(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x.float(), weight.float())

    def experts(self, x: Tensor, gate_up: Tensor, down: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        few = len(x) <= _FEW_TOKENS and gate_up.numel() <= _FEW_WEIGHTS
        if few and not torch.is_grad_enabled():
            return self._mix_all(x, gate_up, down, chosen, weights)
        if x.device.type == "cpu" and chosen.numel() >= _ROWS_PER_EXPERT * len(gate_up):
            return mix_by_expert(x, gate_up, down, chosen, weights)
        flat, top_k = chosen.flatten(), chosen.shape[1]
        order = flat.argsort(stable=True)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(len(order), device=order.device)
        # Not bincount: on a GPU it synchronises with the device.
        experts = torch.arange(len(gate_up), device=flat.device)
        ends = torch.searchsorted(flat[order], experts, right=True, out_int32=True)
        rows = dispatch(x, order, inverse, top_k)
        gate, up = F.grouped_mm(rows, gate_up, offs=ends).chunk(2, dim=-1)
        mixed = F.grouped_mm(self.silu_gate(gate, up), down, offs=ends)
        mixed = permute(mixed, inverse, order).view(len(x), top_k, -1)
        # The sum over experts is float32, like the gates, whatever the type of x.
        return torch.bmm(weights.unsqueeze(1), mixed.float()).squeeze(1).to(x.dtype)

    def _mix_all(self, x: Tensor, gate_up: Tensor, down: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Every expert on every token, weighted with 0 where not chosen: fewer operations for few tokens."""
        gate, up = torch.matmul(x, gate_up).chunk(2, dim=-1)
        mixed = torch.bmm(self.silu_gate(gate, up), down)
        spread = weights.new_zeros((len(x), len(gate_up))).scatter_(1, chosen, weights)
        return (mixed * spread.t().unsqueeze(-1)).sum(0).to(x.dtype)

    def logits(self, hidden: Tensor, head: Tensor) -> Tensor:
        return F.linear(hidden.float(), head.float())

    def logprobs(
        self, hidden: Tensor, head: Tensor, tokens: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        return head_logprobs(hidden, head, tokens, temperature)
