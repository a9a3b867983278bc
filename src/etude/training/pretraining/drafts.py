"""The loss of layers for multi-token prediction, and how often what they draft is right.

Layer k reads, at position i, the hidden state of the layer before it (of the model for k = 1) and token
i + k, and predicts token i + k + 1 (DeepSeek-V3, 2024). Rows whose tokens lie behind the end of their
sequence are computed with any token: attention is causal, so nothing else sees them, and they have no loss.
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
"""Rows whose distributions are compared at once: a vocabulary's worth of numbers each."""


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
    """Runs draft layers over packed sequences."""

    model: LanguageModel
    layers: DraftLayers

    def per_depth(self, batch: PackedSequences, hidden: Tensor, weights: Tensor, total: Tensor) -> Tensor:
        """Loss of each layer in nats, [depths]: sums over the predicted tokens by `weights` [T], by `total`.

        `total` is the model's own, so a layer's loss is over as many tokens as the model's, though each
        sequence has one target fewer per layer: as in the paper, and the same for any micro-batches.
        """
        losses: list[Tensor] = []
        for drafted, targets in self.depths(batch, hidden):
            wanted = targets[weights[targets] > 0]
            depth = len(losses) + 1
            logprobs, _ = self.model.logprobs(drafted[wanted - depth - 1], batch.tokens[wanted], 1.0)
            losses.append(-(logprobs * weights[wanted]).sum() / total)
        return torch.stack(losses)

    def depths(self, batch: PackedSequences, hidden: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Per layer its output at all rows, [T, width], and the rows [N] of the tokens that it predicts: for
        layer k (from 1), target t is predicted at row t - k - 1."""
        attention = self.model.ops.packed_attention(batch.attention)
        for index in range(len(self.layers.layers)):
            following = batch.tokens.roll(-index - 1)
            hidden = self.layers(self.model, index, hidden, following, batch.positions, attention)
            yield hidden, (batch.positions >= index + 2).nonzero().flatten()


@dataclass(frozen=True, slots=True)
class Acceptance:
    """How often drafts at one depth would stand, given that those before them do."""

    greedy: float
    """Share of tokens where the draft's likeliest token is the model's."""
    sampled: float
    """Mean over tokens of sum(min(p, q)): what speculative sampling accepts (Leviathan et al. 2023)."""
    loss: float
    """Nats per token."""


@torch.no_grad()
def measure_acceptance(
    model: LanguageModel, layers: DraftLayers, documents: Sequence[Document]
) -> list[Acceptance]:
    """Per draft layer, on the texts themselves, against the model's own distribution at each place."""
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
    """Draws new weights, as `LanguageModel.initialise` does."""
    generator = torch.Generator().manual_seed(seed)
    std = layers.config.initializer_range
    with torch.no_grad():
        for name, parameter in layers.named_parameters():
            if parameter.ndim == 1:
                parameter.fill_(0.0 if name.endswith(".score_bias") else 1.0)
            else:
                parameter.normal_(0.0, std, generator=generator)
