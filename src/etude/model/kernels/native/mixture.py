"""A layer's experts in a training step: one native call each, forward and backward. float32 on a CPU."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from etude.errors import RouteReplayError
from etude.model.kernels.native.build import load_library

_SIZES = ("tokens", "top_k", "experts", "width", "inner", "as_engine")


class _Mixture(ctypes.Structure):
    """`Mixture` of mixture.c."""

    _fields_: ClassVar = [
        *((name, ctypes.c_int64) for name in _SIZES),
        *((name, ctypes.c_void_p) for name in ("gate_up", "down", "chosen", "weights", "x")),
        *(
            (name, ctypes.c_void_p)
            for name in ("starts", "places", "rows", "gates", "opened", "mixed", "out")
        ),
        ("block", ctypes.c_int64),
        ("counter", ctypes.c_long),
    ]


class _Gradients(ctypes.Structure):
    """`Gradients` of mixture.c."""

    _fields_: ClassVar = [
        ("made", _Mixture),
        *((name, ctypes.c_void_p) for name in ("to_out", "to_gate_up", "to_down", "to_weights")),
        *((name, ctypes.c_void_p) for name in ("back", "inner", "to_opened", "to_gates")),
        ("slices", ctypes.c_int64),
        ("counter", ctypes.c_long),
    ]


@dataclass(frozen=True, slots=True)
class SortedCopies:
    """Saved for the backward pass: a copy of each row for each choice, sorted by expert; N = T * k."""

    starts: Tensor
    """[experts + 1] the first copy of each expert, and the end."""
    places: Tensor
    """[T, k] index of each choice's copy."""
    rows: Tensor
    """[N, width]"""
    gates: Tensor
    """[N, 1]"""
    opened: Tensor
    """[N, 2 * inner] the first product of each."""


def sort_copies(chosen: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """chosen [T, k] -> `starts` and `places` of SortedCopies. Raises RouteReplayError for invalid experts."""
    assert chosen.dtype == torch.int64
    chosen = chosen.contiguous()
    starts, places = chosen.new_empty(experts + 1), torch.empty_like(chosen)
    call = _Mixture(tokens=chosen.shape[0], top_k=chosen.shape[1], experts=experts)
    call.chosen, call.starts, call.places = chosen.data_ptr(), starts.data_ptr(), places.data_ptr()
    if not load_library().etude_sort_copies(ctypes.byref(call)):
        raise RouteReplayError(
            f"routes must name experts from 0 to {experts - 1}",
            field="routes",
            received=[int(chosen.min()), int(chosen.max())],
            fix="train on routes that were recorded with this model",
        )
    return starts, places


def mix(
    x: Tensor, gate_up: Tensor, down: Tensor, chosen: Tensor, weights: Tensor, *, as_engine: bool
) -> tuple[Tensor, SortedCopies]:
    """See Ops.experts: the sum [T, width], and the inputs of `mix_backward`.

    `as_engine`: bitwise equal to the engine, which applies the weights after the second product; otherwise
    they are applied before it, to fewer values.
    """
    assert len(x) == len(chosen) and chosen.shape == weights.shape, "choices of these rows"
    starts, places = sort_copies(chosen, len(gate_up))
    copies, inner, width = places.numel(), *down.shape[1:]
    assert x.shape[1] == width and gate_up.shape == (len(down), width, 2 * inner), "they fit"
    rows, gates, opened = (x.new_empty((copies, size)) for size in (width, 1, 2 * inner))
    made = SortedCopies(starts, places, rows, gates, opened)
    x, gate_up, down, weights = (tensor.contiguous() for tensor in (x, gate_up, down, weights))
    mixed, out = torch.empty_like(rows), torch.empty_like(x)
    call = _describe(made, gate_up, down)
    call.as_engine = as_engine
    call.weights, call.x = weights.data_ptr(), x.data_ptr()
    call.mixed, call.out = mixed.data_ptr(), out.data_ptr()
    load_library().etude_mixture(ctypes.byref(call), ctypes.c_int64(torch.get_num_threads()))
    return out, made


def mix_backward(
    to_out: Tensor,
    made: SortedCopies,
    gate_up: Tensor,
    down: Tensor,
    to_gate_up: Tensor | None,
    to_down: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Gradients of x [T, width] and of the weights [T, k]; those of the matrices are written to `to_gate_up`
    and `to_down` if given."""
    assert all(to is None or to.is_contiguous() for to in (to_gate_up, to_down))
    to_out, gate_up, down = (tensor.contiguous() for tensor in (to_out, gate_up, down))
    back, to_rows, to_opened, to_gates = map(
        torch.empty_like, (made.rows, made.rows, made.opened, made.gates)
    )
    inner = back.new_empty((len(back), down.shape[1]))
    to_x, to_weights = torch.empty_like(to_out), to_out.new_empty(made.places.shape)
    call = _Gradients(_describe(made, gate_up, down))
    call.made.mixed, call.made.out = to_rows.data_ptr(), to_x.data_ptr()
    call.to_out, call.to_weights = to_out.data_ptr(), to_weights.data_ptr()
    call.to_gate_up = None if to_gate_up is None else to_gate_up.data_ptr()
    call.to_down = None if to_down is None else to_down.data_ptr()
    call.back, call.inner = back.data_ptr(), inner.data_ptr()
    call.to_opened, call.to_gates = to_opened.data_ptr(), to_gates.data_ptr()
    load_library().etude_mixture_gradients(ctypes.byref(call), ctypes.c_int64(torch.get_num_threads()))
    return to_x, to_weights


def _describe(made: SortedCopies, gate_up: Tensor, down: Tensor) -> _Mixture:
    experts, inner, width = down.shape
    call = _Mixture(*made.places.shape, experts, width, inner)
    call.gate_up, call.down = gate_up.data_ptr(), down.data_ptr()
    call.starts, call.places = made.starts.data_ptr(), made.places.data_ptr()
    call.rows, call.gates, call.opened = (x.data_ptr() for x in (made.rows, made.gates, made.opened))
    return call
