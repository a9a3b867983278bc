"""Loss of multi-token prediction (draft) layers, and the acceptance rate of their drafts.

Layer k reads, at position i, the hidden state of the layer before it (of the model for k = 1) and token
i + k, and predicts token i + k + 1 (DeepSeek-V3, 2024). Rows whose tokens lie beyond the end of their
sequence are computed with any token: attention is causal, so no other row uses them, and they have no loss.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from etude.model import DraftLayers, LanguageModel, RouterStatistics
from etude.model.scoring import PackedSequences, device_of
from etude.training.pretraining.documents import Document

_LOGIT_ROWS = 512
"""Rows whose distributions over the vocabulary are compared at once."""


def hidden_and_logprobs(
    model: LanguageModel,
    batch: PackedSequences,
    targets: Tensor,
    statistics: RouterStatistics | None = None,
    *,
    frozen: bool = False,
) -> tuple[Tensor, Tensor]:
    """The model's hidden state at every row [T, width], and `packed_logprobs` [N] from the same pass.

    `frozen`: without gradients.
    """
    with torch.set_grad_enabled(torch.is_grad_enabled() and not frozen):
        attention = model.ops.packed_attention(batch.attention)
        hidden = model(batch.tokens, batch.positions, attention, None, statistics)
        logprobs, _ = model.logprobs(hidden[targets - 1], batch.tokens[targets], 1.0)
    return hidden, logprobs


@dataclass(frozen=True, slots=True)
class DraftLoss:
    """Computes draft layers and their losses on packed sequences."""

    model: LanguageModel
    layers: DraftLayers

    def per_depth(self, batch: PackedSequences, hidden: Tensor, weights: Tensor, total: Tensor) -> Tensor:
        """Loss of each layer in nats, [depths]: sums over predicted tokens times `weights` [T], over `total`.

        `total` is that of the model's loss, although each layer has one target fewer per sequence than the
        one before: as in the paper, and independent of the micro-batches.
        """
        losses: list[Tensor] = []
        for drafted, targets in self.depths(batch, hidden):
            wanted = targets[weights[targets] > 0]
            depth = len(losses) + 1
            logprobs, _ = self.model.logprobs(drafted[wanted - depth - 1], batch.tokens[wanted], 1.0)
            losses.append(-(logprobs * weights[wanted]).sum() / total)
        return torch.stack(losses)

    def depths(self, batch: PackedSequences, hidden: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields per layer its output at all rows, [T, width], and the rows [N] of the tokens it predicts:
        layer k (from 1) predicts target t at row t - k - 1."""
        attention = self.model.ops.packed_attention(batch.attention)
        for index in range(len(self.layers.layers)):
            following = batch.tokens.roll(-index - 1)
            hidden = self.layers(self.model, index, hidden, following, batch.positions, attention)
            yield hidden, (batch.positions >= index + 2).nonzero().flatten()


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Acceptance rates of drafts at one depth, given that the drafts before them were accepted."""

    greedy: float
    """Share of tokens for which the most likely tokens of draft and model agree."""
    sampled: float
    """Mean over tokens of sum(min(p, q)): what speculative sampling accepts (Leviathan et al. 2023)."""
    loss: float
    """Nats per token."""


@torch.no_grad()
def measure_acceptance(
    model: LanguageModel, layers: DraftLayers, documents: Sequence[Document]
) -> list[Acceptance]:
    """Acceptance per draft layer on the documents, against the model's distribution at each position."""
    found = torch.zeros(len(layers.layers), 4, dtype=torch.float64)
    for document in documents:
        if len(document.tokens) < 3:
            continue
        batch = PackedSequences.pack([document.tokens], device_of(model))
        targets = torch.arange(1, len(document.tokens), device=batch.tokens.device)
        hidden, _ = hidden_and_logprobs(model, batch, targets)
        for depth, (drafted, predicted) in enumerate(DraftLoss(model, layers).depths(batch, hidden)):
            for rows in predicted.split(_LOGIT_ROWS):
                own = model.logits(hidden[rows - 1]).softmax(-1)
                draft = model.logits(drafted[rows - depth - 2]).softmax(-1)
                agree = (own.argmax(-1) == draft.argmax(-1)).sum()
                right = draft.gather(-1, batch.tokens[rows][:, None]).clamp_min(1e-30).log().sum()
                overlap = torch.minimum(own, draft).sum()
                sums = torch.stack((agree.float(), overlap, -right, agree.new_tensor(len(rows)).float()))
                found[depth] += sums.double().cpu()
    counts = found[:, 3].clamp_min(1)
    return [Acceptance(*row) for row in (found[:, :3] / counts[:, None]).tolist()]


def initialise_drafts(layers: DraftLayers, seed: int) -> None:
    """Initialises the weights at random, as `LanguageModel.initialise` does."""
    generator = torch.Generator().manual_seed(seed)
    std = layers.config.initializer_range
    with torch.no_grad():
        for name, parameter in layers.named_parameters():
            if parameter.ndim == 1:
                parameter.fill_(0.0 if name.endswith(".score_bias") else 1.0)
            else:
                parameter.normal_(0.0, std, generator=generator)
