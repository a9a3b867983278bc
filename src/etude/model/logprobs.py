"""Log-probabilities of given tokens without materialising all logits.

Logits of N rows over a large vocabulary are by far the largest tensor of a training step: 8,192 rows of
150,000 are 4.9 GB, and a plain cross-entropy holds several of that size. Rows are therefore computed in
blocks. If all distributions together are small, they are kept for the backward pass; otherwise it recomputes
their logits: four products instead of three.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from etude.model.kernels.native import calls
from etude.model.products import engine_product, product

BLOCK_LOGITS = 1 << 22
"""Logits that are computed at once on a CPU: 16 MB in float32, which stay in a processor's cache."""
_ACCELERATOR_FACTOR = 16
"""Factor on BLOCK_LOGITS on other devices, which need larger products and have more memory."""
_LEAST_ROWS = 128
"""Minimum rows of a block: with fewer, reading the head costs more than the products."""
KEPT_LOGITS = 1 << 25
"""Up to this size, distributions are kept for the backward pass instead of recomputed: 128 MB."""


class _Logprobs(torch.autograd.Function):
    """hidden [N, width], head [vocabulary, width], tokens [N] -> log-probability, entropy [N] float32.

    The entropy has no gradient. `as_engine`: the log-probabilities are bitwise equal to the engine's.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, tokens: Tensor, temperature: float, as_engine: bool
    ) -> tuple[Tensor, Tensor]:
        num_logits = len(hidden) * len(head)
        kept = num_logits <= KEPT_LOGITS and any(ctx.needs_input_grad[:2])
        values = {"dtype": torch.float32, "device": hidden.device}
        distribution = torch.empty((len(hidden), len(head)), **values) if kept else None
        chosen, entropy, log_sums = (torch.empty(len(hidden), **values) for _ in range(3))
        product = HeadProduct(hidden, head)
        for rows in row_blocks(hidden, len(head)):
            if as_engine:
                logits = scaled(engine_product(hidden[rows], head.t()), temperature)
                found = calls.choose_tokens(
                    logits, tokens[rows], None if distribution is None else distribution[rows]
                )
                chosen[rows], entropy[rows], log_sums[rows] = found
                continue
            logits = scaled(product.logits(rows), temperature)
            highest = logits.amax(-1, keepdim=True)
            logits.sub_(highest)
            weights = torch.exp(logits, out=None if distribution is None else distribution[rows])
            total = weights.sum(-1)
            log_total = total.log()
            chosen[rows] = logits.gather(-1, tokens[rows, None]).squeeze(-1) - log_total
            entropy[rows] = log_total - torch.linalg.vecdot(weights, logits) / total
            log_sums[rows] = log_total + highest.squeeze(-1)
            if distribution is not None:
                weights.div_(total[:, None])
        ctx.temperature, ctx.kept = temperature, kept
        ctx.save_for_backward(hidden, head, tokens, log_sums if distribution is None else distribution)
        ctx.mark_non_differentiable(entropy)
        return chosen, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        return *logprob_gradients(ctx, gradients[0], gradients[0]), None, None, None


def logprob_gradients(ctx: Any, gradient: Tensor, at_token: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """gradient [N] of log-probabilities -> of hidden states and of the head.

    `at_token` [N]: gradient of the token's own logit; 0 if another process has that logit. `ctx` has saved
    hidden states, head, tokens, and the distributions (`ctx.kept`) or their log-sum-exp.
    """
    hidden, head, tokens, kept = ctx.saved_tensors
    product = HeadProduct(hidden, head)
    to_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
    to_head = torch.zeros_like(head, dtype=torch.float32) if ctx.needs_input_grad[1] else None
    for rows in row_blocks(hidden, len(head)):
        if ctx.kept:
            weights = kept[rows]
        else:
            weights = scaled(product.logits(rows), ctx.temperature).sub_(kept[rows, None]).exp_()
        back = weights * -(gradient[rows, None] / ctx.temperature)
        back.scatter_add_(-1, tokens[rows, None], at_token[rows, None] / ctx.temperature)
        if to_hidden is not None:
            to_hidden[rows] = product.to_hidden(back)
        if to_head is not None:
            product.add_to_head(to_head, back, rows)
    return to_hidden, None if to_head is None else to_head.to(head.dtype)


class HeadProduct:
    """Products of rows with the head, summed in float32.

    On a CPU, weights of 16 bits are copied to float32 during a pass. A GPU multiplies 16-bit values into
    float32; gradients of logits are rounded to 16 bits before the products of the backward pass.
    """

    def __init__(self, hidden: Tensor, head: Tensor) -> None:
        self._narrow = hidden.is_cuda and hidden.dtype == head.dtype and head.dtype.itemsize == 2
        self._hidden = hidden if self._narrow else hidden.float()
        self._head = head if self._narrow else head.float()

    def logits(self, rows: slice) -> Tensor:
        """[n, vocabulary] float32."""
        if self._narrow:
            return torch.mm(self._hidden[rows], self._head.t(), out_dtype=torch.float32)
        return product(self._hidden[rows], self._head.t())

    def to_hidden(self, back: Tensor) -> Tensor:
        """back [n, vocabulary] float32, gradients of logits -> [n, width]."""
        return product(back.to(self._head.dtype), self._head)

    def add_to_head(self, gradient: Tensor, back: Tensor, rows: slice) -> None:
        """Adds to gradient [vocabulary, width] float32."""
        if self._narrow:
            narrow = back.to(self._head.dtype)
            gradient.add_(torch.mm(narrow.t(), self._hidden[rows], out_dtype=torch.float32))
        else:
            product(back.t(), self._hidden[rows], gradient, add=True)


def head_logprobs(
    hidden: Tensor, head: Tensor, tokens: Tensor, temperature: float, *, as_engine: bool = False
) -> tuple[Tensor, Tensor]:
    """hidden [N, width], head [vocabulary, width], tokens [N] -> log-probability and entropy [N], float32.

    Entropy is detached. Sums over the vocabulary and the gradient of the head are float32 for all types.
    `as_engine`: log-probabilities are bitwise equal to the engine's; float32 on a CPU.
    """
    return cast(tuple[Tensor, Tensor], _Logprobs.apply(hidden, head, tokens, temperature, as_engine))


def checkpointed_logprobs(
    logits: Callable[[Tensor], Tensor],
    log_softmax: Callable[[Tensor], Tensor],
    hidden: Tensor,
    tokens: Tensor,
    temperature: float,
    vocab_size: int,
) -> tuple[Tensor, Tensor]:
    """The same for any head and softmax, block by block with autograd: results are bitwise equal to those of
    a single block if `logits` and `log_softmax` are batch-invariant."""

    def block(hidden: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        log_distribution = log_softmax(scaled(logits(hidden), temperature))
        with torch.no_grad():
            entropy = -(log_distribution.exp() * log_distribution).sum(-1)
        return log_distribution.gather(-1, tokens[:, None]).squeeze(-1), entropy

    if len(hidden) * vocab_size <= KEPT_LOGITS:
        return block(hidden, tokens)
    parts = [
        cast(tuple[Tensor, Tensor], checkpoint(block, hidden[rows], tokens[rows], use_reentrant=False))
        for rows in row_blocks(hidden, vocab_size)
    ]
    return torch.cat([chosen for chosen, _ in parts]), torch.cat([entropy for _, entropy in parts])


def scaled(logits: Tensor, temperature: float) -> Tensor:
    """Logits divided by the temperature; the same tensor if that is 1."""
    return logits if temperature == 1.0 else logits / temperature


def block_rows(vocab_size: int, device_type: str) -> int:
    """Rows whose logits are computed together."""
    budget = BLOCK_LOGITS if device_type == "cpu" else BLOCK_LOGITS * _ACCELERATOR_FACTOR
    return max(_LEAST_ROWS, budget // vocab_size)


def row_blocks(rows: Tensor, vocab_size: int) -> list[slice]:
    """The blocks of `rows` [N, ...] that are computed together."""
    num_rows, size = len(rows), block_rows(vocab_size, rows.device.type)
    return [slice(first, min(first + size, num_rows)) for first in range(0, num_rows, size)]
