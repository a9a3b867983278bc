"""The engine's forward pass as one native call, where a C compiler is at hand."""

from etude.inference.native.build import find_compiler, load_library
from etude.inference.native.forward import NativeForward

__all__ = ["NativeForward", "find_compiler", "load_library"]
