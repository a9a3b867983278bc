"""Drafts save steps and change no token; what is drawn keeps its distribution."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from etude.inference import NgramLookup
from etude.inference.engine import Kernels
from etude.inference.native.structures import Lookup
from etude.model import LanguageModel, PackedAttention
from etude.model.kernels.native import load_library
from tests.inference.builders import ALL_KERNELS, Client, drain, needs_compiler, prompt, small_engine
from tests.inference.invariants import check_engine
from tests.model.builders import small_model

_CHI_SQUARE_63_AT_1E_4 = 114.6
"""Quantile 0.9999 of chi-square with 63 degrees of freedom."""


def _array(*tokens: int) -> np.ndarray:
    return np.array(tokens, dtype=np.int32)


def test_a_draft_is_what_followed_the_last_time() -> None:
    lookup = NgramLookup(4, longest=3, shortest=2)
    assert lookup.draft(0, _array(1, 2, 3, 4, 9, 2, 3), 4).tolist() == [4, 9, 2, 3]
    assert lookup.draft(0, _array(1, 2, 3, 4, 9, 2, 3), 2).tolist() == [4, 9]
    assert lookup.draft(0, _array(2, 3, 7, 2, 3, 8, 2, 3), 1).tolist() == [8], "the last of several"
    assert lookup.draft(0, _array(1, 2, 3, 5, 2, 3, 6, 1, 2, 3), 1).tolist() == [5], "the longest that agrees"
    for nothing in (_array(), _array(1), _array(1, 2), _array(1, 2, 3, 4), _array(3, 1, 2, 3)):
        assert lookup.draft(0, nothing, 4).tolist() == []
    assert lookup.draft(0, _array(1, 2, 1, 2), 0).tolist() == []


@given(st.lists(st.integers(0, 2), max_size=30), st.integers(0, 6), st.integers(1, 3), st.integers(0, 2))
def test_a_draft_follows_an_earlier_place_that_ends_alike(
    tokens: list[int], most: int, shortest: int, more: int
) -> None:
    lookup = NgramLookup(5, longest=shortest + more, shortest=shortest)
    draft = lookup.draft(0, _array(*tokens), most).tolist()
    assert len(draft) <= min(most, 5)
    if draft:
        context = [*tokens[-shortest:], *draft]
        starts = range(len(tokens) - len(context) + 1)
        assert any(tokens[start : start + len(context)] == context for start in starts)


@needs_compiler
@given(st.lists(st.integers(0, 2), max_size=30), st.integers(0, 6), st.integers(1, 3), st.integers(0, 2))
def test_native_code_looks_up_the_same_drafts(tokens: list[int], most: int, shortest: int, more: int) -> None:
    lookup = NgramLookup(6, longest=shortest + more, shortest=shortest)
    line = np.full(len(tokens) + most, -1, dtype=np.int32)
    line[: len(tokens)] = tokens
    native = Lookup(lookup.longest, lookup.shortest)
    count = load_library().etude_look_up(
        ctypes.byref(native),
        ctypes.c_int64(len(tokens)),
        ctypes.c_void_p(line.ctypes.data),
        ctypes.c_int64(most),
    )
    expected = lookup.draft(0, _array(*tokens), most)
    assert line[len(tokens) :].tolist() == [*expected.tolist(), *[-1] * (most - count)]


def test_lookups_that_make_no_sense_are_refused() -> None:
    for values in ((0, 3, 2), (4, 2, 3), (4, 3, 0)):
        with pytest.raises(ValueError, match="NgramLookup"):
            NgramLookup(*values)


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ALL_KERNELS)
@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0])
def test_tokens_and_logprobs_are_those_without_drafts(temperature: float, kernels: Kernels) -> None:
    model = small_model(3)
    plain = small_engine(model, kernels=kernels)
    drafting = small_engine(
        model, kernels=kernels, drafts=NgramLookup(4, longest=2, shortest=1, adaptive=False)
    )
    for number in range(6):
        pair = Client(f"s{number}", number), Client(f"s{number}", number)
        for client, engine in zip(pair, (plain, drafting), strict=True):
            client.ask(engine, prompt(20, number) * 2, max_tokens=40, temperature=temperature)
            drain(engine, [client])
        assert pair[1].tokens == pair[0].tokens
        if kernels == "native":
            assert pair[1].logprobs == pair[0].logprobs
        if temperature == 1.0:
            pair[1].check(model)
    counters = drafting.counters
    assert 0 < counters.accepted_tokens < counters.drafted_tokens
    assert counters.steps < plain.counters.steps, "accepted drafts save steps"
    check_engine(drafting)


def test_a_stop_token_within_a_draft_ends_the_message_there() -> None:
    model = small_model(3)
    options = {"temperature": 0.0, "max_tokens": 60}
    repeated, plain = Client("repeated", 0), Client("plain", 0)
    engine = small_engine(model, drafts=NgramLookup(8, longest=1, shortest=1, adaptive=False))
    repeated.ask(engine, prompt(8, 0), **options)
    drain(engine, [repeated])
    stop = repeated.tokens[30]
    first = repeated.tokens.index(stop, 8)
    stopped = Client("stopped", 0)
    stopped.ask(engine, prompt(8, 0), **options, stop_tokens=frozenset({stop}))
    drain(engine, [stopped])
    assert stopped.tokens == repeated.tokens[: first + 1]
    plain.ask(small := small_engine(model), prompt(8, 0), **options, stop_tokens=frozenset({stop}))
    drain(small, [plain])
    assert plain.tokens == stopped.tokens
    stopped.ask(engine, prompt(3, 1), temperature=0.0)
    drain(engine, [stopped])
    stopped.check(model)


@pytest.mark.slow
def test_second_tokens_follow_their_distribution_though_they_are_drafted() -> None:
    """Of many samples of one prompt, the second token given the first, against a plain engine's scores."""
    model = small_model(3)
    engine = small_engine(
        model, num_sessions=64, drafts=NgramLookup(2, longest=1, shortest=1, adaptive=False)
    )
    context = prompt(16, 0) * 2
    counts = np.zeros(64)
    for start in range(0, 3000, 60):
        clients = [Client(f"s{start + i}", start + i) for i in range(60)]
        for client in clients:
            client.ask(engine, context, max_tokens=3)
        drain(engine, clients)
        for client in clients:
            counts[client.tokens[-2]] += 1
            engine.close(client.name)
    expected = _second_token(model, context) * counts.sum()
    likely = expected > 5
    rest = counts[~likely].sum() - expected[~likely].sum()
    statistic = ((counts - expected)[likely] ** 2 / expected[likely]).sum()
    statistic += rest**2 / max(expected[~likely].sum(), 1.0)
    assert engine.counters.drafted_tokens > 100
    assert statistic < _CHI_SQUARE_63_AT_1E_4


@torch.no_grad()
def _second_token(model: LanguageModel, context: list[int]) -> np.ndarray:
    def distribution(tokens: list[int]) -> np.ndarray:
        ids = torch.tensor(tokens)
        hidden = model(ids, torch.arange(len(ids)), PackedAttention([len(ids)]))
        return model.logits(hidden[-1:])[0].double().softmax(-1).numpy()

    first = distribution(context)
    return np.sum([p * distribution([*context, token]) for token, p in enumerate(first)], axis=0)
