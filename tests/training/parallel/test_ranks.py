"""One process as a group of one, and distribution of a plan over ranks."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from etude.training.parallel import Share, SingleRank
from etude.training.parallel.ranks import shares_of
from tests.model.builders import small_model

PLANS = st.lists(st.lists(st.lists(st.integers(0, 99), max_size=4), max_size=4), min_size=1, max_size=4)


def test_one_process_trains_on_the_whole_plan() -> None:
    assert SingleRank().share([[[0, 2], [1]]]) == [Share((0, 2)), Share((1,))]


@given(PLANS)
def test_every_rank_takes_as_many_steps_and_nothing_counts_twice(plan: list[list[list[int]]]) -> None:
    shares = [shares_of(plan, rank) for rank in range(len(plan))]
    assert len({len(own) for own in shares}) == 1
    counted = [[list(share.indices) for share in own if share.weight == 1.0] for own in shares]
    assert counted == [[batch for batch in batches if batch] for batches in plan]
    assert all(share.weight in (0.0, 1.0) and share.indices for own in shares for share in own)


def test_one_process_has_the_model_whole_and_sums_nothing() -> None:
    ranks, model = SingleRank(), small_model(0)
    assert ranks.whole_model(model) is model
    rows = torch.arange(4.0)
    assert torch.equal(ranks.all_reduce_(rows.clone()), rows)


def test_a_frozen_copy_does_not_learn_and_shares_no_memory() -> None:
    model = small_model(0)
    frozen = SingleRank().frozen_copy(model)
    assert not any(parameter.requires_grad for parameter in frozen.parameters())
    with torch.no_grad():
        model.final_norm.fill_(7.0)
    assert not bool((frozen.final_norm == 7.0).any())
    SingleRank().load_weights(frozen, model.state_dict())
    assert bool((frozen.final_norm == 7.0).all())
