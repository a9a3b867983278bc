"""Attention over a packed batch on a GPU: flash attention over sequences of any length, without padding.

PyTorch's `varlen_attn` (FlashAttention-2, Dao 2023, or the device's alternative). float32 and heads wider
than 256, which it does not support, use the padded buckets of PackedAttention, which are the reference.
"""

from __future__ import annotations

import inspect
import itertools
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from etude.model.attention import PackedAttention

_MAX_HEAD = 256
_TAKES_GROUPS = "enable_gqa" in inspect.signature(varlen_attn).parameters
"""Whether grouped-query attention is supported: before PyTorch 2.12, keys are repeated per query head."""


class VarlenAttention:
    """Causal attention within each sequence of a packed batch. Implements PackedAttention."""

    def __init__(self, reference: PackedAttention) -> None:
        """`reference`: has the lengths, and computes unsupported inputs."""
        self._reference = reference
        self._ends: Tensor | None = None

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if not self._takes(query):
            return self._reference.attend(layer, query, key, value)
        value_dim = value.shape[-1]
        if value_dim < key.shape[-1]:
            value = F.pad(value, (0, key.shape[-1] - value_dim))
        if self._ends is None:
            ends = [0, *itertools.accumulate(self._reference.lengths)]
            self._ends = torch.tensor(ends, dtype=torch.int32).to(query.device)
        longest = self._reference.lengths[0]
        options: dict[str, Any] = {"window_size": (-1, 0)}
        groups = query.shape[1] // key.shape[1]
        if _TAKES_GROUPS:
            options["enable_gqa"] = groups > 1
        elif groups > 1:
            key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
        out = varlen_attn(query, key, value, self._ends, self._ends, longest, longest, **options)
        return cast(Tensor, out)[..., :value_dim]

    @staticmethod
    def _takes(query: Tensor) -> bool:
        is_half = query.dtype in (torch.bfloat16, torch.float16)
        return query.is_cuda and is_half and query.shape[-1] <= _MAX_HEAD
