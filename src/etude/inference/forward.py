"""One forward pass over the rows of an engine step, and the way PyTorch's operators compute it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from etude.inference.cache import CacheAttention, DecodeRows, KvCache, PrefillRows
from etude.inference.sampling import sample
from etude.model import Qwen3Moe, RecordedRoutes
from etude.records import SamplingParams


@dataclass(frozen=True, slots=True)
class StepRows:
    """What one step computes: a token of each decoding slot, then a run of tokens of each prefilling one."""

    decode: NDArray[np.int64]
    """[R] slots."""
    prefill: NDArray[np.int64]
    """[P] slots."""
    starts: NDArray[np.int64]
    """[R + P] first position that each slot computes."""
    counts: NDArray[np.int64]
    """[R + P] how many positions it computes; 1 for those that decode."""
    num_live: int
    """Slots 0..num_live-1 are in use."""

    @property
    def slots(self) -> NDArray[np.int64]:
        """[T] slot of every row."""
        return np.repeat(np.concatenate((self.decode, self.prefill)), self.counts)

    @property
    def positions(self) -> NDArray[np.int64]:
        """[T] position of every row."""
        first_row = np.cumsum(self.counts) - self.counts
        return np.arange(int(self.counts.sum())) + np.repeat(self.starts - first_row, self.counts)


class ForwardPass(Protocol):
    """Computes the rows of a step, with one model and one cache."""

    def load_weights(self) -> None:
        """Called after the model's weights have changed."""
        ...

    def __call__(
        self, tokens: Tensor, slots: Tensor, positions: Tensor, rows: StepRows
    ) -> tuple[Tensor, Tensor]:
        """tokens, slots, positions [T] int64 -> final hidden states [T, width] and routes [T, layers, top_k]
        uint8; stores keys and values."""
        ...

    def sample(
        self, hidden: Tensor, params: Sequence[SamplingParams], draws: NDArray[np.float64]
    ) -> tuple[Tensor, Tensor]:
        """See `etude.inference.sampling.sample`, from hidden states [N, width] on."""
        ...


class EagerForward:
    """The trainer's own module, operator by operator."""

    def __init__(self, model: Qwen3Moe, cache: KvCache) -> None:
        self._model = model
        self._cache = cache
        self._recorder = RecordedRoutes(model.config.experts_per_token, model.config.num_layers)

    def load_weights(self) -> None:
        """See ForwardPass: the module's own tensors are used as they are."""

    @torch.no_grad()
    def __call__(
        self, tokens: Tensor, slots: Tensor, positions: Tensor, rows: StepRows
    ) -> tuple[Tensor, Tensor]:
        """See ForwardPass."""
        num_decode = len(rows.decode)
        decode_rows = prefill_rows = None
        if num_decode:
            lengths = torch.from_numpy(rows.starts[:num_decode] + 1)
            decode_rows = DecodeRows.plan(torch.from_numpy(rows.decode), lengths, rows.num_live)
        if len(rows.prefill):
            starts, counts = rows.starts[num_decode:], rows.counts[num_decode:]
            prefill_rows = PrefillRows.plan(*(torch.from_numpy(x) for x in (rows.prefill, starts, counts)))
        cache_rows = self._cache.row_index(slots, positions)
        attention = CacheAttention(self._cache, cache_rows, decode_rows, prefill_rows)
        hidden = self._model(tokens, positions, attention, self._recorder)
        return hidden, self._recorder.take()

    def sample(
        self, hidden: Tensor, params: Sequence[SamplingParams], draws: NDArray[np.float64]
    ) -> tuple[Tensor, Tensor]:
        """See ForwardPass."""
        return sample(self._model.logits(hidden), params, draws)
