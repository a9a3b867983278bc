"""Division of groups into updates, and weights of their tokens."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.config import LossConfig
from etude.training.batches import TrainingGroup, TrainingSequence, Update, split_updates

TOKENS = LossConfig(normalizer="tokens")


def _sequence(num_trained: int, name: str = "") -> TrainingSequence:
    length = num_trained + 2
    sampled = np.arange(length) >= 2
    ones = np.ones(length, dtype=np.float32)
    return TrainingSequence(np.zeros(length, dtype=np.int32), sampled, ones - 1, ones, segment_id=name)


def _group(chains: list[list[int]], name: str = "g") -> TrainingGroup:
    """`chains`: trained tokens of each segment of each trajectory."""
    return TrainingGroup(
        tuple(
            tuple(_sequence(length, f"{name}/{i}#{j}") for j, length in enumerate(chain))
            for i, chain in enumerate(chains)
        )
    )


CHAINS = st.lists(st.lists(st.integers(0, 9), max_size=4), max_size=4)


@given(st.lists(CHAINS, max_size=9), st.integers(1, 5))
def test_updates_take_whole_groups_in_turn(groups: list[list[list[int]]], num_updates: int) -> None:
    made = [_group(chains, str(number)) for number, chains in enumerate(groups)]
    updates = split_updates(made, TOKENS, num_updates)
    assert len(updates) <= num_updates
    names = [s.segment_id for update in updates for s in update]
    given_names = [s.segment_id for group in made for chain in group.chains for s in chain]
    assert sorted(names) == sorted(given_names)
    holders = [{name.split("/")[0] for name in (s.segment_id for s in update)} for update in updates]
    for number in range(len(groups)):
        assert sum(str(number) in holder for holder in holders) <= 1


@given(st.lists(CHAINS, max_size=6), st.integers(1, 3))
def test_every_trained_token_has_a_place_of_its_own(groups: list[list[list[int]]], num_updates: int) -> None:
    updates = split_updates([_group(chains) for chains in groups], TOKENS, num_updates)
    places = [int(p) for update in updates for s in update for p in s.places[s.sampled]]
    assert places == list(range(len(places)))


def _total(update: Update) -> float:
    return sum(s.weight * s.num_trained for s in update)


@given(st.lists(CHAINS, min_size=1, max_size=4))
def test_means_have_weights_that_sum_to_one(groups: list[list[list[int]]]) -> None:
    made = [_group(chains) for chains in groups]
    for update in split_updates(made, TOKENS, 1):
        if any(s.num_trained for s in update):
            assert _total(update) == pytest.approx(1.0)
    for update in split_updates(made, LossConfig(normalizer="sequences"), 1):
        lengths = [sum(chain) for chains in groups for chain in chains]
        if lengths:
            assert _total(update) == pytest.approx(sum(n > 0 for n in lengths) / len(lengths))


@pytest.mark.parametrize("normalizer", ["group_constant", "tokens", "sequences"])
def test_how_often_a_session_was_summarised_changes_no_weight(normalizer: str) -> None:
    loss = LossConfig(normalizer=normalizer, constant_tokens=10)  # type: ignore[arg-type]
    (whole,) = split_updates([_group([[12], [6]]), _group([[3]])], loss, 1)
    (cut,) = split_updates([_group([[4, 5, 0, 3], [6]]), _group([[3]])], loss, 1)
    assert {s.weight for s in cut[:4]} == {whole[0].weight}
    assert [s.weight for s in cut[4:]] == [s.weight for s in whole[1:]]


def test_the_normalisers_are_their_formulas() -> None:
    groups = [_group([[4, 2], [3]]), _group([[5]])]
    weights = {
        name: [s.weight for s in split_updates(groups, LossConfig(normalizer=name, constant_tokens=10), 1)[0]]
        for name in ("group_constant", "tokens", "sequences")
    }
    alike = pytest.approx([1 / 30] * 4)
    assert weights["group_constant"] == alike, "tokens of a small group, such as a fork's, weigh no more"
    assert weights["tokens"] == pytest.approx([1 / 14] * 4)
    assert weights["sequences"] == pytest.approx([1 / 18, 1 / 18, 1 / 9, 1 / 15])


def test_a_chain_that_cannot_be_trained_on_keeps_its_place_in_the_group() -> None:
    loss = LossConfig(constant_tokens=10)
    (update,) = split_updates([_group([[4], []])], loss, 1)
    assert [s.weight for s in update] == pytest.approx([1 / 20])
