"""Functions that tests run on every rank, with plain data as arguments and results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from etude.config import ModelConfig
from etude.errors import CheckpointError
from etude.model import LanguageModel, RouterStatistics
from etude.model.huggingface import outline_model, read_fields
from etude.model.scoring import PackedSequences, packed_logprobs, score_sequences
from etude.training import NextTokenTrainer, ShuffledDocuments
from etude.training.parallel.mesh_ranks import MeshRanks
from etude.training.parallel.ranks import Ranks, Share
from tests.model.builders import VOCAB, fresh_routes, random_tokens, small_model
from tests.training.builders import midtrain_config, midtrain_documents

SHORT = (33, 21, 40, 12, 25, 18, 29, 16)
LONG = (270, 90, 33, 21, 530, 12, 40, 7)
"""Of the sequences that tests train on; the second holds some that context ranks cut."""

Plan = list[list[list[int]]]
Gradients = dict[str, np.ndarray]


def model_of(seed: int, **changes: Any) -> LanguageModel:
    """A model that takes the longest of the sequences, with heads that two ranks can divide."""
    return small_model(seed, **{"max_positions": 640, "num_heads": 4, "num_kv_heads": 2} | changes)


def loss_of(
    model: LanguageModel, indices: tuple[int, ...], lengths: tuple[int, ...], replay: bool, balance: bool
) -> Tensor:
    """Summed negative log-likelihood of some of the sequences.

    `replay`: with another model's routes, some of them missing. `balance`: plus the load-balancing loss.
    """
    tokens = [random_tokens(lengths[index], index) for index in indices]
    batch = PackedSequences.pack(tokens)
    first = torch.zeros(len(batch.tokens), dtype=torch.bool)
    first[batch.starts] = True
    routes = None
    if replay:
        recorded = [fresh_routes(model_of(7), one) for one in tokens]
        recorded[0][3:5] = 255
        routes = batch.pack_rows(recorded)
    targets = (~first).nonzero().flatten()
    targets = targets[targets % 3 > 0]
    statistics = RouterStatistics([], []) if balance else None
    logprobs, entropy = packed_logprobs(
        model, batch, targets, temperature=1.3, routes=routes, statistics=statistics
    )
    assert entropy.shape == logprobs.shape == targets.shape
    loss = -logprobs.sum()
    return loss if statistics is None else loss + 50.0 * statistics.balance_loss()


def gradients_of(
    model: LanguageModel,
    shares: list[Share],
    lengths: tuple[int, ...] = SHORT,
    replay: bool = False,
    balance: bool = False,
) -> float:
    """Leaves gradients behind; returns the loss."""
    total = 0.0
    for share in shares:
        loss = loss_of(model, share.indices, lengths, replay, balance) * share.weight
        loss.backward()
        total += float(loss.detach())
    return total


def plan_of(num_ranks: int, per_batch: int = 1) -> Plan:
    """The eight sequences dealt out in turn, `per_batch` in a micro-batch."""
    batches = [list(range(i, min(i + per_batch, 8))) for i in range(0, 8, per_batch)]
    return [batches[rank::num_ranks] for rank in range(num_ranks)]


def losses_and_gradients(
    ranks: MeshRanks,
    plan: Plan,
    lengths: tuple[int, ...] = SHORT,
    replay: bool = False,
    balance: bool = False,
    recompute: bool = False,
) -> tuple[float, Gradients]:
    """The whole batch's loss and gradients, as every rank of the mesh finds them together."""
    model = model_of(0 if ranks.is_main else 1)  # rank 0's weights are those that count
    model.checkpoint_activations(recompute)
    return _train(ranks, model, plan, lengths, replay, balance)


def latent_gradients(ranks: MeshRanks, plan: Plan, dtype: str) -> tuple[float, Gradients]:
    """The same of a model with latent attention, shared experts and biases that stay float32."""
    return _train(ranks, latent_model(dtype), plan, SHORT, False, False)


def latent_model(dtype: str) -> LanguageModel:
    """DeepSeek-V3 in small."""
    config = ModelConfig(
        architecture="deepseek_v3", tie_embeddings=False, hidden_size=32, num_layers=3, q_lora_rank=24
    )
    model = LanguageModel(config, VOCAB)
    model.initialise(0)
    return model.cast(getattr(torch, dtype))


def _train(
    ranks: MeshRanks,
    model: LanguageModel,
    plan: Plan,
    lengths: tuple[int, ...],
    replay: bool,
    balance: bool,
) -> tuple[float, Gradients]:
    ranks.place(model)
    total = gradients_of(model, ranks.share(plan), lengths, replay, balance)
    ranks.reduce_gradients(model)
    loss = ranks.all_reduce_(torch.tensor([total], dtype=torch.float64))
    layout = ranks.layout(model)
    whole = {
        name: layout.gather(name, gradient).float().numpy().copy()
        for name, gradient in layout.gradients().items()
        if gradient is not None
    }
    return float(loss), whole


def whole_weights(ranks: MeshRanks) -> tuple[bool, bool, list[np.ndarray], list[np.ndarray]]:
    """Places a model, collects it, loads others into it; whether all was as it should, and its scores, and
    those of a frozen copy of the others."""
    model, plain, other = model_of(0), model_of(0), model_of(5)
    ranks.place(model)
    scores = score_sequences(model, [random_tokens(20, 3)])
    collected = ranks.whole_model(model)
    same = not ranks.is_main or _are_equal(collected, plain)
    ranks.load_weights(model, dict(other.named_parameters()))
    loaded = ranks.whole_model(model)
    replaced = not ranks.is_main or _are_equal(loaded, other)
    frozen = ranks.frozen_copy(model)
    assert not any(parameter.requires_grad for parameter in frozen.parameters())
    return same, replaced, scores, score_sequences(frozen, [random_tokens(20, 3)])


def next_token_weights(ranks: MeshRanks, steps: int) -> tuple[Gradients, list[float]]:
    """Whole weights and losses after some steps of next-token training on the same documents."""
    model = model_of(0)
    ranks.place(model)
    trainer = next_token_trainer_of(model, ranks)
    losses = [trainer.step()["loss"] for _ in range(steps)]
    layout = ranks.layout(model)
    whole = {name: layout.gather(name, part).numpy().copy() for name, part in layout.parts.items()}
    return whole, losses


def _are_equal(model: LanguageModel, other: LanguageModel) -> bool:
    return all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))


def next_token_trainer_of(model: LanguageModel, ranks: Ranks | None = None) -> NextTokenTrainer:
    """Micro-batches of 32 tokens, so that every rank has some."""
    config = midtrain_config(micro_batch_tokens=32, balance_weight=0.0)
    batches = ShuffledDocuments(midtrain_documents(), config.tokens_per_step, 0)
    return NextTokenTrainer(model, batches, config, ranks=ranks)


def read_weights(ranks: MeshRanks, directory: str) -> tuple[bool, Gradients, list[np.ndarray]]:
    """Places a model whose weights each rank reads from a directory: whether it had no storage before, what
    lies where, and its scores."""
    model = outline_model(read_fields(Path(directory) / "config.json"), torch.float32)
    model.unread = Path(directory)
    ranks.place(model)
    layout = ranks.layout(model)
    whole = {name: layout.gather(name, part).numpy().copy() for name, part in layout.parts.items()}
    return model.unread is None, whole, score_sequences(model, [random_tokens(20, 3)])


def receive_weights(ranks: MeshRanks) -> tuple[bool, Gradients]:
    """Places a model that only the first rank has."""
    model = model_of(0)
    if not ranks.is_main:
        with torch.device("meta"):
            model = LanguageModel(model.config, model.vocab_size)
    ranks.place(model)
    layout = ranks.layout(model)
    collected = ranks.whole_model(model)
    has_storage = not collected.embedding.is_meta
    whole = {name: layout.gather(name, part).numpy().copy() for name, part in layout.parts.items()}
    return has_storage == ranks.is_main, whole


def damaged_weights(ranks: MeshRanks, directory: str) -> str:
    """What a rank raises where only the last one cannot read its part."""
    own = Path(directory) if ranks.rank < ranks.world_size - 1 else Path(directory) / "missing"
    model = outline_model(read_fields(Path(directory) / "config.json"), torch.float32)
    model.unread = own
    try:
        ranks.place(model)
    except CheckpointError as error:
        return str(error)
    return ""
