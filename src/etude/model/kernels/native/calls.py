"""Calls of the engine's native kernels on all rows of a batch: float32 in, a new tensor out."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from etude.model.kernels.native.build import load_library
from etude.model.kernels.native.matrices import PackedMatrices, aligned
from etude.model.kernels.native.training import side_by_side

PAGE_TOKENS = 16
"""PAGE in common.h: positions in a page of keys and values."""
_LINEAR, _SOFTMAX, _SIGMOID, _LOG_SOFTMAX = range(4)


class _Rows(ctypes.Structure):
    """`Rows` of trainer.c."""

    _fields_: ClassVar = [
        *((name, ctypes.c_int64) for name in ("kind", "rows", "size")),
        *((name, ctypes.c_void_p) for name in ("matrix", "x", "out")),
    ]


class _Choice(ctypes.Structure):
    """`Choice` of trainer.c."""

    _fields_: ClassVar = [
        *((name, ctypes.c_int64) for name in ("rows", "size", "keep")),
        *((name, ctypes.c_void_p) for name in ("logits", "tokens", "masses")),
        *((name, ctypes.c_void_p) for name in ("chosen", "entropy", "log_sums")),
    ]


class _Pages(ctypes.Structure):
    """`Pages` of common.h."""

    _fields_: ClassVar = [
        *((name, ctypes.c_int64) for name in ("heads", "kv_heads", "dim", "value_dim")),
        ("tables", ctypes.c_void_p),
        ("max_pages", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("keys", "values")),
    ]


class _Packed(ctypes.Structure):
    """`Packed` of trainer.c."""

    _fields_: ClassVar = [
        ("pages", _Pages),
        ("rows", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("sequences", "positions", "queries", "keys", "values")),
        *((name, ctypes.c_int64) for name in ("query_row", "key_row", "value_row")),
        *((name, ctypes.c_void_p) for name in ("out", "log_sums", "scratch", "runs")),
        ("num_runs", ctypes.c_int64),
        ("counter", ctypes.c_long),
    ]


def linear(matrix: PackedMatrices, x: Tensor, threads: int) -> Tensor:
    """x [T, inputs] times the first of `matrix` -> [T, outputs]."""
    assert x.shape[1] == matrix.native[0].inputs and x.is_contiguous(), "they fit"
    out = x.new_empty((len(x), matrix.native[0].outputs))
    rows = _Rows(_LINEAR, len(x), 0, ctypes.addressof(matrix.native), x.data_ptr(), out.data_ptr())
    _run_rows(rows, threads)
    return out


def softmax(x: Tensor, threads: int) -> Tensor:
    """Softmax over the last dimension."""
    return _each_row(_SOFTMAX, x, threads)


def sigmoid(x: Tensor, threads: int) -> Tensor:
    """Sigmoid of each value."""
    return _each_row(_SIGMOID, x, threads)


def log_softmax(x: Tensor, threads: int) -> Tensor:
    """Log-softmax over the last dimension."""
    return _each_row(_LOG_SOFTMAX, x, threads)


def choose_tokens(
    logits: Tensor, tokens: Tensor, distribution: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """For rows of logits [N, vocabulary]: the log-probability of each of `tokens` [N] (as `log_softmax`), the
    entropy and the log-sum-exp, [N] each. The probabilities are written to `distribution` [N, vocabulary] if
    given."""
    assert tokens.dtype == torch.int64 and len(tokens) == len(logits), "one each"
    logits, tokens = logits.contiguous(), tokens.contiguous()
    keep = distribution is not None
    masses = torch.empty_like(logits) if distribution is None else distribution
    assert masses.is_contiguous() and masses.shape == logits.shape
    found = tuple(logits.new_empty(len(logits)) for _ in range(3))
    addresses = (tensor.data_ptr() for tensor in (logits, tokens, masses, *found))
    choice = _Choice(*logits.shape, keep, *addresses)
    load_library().etude_choice(ctypes.byref(choice), ctypes.c_int64(torch.get_num_threads()))
    return found[0], found[1], found[2]


class PackedPages:
    """Pages for the keys and values of packed sequences, laid out as in the engine's cache."""

    def __init__(self, lengths: Sequence[int]) -> None:
        """`lengths`: rows of each sequence."""
        num_pages = [-(-length // PAGE_TOKENS) for length in lengths]
        self._total = sum(num_pages)
        self._tables = np.zeros((len(lengths), max(num_pages)), dtype=np.int32)
        used = np.arange(self._tables.shape[1]) < np.array(num_pages)[:, None]
        self._tables[used] = np.arange(self._total)
        self._sequences = np.repeat(np.arange(len(lengths)), lengths)
        self._positions = np.concatenate([np.arange(length) for length in lengths])

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Causal attention within each sequence: query [T, heads, dim], key [T, kv_heads, dim], value
        [T, kv_heads, value_dim] -> out [T, heads, value_dim] and the log-sum [T, heads] of each row's scores.

        Values that are narrower than keys must be the first entries of the only key head.
        """
        assert len(query) == len(key) == len(value) == len(self._positions), "rows of these sequences"
        assert query.shape[2] == key.shape[2] and key.shape[1] == value.shape[1], "they fit"
        library = load_library()
        query, key, value = (side_by_side(x) for x in (query, key, value))
        is_prefix = value.shape[2] < key.shape[2]
        out = query.new_empty((*query.shape[:2], value.shape[2]))
        log_sums = query.new_empty(query.shape[:2])
        keys = aligned((self._total, PAGE_TOKENS * key.shape[1] * key.shape[2]))
        values = None if is_prefix else aligned((self._total, PAGE_TOKENS * value.shape[1] * value.shape[2]))
        pages = _Pages(
            query.shape[1],
            *key.shape[1:],
            value.shape[2],
            self._tables.ctypes.data,
            self._tables.shape[1],
            keys.data_ptr(),
            None if values is None else values.data_ptr(),
        )
        threads = ctypes.c_int64(torch.get_num_threads())
        num_floats = library.etude_attention_floats(ctypes.byref(pages), ctypes.c_int64(len(query)), threads)
        scratch = aligned((num_floats,))
        packed = _Packed(
            pages,
            len(query),
            self._sequences.ctypes.data,
            self._positions.ctypes.data,
            *(x.data_ptr() for x in (query, key, value)),
            *(x.stride(0) for x in (query, key, value)),
            *(x.data_ptr() for x in (out, log_sums, scratch)),
        )
        library.etude_attention(ctypes.byref(packed), threads)
        return out, log_sums


def _each_row(kind: int, x: Tensor, threads: int) -> Tensor:
    """Applies the kernel `kind` to every row of the last dimension."""
    x = x.contiguous()
    out, size = torch.empty_like(x), x.shape[-1]
    _run_rows(_Rows(kind, x.numel() // size, size, None, x.data_ptr(), out.data_ptr()), threads)
    return out


def _run_rows(rows: _Rows, threads: int) -> None:
    load_library().etude_rows(ctypes.byref(rows), ctypes.c_int64(threads))
