"""The model over packed sequences: isolation, routes, the balance loss, scoring."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from etude.model import LanguageModel, PackedAttention, ReplayedRoutes, RouterStatistics
from etude.model.scoring import PackedSequences, packed_logprobs, score_sequences
from etude.records import NATIVE_ROUTE
from tests.model.builders import VOCAB, fresh_routes, random_tokens, small_model


def _plain_logprobs(model: LanguageModel, tokens: NDArray[np.int32], temperature: float = 1.0) -> Tensor:
    """log p of each token by itself, [T]; 0 for the first."""
    ids = torch.from_numpy(tokens.astype(np.int64))
    hidden = model(ids, torch.arange(len(ids)), PackedAttention([len(ids)]))
    distribution = (model.logits(hidden) / temperature).log_softmax(-1)
    return torch.cat((torch.zeros(1), distribution[:-1].gather(-1, ids[1:, None]).squeeze(-1)))


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=6), st.sampled_from([1.0, 0.6]))
def test_scores_come_back_in_the_given_order(lengths: list[int], temperature: float) -> None:
    model = small_model(1)
    sequences = [random_tokens(length, seed) for seed, length in enumerate(lengths)]
    scores = score_sequences(model, sequences, temperature=temperature)
    for sequence, score in zip(sequences, scores, strict=True):
        expected = _plain_logprobs(model, sequence, temperature).detach().numpy()
        assert score[0] == 0.0
        np.testing.assert_allclose(score, expected, atol=1e-5)


@settings(max_examples=20)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_unpacking_undoes_packing(lengths: list[int]) -> None:
    sequences = [random_tokens(length, seed) for seed, length in enumerate(lengths)]
    batch = PackedSequences.pack(sequences)
    rows = [sequence.astype(np.float32) for sequence in sequences]
    packed = batch.pack_rows(rows)
    assert torch.equal(packed.long(), batch.tokens)
    for given_row, unpacked in zip(rows, batch.unpack(packed.numpy()), strict=True):
        np.testing.assert_array_equal(given_row, unpacked)
    for start, index in zip(batch.starts, batch.order, strict=True):
        assert batch.positions[start : start + lengths[index]].tolist() == list(range(lengths[index]))


def test_changing_one_packed_sequence_moves_others_by_rounding_at_most() -> None:
    """Experts see other row counts then, and sums of other blocks: last bits may differ, nothing more."""
    model = small_model(2)
    kept, changed = random_tokens(30, 0), random_tokens(20, 1)
    before = score_sequences(model, [changed, kept])
    after = score_sequences(model, [(changed + 1) % VOCAB, kept])
    np.testing.assert_allclose(before[1], after[1], atol=1e-6)
    assert np.abs(before[0] - after[0])[1:].max() > 0.1


def test_a_token_does_not_change_what_came_before_it() -> None:
    model = small_model(3)
    tokens = random_tokens(20)
    changed = tokens.copy()
    changed[12:] = (changed[12:] + 7) % VOCAB
    before, after = score_sequences(model, [tokens])[0], score_sequences(model, [changed])[0]
    np.testing.assert_allclose(before[:12], after[:12], atol=1e-6)
    assert np.abs(before - after)[12:].max() > 0.1


def test_replaying_the_models_own_routes_changes_nothing() -> None:
    model = small_model(4)
    sequences = [random_tokens(n, n) for n in (7, 25, 13)]
    routes = [fresh_routes(model, sequence) for sequence in sequences]
    native = score_sequences(model, sequences)
    replayed = score_sequences(model, sequences, routes=routes)
    for a, b in zip(native, replayed, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


def test_replay_uses_the_recorded_experts_whatever_the_router_says() -> None:
    model = small_model(4)
    sequence = random_tokens(20)
    routes = fresh_routes(model, sequence)
    with torch.no_grad():
        for block in model.blocks:
            block.experts.router.neg_()  # type: ignore[union-attr]
    assert (fresh_routes(model, sequence) != routes).any()
    native, replayed = (
        score_sequences(model, [sequence])[0],
        score_sequences(model, [sequence], routes=[routes])[0],
    )
    assert np.abs(native - replayed).max() > 0.01


@pytest.mark.parametrize("layer", [0, 1])
def test_unrecorded_positions_are_routed_natively_and_recorded_ones_replayed(layer: int) -> None:
    model = small_model(5)
    sequence = random_tokens(20)
    native = fresh_routes(model, sequence)
    other = (native + 1) % 4
    mixed = other.copy()
    mixed[8:] = NATIVE_ROUTE
    replay = ReplayedRoutes(torch.from_numpy(mixed))
    scores = torch.rand((20, 4), generator=torch.Generator().manual_seed(0))
    chosen = replay.select(layer, scores)
    assert chosen[:8].tolist() == other[:8, layer].tolist()
    assert chosen[8:].tolist() == scores.topk(2).indices[8:].tolist()
    mostly_unrecorded = np.full_like(native, NATIVE_ROUTE)
    np.testing.assert_allclose(
        score_sequences(model, [sequence], routes=[mostly_unrecorded])[0],
        score_sequences(model, [sequence])[0],
        atol=1e-6,
    )


def test_gradients_reach_the_router_under_replay_and_agree_with_native_ones() -> None:
    model = small_model(6)
    sequence = random_tokens(30)
    batch = PackedSequences.pack([sequence])
    targets = torch.arange(1, 30)
    gradients = []
    for routes in (None, batch.pack_rows([fresh_routes(model, sequence)])):
        model.zero_grad()
        logprobs, _ = packed_logprobs(model, batch, targets, routes=routes)
        logprobs.sum().backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == dict(model.named_parameters()).keys()
    for name, gradient in gradients[1].items():
        torch.testing.assert_close(gradient, gradients[0][name], rtol=1e-4, atol=1e-5)
    assert gradients[1]["blocks.0.experts.router"].abs().max() > 1e-3


def test_entropy_is_that_of_the_scored_distribution() -> None:
    model = small_model(6)
    sequence = random_tokens(12)
    batch = PackedSequences.pack([sequence])
    _, entropy = packed_logprobs(model, batch, torch.arange(1, 12), temperature=0.5)
    hidden = model(batch.tokens, batch.positions, batch.attention)
    distribution = torch.distributions.Categorical(logits=model.logits(hidden[:-1]).detach() / 0.5)
    torch.testing.assert_close(entropy, distribution.entropy(), rtol=1e-4, atol=1e-5)
    assert not entropy.requires_grad


def test_the_balance_loss_is_one_when_even_and_the_expert_count_when_collapsed() -> None:
    even = torch.full((4,), 0.25)
    one = torch.tensor([1.0, 0.0, 0.0, 0.0])
    assert float(RouterStatistics([even, even], [even, one]).balance_loss()) == pytest.approx(1.0)
    assert float(RouterStatistics([one], [one]).balance_loss()) == pytest.approx(4.0)
    assert float(RouterStatistics([one, even], [one, even]).balance_loss()) == pytest.approx(2.5)


def test_the_balance_loss_pulls_the_router_from_its_favourite() -> None:
    model = small_model(7)
    batch = PackedSequences.pack([random_tokens(60)])
    statistics = RouterStatistics([], [])
    packed_logprobs(model, batch, torch.tensor([1]), statistics=statistics)
    assert len(statistics.shares) == len(statistics.probabilities) == 2
    for share, probability in zip(statistics.shares, statistics.probabilities, strict=True):
        assert float(share.sum()) == pytest.approx(1.0, abs=1e-6)
        assert probability.detach().sum().item() == pytest.approx(1.0, abs=1e-5)
    before = statistics.balance_loss()
    before.backward()
    with torch.no_grad():
        for block in model.blocks:
            router = block.experts.router  # type: ignore[union-attr]
            router.sub_(0.05 * router.grad / router.grad.norm())  # type: ignore[union-attr, operator]
    after = RouterStatistics([], [])
    packed_logprobs(model, batch, torch.tensor([1]), statistics=after)
    assert after.balance_loss().item() < before.item()


def test_equal_seeds_give_equal_weights_and_others_differ() -> None:
    a, b, c = small_model(1), small_model(1), small_model(2)
    for (name, p), q, r in zip(a.named_parameters(), b.parameters(), c.parameters(), strict=True):
        assert torch.equal(p, q), name
        assert not torch.equal(p, r), name
