"""Which kernels serve on this machine."""

from __future__ import annotations

import functools
from typing import Literal

from etude.errors import ResourceError
from etude.weights.delta.kernels import DeltaKernels
from etude.weights.delta.native import NativeKernels
from etude.weights.delta.vectorised import VectorisedKernels

KernelChoice = Literal["auto", "native", "numpy"]
"""`auto`: native code where a C compiler is found, else numpy. What they write is the same."""


@functools.cache
def choose_kernels(choice: KernelChoice = "auto") -> DeltaKernels:
    """Raises ResourceError for `native` without a C compiler."""
    if choice == "numpy":
        return VectorisedKernels()
    try:
        return NativeKernels()
    except ResourceError:
        if choice == "native":
            raise
        return VectorisedKernels()
