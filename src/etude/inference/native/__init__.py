"""The native forward pass for CPUs: one native call per engine step."""

from etude.inference.native.forward import NativeForward as NativeForward
