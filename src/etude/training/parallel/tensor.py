"""Tensor parallelism: ranks divide every layer's heads and inner widths, and the vocabulary.

    x, replicated ──> column-parallel products ──> heads, inner units ──> row-parallel products ──sum──> x'
    backward: sum <──                                                                                <──

The forward pass has one sum each for attention and the feed-forward part, in the type of the rows; the
backward pass as many, and one more for routed tokens (rows and gates) and in latent attention (queries and
keys). Every rank adds the same terms in the same order, so replicated values, and with them the choice of
experts, are bitwise equal on all ranks. Norms, routers and residual rows are computed on every rank.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from etude.errors import ConfigError
from etude.model import LanguageModel, block_of
from etude.model.ops import Ops
from etude.training.parallel.collectives import Group, gather_parts, group_rank, group_size, summed_in_order
from etude.training.parallel.cuts import cuts_of, name_within, run_bounds
from etude.training.parallel.vocabulary import embed_part, part_logprobs
from etude.training.parallel.wrapped import WrappedOps


class _Spread(torch.autograd.Function):
    """The identity; backward, the sum of the gradients over ranks (Megatron's f)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return summed_in_order(gradients[0], ctx.group), None


class _Total(torch.autograd.Function):
    """The sum over ranks; backward, the identity (Megatron's g)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        return summed_in_order(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class TensorParallelOps(WrappedOps):
    """Ops for weights that are this rank's parts of a layer; other operations are `inner`'s."""

    def __init__(self, inner: Ops, group: Group, vocab_size: int) -> None:
        super().__init__(inner)
        self._group = group
        count, own = group_size(group), group_rank(group)
        bounds = [run_bounds(vocab_size, count, rank) for rank in range(count)]
        self._counts = [stop - start for start, stop in bounds]
        self._first = bounds[own][0]

    def spread(self, x: Tensor) -> Tensor:
        """See Ops. Backward is collective."""
        return cast(Tensor, _Spread.apply(x, self._group))

    def total(self, x: Tensor) -> Tensor:
        """See Ops. Collective."""
        return cast(Tensor, _Total.apply(x, self._group))

    def embed(self, tokens: Tensor, table: Tensor) -> Tensor:
        """See Ops. Collective."""
        return self.total(embed_part(tokens, table, self._first))

    def linear_add(self, residual: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """See Ops. Collective."""
        return residual + self.total(self.inner.linear(x, weight))

    def logits(self, hidden: Tensor, head: Tensor) -> Tensor:
        """See Ops: of the whole vocabulary, on every rank. Collective, also in the backward pass."""
        own = self.inner.logits(self.spread(hidden), head)
        return gather_parts(own.t().contiguous(), self._counts, self._group, shared=True).t()

    def logprobs(
        self, hidden: Tensor, head: Tensor, tokens: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """See Ops. Collective, also in the backward pass."""
        return part_logprobs(self.spread(hidden), head, tokens, temperature, self._first, self._group)


def cut_model(model: LanguageModel, group: Group) -> None:
    """Reduces a model to this tensor rank's parts, in place. Raises ConfigError for a vocabulary that is too
    small."""
    count, own = group_size(group), group_rank(group)
    if run_bounds(model.vocab_size, count, count - 1)[0] >= model.vocab_size:
        raise ConfigError(
            f"leaves a rank without any of {model.vocab_size} tokens", field="parallel.tensor", received=count
        )
    cuts = cuts_of(model.config, model.vocab_size)
    for name, whole in list(model.named_parameters()):
        cut = cuts.get(name_within(name))
        if cut is not None:
            module, _, last = name.rpartition(".")
            part = cut.part(whole.detach(), count, own).clone(memory_format=torch.contiguous_format)
            setattr(model.get_submodule(module), last, nn.Parameter(part, requires_grad=whole.requires_grad))
    for layer in range(len(model.blocks)):
        block_of(model, layer).divide_heads(count)
    model.ops = cast(Ops, TensorParallelOps(model.ops, group, model.vocab_size))
