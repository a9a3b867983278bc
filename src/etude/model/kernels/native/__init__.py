"""C sources of a transformer's blocks, compiled on first use: see `common.h` and `build`."""

from etude.model.kernels.native.build import find_compiler, load_library

__all__ = ["find_compiler", "load_library"]
