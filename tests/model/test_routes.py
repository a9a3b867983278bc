"""Recorded routes: replayed once, in their order, with the trainer's own gates."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.errors import RouteReplayError
from etude.model import RecordedRoutes, ReplayedRoutes, missing_route
from etude.model.scoring import PackedSequences, packed_logprobs
from tests.model.builders import fresh_routes, random_tokens, small_model


def _replay(chosen: list[list[int]], scores: list[list[float]], min_share: float) -> list[list[int]]:
    recorded = torch.tensor(chosen, dtype=torch.uint8).unsqueeze(1)
    return ReplayedRoutes(recorded, min_share=min_share).select(0, torch.tensor(scores)).tolist()


def test_an_implausible_expert_is_replaced_in_its_place_by_the_best_that_is_not_replayed() -> None:
    scores = [[0.5, 0.3, 0.15, 0.04, 0.01]]
    assert _replay([[3, 1]], scores, 0.2) == [[0, 1]], "0.04 is under a fifth of 0.3"
    assert _replay([[3, 1]], scores, 0.1) == [[3, 1]]
    assert _replay([[0, 4]], scores, 0.2) == [[0, 1]]
    assert _replay([[4, 3]], scores, 0.2) == [[0, 1]]
    assert _replay([[1, 0]], scores, 1.0) == [[1, 0]], "the order of the record stays"


def test_where_scores_are_not_positive_nothing_is_filtered() -> None:
    assert _replay([[3, 2]], [[-1.0, -2.0, -3.0, -9.0]], 1.0) == [[3, 2]]


def test_an_unrecorded_row_is_the_routers_with_and_without_the_filter() -> None:
    gone = missing_route(torch.uint8)
    for min_share in (0.0, 0.5):
        assert _replay([[gone, gone], [2, 1]], [[0.1, 0.2, 0.7], [0.1, 0.4, 0.5]], min_share) == [
            [2, 1],
            [2, 1],
        ]


@settings(deadline=None)
@given(
    st.integers(1, 6).flatmap(
        lambda k: st.tuples(st.just(k), st.integers(k, 12), st.integers(0, 2**31), st.floats(0, 1))
    )
)
def test_the_filter_keeps_experts_distinct_and_plausible(drawn: tuple[int, int, int, float]) -> None:
    top_k, num_experts, seed, min_share = drawn
    generator = torch.Generator().manual_seed(seed)
    scores = (4 * torch.randn(5, num_experts, generator=generator)).softmax(-1)
    recorded = torch.stack([torch.randperm(num_experts, generator=generator)[:top_k] for _ in range(5)])
    replay = ReplayedRoutes(recorded.to(torch.uint8).unsqueeze(1), min_share=min_share)
    chosen = replay.select(0, scores)
    last = scores.topk(top_k, dim=-1).values[:, -1:]
    plausible = scores.gather(1, recorded) >= min_share * last
    assert torch.equal(chosen[plausible], recorded[plausible])
    assert bool((scores.gather(1, chosen) >= min_share * last).all())
    assert all(len(set(row)) == top_k for row in chosen.tolist())


def test_a_record_is_consumed_by_one_forward_pass_exactly() -> None:
    model = small_model()
    tokens = random_tokens(12)
    batch = PackedSequences.pack([tokens])
    targets = torch.arange(1, 12)
    replay = ReplayedRoutes(torch.from_numpy(fresh_routes(model, tokens)), targets - 1)
    with pytest.raises(RouteReplayError, match="exactly once"):
        replay.check_consumed()
    packed_logprobs(model, batch, targets, routes=replay)
    replay.check_consumed()
    packed_logprobs(model, batch, targets, routes=replay)
    with pytest.raises(RouteReplayError) as caught:
        replay.check_consumed()
    assert caught.value.field == "routes"


@pytest.mark.parametrize("architecture", ["qwen3_moe", "deepseek_v3"])
def test_gradients_reach_the_router_through_replayed_experts(
    architecture: Literal["qwen3_moe", "deepseek_v3"],
) -> None:
    """A replayed choice is fixed; the gates that weigh it are the trainer's."""
    changes = {} if architecture == "qwen3_moe" else {"architecture": architecture, "num_kv_heads": 2}
    model, other = small_model(0, **changes), small_model(5, **changes)
    tokens = random_tokens(20)
    ids, targets = PackedSequences.pack([tokens]), torch.arange(1, 20)
    recorder = RecordedRoutes.of(other.config)
    with torch.no_grad():
        packed_logprobs(other, ids, targets, routes=recorder)
    routes = recorder.pop_routes(20, targets - 1)
    replay = ReplayedRoutes(routes, targets - 1)
    packed_logprobs(model, ids, targets, routes=replay)[0].sum().backward()
    for name, parameter in model.named_parameters():
        if name.endswith("experts.router"):
            assert parameter.grad is not None and parameter.grad.abs().max() > 1e-6, name


def test_what_a_pass_over_some_rows_recorded_is_replayed_as_it_was() -> None:
    model = small_model()
    batch = PackedSequences.pack([random_tokens(9, 1), random_tokens(14, 2)])
    targets = torch.tensor([3, 4, 8, 17, 20])
    recorder = RecordedRoutes.of(model.config)
    expected, _ = packed_logprobs(model, batch, targets, routes=recorder)
    routes = recorder.pop_routes(len(batch.tokens), targets - 1)
    assert routes.shape == (23, model.config.num_moe_layers, model.config.experts_per_token)
    missing = (routes[:, -1] == missing_route(routes.dtype)).any(-1)
    assert missing.nonzero().flatten().tolist() == sorted(set(range(23)) - {2, 3, 7, 16, 19})
    assert not bool((routes[:, :-1] == missing_route(routes.dtype)).any())
    with torch.no_grad():
        model.blocks[0].experts.router.add_(torch.randn(model.blocks[0].experts.router.shape))  # type: ignore[union-attr, operator]
    replayed, _ = packed_logprobs(model, batch, targets, routes=routes)
    native, _ = packed_logprobs(model, batch, targets)
    assert (native - expected).abs().max() > 1e-3
    chosen = ReplayedRoutes(routes, targets - 1)
    packed_logprobs(model, batch, targets, routes=chosen)
    np.testing.assert_allclose(
        replayed.detach(), packed_logprobs(model, batch, targets, routes=routes)[0].detach()
    )
