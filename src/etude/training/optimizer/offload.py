"""Optimiser states that are kept in host memory between steps."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class OffloadedStates:
    """Moves tensors between their device and host memory, in place: references to them stay valid.

    With a GPU, host memory is pinned, so that copies run at the bus' full rate. On a CPU the tensors move
    within its memory, without a benefit. Each tensor is moved completely or not at all, so either method can
    be called again after the other or itself failed half-way.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        """`tensors`: all on one device, none sharing its storage."""
        self._tensors = [tensor for tensor in tensors if tensor.numel() > 1]
        self._away: dict[int, Tensor] = {}
        """Values in host memory, by the id() of the tensor."""

    def offload(self) -> None:
        """Moves the values to host memory and frees the device's. Idempotent."""
        if here := [tensor for tensor in self._tensors if id(tensor) not in self._away]:
            for tensor in here:
                self._offload(tensor)
            self._settle()

    def fetch(self) -> None:
        """Moves the values back to the device. Idempotent. Raises torch.OutOfMemoryError."""
        if away := [tensor for tensor in self._tensors if id(tensor) in self._away]:
            for tensor in away:
                self._fetch(tensor)
            self._settle()

    def values(self, tensor: Tensor) -> Tensor:
        """The tensor that currently holds the values of `tensor`, to be read or written."""
        return self._away.get(id(tensor), tensor)

    def _offload(self, tensor: Tensor) -> None:
        kept = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        kept.copy_(tensor, non_blocking=tensor.is_cuda)
        self._away[id(tensor)] = kept
        tensor.untyped_storage().resize_(0)  # on a GPU reused only after the copy, in stream order

    def _fetch(self, tensor: Tensor) -> None:
        kept = self._away[id(tensor)]
        tensor.untyped_storage().resize_(kept.numel() * kept.element_size())
        tensor.copy_(kept, non_blocking=tensor.is_cuda)
        del self._away[id(tensor)]  # pinned memory is reused only after the copy

    def _settle(self) -> None:
        """Waits for the copies, and returns unused memory to the device."""
        if self._tensors[0].is_cuda:
            torch.cuda.synchronize(self._tensors[0].device)
            torch.cuda.empty_cache()
