"""Next-token training: weighted loss, micro-batches, every document once per epoch, exact resumption."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from etude.model import LanguageModel
from etude.model.scoring import score_sequences
from etude.training import Document, ShuffledDocuments
from etude.training.pretraining.trainer import evaluate_loss
from tests.model.builders import random_tokens, small_model
from tests.training.builders import midtrain_config, midtrain_documents, next_token_trainer


def test_the_loss_is_the_weighted_mean_and_the_agents_is_reported_by_itself() -> None:
    model, documents = small_model(0), midtrain_documents(5)
    scores = score_sequences(model, [document.tokens for document in documents])
    weights = [document.weights.copy() for document in documents]
    for weight in weights:
        weight[0] = 0.0
    expected = -sum((s * w).sum() for s, w in zip(scores, weights, strict=True)) / sum(
        weight.sum() for weight in weights
    )
    agent = np.concatenate([s[d.agent] for s, d in zip(scores, documents, strict=True)])
    total = sum(len(document.tokens) for document in documents)
    metrics = next_token_trainer(model, documents, midtrain_config(tokens_per_step=total), 0).step()
    assert metrics["tokens"] == total, "one step sees every document once"
    assert metrics["loss"] == pytest.approx(expected, abs=1e-5)
    assert metrics["agent_loss"] == pytest.approx(-agent.mean(), abs=1e-5)


def test_factors_are_rounded_in_a_step_that_is_to_multiply_in_bfloat16_and_not_afterwards() -> None:
    found, losses = list[str](), list[float]()
    for products in ("float32", "bfloat16"):
        model = small_model(0)
        model.register_forward_pre_hook(lambda *_: found.append(torch.get_float32_matmul_precision()))
        trainer = next_token_trainer(model, midtrain_documents(), midtrain_config(products=products), 0)
        losses.append(trainer.step()["loss"])
    assert set(found) == {"highest", "medium"}
    assert torch.get_float32_matmul_precision() == "highest"
    assert losses[1] == pytest.approx(losses[0], rel=0.02)


def test_a_document_without_an_agent_reports_no_agent_loss() -> None:
    tokens = random_tokens(64)
    document = Document(tokens, np.ones(64, dtype=np.float32), np.zeros(64, dtype=np.bool_))
    assert next_token_trainer(small_model(0), [document], midtrain_config(), 0).step()["agent_loss"] == 0.0


def test_masked_tokens_and_the_first_do_not_matter() -> None:
    """Weight 0 at the end: other tokens there leave the same loss and the same gradient norm."""
    tokens = random_tokens(70)
    weights = np.ones(70, dtype=np.float32)
    weights[50:] = 0.0
    other = tokens.copy()
    other[50:] = (other[50:] + 9) % 64
    first_counts = weights.copy()
    first_counts[0] = 100.0
    agent = np.ones(70, dtype=np.bool_)
    variants = [
        Document(tokens, weights, agent),
        Document(other, weights, agent),
        Document(tokens, first_counts, agent),
    ]
    results = [
        next_token_trainer(small_model(0), [variant], midtrain_config(balance_weight=0.0), 0).step()
        for variant in variants
    ]
    for result in results[1:]:
        assert result["loss"] == pytest.approx(results[0]["loss"], rel=1e-5)
        assert result["grad_norm"] == pytest.approx(results[0]["grad_norm"], rel=1e-4)


def test_every_document_comes_once_per_epoch_and_epochs_differ() -> None:
    documents = midtrain_documents(8)
    drawn = [_draw(documents, seed) for seed in (3, 3, 4)]
    assert sorted(drawn[0][:8]) == sorted(drawn[0][8:16]) == list(range(8))
    assert drawn[0][:8] != drawn[0][8:16]
    assert drawn[0] == drawn[1] != drawn[2]


def _draw(documents: list[Document], seed: int) -> list[int]:
    """Which documents two epochs train on, in order."""
    batches = ShuffledDocuments(documents, 64, seed)
    names = {id(document): index for index, document in enumerate(documents)}
    drawn: list[int] = []
    while len(drawn) < 16:
        drawn += [names[id(document)] for document in batches.draw()]
    return drawn


def test_micro_batches_change_rounding_only() -> None:
    documents = midtrain_documents(12)
    models = [small_model(0), small_model(0)]
    metrics = [
        next_token_trainer(model, documents, midtrain_config(tokens_per_step=200, **changes), 0).step()
        for model, changes in zip(models, ({"balance_weight": 0.0}, _SMALL), strict=True)
    ]
    for name in ("loss", "agent_loss", "grad_norm", "tokens"):
        assert metrics[0][name] == pytest.approx(metrics[1][name], rel=1e-4), name


_SMALL = {"balance_weight": 0.0, "micro_batch_tokens": 50}


def test_training_lowers_the_loss() -> None:
    documents = midtrain_documents(2)
    model = small_model(0)
    before = evaluate_loss(model, documents)
    trainer = next_token_trainer(model, documents, midtrain_config(num_steps=20), 0)
    for _ in range(20):
        trainer.step()
    assert evaluate_loss(model, documents) < 0.5 * before


def test_the_evaluated_loss_is_the_mean_over_agent_tokens() -> None:
    model, documents = small_model(1), midtrain_documents(5)
    scores = score_sequences(model, [document.tokens for document in documents])
    agent = np.concatenate([s[d.agent] for s, d in zip(scores, documents, strict=True)])
    assert evaluate_loss(model, documents) == pytest.approx(-agent.mean(), abs=1e-5)


def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit() -> None:
    straight = small_model(0)
    trainer = next_token_trainer(straight, midtrain_documents(), midtrain_config(), 0)
    for _ in range(6):
        trainer.step()
    interrupted = small_model(0)
    first = next_token_trainer(interrupted, midtrain_documents(), midtrain_config(), 0)
    for _ in range(4):
        first.step()
    resumed = small_model(5)
    resumed.load_state_dict(interrupted.state_dict())
    second = next_token_trainer(resumed, midtrain_documents(), midtrain_config(), 0)
    second.load_state_dict(first.state_dict())
    assert second.num_steps_taken == 4
    for _ in range(2):
        second.step()
    _assert_same(straight, resumed)


def _assert_same(a: LanguageModel, b: LanguageModel) -> None:
    for (name, p), q in zip(a.named_parameters(), b.parameters(), strict=True):
        assert torch.equal(p, q), name
