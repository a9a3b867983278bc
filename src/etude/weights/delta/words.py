"""Words of data types, and the bits of a word that predict whether it changes: its exponent."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class WordLayout:
    """Layout of the words of one data type.

    Whether a step of the optimiser changes a number depends first of all on its exponent: the same update
    reaches the next representable value of a small number and not of a large one.
    """

    size_bytes: int
    """Size of a word: 1, 2 or 4. Larger numbers are split into several words."""
    key_mask: int
    """Exponent and what is below it; 0 where a word has no exponent."""
    key_shift: int
    """Bits below the exponent."""


_PLAIN = {1: WordLayout(1, 0, 0), 2: WordLayout(2, 0, 0), 4: WordLayout(4, 0, 0)}
_MANTISSA_BITS = {
    torch.float32: 23,
    torch.bfloat16: 7,
    torch.float16: 10,
    torch.float8_e4m3fn: 3,
    torch.float8_e4m3fnuz: 3,
    torch.float8_e5m2: 2,
    torch.float8_e5m2fnuz: 2,
}


def layout_of(dtype: torch.dtype) -> WordLayout:
    """The layout of a type. Quantised bytes, integers and numbers of 8 or more bytes have no exponent."""
    size = min(dtype.itemsize, 4)
    mantissa_bits = _MANTISSA_BITS.get(dtype)
    if mantissa_bits is None:
        return _PLAIN[size]
    return WordLayout(size, (1 << (8 * size - 1)) - 1, mantissa_bits)
