"""Draft layers: the loss written out, masks, what a frozen model keeps, acceptance, checkpoints."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from etude.config import DraftsConfig
from etude.model import DraftLayers, PackedAttention
from etude.model.huggingface import load_draft_layers, load_model, save_model
from etude.model.scoring import PackedSequences
from etude.training.pretraining import Document, NextTokenTrainer, ShuffledDocuments
from etude.training.pretraining.drafts import (
    DraftLoss,
    hidden_and_logprobs,
    initialise_drafts,
    measure_acceptance,
)
from etude.training.pretraining.trainer import DraftTraining
from tests.model.builders import draft_layers, random_tokens, small_model
from tests.training.builders import midtrain_config, midtrain_documents


def test_each_depth_predicts_one_token_further_of_the_same_sequence() -> None:
    model = small_model(0)
    drafts = draft_layers(model, 2)
    sequences = [random_tokens(length, length) for length in (9, 14)]
    weights = [np.linspace(0.0, 1.0, len(tokens)).astype(np.float32) for tokens in sequences]
    batch = PackedSequences.pack(sequences)
    packed = batch.pack_rows(weights)
    hidden, _ = hidden_and_logprobs(model, batch, torch.tensor([1]))
    found = DraftLoss(model, drafts).per_depth(batch, hidden, packed, torch.tensor(10.0))
    for depth in (1, 2):
        expected = sum(
            _written_out(model, drafts, tokens, weight, depth)
            for tokens, weight in zip(sequences, weights, strict=True)
        )
        assert float(found[depth - 1].detach()) == pytest.approx(expected / 10.0, rel=1e-4)


def _written_out(model, drafts: DraftLayers, tokens, weights, depth: int) -> float:
    """The loss of one sequence by itself, only over rows whose tokens are all there."""
    ids = torch.from_numpy(tokens.astype(np.int64))
    places = torch.arange(len(ids))
    with torch.no_grad():
        hidden = model(ids, places, PackedAttention([len(ids)]))
        for layer in range(depth):
            rows = len(ids) - layer - 1
            attention = PackedAttention([rows])
            hidden = drafts(model, layer, hidden[:rows], ids[layer + 1 :], places[:rows], attention)
        logprobs = model.logits(hidden).log_softmax(-1)
    return -sum(
        float(logprobs[row, ids[row + depth + 1]]) * float(weights[row + depth + 1])
        for row in range(len(ids) - depth - 1)
    )


def _trainer(model, drafts: DraftLayers, **config) -> NextTokenTrainer:
    batches = ShuffledDocuments(midtrain_documents(6), 200, 0)
    training = DraftTraining(drafts, DraftsConfig(num_layers=len(drafts.layers), **config))
    return NextTokenTrainer(model, batches, midtrain_config(num_steps=30, tokens_per_step=200), training)


@pytest.mark.slow
def test_a_frozen_model_stays_and_its_drafts_learn() -> None:
    model = small_model(0)
    drafts = DraftLayers(model.config, 2)
    initialise_drafts(drafts, 0)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    trainer = _trainer(model, drafts, only=True)
    metrics = [trainer.step() for _ in range(30)]
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    for depth in (1, 2):
        assert metrics[-1][f"draft_loss_{depth}"] < 0.9 * metrics[0][f"draft_loss_{depth}"]


@pytest.mark.slow
def test_with_the_model_both_learn() -> None:
    model = small_model(0)
    drafts = draft_layers(model)
    trainer = _trainer(model, drafts)
    metrics = [trainer.step() for _ in range(20)]
    assert metrics[-1]["loss"] < metrics[0]["loss"]
    assert metrics[-1]["draft_loss_1"] < metrics[0]["draft_loss_1"]


def test_acceptance_is_total_where_a_draft_is_what_the_model_says() -> None:
    """A model that says the same after every token: any draft layer that ends in its norm agrees."""
    model = small_model(0)
    drafts = draft_layers(model)
    with torch.no_grad():
        model.embedding.zero_()
    documents = [Document.plain(random_tokens(30))]
    (accepted,) = measure_acceptance(model, drafts, documents)
    assert accepted.greedy == accepted.sampled == pytest.approx(1.0)
    assert accepted.loss == pytest.approx(np.log(64), rel=1e-4)


def test_acceptance_is_the_overlap_of_the_two_distributions() -> None:
    model = small_model(1)
    drafts = draft_layers(model)
    tokens = random_tokens(20)
    (accepted,) = measure_acceptance(model, drafts, [Document.plain(tokens)])
    ids, places = torch.from_numpy(tokens.astype(np.int64)), torch.arange(20)
    with torch.no_grad():
        hidden = model(ids, places, PackedAttention([20]))
        drafted = drafts(model, 0, hidden[:19], ids[1:], places[:19], PackedAttention([19]))
        own, draft = (model.logits(rows).softmax(-1) for rows in (hidden[1:19], drafted[:18]))
    assert accepted.sampled == pytest.approx(float(torch.minimum(own, draft).sum(-1).mean()), rel=1e-4)
    assert accepted.greedy == pytest.approx(float((own.argmax(-1) == draft.argmax(-1)).float().mean()))


@pytest.mark.parametrize("max_file_bytes", [5_000_000_000, 20_000])
def test_draft_layers_are_read_again_and_the_model_beside_them(tmp_path: Path, max_file_bytes: int) -> None:
    model = small_model(0)
    drafts = draft_layers(model, 2)
    save_model(model, tmp_path, max_file_bytes, drafts)
    again, read = load_model(tmp_path), load_draft_layers(tmp_path)
    assert read is not None
    for old, new in ((model, again), (drafts, read)):
        for name, weight in old.state_dict().items():
            assert torch.equal(weight, new.state_dict()[name]), name
