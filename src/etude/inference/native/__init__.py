"""The native forward pass for CPUs: one native call per engine step."""

from etude.inference.native.forward import NativeForward
from etude.model.kernels.native import find_compiler, load_library

__all__ = ["NativeForward", "find_compiler", "load_library"]
