"""A control for measurements of numerics: what Étude does not do."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from etude.model.ops import Ops, TorchOps


class HalfOps(TorchOps):
    """Router and output head in the type of the weights, where TorchOps computes them in float32.

    With weights in bfloat16 it shows what that is worth; nothing trains or samples with it.
    """

    def router(self, x: Tensor, weight: Tensor) -> Tensor:
        """See Ops."""
        return F.linear(x, weight).float()

    def logits(self, hidden: Tensor, head: Tensor) -> Tensor:
        """See Ops."""
        return F.linear(hidden, head).float()

    def logprobs(
        self, hidden: Tensor, head: Tensor, tokens: Tensor, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """See Ops."""
        return Ops.logprobs(self, hidden, head, tokens, temperature)  # from these logits
