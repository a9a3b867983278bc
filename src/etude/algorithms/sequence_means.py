"""Sums within the sequences of a packed batch."""

from __future__ import annotations

import torch
from torch import Tensor


def sequence_means(values: Tensor, sequence: Tensor) -> Tensor:
    """Means of values [N] within each sequence, [sequences]; 0 for one without tokens. Differentiable.

    `sequence` [N] int64 numbers the sequence of each value from 0.
    """
    num_sequences = int(sequence.max()) + 1 if len(sequence) else 0
    counts = torch.bincount(sequence, minlength=num_sequences).clamp(min=1)
    sums = values.new_zeros(num_sequences).index_add(0, sequence, values)
    return sums / counts.to(values.dtype)
