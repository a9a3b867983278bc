"""A control for numerics measurements: operations in lower precision than Étude uses."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from etude.model.ops import Ops, TorchOps


class HalfOps(TorchOps):
    """Router and output head in the weights' number format, where TorchOps computes them in float32.

    With bfloat16 weights it shows the effect of that precision; nothing trains or samples with it.
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
