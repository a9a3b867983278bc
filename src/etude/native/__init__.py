"""Compiles C sources of other layers for this processor on first use, and caches the libraries."""

from etude.native.compiling import compile_library, find_compiler

__all__ = ["compile_library", "find_compiler"]
