"""Micro-batches contain every sequence once, respect their limit, and are balanced over ranks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.errors import ConfigError
from etude.training.packing import Packing, pack_sequences, sequence_cost

RAGGED = st.lists(st.integers(1, 300), max_size=60)


def _batches(packing: Packing) -> list[list[int]]:
    return [batch for batches in packing for batch in batches]


def _waste(lengths: list[int], packing: Packing) -> float:
    """Share of the ranks' time spent waiting for the slowest of each round."""
    costs = [sequence_cost(length) for length in lengths]
    rounds = zip(*packing, strict=True)
    slowest = sum(max(sum(costs[i] for i in batch) for batch in batches) for batches in rounds)
    return 1.0 - sum(costs) / (len(packing) * slowest) if slowest else 0.0


@given(RAGGED, st.integers(1, 400), st.integers(1, 5))
def test_every_sequence_is_packed_once_within_the_bound(
    lengths: list[int], max_tokens: int, num_ranks: int
) -> None:
    packing = pack_sequences(lengths, max_tokens, num_ranks)
    assert sorted(i for batch in _batches(packing) for i in batch) == list(range(len(lengths)))
    assert len(packing) == num_ranks
    assert len({len(batches) for batches in packing}) == 1
    for batch in _batches(packing):
        assert len(batch) <= 1 or sum(lengths[i] for i in batch) <= max_tokens
        assert [lengths[i] for i in batch] == sorted((lengths[i] for i in batch), reverse=True)
    assert packing == pack_sequences(lengths, max_tokens, num_ranks)
    assert 0.0 <= _waste(lengths, packing) < 1.0


@given(RAGGED.filter(bool))
def test_few_micro_batches_are_made(lengths: list[int]) -> None:
    packing = pack_sequences(lengths, 300)
    least = -(-sum(lengths) // 300)
    assert all(_batches(packing))
    # Best-fit decreasing needs at most 11/9 of the best number and 6/9 (Dosa 2007); two bins of the best
    # packing hold more than one bin's room between them.
    assert len(packing[0]) <= 11 / 9 * (2 * least + 1) + 1


def _sessions(seed: int, shape: tuple[float, float], num_ranks: int) -> list[int]:
    """Lengths as agents' sessions have them: lognormal, cut at the window."""
    drawn = np.random.default_rng(seed).lognormal(*shape, size=64 * num_ranks)
    return np.clip(drawn, 16, 32_768).astype(int).tolist()


def _can_be_shared(lengths: list[int], packing: Packing) -> bool:
    """Whether no sequence costs more than a micro-batch does on average."""
    costs = [sequence_cost(length) for length in lengths]
    return max(costs) <= sum(costs) / (len(packing) * len(packing[0]))


@given(st.integers(0, 10_000), st.sampled_from([(5.5, 0.6), (7.0, 1.0)]), st.sampled_from([1, 2, 4, 8]))
def test_ranks_do_not_wait_long_where_no_sequence_is_too_long_to_share(
    seed: int, shape: tuple[float, float], num_ranks: int
) -> None:
    lengths = _sessions(seed, shape, num_ranks)
    packing = pack_sequences(lengths, 32_768, num_ranks)
    if _can_be_shared(lengths, packing):
        # 5,700 such drawings wait 0.1 % on average; twice it was just above 5 %, where memory bound them.
        assert _waste(lengths, packing) <= 0.1
    used = sum(lengths) / (32_768 * num_ranks)
    assert len(packing[0]) <= np.ceil(used / 0.85)


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_ranks_hardly_wait_on_average_where_no_sequence_is_too_long_to_share(num_ranks: int) -> None:
    wastes = []
    for seed in range(40):
        lengths = _sessions(seed, (7.0, 1.0), num_ranks)
        packing = pack_sequences(lengths, 32_768, num_ranks)
        if _can_be_shared(lengths, packing):
            wastes.append(_waste(lengths, packing))
    assert wastes
    assert np.mean(wastes) <= 0.01


def test_ranks_wait_under_three_percent_on_sessions_up_to_the_window() -> None:
    wastes = []
    for seed in range(12):
        lengths = _sessions(seed, (8.0, 1.2), 8)
        wastes.append(_waste(lengths, pack_sequences(lengths, 32_768, 8)))
    assert np.mean(wastes) <= 0.03


def test_a_sequence_over_the_bound_is_alone() -> None:
    assert pack_sequences([5, 100, 6], 20) == [[[1], [2, 0]]]


def test_ranks_without_sequences_have_empty_micro_batches() -> None:
    assert pack_sequences([7], 20, 3) == [[[0]], [[]], [[]]]
    assert pack_sequences([], 20, 2) == [[], []]
    assert _waste([], [[], []]) == 0.0
    assert _waste([7], [[[0]], [[]]]) == pytest.approx(0.5)


def test_long_sequences_count_for_their_squares() -> None:
    packing = pack_sequences([400, 100, 100, 100, 100], 1000, 2, crossover_tokens=1.0)
    assert [sorted(batch) for batch in _batches(packing)] == [[0], [1, 2, 3, 4]]


@pytest.mark.parametrize("arguments", [([0], 5, 1), ([3], 0, 1), ([3], 5, 0)])
def test_what_cannot_be_packed_is_refused(arguments: tuple[list[int], int, int]) -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        pack_sequences(*arguments)


def test_of_what_all_sequences_begin_with_three_quarters_are_counted_once_in_each_micro_batch() -> None:
    lengths = [700, 600, 600, 500]
    assert [len(rank) for rank in pack_sequences(lengths, 1_500)] == [2]
    (batches,) = pack_sequences(lengths, 1_500, shared_tokens=400)
    assert [sorted(batch) for batch in batches] == [[0, 1, 2, 3]], "300, and 400, 300, 300, 200 of their own"
    assert len(pack_sequences(lengths, 1_499, shared_tokens=400)[0]) == 2


def test_many_sequences_that_hardly_differ_do_not_go_into_one_micro_batch() -> None:
    """Attention has queries, keys and values for every sequence, whatever is shared."""
    (batches,) = pack_sequences([1_001] * 64, 8_192, shared_tokens=1_000)
    assert max(len(batch) for batch in batches) * 1_001 < 4 * 8_192
