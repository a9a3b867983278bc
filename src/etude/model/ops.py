"""The arithmetic of every architecture, behind one object that can be exchanged.

A model computes through `model.ops`. `TorchOps` is the fast one; a batch-invariant one has a fixed order of
every sum. Values per row and element (residual sums, reshapes, gathers) are left to the module itself.
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
from etude.model.logprobs import checkpointed_logprobs, head_logprobs
from etude.model.permute import dispatch, permute
from etude.model.rows import PackedRows
from etude.protocols import Attention

_FEW_TOKENS = 32
"""Up to so many tokens, computing all experts costs less than sorting tokens by expert (measured)."""
_FEW_WEIGHTS = 250_000
"""That holds for experts whose gate and up projections have no more weights in all; larger ones are best read
for the tokens that chose them (measured, at widths 128 and 512 with 8 to 128 experts)."""
_ROWS_PER_EXPERT = 16
"""With fewer rows for an expert on average, calling a product for each costs more than it saves."""


class Ops(Protocol):
    """What a block is made of. T rows; all differentiable.

    Methods with a body have it as their meaning: a class that inherits from Ops may leave them as they are.

    Where several processes divide every layer's heads, inner widths and the vocabulary, each computes from
    its parts of the weights, and three methods are theirs: `embed`, `spread`, `total`. What is computed from
    whole weights is the same in each.
    """

    def embed(self, tokens: Tensor, table: Tensor) -> Tensor:
        """tokens [T], table [vocabulary, width] -> rows [T, width]."""
        return F.embedding(tokens, table)

    def spread(self, x: Tensor) -> Tensor:
        """x, which is whole, where products with parts of weights begin: gradients are added up here."""
        return x

    def total(self, x: Tensor) -> Tensor:
        """x, made from parts of weights, where it is to be whole again: it is added up here."""
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
        """Over the last dimension of x [..., n], weight [n]."""
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
        """Router scores [T, experts] -> what gates are made of, float32."""
        return scores.softmax(dim=-1) if activation == "softmax" else scores.sigmoid()

    def gates(self, activated: Tensor, chosen: Tensor, normalise: bool, scale: float) -> Tensor:
        """activated [T, experts], chosen [T, k] -> gates [T, k], if wanted with sum 1, times `scale`."""
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
        """Over the last dimension of [N, vocabulary]."""
        return logits.log_softmax(dim=-1)

    def logprobs(
        self, hidden: Tensor, head: Tensor, tokens: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """hidden [N, width], head [vocabulary, width], tokens [N] -> log-probability of each and entropy
        (detached) [N], of logits divided by `temperature`; all logits are never held at once."""
        return checkpointed_logprobs(
            lambda rows: self.logits(rows, head), self.log_softmax, hidden, tokens, temperature, len(head)
        )

    def packed_attention(self, attention: PackedAttention) -> Attention[Tensor]:
        """What computes attention over a packed batch, for the reference that does."""
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

        Where several processes share a batch, each computes some of the rows, and all get the whole.
        """
        return compute(rows)


def _is_trained_on_cpu(x: Tensor) -> bool:
    """Whether gradients are written out: autograd's own take twice the passes over memory."""
    return torch.is_grad_enabled() and x.device.type == "cpu"


class TorchOps(Ops):
    """PyTorch's operators: fastest, and free to sum in an order that depends on the batch."""

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        if torch.is_grad_enabled() and products.is_native(x, weight):
            return products.linear(x, weight)
        return F.linear(x, weight)

    def linear_add(self, residual: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        if torch.is_grad_enabled() and products.is_native(x, weight):
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
        # Not bincount: on a GPU it waits for the device.
        experts = torch.arange(len(gate_up), device=flat.device)
        ends = torch.searchsorted(flat[order], experts, right=True, out_int32=True)
        rows = dispatch(x, order, inverse, top_k)
        gate, up = F.grouped_mm(rows, gate_up, offs=ends).chunk(2, dim=-1)
        mixed = F.grouped_mm(self.silu_gate(gate, up), down, offs=ends)
        mixed = permute(mixed, inverse, order).view(len(x), top_k, -1)
        # The sum over experts is float32, as the gates are, whatever the type of the rest.
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
