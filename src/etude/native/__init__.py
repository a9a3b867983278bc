"""C sources of the other layers, compiled for this processor on first use and kept."""

from etude.native.compiling import compile_library, find_compiler

__all__ = ["compile_library", "find_compiler"]
