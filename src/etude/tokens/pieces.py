"""Pieces: the alternating text and control tokens that a model reads and writes.

A control token is never spelled in characters. Everything that comes from outside (a user's message, a file,
a test's output) is a `str` piece and can therefore never become one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby


@dataclass(frozen=True, slots=True)
class Control:
    """One control token, by its name: `<|end|>`, `<path>`, `</path>`."""

    name: str


Piece = str | Control
"""Ordinary text, or one control token."""


def join_text(pieces: Iterable[Piece]) -> list[Piece]:
    """Merges neighbouring text pieces and drops empty ones, so that equal content has equal tokens."""
    merged: list[Piece] = []
    for is_text, run in groupby(pieces, lambda piece: isinstance(piece, str)):
        listed = list(run)
        merged += filter(None, ["".join(map(str, listed))]) if is_text else listed
    return merged


def spell(pieces: Iterable[Piece]) -> str:
    """The pieces as text for people, control tokens by name. Not reversible."""
    return "".join(piece if isinstance(piece, str) else piece.name for piece in pieces)
