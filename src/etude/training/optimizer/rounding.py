"""Stochastic rounding of float32 results to bfloat16, so that small changes are not lost.

bfloat16 keeps 8 bits, so rounding to nearest drops every change below 1/512 of a value: a moving average with
a decay of 0.999 never changes, nor do weights at the small steps of RL. Rounding up or down at random, in
proportion to the distance, is unbiased and needs no memory; a compensation term (Kahan) is exact to
16 bits but doubles the memory that bfloat16 was to halve. (Gupta et al. 2015; Zamirai et al. 2020.)
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_DROPPED_BITS = 16


class Rounding:
    """Writes float32 values into tensors of any type; the noise depends only on step, part and call count."""

    def __init__(self, step: int, part_of: Callable[[str], int]) -> None:
        """`part_of`: index of the part of a parameter that this rank holds. Ranks that hold the same part
        must draw the same noise, or they diverge."""
        self._step = step
        self._part_of = part_of
        self._count = 0

    def store(self, name: str, target: Tensor, values: Tensor) -> None:
        """Writes `values` (float32), of the parameter `name`, into `target` of the same shape, rounding
        stochastically if it is bfloat16."""
        self._count += 1
        if target.dtype != torch.bfloat16:
            target.copy_(values)
            return
        key = (self._step * 65_537 + self._part_of(name)) * 1_000_003
        generator = torch.Generator(values.device).manual_seed((key + self._count) % 2**62)
        target.copy_(round_stochastically(values, generator))


def round_stochastically(values: Tensor, generator: torch.Generator) -> Tensor:
    """values float32 -> bfloat16: one of the two neighbours, more often the nearer; exact ones stay."""
    bits = values.contiguous().view(torch.int32)
    noise = torch.randint(
        0, 1 << _DROPPED_BITS, bits.shape, dtype=torch.int32, device=bits.device, generator=generator
    )
    kept = (bits + noise) & -(1 << _DROPPED_BITS)
    return kept.view(torch.float32).to(torch.bfloat16)
