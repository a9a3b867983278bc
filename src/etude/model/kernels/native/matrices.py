"""Packed matrices: weights in the order in which the native products read them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from etude.model.kernels.native.build import load_library

WeightType = Literal["float32", "bfloat16"]


class NativeMatrix(ctypes.Structure):
    """`Matrix` of the source."""

    _fields_: ClassVar = [
        ("inputs", ctypes.c_int64),
        ("outputs", ctypes.c_int64),
        ("half", ctypes.c_int64),
        ("panels", ctypes.c_void_p),
    ]


@dataclass(frozen=True, slots=True)
class PackedMatrices:
    """One packed matrix or several of one shape, and the memory that they lie in."""

    native: ctypes.Array[NativeMatrix]
    memory: Tensor

    def __len__(self) -> int:
        return len(self.native)


def pack(weights: Sequence[Tensor], weight_type: WeightType = "float32") -> PackedMatrices:
    """Packs matrices [inputs, outputs] of one shape, whatever their strides (pass `weight.t()` for a torch
    linear layer's [outputs, inputs]). `bfloat16` rounds to nearest even."""
    library = load_library()
    inputs, outputs = weights[0].shape
    size = library.etude_packed_size(ctypes.c_int64(inputs), ctypes.c_int64(outputs))
    half = weight_type == "bfloat16"
    memory = aligned((len(weights), size), torch.bfloat16 if half else torch.float32)
    native = (NativeMatrix * len(weights))()
    for index, weight in enumerate(weights):
        source = weight.detach().float()
        target = memory[index].data_ptr()
        library.etude_pack(
            ctypes.c_int64(inputs),
            ctypes.c_int64(outputs),
            ctypes.c_void_p(source.data_ptr()),
            *(ctypes.c_int64(stride) for stride in source.stride()),
            ctypes.c_int(half),
            ctypes.c_void_p(target),
        )
        native[index] = NativeMatrix(inputs, outputs, half, target)
    return PackedMatrices(native, memory)


def aligned(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """Uninitialised memory that begins at a cache line."""
    count = 1
    for size in shape:
        count *= size
    spare = 64 // dtype.itemsize
    memory = torch.empty(count + spare, dtype=dtype, device="cpu")
    offset = -memory.data_ptr() % 64 // dtype.itemsize
    return memory[offset : offset + count].view(shape)


def pointer(tensor: Tensor) -> ctypes.c_void_p:
    """Address of a tensor's first value."""
    return ctypes.c_void_p(tensor.data_ptr())


def address(structure: Any) -> int:
    """Address of a ctypes structure or array."""
    return ctypes.addressof(structure)
