"""Vocabulary-parallel embedding and head: every tensor rank has a contiguous run of the vocabulary.

    tokens ──> rows of this rank's tokens, zeros for others ──sum over ranks──> rows
    states ──> logits of this rank's tokens ──> maximum, sums, the token's own logit ──gather──>
               the same log-probability on every rank

Four numbers per row are communicated, never logits. As in one process, a few rows are computed at a time.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from etude.model.logprobs import KEPT_LOGITS, HeadProduct, logprob_gradients, row_blocks, scaled
from etude.training.parallel.collectives import Group, gather_parts, group_size


def local_tokens(tokens: Tensor, first: int, count: int) -> tuple[Tensor, Tensor]:
    """tokens [N] -> their rows in a table of the `count` tokens from `first` on [N], and whether they are in
    it [N]; rows of tokens that are not are 0."""
    rows = tokens - first
    here = (rows >= 0) & (rows < count)
    return rows.where(here, 0), here


def embed_part(tokens: Tensor, table: Tensor, first: int) -> Tensor:
    """tokens [T], table [count, width] of the tokens from `first` on -> rows [T, width], zeros for others."""
    rows, here = local_tokens(tokens, first, len(table))
    return F.embedding(rows, table).masked_fill(~here[:, None], 0.0)


class _PartLogprobs(torch.autograd.Function):
    """hidden [N, width], head [count, width] of the tokens from `first`, tokens [N] -> log-probability and
    entropy [N] float32 over the whole vocabulary. The gradient of `hidden` is this part's contribution."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, tokens: Tensor, temperature: float, first: int, group: Group
    ) -> tuple[Tensor, Tensor]:
        kept = len(hidden) * len(head) <= KEPT_LOGITS and any(ctx.needs_input_grad[:2])
        values = {"dtype": torch.float32, "device": hidden.device}
        distribution = torch.empty((len(hidden), len(head)), **values) if kept else None
        own, here = local_tokens(tokens, first, len(head))
        found = torch.empty((4, len(hidden)), **values)
        highest, total, moment, chosen = found
        product = HeadProduct(hidden, head)
        for rows in row_blocks(hidden, len(head)):
            logits = scaled(product.logits(rows), temperature)
            highest[rows] = logits.amax(-1)
            chosen[rows] = logits.gather(-1, own[rows, None]).squeeze(-1)
            logits.sub_(highest[rows, None])
            weights = torch.exp(logits, out=None if distribution is None else distribution[rows])
            total[rows] = weights.sum(-1)
            moment[rows] = torch.linalg.vecdot(weights, logits)
        chosen.masked_fill_(~here, 0.0)
        everyone = gather_parts(found[None], [1] * group_size(group), group, shared=True)
        logprob, entropy, log_sum = _combined(everyone)
        if distribution is not None:
            distribution.mul_((highest - log_sum).exp_()[:, None])
        ctx.temperature, ctx.kept = temperature, kept
        ctx.save_for_backward(hidden, head, own, log_sum if distribution is None else distribution)
        ctx.here = here
        ctx.mark_non_differentiable(entropy)
        return logprob, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        at_token = gradients[0].masked_fill(~ctx.here, 0.0)
        return *logprob_gradients(ctx, gradients[0], at_token), None, None, None, None


def _combined(found: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """found [ranks, 4, N]: each part's largest logit, sum of exp(logit - largest), the same sum weighted with
    logit - largest, and the token's logit or 0 -> log-probability, entropy, logarithm of the sum [N]."""
    highest, total, moment, chosen = found.unbind(1)
    top = highest.amax(0)
    weight = (highest - top).exp()
    whole = (weight * total).sum(0)
    log_total = whole.log()
    spread = (weight * (moment + (highest - top) * total)).sum(0)
    return chosen.sum(0) - top - log_total, log_total - spread / whole, log_total + top


def part_logprobs(
    hidden: Tensor, head: Tensor, tokens: Tensor, temperature: float, first: int, group: Group
) -> tuple[Tensor, Tensor]:
    """See `etude.model.logprobs.head_logprobs`, with this rank's part of the head, which begins with token
    `first`. Collective; the gradient of `hidden` has yet to be summed over ranks."""
    return cast(tuple[Tensor, Tensor], _PartLogprobs.apply(hidden, head, tokens, temperature, first, group))
