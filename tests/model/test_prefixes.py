"""Shared prefixes of sequences are computed once, with unchanged results."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from etude.model import LanguageModel, prefixes
from etude.model.kernels.invariant import InvariantOps
from etude.model.kernels.native import find_compiler
from etude.model.prefixes import find_shared_rows
from etude.model.scoring import PackedSequences, packed_logprobs
from tests.model.builders import random_tokens, small_model

SYSTEM, TASK, OTHER = random_tokens(70, 1), random_tokens(30, 2), random_tokens(20, 3)
TURNS = [random_tokens(length, seed) for seed, length in enumerate((25, 9, 40, 1, 17))]
SESSIONS = [
    np.concatenate(parts)
    for parts in (
        (SYSTEM, TASK, TURNS[0], TURNS[1]),
        (SYSTEM, TASK, TURNS[0], TURNS[2]),
        (SYSTEM, TASK, TURNS[0], TURNS[2]),
        (SYSTEM, TASK, TURNS[3]),
        (SYSTEM, OTHER, TURNS[4]),
        (OTHER,),
    )
]


def compute(
    model: LanguageModel, sequences: Sequence[NDArray[np.int32]], num_rows: list[int]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probabilities of all tokens but the first ones, and gradients of a weighted sum of them."""
    batch = PackedSequences.pack(sequences)
    first = torch.zeros(len(batch.tokens), dtype=torch.bool)
    first[batch.starts] = True
    targets = (~first).nonzero().flatten()
    model.zero_grad()
    handle = model.blocks[0].register_forward_pre_hook(lambda _, given: num_rows.append(len(given[0])))
    logprobs, _ = packed_logprobs(model, batch, targets)
    handle.remove()
    weights = torch.linspace(-1.0, 2.0, len(targets))
    (logprobs * weights).sum().backward()
    return logprobs.detach(), {
        name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
    }


def whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefixes, "LEAST_SAVED", 2.0)


def dense_model(seed: int) -> LanguageModel:
    return small_model(seed, architecture="qwen3", intermediate_size=48, max_positions=256)


def test_sessions_of_one_beginning_take_fewer_rows_with_the_same_results(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, num_rows = dense_model(0), list[int]()
    shared, shared_gradients = compute(model, SESSIONS, num_rows)
    whole(monkeypatch)
    expected, gradients = compute(model, SESSIONS, num_rows)
    distinct = len({tuple(s[: i + 1]) for s in SESSIONS for i in range(len(s))})
    assert num_rows == [distinct, sum(map(len, SESSIONS))]
    torch.testing.assert_close(shared, expected, atol=2e-5, rtol=0)
    assert shared_gradients.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(shared_gradients[name], gradient, atol=2e-4, rtol=1e-3)


@pytest.mark.skipif(find_compiler() is None, reason="no C compiler")
def test_with_invariant_operations_the_log_probabilities_are_equal_to_the_bit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = dense_model(1)
    model.ops = InvariantOps()
    shared, _ = compute(model, SESSIONS, [])
    whole(monkeypatch)
    expected, _ = compute(model, SESSIONS, [])
    assert torch.equal(shared, expected)


def test_a_model_that_routes_computes_every_row() -> None:
    num_rows = list[int]()
    compute(small_model(2, max_positions=256), SESSIONS, num_rows)
    assert num_rows == [sum(map(len, SESSIONS))]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=8))
def test_every_row_is_one_of_the_same_tokens_and_none_is_there_twice(drawn: list[list[int]]) -> None:
    sequences = sorted((np.array(tokens, np.int32) for tokens in drawn), key=len, reverse=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefixes, "LEAST_SAVED", 0.0)
        shared = find_shared_rows(sequences)
    assert shared is not None
    source, first = shared.source, shared.first
    beginnings = [tuple(tokens[: place + 1]) for tokens in sequences for place in range(len(tokens))]
    assert len(first) == len(set(beginnings))
    assert [beginnings[first[row]] for row in source] == beginnings
    assert list(source[first]) == list(range(len(first)))
    starts = np.cumsum([0, *map(len, sequences)])
    for start, tokens, repeated in zip(starts[:-1], sequences, shared.repeated, strict=True):
        own = np.arange(start, start + len(tokens))
        assert list(np.isin(own, first)) == [place >= repeated for place in range(len(tokens))]
