"""C sources of a transformer's blocks, compiled on first use: see `common.h` and `build`."""

from etude.model.kernels.native.build import load_library
from etude.native import find_compiler

__all__ = ["find_compiler", "load_library"]
