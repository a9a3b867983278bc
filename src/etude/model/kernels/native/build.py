"""Loads the C sources beside this file, compiled on first use."""

from __future__ import annotations

import ctypes
import functools
import re
from importlib.resources import files
from pathlib import Path

from etude.native import compile_library

_SIZES = (
    "etude_packed_size",
    "etude_scratch_bytes",
    "etude_sample_floats",
    "etude_attention_floats",
    "etude_look_up",
    "etude_drafting_bytes",
    "etude_drafting_rows",
    "etude_draft_run",
    "etude_lanes",
    "etude_outruns_mkl",
    "etude_sort_copies",
)
"""Functions that return a size, a count or a boolean. What ctypes makes of the others has no meaning."""


@functools.cache
def load_library() -> ctypes.CDLL:
    """The library, compiled if no cached one fits. Raises ResourceError without a suitable compiler."""
    library = compile_library(
        Path(str(files("etude.model.kernels.native"))),
        field="engine.kernels",
        fix="install a C compiler such as gcc, or set engine.kernels=eager",
    )
    for name in _SIZES:
        getattr(library, name).restype = ctypes.c_int64
    library.etude_borrow_threads(_parallel())
    return library


def _parallel() -> ctypes.c_void_p:
    """GOMP_parallel of the OpenMP library that PyTorch uses; NULL if that cannot be determined."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ctypes.c_void_p()
    paths = {
        line.split(maxsplit=5)[5] for line in lines if re.search(r"/lib(gomp|omp|iomp5)[-.][^/ ]*$", line)
    }
    for path in sorted(paths, key=lambda path: ("torch" not in path, path)):
        found = getattr(ctypes.CDLL(path), "GOMP_parallel", None)
        if found is not None:
            return ctypes.cast(found, ctypes.c_void_p)
    return ctypes.c_void_p()
