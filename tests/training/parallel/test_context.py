"""Splitting of sequences for context ranks: every token once, and balanced work."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from etude.training.parallel.context import Piece, cut_pieces, piece_rows

LENGTHS = st.lists(st.integers(1, 400), min_size=1, max_size=12).map(
    lambda lengths: tuple(sorted(lengths, reverse=True))
)


@given(LENGTHS, st.integers(1, 4), st.integers(1, 64))
def test_every_row_is_computed_exactly_once(lengths: tuple[int, ...], num_ranks: int, min_piece: int) -> None:
    pieces = cut_pieces(lengths, num_ranks, min_piece)
    rows = torch.cat([piece_rows(own) for own in pieces])
    assert torch.equal(rows.sort().values, torch.arange(sum(lengths)))


@given(st.integers(1, 4), st.integers(512, 5000))
def test_a_long_sequence_costs_every_rank_alike(num_ranks: int, length: int) -> None:
    """Its attention too: pairs of rows that see each other differ by little."""
    pieces = cut_pieces((length,), num_ranks, 64)
    seen = [sum((p.begin + p.end + 1) * (p.end - p.begin) / 2 for p in own) for own in pieces]
    assert max(seen) / min(seen) < 1.05


def test_short_sequences_stay_whole_and_are_shared_out() -> None:
    assert cut_pieces((100, 90, 20), 2, 64) == [[Piece(0, 0, 100)], [Piece(100, 0, 90), Piece(190, 0, 20)]]
