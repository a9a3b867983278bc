"""Memory that this process holds without need."""

from __future__ import annotations

import ctypes


def return_free_memory() -> None:
    """Gives the memory that was freed back to the system, where the C library can (glibc).

    After many tensors of differing sizes came and went, what is free lies between what is in use, and else
    stays with the process for good.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))
