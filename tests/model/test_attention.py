"""Packed attention is plain causal attention of each sequence by itself."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from etude.model import PackedAttention

_LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=7).map(lambda items: sorted(items, reverse=True))


def _inputs(count: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn((count, 4, 8), generator=generator)
    key, value = torch.randn((2, count, 2, 8), generator=generator)
    return query, key, value


def _plain(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """One sequence, by the definition: softmax(q k / sqrt(dim)) over what is not later."""
    key, value = key.repeat_interleave(2, dim=1), value.repeat_interleave(2, dim=1)
    scores = torch.einsum("qhd,khd->hqk", query, key) / math.sqrt(query.shape[-1])
    later = torch.ones(scores.shape[-2:]).triu(1).bool()
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(later, float("-inf")).softmax(-1), value)


@given(_LENGTHS, st.sampled_from([0.0, 0.15, 1.0]))
def test_packed_is_plain_attention_per_sequence(lengths: list[int], waste: float) -> None:
    inputs = _inputs(sum(lengths))
    packed = PackedAttention(lengths, waste).attend(0, *inputs)
    expected = [_plain(*parts) for parts in zip(*(tensor.split(lengths) for tensor in inputs), strict=True)]
    torch.testing.assert_close(packed, torch.cat(expected), rtol=1e-4, atol=1e-5)


@settings(max_examples=15, deadline=None)
@given(_LENGTHS)
def test_gradients_are_those_of_plain_attention(lengths: list[int]) -> None:
    inputs = [tensor.double().requires_grad_() for tensor in _inputs(sum(lengths))]
    weight = _inputs(sum(lengths), 1)[0].double()
    packed = PackedAttention(lengths).attend(0, *inputs)
    parts = zip(*(tensor.split(lengths) for tensor in inputs), strict=True)
    expected = torch.cat([_plain(*part) for part in parts])
    ours = torch.autograd.grad((packed * weight).sum(), inputs)
    theirs = torch.autograd.grad((expected * weight).sum(), inputs)
    torch.testing.assert_close(ours, theirs)


@settings(max_examples=20, deadline=None)
@given(_LENGTHS, st.data())
def test_changing_one_sequence_changes_no_bit_of_another(lengths: list[int], data: st.DataObject) -> None:
    changed = data.draw(st.integers(0, len(lengths) - 1))
    first = sum(lengths[:changed])
    inside = slice(first, first + lengths[changed])
    before = _inputs(sum(lengths))
    after = [tensor.clone() for tensor in before]
    for tensor in after:
        tensor[inside] *= -3.0
    attention = PackedAttention(lengths)
    old, new = attention.attend(0, *before), attention.attend(0, *after)
    others = torch.ones(sum(lengths), dtype=torch.bool)
    others[inside] = False
    assert torch.equal(old[others], new[others])
    assert not torch.equal(old[inside], new[inside])


def test_padding_stays_under_the_named_waste() -> None:
    lengths = [100, 98, 90, 60, 55, 20, 19, 3, 1, 1]
    for waste in (0.0, 0.1, 0.3):
        attention = PackedAttention(lengths, waste)
        for bucket in attention._buckets:
            assert 1 - bucket.num_rows / (bucket.num_sequences * bucket.length) <= waste + 1e-9
        assert sum(bucket.num_rows for bucket in attention._buckets) == sum(lengths)


def test_lengths_must_fall() -> None:
    with pytest.raises(AssertionError):
        PackedAttention([3, 5])
