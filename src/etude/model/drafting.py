"""Layers that draft tokens beyond the next one (multi-token prediction).

They are separate from the model: not trained or published with its weights, and not needed to sample. A
drafted token is only a proposal that the model accepts or rejects, so draft layers that lag behind the policy
lower the acceptance rate and do not change the distribution.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from etude.config import ModelConfig
from etude.model.blocks import make_block
from etude.model.feed_forward import Pass
from etude.model.language_model import LanguageModel
from etude.model.routes import NativeRoutes
from etude.protocols import Attention

DRAFT_PREFIX = "drafts."
"""Prefix of the names of draft layers' tensors in a set of weights that also holds the model's."""


class DraftLayer(nn.Module):
    """One more block, fed with a hidden state and the token that follows it (DeepSeek-V3, 2024)."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        """`config`: of the draft layers, whose blocks all route; `index`: its layer in their cache."""
        super().__init__()
        width = config.hidden_size
        self.eps = config.rms_norm_eps
        self.embedding_norm = nn.Parameter(torch.ones(width))
        self.hidden_norm = nn.Parameter(torch.ones(width))
        self.projection = nn.Parameter(torch.empty(width, 2 * width))
        """Columns of the embedding, then of the hidden state."""
        self.block = make_block(config, index)
        self.final_norm = nn.Parameter(torch.ones(width))

    def forward(self, embedded: Tensor, hidden: Tensor, shared: Pass) -> Tensor:
        """embedded [T, width], hidden [T, width] -> [T, width], after the last norm."""
        ops = shared.ops
        joined = torch.cat(
            (
                ops.rms_norm(embedded, self.embedding_norm, self.eps),
                ops.rms_norm(hidden, self.hidden_norm, self.eps),
            ),
            dim=-1,
        )
        drafted = self.block(ops.linear(joined, self.projection), shared, None)
        return ops.rms_norm(drafted, self.final_norm, self.eps)


class DraftLayers(nn.Module):
    """All draft layers of one model, with which they share embedding, rotary tables, operators and head."""

    def __init__(self, config: ModelConfig, num_layers: int) -> None:
        """`config`: the model's; `num_layers`: number of tokens that can be drafted at once."""
        super().__init__()
        self.config = config.model_copy(update={"num_layers": num_layers, "first_k_dense_replace": 0})
        """Configuration of the draft layers alone, for instance to create their cache."""
        self.layers = nn.ModuleList(DraftLayer(self.config, index) for index in range(num_layers))
        self._routes = NativeRoutes(config.experts_per_token)

    def forward(
        self,
        model: LanguageModel,
        index: int,
        hidden: Tensor,
        tokens: Tensor,
        positions: Tensor,
        attention: Attention[Tensor],
    ) -> Tensor:
        """The output of layer `index` for hidden [T, width] and the tokens [T] that follow those rows.

        For layer 0, `hidden` is the model's output; for each further one, that of the layer before it, with
        the tokens one position later. `positions` [T]: of `tokens`, or all smaller by the same number, since
        only distances matter. `attention` is for these layers alone, counted from 0.
        `model.logits` of the result is the distribution of the token after `tokens`. Differentiable.
        """
        embedded = F.embedding(tokens, model.embedding)
        shared = Pass(model.ops, model.rotation(positions), attention, self._routes, None)
        return self.layers[index](embedded, hidden, shared)
