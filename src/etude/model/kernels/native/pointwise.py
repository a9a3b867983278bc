"""Native norms, rotations and gates of a training step, with their gradients. float32 on a CPU.

`as_engine`: the forward pass is bitwise equal to the engine's; otherwise see `training`.
"""

from __future__ import annotations

import ctypes
from typing import ClassVar

import torch
from torch import Tensor

from etude.model.kernels.native.build import load_library

_CHUNK = 128
"""CHUNK of pointwise.c."""


class _Strided(ctypes.Structure):
    """`Strided` of common.h."""

    _fields_: ClassVar = [
        ("values", ctypes.c_void_p),
        ("stride", ctypes.c_int64),
        ("step", ctypes.c_int64),
    ]


class _Norm(ctypes.Structure):
    """`Norm` of pointwise.c."""

    _fields_: ClassVar = [
        *((name, ctypes.c_int64) for name in ("rows", "heads", "size")),
        ("eps", ctypes.c_float),
        ("as_engine", ctypes.c_int64),
        ("x", _Strided),
        ("to_out", _Strided),
        *((name, ctypes.c_void_p) for name in ("weight", "inverse", "out", "to_x", "to_weight")),
        ("counter", ctypes.c_long),
    ]


class _Rotation(ctypes.Structure):
    """`Rotation` of pointwise.c."""

    _fields_: ClassVar = [
        *((name, ctypes.c_int64) for name in ("rows", "heads", "size", "backwards")),
        ("x", _Strided),
        *((name, ctypes.c_void_p) for name in ("cosine", "signed_sine", "out")),
        ("counter", ctypes.c_long),
    ]


class _Gate(ctypes.Structure):
    """`Gate` of pointwise.c."""

    _fields_: ClassVar = [
        *((name, ctypes.c_int64) for name in ("rows", "size", "as_engine")),
        *((name, ctypes.c_void_p) for name in ("gate", "up")),
        ("stride", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("scale", "out", "to_out", "to_gate", "to_up")),
        ("to_stride", ctypes.c_int64),
        ("to_scale", ctypes.c_void_p),
        ("counter", ctypes.c_long),
    ]


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, as_engine: bool = False) -> tuple[Tensor, Tensor]:
    """x [T, n] or [T, heads, n], weight [n] -> the normalised rows, and 1 / RMS of each."""
    assert weight.shape == x.shape[-1:]
    heads = _by_heads(x)
    weight = weight.contiguous()
    out, inverse = x.new_empty(x.shape), x.new_empty(heads.shape[:2])
    norm = _Norm(*heads.shape, eps, as_engine, _strided(heads))
    norm.weight, norm.inverse, norm.out = weight.data_ptr(), inverse.data_ptr(), out.data_ptr()
    load_library().etude_norm(ctypes.byref(norm), _threads())
    return out, inverse


def rms_norm_backward(to_out: Tensor, x: Tensor, weight: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x and of the weight."""
    heads, back, weight = _by_heads(x), _by_heads(to_out), weight.contiguous()
    to_x = x.new_empty(x.shape)
    to_weight = x.new_zeros((-(-len(heads) // _CHUNK), len(weight)))
    norm = _Norm(*heads.shape, 0.0, False, _strided(heads), _strided(back))
    norm.weight, norm.inverse = weight.data_ptr(), inverse.data_ptr()
    norm.to_x, norm.to_weight = to_x.data_ptr(), to_weight.data_ptr()
    load_library().etude_norm(ctypes.byref(norm), _threads())
    return to_x, to_weight.sum(0)


def rotate(x: Tensor, cosine: Tensor, signed_sine: Tensor, *, backwards: bool = False) -> Tensor:
    """x [T, heads, n], tables [T, 1, n], bitwise equal to the engine; `backwards`: x is the gradient of the
    output, and that of the input is returned."""
    heads, tables = _by_heads(x), [table.contiguous() for table in (cosine, signed_sine)]
    assert all(table.shape == (len(x), 1, x.shape[-1]) for table in tables)
    out = x.new_empty(x.shape)
    addresses = (tensor.data_ptr() for tensor in (*tables, out))
    rotation = _Rotation(*heads.shape, backwards, _strided(heads), *addresses)
    load_library().etude_rotation(ctypes.byref(rotation), _threads())
    return out


def silu_gate(gate: Tensor, up: Tensor, scale: Tensor | None = None, *, as_engine: bool = False) -> Tensor:
    """silu(gate) * up * scale of each row: gate and up [T, n], scale [T]; not with `as_engine`."""
    assert scale is None or not as_engine
    gate, up = _alike(gate, up)
    out = gate.new_empty(gate.shape)
    call = _gate(gate, up, scale, out)
    call.as_engine = as_engine
    _run_gate(call)
    return out


def silu_gate_backward(
    to_out: Tensor, gate: Tensor, up: Tensor, scale: Tensor | None = None, to_scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The recomputed `silu_gate`, and the concatenated gradients [T, 2 n] of gate and up. That of `scale` is
    written to `to_scale` [T]."""
    gate, up = _alike(gate, up)
    to_out, size = to_out.contiguous(), gate.shape[1]
    out, gradient = gate.new_empty(gate.shape), gate.new_empty((len(gate), 2 * size))
    call = _gate(gate, up, scale, out)
    call.to_out, call.to_gate, call.to_stride = to_out.data_ptr(), gradient.data_ptr(), 2 * size
    call.to_up = gradient.data_ptr() + size * gradient.itemsize
    if to_scale is not None:
        assert to_scale.is_contiguous()
        call.to_scale = to_scale.data_ptr()
    _run_gate(call)
    return out, gradient


def _by_heads(x: Tensor) -> Tensor:
    """x [T, n] or [T, heads, n] -> [T, heads, n] with contiguous values."""
    assert x.ndim in (2, 3)
    heads = x.unsqueeze(1) if x.ndim == 2 else x
    return heads if heads.stride(2) == 1 else heads.contiguous()


def _strided(x: Tensor) -> _Strided:
    return _Strided(x.data_ptr(), x.stride(0), x.stride(1))


def _alike(gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Both with the same row stride and contiguous values."""
    assert gate.shape == up.shape
    if gate.stride() == up.stride() and gate.stride(1) == 1:
        return gate, up
    return gate.contiguous(), up.contiguous()


def _gate(gate: Tensor, up: Tensor, scale: Tensor | None, out: Tensor) -> _Gate:
    if scale is not None:
        assert scale.is_contiguous()
    return _Gate(
        *gate.shape,
        False,
        gate.data_ptr(),
        up.data_ptr(),
        gate.stride(0),
        None if scale is None else scale.data_ptr(),
        out.data_ptr(),
    )


def _run_gate(call: _Gate) -> None:
    load_library().etude_gate(ctypes.byref(call), _threads())


def _threads() -> ctypes.c_int64:
    return ctypes.c_int64(torch.get_num_threads())
