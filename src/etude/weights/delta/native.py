"""The delta kernels in C: see `words.c` and `rans.c`."""

from __future__ import annotations

import ctypes
import functools
import threading
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from etude.native import compile_library
from etude.weights.delta.classes import Words
from etude.weights.delta.kernels import Changes, Coded, Starts, Tables
from etude.weights.delta.symbols import NUM_SYMBOLS, Counts, Values
from etude.weights.delta.words import WordLayout

_I64 = ctypes.c_int64
_LANES = 8
"""Values decoded at a time, possibly beyond the end of the input."""


class _Scratch(threading.local):
    """Reusable buffers: page faults on fresh memory would cost more than the work itself."""

    def __init__(self) -> None:
        self._held: dict[str, NDArray[Any]] = {}

    def take(self, name: str, count: int, dtype: type[np.generic]) -> NDArray[Any]:
        """An uninitialised buffer of `count` values, valid until the next call for `name`."""
        held = self._held.get(name)
        if held is None or len(held) < count:
            held = self._held[name] = np.empty(count, dtype)
        return held[:count]


class NativeKernels:
    """See DeltaKernels. Compiled on first use; calls release the interpreter's lock.

    Arrays that are returned may be overwritten by the same thread's next call of the same method.
    """

    def __init__(self, flags: tuple[str, ...] = ()) -> None:
        """`flags`: the compiler's, to leave out instructions. Raises ResourceError without a compiler."""
        self._library = _load(flags)
        self._scratch = _Scratch()

    def scan(self, base: Words, target: Words, layout: WordLayout) -> Changes:
        positions = self._scratch.take("positions", len(base) + 4, np.uint32)
        differences = self._scratch.take("differences", len(base), np.uint32)
        counts = np.zeros((256, NUM_SYMBOLS), np.uint32)
        found = self._library.etude_delta_scan(
            _I64(base.itemsize), _at(base), _at(target), _I64(len(base)), *_key(layout), _at(positions),
            _at(differences), _at(counts),
        )  # fmt: skip
        return Changes(positions[:found], differences[:found], counts.astype(np.int64))

    def gather(
        self, base: Words, changes: Changes, layout: WordLayout, thresholds: list[int], starts: Starts
    ) -> Values:
        values = self._scratch.take("values", 2 * len(changes), np.uint32)
        self._library.etude_delta_gather(
            _I64(base.itemsize), _at(base), _I64(len(base)), _at(changes.positions), _at(changes.differences),
            _I64(len(changes)), *_key(layout), bytes(thresholds), _I64(len(thresholds)), _at(starts),
            _at(values),
        )  # fmt: skip
        return values

    def place(
        self,
        base: Words,
        target: Words,
        layout: WordLayout,
        thresholds: list[int],
        starts: Starts,
        values: Values,
    ) -> None:
        missing = self._library.etude_delta_place(
            _I64(base.itemsize), _at(base), _at(target), _I64(len(base)), *_key(layout), bytes(thresholds),
            _I64(len(thresholds)), _at(starts), _at(values),
        )  # fmt: skip
        if missing:
            raise ValueError("changes beyond the end")

    def count(self, values: Values, starts: Starts) -> Counts:
        groups = len(starts) - 1
        counts = np.zeros((groups, NUM_SYMBOLS), np.uint32)
        self._library.etude_delta_count(_at(values), _at(starts), _I64(groups), _at(counts))
        return counts.astype(np.int64)

    def encode(self, values: Values, starts: Starts, tables: Tables, lanes: int) -> Coded:
        states = np.empty(lanes, np.uint32)
        words = self._scratch.take("words", len(values) + 1, np.uint16)
        bits = self._scratch.take("bits", 4 * len(values) + 8, np.uint8)
        num_bits = _I64()
        num_words = self._library.etude_delta_encode(
            _at(values), _at(starts), _I64(len(starts) - 1), _at(tables), _I64(lanes), _at(words),
            _I64(len(words)), _at(states), _at(bits), ctypes.byref(num_bits),
        )  # fmt: skip
        assert num_words >= 0, "every value has a frequency"
        return Coded(states, words[len(words) - num_words :], bits[: num_bits.value])

    def decode(self, coded: Coded, starts: Starts, tables: Tables) -> Values:
        values = self._scratch.take("values", int(starts[-1]), np.uint32)
        states = coded.states.copy()
        words = np.concatenate([coded.words, np.zeros(_LANES, np.uint16)])
        bits = np.concatenate([coded.bits, np.zeros(4 * _LANES + 8, np.uint8)])
        failed = self._library.etude_delta_decode(
            _at(words), _I64(len(coded.words)), _at(states), _I64(len(states)), _at(bits),
            _I64(len(coded.bits)), _at(starts), _I64(len(starts) - 1), _at(tables), _at(values),
        )  # fmt: skip
        if failed:
            raise ValueError("the coded values are damaged")
        return values


@functools.cache
def _load(flags: tuple[str, ...]) -> ctypes.CDLL:
    library = compile_library(
        Path(str(files("etude.weights.delta"))),
        field="kernels",
        fix="install a C compiler such as gcc, or use VectorisedKernels",
        flags=flags,
    )
    for name in ("scan", "place", "encode", "decode"):
        getattr(library, f"etude_delta_{name}").restype = ctypes.c_int64
    for name in ("gather", "count"):
        getattr(library, f"etude_delta_{name}").restype = None
    return library


def _key(layout: WordLayout) -> tuple[ctypes.c_uint32, ctypes.c_int64]:
    return ctypes.c_uint32(layout.key_mask), _I64(layout.key_shift)


def _at(array: NDArray[Any]) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)
