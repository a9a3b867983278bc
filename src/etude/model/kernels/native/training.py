"""Native kernels of the trainer: products of matrices that change at every step, attention with gradients.

Unlike the engine's kernels, these may sum in blocks, in an order that depends on the shapes and not on the
number of threads. Products are also available in the engine's order. float32 on a CPU.
"""

from __future__ import annotations

import ctypes
import functools
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from etude.errors import ResourceError
from etude.model.kernels.native.build import load_library

_LEAST_LANES = 8
"""With narrower vectors PyTorch's own attention is faster (measured)."""


class _Product(ctypes.Structure):
    """`Product` of products.c."""

    _fields_: ClassVar = [
        *((name, ctypes.c_int64) for name in ("rows", "columns", "depth")),
        *((name, ctypes.c_void_p) for name in ("a", "b")),
        *((name, ctypes.c_int64) for name in ("a_row", "a_step", "b_step", "b_column")),
        ("c", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("c_row", "add", "as_engine")),
    ]


class _Flash(ctypes.Structure):
    """`Flash` of flash.c."""

    _fields_: ClassVar = [
        *((name, ctypes.c_int64) for name in ("sequences", "heads", "kv_heads", "dim", "value_dim")),
        *((name, ctypes.c_void_p) for name in ("starts", "unused")),
        ("scale", ctypes.c_float),
        *((name, ctypes.c_void_p) for name in ("queries", "keys", "values")),
        *((name, ctypes.c_int64) for name in ("query_row", "key_row", "value_row")),
        *((name, ctypes.c_void_p) for name in ("out", "log_sums", "to_out")),
        *((name, ctypes.c_void_p) for name in ("to_queries", "to_keys", "to_values")),
        ("counter", ctypes.c_long),
    ]


@functools.cache
def _lanes() -> int:
    """Vector width of the compiled library in values; 0 if it cannot be compiled (see `etude doctor`)."""
    try:
        return load_library().etude_lanes()
    except ResourceError:
        return 0


@functools.cache
def _outruns_mkl() -> bool:
    return bool(_lanes()) and bool(torch.backends.mkl.is_available() and load_library().etude_outruns_mkl())


def is_plain(x: Tensor) -> bool:
    """Whether these kernels support `x`: float32 in this process' memory."""
    return x.dtype == torch.float32 and x.device.type == "cpu" and type(x) in (Tensor, torch.nn.Parameter)


def computes(*inputs: Tensor) -> bool:
    """Whether attention, norms and gates of these inputs are supported, and faster than PyTorch's."""
    return all(is_plain(x) for x in inputs) and _lanes() >= _LEAST_LANES


def multiplies(*inputs: Tensor) -> bool:
    """Whether `multiply` supports these inputs and is faster than PyTorch, which alone can round factors
    to bfloat16."""
    return (
        all(is_plain(x) for x in inputs)
        and _outruns_mkl()
        and torch.get_float32_matmul_precision() != "medium"
    )


def multiply(a: Tensor, b: Tensor, out: Tensor, *, add: bool = False, as_engine: bool = False) -> Tensor:
    """out [m, n] (+)= a [m, k] b [k, n]; a and b of any strides, rows of out contiguous. Returns `out`.

    `as_engine`: bitwise equal to the engine's product; not with `add`.
    """
    assert out.stride(1) == 1, "rows without gaps"
    assert a.shape[1] == b.shape[0] and out.shape == (a.shape[0], b.shape[1]), "they fit"
    assert not (add and as_engine), "the engine adds a whole sum"
    assert a.shape[1] > 0, "a sum of something"
    product = _Product(
        *out.shape,
        a.shape[1],
        a.data_ptr(),
        b.data_ptr(),
        *a.stride(),
        *b.stride(),
        out.data_ptr(),
        out.stride(0),
        add,
        as_engine,
    )
    load_library().etude_product(ctypes.byref(product), ctypes.c_int64(torch.get_num_threads()))
    return out


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    starts: NDArray[np.int64],
    unused: NDArray[np.int64] | None = None,
) -> tuple[Tensor, Tensor]:
    """Causal attention within sequences; `starts` [sequences + 1]: their first rows, and the end.

    query [T, heads, dim], key [T, kv_heads, dim], value [T, kv_heads, value_dim] -> out [T, heads, value_dim]
    and the log-sum-exp [T, heads] of each row's scores. `unused` [sequences]: number of rows at the start of
    each whose results are undefined.
    """
    query, key, value = (side_by_side(x) for x in (query, key, value))
    out = query.new_empty((*query.shape[:2], value.shape[2]))
    log_sums = query.new_empty(query.shape[:2])
    unused = np.zeros(len(starts) - 1, np.int64) if unused is None else unused
    flash = _describe(query, key, value, starts, unused)
    flash.out, flash.log_sums = out.data_ptr(), log_sums.data_ptr()
    load_library().etude_flash(ctypes.byref(flash), ctypes.c_int64(torch.get_num_threads()))
    return out, log_sums


def attend_backward(
    to_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    log_sums: Tensor,
    starts: NDArray[np.int64],
    unused: NDArray[np.int64] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value from that of `out`, which is 0 for rows that are `unused`; see
    `attend`."""
    query, key, value = (side_by_side(x) for x in (query, key, value))
    to_out = to_out.contiguous()
    gradients = tuple(x.new_empty(x.shape) for x in (query, key, value))
    unused = np.zeros(len(starts) - 1, np.int64) if unused is None else unused
    flash = _describe(query, key, value, starts, unused)
    flash.out, flash.log_sums, flash.to_out = out.data_ptr(), log_sums.data_ptr(), to_out.data_ptr()
    flash.to_queries, flash.to_keys, flash.to_values = (x.data_ptr() for x in gradients)
    load_library().etude_flash_gradients(ctypes.byref(flash), ctypes.c_int64(torch.get_num_threads()))
    return gradients[0], gradients[1], gradients[2]


def side_by_side(x: Tensor) -> Tensor:
    """x [T, heads, dim] with the heads of each row contiguous; rows may have any stride."""
    packed = x.stride(2) == 1 and (x.shape[1] == 1 or x.stride(1) == x.shape[2])
    return x if packed else x.contiguous()


def _describe(
    query: Tensor, key: Tensor, value: Tensor, starts: NDArray[np.int64], unused: NDArray[np.int64]
) -> _Flash:
    assert len(query) == len(key) == len(value) == starts[-1], "rows of these sequences"
    assert len(unused) == len(starts) - 1, "of each sequence"
    assert query.shape[2] == key.shape[2] and key.shape[1] == value.shape[1], "they fit"
    return _Flash(
        len(starts) - 1,
        query.shape[1],
        key.shape[1],
        query.shape[2],
        value.shape[2],
        starts.ctypes.data,
        unused.ctypes.data,
        query.shape[2] ** -0.5,
        *(x.data_ptr() for x in (query, key, value)),
        *(x.stride(0) for x in (query, key, value)),
    )
