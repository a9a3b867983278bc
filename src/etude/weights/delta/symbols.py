"""Splits 32-bit values into entropy-coded symbols and raw bits, so that few symbols suffice."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

NUM_SYMBOLS = 128
"""Size of tables; the last entries are unused."""
LAST_SYMBOL = 123
"""The symbol of values from 7 * 2^29 on."""
_DIRECT = 8

Values = NDArray[np.uint32]
Counts = NDArray[np.int64]


def symbols_of(values: Values) -> NDArray[np.int64]:
    """Symbols of values: below 8 each value is a symbol; above, each octave has four symbols."""
    wide = values.astype(np.float64)  # exact: its exponent is the position of the highest bit
    octave = np.frexp(np.maximum(wide, _DIRECT))[1].astype(np.int64) - 1
    quarter = (values.astype(np.int64) >> (octave - 2)) & 3
    return np.where(values < _DIRECT, values, _DIRECT + (octave - 3) * 4 + quarter)


def widths_of(symbols: NDArray[np.int64]) -> NDArray[np.int64]:
    """Number of raw bits after each symbol."""
    return np.where(symbols < _DIRECT, 0, (symbols - _DIRECT) // 4 + 1)


def least_of(symbols: NDArray[np.int64]) -> NDArray[np.int64]:
    """The least value of each symbol."""
    return np.where(symbols < _DIRECT, symbols, (4 + (symbols - _DIRECT) % 4) << widths_of(symbols))
