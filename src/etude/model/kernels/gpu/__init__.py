"""Kernels for GPUs, in Triton, whose interpreter runs them on a CPU. Imported only where they run."""
