"""Returns freed memory to the operating system."""

from __future__ import annotations

import ctypes


def return_free_memory() -> None:
    """Returns the C library's freed memory to the operating system (`malloc_trim`; glibc only).

    After many tensors of different sizes were freed, the heap is fragmented, and the process would keep the
    free parts for good.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))
