"""Tensors like those of training, and pathological ones."""

from __future__ import annotations

import platform

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from etude.native import find_compiler
from etude.weights.delta.kernels import DeltaKernels
from etude.weights.delta.native import NativeKernels
from etude.weights.delta.vectorised import VectorisedKernels

DTYPES = (
    torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool, torch.complex64,
)  # fmt: skip

_BUILDS: dict[str, tuple[str, ...]] = {"native": (), "portable": ("-DETUDE_PORTABLE",)}
if platform.machine() == "x86_64":
    _BUILDS["sse2"] = ("-mno-ssse3", "-mno-bmi2", "-mno-popcnt", "-mno-lzcnt")
"""Flags for each width of vectors, with instructions for it and without."""


def all_kernels() -> dict[str, DeltaKernels]:
    """Those that run here, by name."""
    kernels: dict[str, DeltaKernels] = {"numpy": VectorisedKernels()}
    if find_compiler() is not None:
        kernels |= {name: NativeKernels(flags) for name, flags in _BUILDS.items()}
    return kernels


def trained_pair(
    num_words: int, learning_rate: float = 1e-6, seed: int = 0, dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, Tensor]:
    """A tensor before and after a step: updates of about the learning rate on weights of about 0.02."""
    generator = torch.Generator().manual_seed(seed)
    master = torch.randn(num_words, generator=generator) * 0.02
    step = torch.randn(num_words, generator=generator) * 0.25 * learning_rate
    return master.to(dtype), (master - step).to(dtype)


@st.composite
def byte_pairs(draw: st.DrawFn) -> tuple[bytes, bytes]:
    """Two runs of bytes of one length, from equal to wholly different, often in clusters."""
    length = draw(st.sampled_from([0, 8, 16, 64, 504, 512, 520, 1024, 4096]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    base = rng.integers(0, draw(st.sampled_from([1, 2, 256])), length, dtype=np.uint8)
    target = base.copy()
    share = draw(st.sampled_from([0.0, 0.001, 0.1, 0.5, 1.0]))
    changed = rng.random(length) < share
    if draw(st.booleans()) and length:
        changed[: length // 2] = False
    target[changed] = rng.integers(0, 256, int(changed.sum()), dtype=np.uint8)
    return base.tobytes(), target.tobytes()


def as_tensor(data: bytes, dtype: torch.dtype) -> Tensor:
    """These bytes as numbers, whatever they mean: NaN with payloads, infinities, -0."""
    raw = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    if dtype == torch.bool:
        return (raw & 1).view(torch.bool)
    return raw.view(dtype)


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Equal type, shape and bytes: NaN equals itself here and 0 does not equal -0."""
    if (left.dtype, left.shape) != (right.dtype, right.shape):
        return False
    return torch.equal(left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8))
