"""The forward pass on a GPU: the trainer's own module there, with Triton's attention over the paged cache.

Tokens, positions and tables go over once per step; routes and what was drawn come back. All tiles have one
shape, so a row's attention does not depend on what else is in the step. Steps are not captured as graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from etude.errors import ResourceError
from etude.inference.cache import PagedCache, StepRows
from etude.inference.sampling import sample
from etude.model import LanguageModel, RecordedRoutes
from etude.records import SamplingParams

_TILE_ROWS = 16
"""Rows of one product: query heads that share a head of the cache, times positions."""


class GpuForward:
    """Implements ForwardPass with a model and a cache of one device."""

    def __init__(self, model: LanguageModel, cache: PagedCache) -> None:
        """Raises ResourceError without Triton."""
        self._model = model
        self._cache = cache
        self._kernel = _load_kernel()
        self._recorder = RecordedRoutes.of(model.config)

    def load_weights(self) -> None:
        """See ForwardPass: the module's own tensors are used as they are."""

    @torch.no_grad()
    def __call__(self, rows: StepRows) -> tuple[Tensor, Tensor]:
        """See ForwardPass; the hidden states stay on the device."""
        device = self._cache.keys.device
        tokens, positions = (torch.from_numpy(a).to(device) for a in (rows.tokens, rows.positions))
        attention = GpuPagedAttention(self._cache, rows, positions, self._kernel)
        hidden = self._model(tokens, positions, attention, self._recorder)
        return hidden, self._recorder.take(len(tokens)).cpu()

    def sample(
        self, hidden: Tensor, params: Sequence[SamplingParams], draws: NDArray[np.float64]
    ) -> tuple[Tensor, Tensor]:
        """See ForwardPass."""
        tokens, logprobs = sample(self._model.logits(hidden), params, draws)
        return tokens.cpu(), logprobs.cpu()

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """See ForwardPass."""
        return self._model.logits(hidden).cpu()


class GpuPagedAttention:
    """Attention of one engine step: stores the new keys and values, then attends to all up to them."""

    def __init__(self, cache: PagedCache, rows: StepRows, positions: Tensor, kernel: ModuleType) -> None:
        """`positions` [T]: the rows' own, on the cache's device."""
        device = cache.keys.device
        self._cache = cache
        self._positions = positions
        self._kernel = kernel
        self._pages = torch.from_numpy(rows.pages.astype(np.int64)).to(device)
        self._offsets = torch.from_numpy(rows.offsets).to(device)
        self._tables = torch.from_numpy(rows.tables).to(device)
        self._counts = rows.counts
        self._tiles = None

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See Attention."""
        cache = self._cache
        keys, values = cache.keys[layer], None if cache.values is None else cache.values[layer]
        keys[self._pages, :, :, self._offsets] = key
        if values is not None:
            values[self._pages, :, self._offsets] = value
        if self._tiles is None:
            positions_of_tile = max(1, _TILE_ROWS // (query.shape[1] // keys.shape[1]))
            self._tiles = self._kernel.Tiles.plan(self._counts, positions_of_tile, keys.device)
        return self._kernel.paged_attention(
            query.contiguous(),
            keys,
            values,
            self._tables,
            self._positions,
            self._tiles,
            query.shape[2] ** -0.5,
            cache.value_dim,
        )


def _load_kernel() -> ModuleType:
    try:
        from etude.model.kernels.gpu import paged_attention
    except ImportError as error:
        raise ResourceError(
            "Triton is missing", field="engine.kernels", received="gpu", fix="pip install triton"
        ) from error
    return paged_attention
