"""Gather pairs have the gradients of plain indexing."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from etude.model.permute import dispatch, pad, permute, unpad


def _rows(count: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((count, 3), generator=generator, dtype=torch.float64).requires_grad_()


def _same(ours: torch.Tensor, plain: torch.Tensor, rows: torch.Tensor) -> None:
    """Equal values and, for the same gradient of the output, equal gradients of the input."""
    assert torch.equal(ours, plain)
    weight = _rows(len(ours), 1).detach()
    (a,) = torch.autograd.grad((ours * weight).sum(), rows)
    (b,) = torch.autograd.grad((plain * weight).sum(), rows)
    torch.testing.assert_close(a, b)


def _inverse(order: torch.Tensor) -> torch.Tensor:
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order))
    return inverse


@given(st.integers(1, 12), st.integers(1, 3), st.integers(0, 99))
def test_dispatch_is_indexing_by_the_copied_row(count: int, copies: int, seed: int) -> None:
    rows = _rows(count)
    order = torch.randperm(count * copies, generator=torch.Generator().manual_seed(seed))
    _same(dispatch(rows, order, _inverse(order), copies), rows[order // copies], rows)


@given(st.integers(1, 12), st.integers(0, 99))
def test_permute_is_indexing_and_its_inverse_undoes_it(count: int, seed: int) -> None:
    rows = _rows(count)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    inverse = _inverse(order)
    _same(permute(rows, order, inverse), rows[order], rows)
    assert torch.equal(permute(permute(rows, order, inverse), inverse, order), rows)


@given(st.lists(st.integers(1, 6), min_size=1, max_size=4))
def test_pad_fills_with_zeros_and_unpad_takes_them_out(lengths: list[int]) -> None:
    count, longest = sum(lengths), max(lengths)
    source = torch.full((len(lengths), longest), count)
    first = 0
    for index, length in enumerate(lengths):
        source[index, :length] = torch.arange(first, first + length)
        first += length
    source = source.flatten()
    place = (source < count).nonzero().flatten()
    rows = _rows(count)
    plain = torch.zeros((len(source), 3), dtype=torch.float64).index_put((place,), rows)
    _same(pad(rows, source, place), plain, rows)
    padded = _rows(len(source), 5)
    _same(unpad(padded, source, place), padded[place], padded)


def test_gradients_agree_with_finite_differences() -> None:
    rows, order = _rows(4), torch.tensor([3, 0, 7, 5, 1, 2, 6, 4])
    assert torch.autograd.gradcheck(lambda r: dispatch(r, order, _inverse(order), 2), (rows,))
    source, place = torch.tensor([0, 1, 2, 3, 4, 4]), torch.tensor([0, 1, 2, 3])
    assert torch.autograd.gradcheck(lambda r: unpad(pad(r, source, place) ** 2, source, place), (rows,))
