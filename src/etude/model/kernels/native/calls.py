"""The native blocks over all rows of a batch, one call each: contiguous float32 in, a new tensor out."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from etude.model.kernels.native.build import load_library
from etude.model.kernels.native.matrices import PackedMatrices, aligned, pointer

PAGE_TOKENS = 16
"""PAGE of the source: positions in a page of keys and values."""
_LINEAR, _RMS_NORM, _ROTATE, _SWIGLU, _SOFTMAX, _SIGMOID, _LOG_SOFTMAX = range(7)


class _Rows(ctypes.Structure):
    """`Rows` of trainer.c."""

    _fields_: ClassVar = [
        ("kind", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("size", ctypes.c_int64),
        ("heads", ctypes.c_int64),
        ("eps", ctypes.c_float),
        ("matrix", ctypes.c_void_p),
        ("x", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("z", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
    ]


class _Pages(ctypes.Structure):
    """`Pages` of common.h."""

    _fields_: ClassVar = [
        ("heads", ctypes.c_int64),
        ("kv_heads", ctypes.c_int64),
        ("dim", ctypes.c_int64),
        ("value_dim", ctypes.c_int64),
        ("tables", ctypes.c_void_p),
        ("max_pages", ctypes.c_int64),
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
    ]


class _Experts(ctypes.Structure):
    """`Experts` of common.h."""

    _fields_: ClassVar = [
        ("count", ctypes.c_int64),
        ("top_k", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("inner", ctypes.c_int64),
        ("gate_up", ctypes.c_void_p),
        ("down", ctypes.c_void_p),
    ]


def linear(matrix: PackedMatrices, x: Tensor, threads: int) -> Tensor:
    """x [T, inputs] times the first of `matrix` -> [T, outputs]."""
    out = torch.empty((len(x), matrix.native[0].outputs))
    native = ctypes.addressof(matrix.native)
    _run_rows(_Rows(kind=_LINEAR, rows=len(x), matrix=native, x=x.data_ptr(), out=out.data_ptr()), threads)
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float, threads: int) -> Tensor:
    """x [..., n], weight [n]."""
    return _each_row(_RMS_NORM, x, threads, y=weight, eps=eps)


def rotate(x: Tensor, cosine: Tensor, signed_sine: Tensor, threads: int) -> Tensor:
    """x [T, heads, n], tables of T * n values."""
    return _each_row(_ROTATE, x, threads, y=cosine, z=signed_sine, heads=x.shape[1])


def swiglu(gate: Tensor, up: Tensor, threads: int) -> Tensor:
    """silu(gate) * up, [T, n]."""
    return _each_row(_SWIGLU, gate, threads, y=up)


def softmax(x: Tensor, threads: int) -> Tensor:
    """Over the last dimension."""
    return _each_row(_SOFTMAX, x, threads)


def sigmoid(x: Tensor, threads: int) -> Tensor:
    """Of each value."""
    return _each_row(_SIGMOID, x, threads)


def log_softmax(x: Tensor, threads: int) -> Tensor:
    """Over the last dimension."""
    return _each_row(_LOG_SOFTMAX, x, threads)


def attention(
    query: Tensor, key: Tensor, value: Tensor | None, lengths: Sequence[int], threads: int, value_dim: int
) -> Tensor:
    """Causal within sequences of `lengths` rows: query [T, heads, dim], key [T, kv_heads, dim] and value
    [T, kv_heads, value_dim] -> [T, heads, value_dim]. Without `value`, values are the first `value_dim`
    entries of the keys, of which there is one head."""
    library = load_library()
    heads, kv_heads, dim = query.shape[1], key.shape[1], query.shape[2]
    num_pages = [-(-length // PAGE_TOKENS) for length in lengths]
    total = sum(num_pages)
    tables = np.zeros((len(lengths), max(num_pages)), dtype=np.int32)
    used = np.arange(tables.shape[1]) < np.array(num_pages)[:, None]
    tables[used] = np.arange(total)
    sequences = np.repeat(np.arange(len(lengths)), lengths)
    positions = np.concatenate([np.arange(length) for length in lengths])
    keys = aligned((total, kv_heads, dim * PAGE_TOKENS))
    values = None if value is None else aligned((total, kv_heads, value_dim * PAGE_TOKENS))
    out = query.new_empty((len(query), heads, value_dim))
    pages = _Pages(
        heads,
        kv_heads,
        dim,
        value_dim,
        tables.ctypes.data,
        tables.shape[1],
        keys.data_ptr(),
        None if values is None else values.data_ptr(),
    )
    rows, num_threads = ctypes.c_int64(len(query)), ctypes.c_int64(threads)
    scratch = aligned((library.etude_attention_floats(ctypes.byref(pages), rows, num_threads),))
    library.etude_attention(
        ctypes.byref(pages),
        rows,
        ctypes.c_void_p(sequences.ctypes.data),
        ctypes.c_void_p(positions.ctypes.data),
        pointer(query),
        pointer(key),
        None if value is None else pointer(value),
        pointer(out),
        num_threads,
        pointer(scratch),
    )
    return out


def experts(
    x: Tensor, gate_up: PackedMatrices, down: PackedMatrices, chosen: Tensor, weights: Tensor, threads: int
) -> Tensor:
    """x [T, width], chosen [T, k] int64, weights [T, k] -> [T, width]."""
    library = load_library()
    out = torch.empty_like(x)
    native = _Experts(
        len(gate_up),
        chosen.shape[1],
        x.shape[1],
        down.native[0].inputs,
        ctypes.addressof(gate_up.native),
        ctypes.addressof(down.native),
    )
    rows, num_threads = ctypes.c_int64(len(x)), ctypes.c_int64(threads)
    scratch = aligned((library.etude_expert_floats(ctypes.byref(native), rows, num_threads),))
    library.etude_experts(
        ctypes.byref(native),
        rows,
        *(pointer(tensor) for tensor in (x, chosen, weights, out)),
        num_threads,
        pointer(scratch),
    )
    return out


def _each_row(
    kind: int,
    x: Tensor,
    threads: int,
    *,
    y: Tensor | None = None,
    z: Tensor | None = None,
    eps: float = 0.0,
    heads: int = 1,
) -> Tensor:
    """A block on every row of the last dimension."""
    out, size = torch.empty_like(x), x.shape[-1]
    _run_rows(
        _Rows(
            kind=kind,
            rows=x.numel() // size,
            size=size,
            heads=heads,
            eps=eps,
            x=x.data_ptr(),
            y=None if y is None else y.data_ptr(),
            z=None if z is None else z.data_ptr(),
            out=out.data_ptr(),
        ),
        threads,
    )
    return out


def _run_rows(rows: _Rows, threads: int) -> None:
    load_library().etude_rows(ctypes.byref(rows), ctypes.c_int64(threads))
