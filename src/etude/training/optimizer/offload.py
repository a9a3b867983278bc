"""States that lie in host memory while nobody steps."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class OffloadedStates:
    """Moves tensors between their device and host memory, in place: references to them stay valid.

    In host memory they are pinned where the device is a GPU, so that copies run at the bus' full rate. On a
    CPU the same happens from one place of its memory to another: nothing is gained there. A tensor is moved
    whole or not at all, so what fails half-way can be called again, in either direction.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        """`tensors`: each with a storage of its own, on one device."""
        self._tensors = [tensor for tensor in tensors if tensor.numel() > 1]
        self._away: dict[int, Tensor] = {}
        """By the tensor's identity: its values, in host memory."""

    @property
    def device_bytes(self) -> int:
        """Memory that the tensors have on their device."""
        return sum(tensor.untyped_storage().nbytes() for tensor in self._tensors)

    def offload(self) -> None:
        """Brings the values into host memory and lets that of the device go. Idempotent."""
        if len(self._away) == len(self._tensors):
            return
        for tensor in self._tensors:
            if id(tensor) not in self._away:
                self._offload(tensor)
        self._settle()

    def fetch(self) -> None:
        """Brings the values back. Idempotent. Raises torch.OutOfMemoryError where there is no room."""
        if not self._away:
            return
        for tensor in self._tensors:
            if id(tensor) in self._away:
                self._fetch(tensor)
        self._settle()

    def values(self, tensor: Tensor) -> Tensor:
        """Where the values of one of the tensors are now, to be read or written."""
        return self._away.get(id(tensor), tensor)

    def _offload(self, tensor: Tensor) -> None:
        kept = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        kept.copy_(tensor, non_blocking=tensor.is_cuda)
        self._away[id(tensor)] = kept
        tensor.untyped_storage().resize_(0)  # on a GPU given to others only behind the copy, in stream order

    def _fetch(self, tensor: Tensor) -> None:
        kept = self._away[id(tensor)]
        tensor.untyped_storage().resize_(kept.numel() * kept.element_size())
        tensor.copy_(kept, non_blocking=tensor.is_cuda)
        del self._away[id(tensor)]  # pinned memory is used again only behind the copy

    def _settle(self) -> None:
        """Waits for the copies, and lets memory of the device go that nothing lies in."""
        if self._tensors and self._tensors[0].is_cuda:
            torch.cuda.synchronize(self._tensors[0].device)
            torch.cuda.empty_cache()
