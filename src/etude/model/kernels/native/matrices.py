"""Packed matrices: weights in the order in which the native products read them."""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from etude.model.kernels.native.build import load_library

WeightType = Literal["float32", "bfloat16"]
_HUGE_PAGE = 1 << 21
_MAPPED_BYTES = 1 << 25
"""Minimum size of a mapping."""


class NativeMatrix(ctypes.Structure):
    """`Matrix` in common.h."""

    _fields_: ClassVar = [
        ("inputs", ctypes.c_int64),
        ("outputs", ctypes.c_int64),
        ("half", ctypes.c_int64),
        ("panels", ctypes.c_void_p),
    ]


@dataclass(frozen=True, slots=True)
class PackedMatrices:
    """One packed matrix or several of one shape, and the memory that holds them."""

    native: ctypes.Array[NativeMatrix]
    memory: Tensor

    def __len__(self) -> int:
        return len(self.native)


def aligned(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    """Uninitialised memory, aligned to a cache line."""
    count, spare = math.prod(shape), 64 // dtype.itemsize
    memory = torch.empty(count + spare, dtype=dtype, device="cpu")
    offset = -memory.data_ptr() % 64 // dtype.itemsize
    return memory[offset : offset + count].view(shape)


class StreamedMemory:
    """Allocates memory that every step reads completely: weights, cache pages. It uses huge pages if the
    kernel has them, for fewer TLB misses, and places tensors one after the other. A mapping is freed with its
    last tensor."""

    def __init__(self) -> None:
        self._unused = torch.empty(0, dtype=torch.uint8)

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        """Zeros, aligned to a cache line."""
        size = math.prod(shape) * dtype.itemsize
        whole = -(-size // 64) * 64
        if whole > len(self._unused):
            self._unused = _map_huge_pages(max(whole, _MAPPED_BYTES))
        allocated, self._unused = self._unused[:size], self._unused[whole:]
        return allocated.view(dtype).view(shape)


def _map_huge_pages(size: int) -> Tensor:
    """Zeros, aligned to a huge page."""
    memory = mmap.mmap(-1, size + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    offset = -whole.data_ptr() % _HUGE_PAGE
    return whole[offset : offset + size]


def pack(
    weights: Sequence[Tensor],
    weight_type: WeightType = "float32",
    allocate: Callable[[tuple[int, ...], torch.dtype], Tensor] = aligned,
) -> PackedMatrices:
    """Packs matrices [inputs, outputs] of one shape and any strides (pass `weight.t()` for a torch linear
    layer's [outputs, inputs]). `bfloat16` rounds to nearest even. `allocate`: returns memory for them."""
    library = load_library()
    inputs, outputs = weights[0].shape
    size = library.etude_packed_size(ctypes.c_int64(inputs), ctypes.c_int64(outputs))
    half = weight_type == "bfloat16"
    memory = allocate((len(weights), size), torch.bfloat16 if half else torch.float32)
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


def pointer(tensor: Tensor) -> ctypes.c_void_p:
    """Address of a tensor's first value."""
    return ctypes.c_void_p(tensor.data_ptr())


def address(structure: Any) -> int:
    """Address of a ctypes structure or array."""
    return ctypes.addressof(structure)
