"""The forward pass on a GPU: the trainer's own module there, with Triton's kernels over the paged cache.

The inputs of a step are copied to the device at once; routes and sampled tokens are copied back. Tiles have a
fixed shape per kernel variant, so a row's attention does not depend on the other rows of the step.

Steps of few rows, such as decoding, are CUDA graphs: their inputs lie in fixed buffers, bucketed by numbers
of rows and pages, and the computation from these buffers is captured when it is first needed. Padding rows
are at position -1: they are not stored and attend to nothing. On a CPU, under Triton's interpreter, the same
buffers are used without a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from etude.config import ModelConfig
from etude.errors.packages import missing_package
from etude.inference.cache import PagedCache, StepRows
from etude.inference.forward import ModuleForward
from etude.inference.sampling import sample
from etude.model import DraftLayers, LanguageModel, RecordedRoutes
from etude.model.adapted_ops import Pairs
from etude.records import SamplingParams

_TILE_ROWS, _WIDE_TILE_ROWS = 64, 16
"""Rows of one tile (query heads that share a cache head, times positions): for prompts, and where values are
so wide that more accumulators would not fit into registers."""
_WIDE_VALUE = 128
_ROW_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Row counts of captured steps."""
_PAGE_BUCKET, _PAGE_GROWTH = 64, 4
"""Page counts of captured steps: the smallest, and the factor between sizes."""
_MOST_PER_SEQUENCE = 16
"""Most rows of one sequence in a captured step: each row reads the keys separately, as drafts may."""

Compute = Callable[[], None]
Capture = Callable[[Compute], Compute]
"""Takes a function over fixed buffers, which it may call; returns a function that repeats it."""


def run_uncaptured(compute: Compute) -> Compute:
    """A Capture that records nothing: for devices without graphs."""
    return compute


class CudaGraphs:
    """Captures CUDA graphs, which share one memory pool: one of them runs at a time."""

    def __init__(self) -> None:
        self._pool: Any = torch.cuda.graph_pool_handle()

    def __call__(self, compute: Compute) -> Compute:
        """Runs `compute` twice before the capture, so that kernels are compiled and libraries initialised."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                compute()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Another thread may be staging weights: its allocations must not disturb this capture.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            compute()
        return graph.replay


class GpuForward(ModuleForward):
    """Implements ForwardPass with a model and a cache on one device. Steps with several adapters, or with any
    adapter in a mixture of experts, are not captured."""

    def __init__(
        self,
        model: LanguageModel,
        cache: PagedCache,
        capture: Capture | None = None,
        max_captured_rows: int = _ROW_BUCKETS[-1],
        drafts: DraftLayers | None = None,
    ) -> None:
        """`capture`: by default CUDA graphs where the cache is on a GPU; `max_captured_rows`: rows of
        the largest captured step, 0 for none. Raises ResourceError without Triton."""
        super().__init__(model, cache, drafts)
        self._kernel, ops = _load_kernels()
        model.ops = ops.GpuOps()
        if capture is None:
            capture = CudaGraphs() if cache.keys.is_cuda else run_uncaptured
        self._capture = capture
        self._max_captured_rows = min(max_captured_rows, _ROW_BUCKETS[-1])
        self._captured: dict[tuple[int, int, int], _CapturedStep] = {}

    def load_cache(self) -> None:
        """See ForwardPass: captured steps hold old pointers, and are captured again when needed."""
        self._captured.clear()

    @torch.no_grad()
    def __call__(self, rows: StepRows) -> tuple[Tensor, Tensor]:
        """See ForwardPass; the hidden states stay on the device."""
        used = {-1} if rows.adapters is None else {*rows.adapters.tolist()}
        alike = len(used) == 1 and (used == {-1} or not self._model.num_experts)
        few = len(rows.tokens) <= self._max_captured_rows and int(rows.counts.max()) <= _MOST_PER_SEQUENCE
        with self.adapted(rows):
            if few and alike:
                hidden, routes = self._captured_step(rows, *used).run(rows)
            else:
                hidden, routes = self._compute(DeviceRows.of(rows, self._model.config, self._cache))
        return hidden, routes.cpu()

    def sample(
        self, hidden: Tensor, params: Sequence[SamplingParams], draws: NDArray[np.float64]
    ) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            tokens, logprobs = sample(self._model.logits(hidden), params, draws)
        return tokens.cpu(), logprobs.cpu()

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        return self._model.logits(hidden).cpu()

    @torch.no_grad()
    def draft_layer(self, index: int, rows: StepRows, hidden: Tensor) -> Tensor:
        cache = self._cache.drafts
        assert self._drafts is not None and cache is not None, "made together"
        placed = DeviceRows.of(rows, self._model.config, cache)
        attention = GpuPagedAttention(cache, placed, self._kernel)
        return self._drafts(self._model, index, hidden, placed.tokens, placed.positions, attention)

    def _compute(self, rows: DeviceRows) -> tuple[Tensor, Tensor]:
        """Hidden states [T, width] and routes [T, MoE layers, top_k]; does not synchronise unless the model's
        blocks do."""
        recorder = RecordedRoutes.of(self._model.config)
        attention = GpuPagedAttention(self._cache, rows, self._kernel)
        hidden = self._model(rows.tokens, rows.positions.clamp_min(0), attention, recorder)
        return hidden, recorder.pop_routes(len(rows.tokens))

    def use_adapters(self, adapters: Sequence[Pairs]) -> None:
        """See ForwardPass: captured steps hold the old adapters, and are dropped."""
        if adapters or self._adapters:
            self._captured.clear()
        super().use_adapters(adapters)

    def _captured_step(self, rows: StepRows, adapter: int) -> _CapturedStep:
        """The captured step with the smallest buffers that fit `rows`, which all use `adapter`."""
        num_rows = next(size for size in _ROW_BUCKETS if size >= len(rows.tokens))
        num_pages = _PAGE_BUCKET
        while num_pages < rows.tables.shape[1]:
            num_pages *= _PAGE_GROWTH
        key = (num_rows, num_pages, adapter)
        if key not in self._captured:
            device = self._cache.keys.device
            self._captured[key] = _CapturedStep(num_rows, num_pages, device, self._compute, self._capture)
        return self._captured[key]


@dataclass(frozen=True, slots=True)
class DeviceRows:
    """StepRows on a device. Positions of -1 mark padding rows."""

    tokens: Tensor
    """[T] int64"""
    positions: Tensor
    """[T] int64"""
    sequence: Tensor
    """[T] int32 row of `tables`."""
    tables: Tensor
    """[S, pages] int32"""
    tiles: Any
    """`Tiles` of the attention kernel."""

    @staticmethod
    def of(rows: StepRows, config: ModelConfig, cache: PagedCache) -> DeviceRows:
        """Copies rows to the device, with tiles of several positions where the number of heads permits."""
        device, (num_sequences, num_pages) = cache.keys.device, rows.tables.shape
        kernel, _ = _load_kernels()
        flat = (rows.tokens, rows.positions, rows.sequence, rows.tables.reshape(-1))
        packed = torch.from_numpy(np.concatenate(flat, dtype=np.int32, casting="unsafe")).to(device)
        tokens, positions, sequence, tables = packed.split([len(part) for part in flat])
        tile_rows = _TILE_ROWS if cache.value_dim <= _WIDE_VALUE else _WIDE_TILE_ROWS
        tile_heads = min(config.num_heads // config.cache_heads, kernel.MAX_TILE_HEADS)
        positions_of_tile = max(1, tile_rows // tile_heads)
        tiles = kernel.Tiles.plan(rows.counts, positions_of_tile, device)
        shaped = tables.view(num_sequences, num_pages)
        return DeviceRows(tokens.long(), positions.long(), sequence, shaped, tiles)


class _CapturedStep:
    """A captured step, from fixed input buffers to fixed outputs, of up to `num_rows` rows, each with its own
    table of up to `num_pages` pages."""

    def __init__(
        self,
        num_rows: int,
        num_pages: int,
        device: torch.device,
        compute: Callable[[DeviceRows], tuple[Tensor, Tensor]],
        capture: Capture,
    ) -> None:
        """Initially all rows are padding."""
        self._packed = torch.zeros((num_rows, 2 + num_pages), dtype=torch.int32, device=device)
        """[rows, token | position | pages]: one copy brings all of them."""
        self._packed[:, 1] = -1
        places = torch.arange(num_rows, dtype=torch.int32, device=device)
        kernel, _ = _load_kernels()
        self._tiles = kernel.Tiles(places, torch.ones_like(places), places, rows_per_tile=1)
        self._compute = compute
        self._capture = capture
        self._outputs: tuple[Tensor, Tensor] | None = None
        self._repeat: Compute | None = None

    def run(self, rows: StepRows) -> tuple[Tensor, Tensor]:
        """Hidden states of `rows`, and their routes, which the next run overwrites."""
        self._fill(rows)
        if self._repeat is None:
            self._repeat = self._capture(self._into_outputs)
        self._repeat()
        assert self._outputs is not None
        hidden, routes = self._outputs
        return hidden[: len(rows.tokens)].clone(), routes[: len(rows.tokens)]

    def _fill(self, rows: StepRows) -> None:
        """Writes `rows`, and padding after them. Does not wait for the device."""
        count, num_pages = len(rows.tokens), rows.tables.shape[1]
        packed = np.zeros((len(self._packed), 2 + num_pages), dtype=np.int32)
        packed[:count, 0] = rows.tokens
        packed[:, 1] = -1
        packed[:count, 1] = rows.positions
        packed[:count, 2:] = rows.tables[rows.sequence]
        self._packed[:, : 2 + num_pages].copy_(torch.from_numpy(packed))

    def _into_outputs(self) -> None:
        tokens, positions = self._packed[:, 0].long(), self._packed[:, 1].long()
        rows = DeviceRows(tokens, positions, self._tiles.sequence, self._packed[:, 2:], self._tiles)
        computed = self._compute(rows)
        if self._outputs is None:
            self._outputs = computed[0].clone(), computed[1].clone()
        for output, value in zip(self._outputs, computed, strict=True):
            output.copy_(value)


class GpuPagedAttention:
    """Attention of one engine step: stores the new keys and values, then attends to all up to them."""

    def __init__(self, cache: PagedCache, rows: DeviceRows, kernel: ModuleType) -> None:
        self._cache = cache
        self._rows = rows
        self._kernel = kernel

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        cache, rows = self._cache, self._rows
        keys, values = cache.keys[layer], None if cache.values is None else cache.values[layer]
        self._kernel.store_rows(key, value, keys, values, rows.tables, rows.sequence, rows.positions)
        scale = query.shape[2] ** -0.5
        return self._kernel.paged_attention(
            query, keys, values, rows.tables, rows.positions, rows.tiles, scale, cache.value_dim
        )


def _load_kernels() -> tuple[ModuleType, ModuleType]:
    """The modules of attention and of operators, imported here alone, since Triton is not installed
    everywhere. Raises ResourceError."""
    try:
        from etude.model.kernels.gpu import ops, paged_attention
    except ImportError as error:
        raise missing_package("computing on a GPU", "triton", field="engine.kernels") from error
    return paged_attention, ops
