"""The forward pass of an engine step: the `ForwardPass` protocol, and `EagerForward` in PyTorch operators."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from etude.inference.cache import PAGE_TOKENS, PagedCache, StepRows
from etude.inference.sampling import sample
from etude.model import DraftLayers, LanguageModel, RecordedRoutes
from etude.model.adapted_ops import AdaptedOps, Pair, Pairs
from etude.model.ops import Ops
from etude.records import SamplingParams


@dataclass(frozen=True, slots=True)
class _DecodeBucket:
    """Decoding sequences of similar length, one position each, as one batch."""

    rows: Tensor
    """[R] rows of the step."""
    tables: Tensor
    """[R, pages]"""
    mask: Tensor
    """[R, 1, 1, pages * 16] additive: 0 for visible positions, -inf for others."""


@dataclass(frozen=True, slots=True)
class _Prefill:
    """One sequence that computes several positions, as one batch."""

    first: int
    end: int
    table: Tensor
    """[pages]"""
    mask: Tensor
    """[rows, pages * 16] additive: 0 for visible positions, -inf for others."""


class PagedAttention:
    """Attention of one engine step: stores the new keys and values, then attends to all up to them."""

    def __init__(self, cache: PagedCache, rows: StepRows) -> None:
        self._cache = cache
        self._pages = torch.from_numpy(rows.pages.astype(np.int64))
        self._offsets = torch.from_numpy(rows.offsets)
        ends = np.cumsum(rows.counts)
        decoding = rows.counts == 1
        self._decode = _buckets(rows, np.flatnonzero(decoding), ends)
        self._prefill = [_prefill(rows, int(s), int(ends[s])) for s in np.flatnonzero(~decoding)]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query [T, heads, key_dim], key [T, cache_heads, key_dim], value [T, cache_heads, value_dim] ->
        [T, heads, value_dim]."""
        cache = self._cache
        cache.keys[layer][self._pages, :, :, self._offsets] = key.to(cache.keys.dtype)
        if cache.values is not None:
            cache.values[layer][self._pages, :, self._offsets] = value.to(cache.values.dtype)
        out = query.new_empty((*query.shape[:2], cache.value_dim))
        for bucket in self._decode:
            out[bucket.rows] = self._attend_decode(layer, bucket, query[bucket.rows])
        for run in self._prefill:
            out[run.first : run.end] = self._attend_prefill(layer, run, query[run.first : run.end])
        return out

    def _attend_decode(self, layer: int, bucket: _DecodeBucket, query: Tensor) -> Tensor:
        keys, values = self._gather(layer, bucket.tables, query.dtype)
        folded = query.view(len(query), keys.shape[1], -1, keys.shape[2])
        scores = torch.matmul(folded, keys).mul_(keys.shape[2] ** -0.5).add_(bucket.mask)
        out = torch.matmul(scores.softmax(dim=-1), values)
        return out.view(len(query), query.shape[1], -1)

    def _attend_prefill(self, layer: int, run: _Prefill, query: Tensor) -> Tensor:
        keys, values = self._gather(layer, run.table[None], query.dtype)
        out = F.scaled_dot_product_attention(
            query.transpose(0, 1)[None], keys.transpose(2, 3), values, attn_mask=run.mask, enable_gqa=True
        )
        return out[0].transpose(0, 1)

    def _gather(self, layer: int, tables: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """tables [R, pages] -> keys [R, heads, key_dim, L] and values [R, heads, L, value_dim], copied and
        converted to `dtype`."""
        cache, (count, pages) = self._cache, tables.shape
        length = pages * PAGE_TOKENS
        keys = cache.keys[layer][tables].to(dtype).permute(0, 2, 3, 1, 4)
        keys = keys.reshape(count, keys.shape[1], keys.shape[2], length)
        if cache.values is None:
            return keys, keys[:, :, : cache.value_dim].transpose(2, 3)
        values = cache.values[layer][tables].to(dtype).permute(0, 2, 1, 3, 4)
        return keys, values.reshape(count, values.shape[1], length, cache.value_dim)


def _buckets(rows: StepRows, sequences: NDArray[np.int64], ends: NDArray[np.int64]) -> list[_DecodeBucket]:
    """Groups decoding sequences by the binary logarithm of their pages, so that padding is under one half."""
    lengths = rows.starts[sequences] + 1
    num_pages = -(-lengths // PAGE_TOKENS)
    sizes = np.ceil(np.log2(num_pages)).astype(np.int64)
    buckets: list[_DecodeBucket] = []
    for size in np.unique(sizes).tolist():
        inside = np.flatnonzero(sizes == size)
        pages = int(num_pages[inside].max())
        members = sequences[inside]
        tables = torch.from_numpy(rows.tables[members, :pages].astype(np.int64))
        mask = _mask(lengths[inside], pages * PAGE_TOKENS)[:, None, None]
        buckets.append(_DecodeBucket(torch.from_numpy(ends[members] - 1), tables, mask))
    return buckets


def _prefill(rows: StepRows, sequence: int, end: int) -> _Prefill:
    count, start = int(rows.counts[sequence]), int(rows.starts[sequence])
    pages = -(-(start + count) // PAGE_TOKENS)
    table = torch.from_numpy(rows.tables[sequence, :pages].astype(np.int64))
    mask = _mask(np.arange(start + 1, start + count + 1), pages * PAGE_TOKENS)
    return _Prefill(end - count, end, table, mask)


def _mask(seen: NDArray[np.int64], length: int) -> Tensor:
    """[R, length]: 0 at the first seen[r] positions, -inf after them."""
    hidden = torch.arange(length) >= torch.from_numpy(seen)[:, None]
    return torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf"))


class ForwardPass(Protocol):
    """Computes the rows of a step, with one model and one cache."""

    def load_weights(self) -> None:
        """Reads the model's weights again after they have changed. May be called in another thread, but never
        during a pass of the same object."""
        ...

    def pack_adapter(self, pairs: Mapping[str, Pair]) -> Any:
        """Copies one adapter's factors, given by the names of their weights, into the form that
        `use_adapters` takes. May be called in another thread."""
        ...

    def use_adapters(self, adapters: Sequence[Any]) -> None:
        """Sets the adapters that rows refer to by slot (`StepRows.adapters`). Called between two passes."""
        ...

    def load_cache(self) -> None:
        """Updates pointers into the cache after its memory was freed or allocated again."""
        ...

    def __call__(self, rows: StepRows) -> tuple[Tensor, Tensor]:
        """Final hidden states [T, width] and routes [T, MoE layers, top_k]; stores keys and values."""
        ...

    def sample(
        self, hidden: Tensor, params: Sequence[SamplingParams], draws: NDArray[np.float64]
    ) -> tuple[Tensor, Tensor]:
        """Samples from hidden states [N, width]: see `etude.inference.sampling.sample`."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [N, width] -> [N, vocabulary] float32, for raw and alternative log-probabilities."""
        ...

    def draft_layer(self, index: int, rows: StepRows, hidden: Tensor) -> Tensor:
        """Computes draft layer `index` over `rows`, whose tokens it reads: hidden [T, width] of the model, or
        of the layer before, -> [T, width]. Stores keys and values in the draft layers' cache."""
        ...


class ModuleForward:
    """Base of the passes that run the trainer's module: the weight and adapter methods of `ForwardPass`."""

    def __init__(self, model: LanguageModel, cache: PagedCache, drafts: DraftLayers | None) -> None:
        self._model = model
        self._cache = cache
        self._drafts = drafts
        self._adapters: Sequence[Pairs] = ()

    def load_weights(self) -> None:
        """See ForwardPass: the module's own tensors are used as they are, by captured steps too."""

    def pack_adapter(self, pairs: Mapping[str, Pair]) -> Pairs:
        packed: dict[int, Pair] = {}
        for name, (left, right) in pairs.items():
            weight = self._model.get_parameter(name)
            packed[id(weight)] = (left.to(weight.device, copy=True), right.to(weight.device, copy=True))
        return packed

    def use_adapters(self, adapters: Sequence[Pairs]) -> None:
        self._adapters = adapters

    @contextmanager
    def adapted(self, rows: StepRows) -> Iterator[None]:
        """Context in which passes of the module use the adapters of `rows`."""
        if rows.adapters is None:
            yield
            return
        used = rows.adapters[rows.sequence]
        own = [torch.from_numpy(np.flatnonzero(used == slot)) for slot in range(len(self._adapters))]
        device = self._model.embedding.device
        places = [None if len(index) == len(used) else index.to(device) for index in own]

        def adapt(ops: Ops) -> Ops:
            return cast(Ops, AdaptedOps(ops, self._adapters, places))

        self._model.adapt = adapt
        try:
            yield
        finally:
            self._model.adapt = None


class EagerForward(ModuleForward):
    """Runs the trainer's own module, operator by operator. Implements `ForwardPass`."""

    def __init__(self, model: LanguageModel, cache: PagedCache, drafts: DraftLayers | None = None) -> None:
        super().__init__(model, cache, drafts)
        self._recorder = RecordedRoutes.of(model.config)

    def load_cache(self) -> None:
        """See ForwardPass: no pointers are kept."""

    @torch.no_grad()
    def __call__(self, rows: StepRows) -> tuple[Tensor, Tensor]:
        tokens, positions = torch.from_numpy(rows.tokens), torch.from_numpy(rows.positions)
        attention = PagedAttention(self._cache, rows)
        with self.adapted(rows):
            hidden = self._model(tokens, positions, attention, self._recorder)
        return hidden, self._recorder.pop_routes(len(tokens))

    def sample(
        self, hidden: Tensor, params: Sequence[SamplingParams], draws: NDArray[np.float64]
    ) -> tuple[Tensor, Tensor]:
        return sample(self.logits(hidden), params, draws)

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        return self._model.logits(hidden)

    @torch.no_grad()
    def draft_layer(self, index: int, rows: StepRows, hidden: Tensor) -> Tensor:
        assert self._drafts is not None and self._cache.drafts is not None, "made together"
        tokens, positions = torch.from_numpy(rows.tokens), torch.from_numpy(rows.positions)
        attention = PagedAttention(self._cache.drafts, rows)
        return self._drafts(self._model, index, hidden, tokens, positions, attention)
