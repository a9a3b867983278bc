"""Kernels of our own: native code for CPUs, and the batch-invariant operations made of it."""
