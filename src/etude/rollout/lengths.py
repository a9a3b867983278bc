"""Whether what is left out is longer than what is not: dropping long sessions is a bias."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

_DECILES = 10


class LengthBias:
    """Sampled tokens of all trajectories of a sitting, and of those that were left out."""

    def __init__(self) -> None:
        self._all: Counter[int] = Counter()
        """Length -> trajectories that have come to an end or were left out."""
        self._left_out: Counter[int] = Counter()

    def add(self, num_tokens: int) -> None:
        """A trajectory has ended."""
        self._all[num_tokens] += 1

    def leave_out(self, num_tokens: int, *, ended: bool) -> None:
        """A trajectory is not trained on. One that has not `ended` is at least so long."""
        if not ended:
            self.add(num_tokens)
        self._left_out[num_tokens] += 1

    @property
    def share(self) -> float:
        """Trajectories left out, of all."""
        total = self._all.total()
        return self._left_out.total() / total if total else 0.0

    def by_decile(self) -> list[float]:
        """[10] of the trajectories in each tenth by length, shortest first, the share that was left out.

        Equal lengths are in one tenth: that of the middle one among them.
        """
        if not self._all:
            return [0.0] * _DECILES
        lengths = sorted(self._all)
        counts = np.array([self._all[length] for length in lengths])
        middles = counts.cumsum() - (counts + 1) // 2
        tenths = np.minimum(middles * _DECILES // counts.sum(), _DECILES - 1)
        out = np.array([self._left_out[length] for length in lengths])
        return [_share(out[tenths == tenth], counts[tenths == tenth]) for tenth in range(_DECILES)]


def _share(out: Sequence[int] | np.ndarray, of: Sequence[int] | np.ndarray) -> float:
    total = int(np.sum(of))
    return float(np.sum(out)) / total if total else 0.0
