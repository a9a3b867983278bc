"""The forward pass in native code, called with the engine's model, cache and rows."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from etude.config import ModelConfig
from etude.inference.cache import PagedCache, StepRows
from etude.inference.native.drafting import DecodingRun, sampling_columns
from etude.inference.native.structures import Draw, Step
from etude.inference.native.weights import NativeAdapter, NativeDraftWeights, NativeWeights
from etude.inference.sequences import Sequences
from etude.inference.speculation import CarriedStates, NgramLookup
from etude.model import DraftLayers, LanguageModel
from etude.model.adapted_ops import Pair
from etude.model.kernels.native import calls, load_library
from etude.model.kernels.native.matrices import WeightType, aligned, pointer
from etude.records import SamplingParams

MIN_WORK_PER_THREAD = 8_000_000
"""Multiplications per thread below which another thread would not pay: an estimate, not fitted."""
MAX_STEPS_AHEAD = 32
WORK_AHEAD = 50_000_000
"""Multiplications of one run of decoding steps: about a millisecond."""


class NativeForward:
    """One native call per step, without the GIL. Implements `ForwardPass`.

    A row's bits depend neither on what else is in the step, nor on how its sequence was cut into steps, nor
    on the number of threads. With `float32` weights they are those that the trainer's module computes with
    `InvariantOps`; against `EagerForward` results differ by float32 rounding.
    """

    def __init__(
        self,
        model: LanguageModel,
        cache: PagedCache,
        num_threads: int = 1,
        weights: WeightType = "float32",
        drafts: DraftLayers | None = None,
    ) -> None:
        """`weights`: storage format of the matrices; `bfloat16` halves what decoding reads, and computes in
        float32. `drafts`: layers over the cache's `drafts`. Raises ResourceError if it cannot be compiled."""
        self._library = load_library()
        self._model = model
        self._cache = cache
        self._drafts = drafts
        self._num_threads = num_threads
        self._weight_type: WeightType = weights
        self._scratch = aligned((64,), torch.uint8)
        self._workspace = aligned((64,), torch.uint8)
        self._sample_scratch = torch.empty(0)
        self.load_weights()

    def load_weights(self) -> None:
        """See ForwardPass: makes copies of the weights, packed for the matrix products."""
        self._weights = NativeWeights(self._model, self._cache, self._weight_type)
        self._draft_weights: NativeDraftWeights | None = None
        if self._drafts is not None:
            assert self._cache.drafts is not None, "made together"
            self._draft_weights = NativeDraftWeights(
                self._drafts, self._model, self._cache.drafts, self._weight_type
            )

    def pack_adapter(self, pairs: Mapping[str, Pair]) -> NativeAdapter:
        return NativeAdapter(self._model, pairs)

    def use_adapters(self, adapters: Sequence[NativeAdapter]) -> None:
        self._weights.use_adapters(adapters)

    def load_cache(self) -> None:
        """See ForwardPass: updates the layers' pointers to the pages."""
        self._weights.point_at_pages()
        if self._draft_weights is not None:
            self._draft_weights.point_at_pages()

    def __call__(self, rows: StepRows) -> tuple[Tensor, Tensor]:
        count = len(rows.tokens)
        hidden = aligned((count, self._model.config.hidden_size))
        routes = self._empty_routes(self._model.config, count)
        threads = self._threads_for(count * self._weights.work_per_row)
        self._reserve(count, threads, self._weights)
        step = self._step(rows, hidden, routes)
        self._library.etude_forward(
            ctypes.byref(self._weights.model),
            self._weights.layers,
            ctypes.byref(step),
            ctypes.c_int64(threads),
            pointer(self._scratch),
        )
        return hidden, torch.from_numpy(routes)

    def sample(
        self, hidden: Tensor, params: Sequence[SamplingParams], draws: NDArray[np.float64]
    ) -> tuple[Tensor, Tensor]:
        count = len(hidden)
        threads = self._threads_for(count * self._model.head.numel())
        self._reserve_sampling(threads)
        tokens, logprobs = aligned((count,), torch.int64), aligned((count,))
        logits = aligned((count, self._model.vocab_size))
        hidden, columns, noise = hidden.contiguous(), sampling_columns(params), np.ascontiguousarray(draws)
        draw = Draw(
            rows=count,
            vocabulary=self._model.vocab_size,
            hidden=hidden.data_ptr(),
            draws=noise.ctypes.data,
            logits=logits.data_ptr(),
            tokens=tokens.data_ptr(),
            logprobs=logprobs.data_ptr(),
            raw_logprobs=None,
            **{name: column.ctypes.data for name, column in columns.items()},
        )
        head = ctypes.byref(self._weights.head.native[0])
        self._library.etude_sample(
            ctypes.byref(draw), head, ctypes.c_int64(threads), pointer(self._sample_scratch)
        )
        return tokens, logprobs

    def steps_ahead(self, num_rows: int) -> int:
        """Most steps of `num_rows` decoding rows for one call of `decode`: about a millisecond, so that it
        does not delay the waiting thread noticeably."""
        work = num_rows * (self._weights.work_per_row + self._model.head.numel())
        return max(1, min(MAX_STEPS_AHEAD, WORK_AHEAD // work))

    def decode(
        self,
        sequences: Sequences,
        members: NDArray[np.int64],
        most_steps: int,
        wanted: NDArray[np.int64],
        ready: NDArray[np.int64],
        source: NgramLookup | CarriedStates | None,
    ) -> DecodingRun:
        """Computes up to `most_steps` steps of the rows `members`, until a session ends or lacks a page:
        see DecodingRun. Tokens, log-probabilities and routes have the bits of single steps without drafts."""
        layers, vocabulary = self._draft_weights, self._model.vocab_size
        run = DecodingRun(sequences, members, most_steps, wanted, ready, source, layers, vocabulary)
        rows = self._library.etude_drafting_rows(ctypes.byref(run.native))
        threads = self._threads_for(rows * (self._weights.work_per_row + self._model.head.numel()))
        self._reserve(rows, threads, self._weights)
        if self._draft_weights is not None:
            self._reserve(rows, threads, self._draft_weights)
        self._reserve_sampling(threads)
        needed = self._library.etude_drafting_bytes(
            ctypes.byref(self._weights.model), ctypes.byref(run.native)
        )
        if len(self._workspace) < needed:
            self._workspace = aligned((needed,), torch.uint8)
        run.num_steps = self._library.etude_draft_run(
            ctypes.byref(self._weights.model),
            self._weights.layers,
            ctypes.byref(self._weights.head.native[0]),
            ctypes.byref(run.native),
            ctypes.c_int64(threads),
            pointer(self._workspace),
            pointer(self._scratch),
            pointer(self._sample_scratch),
        )
        return run

    def logits(self, hidden: Tensor) -> Tensor:
        """See ForwardPass: the same bits that `sample` draws from."""
        threads = self._threads_for(len(hidden) * self._model.head.numel())
        return calls.linear(self._weights.head, hidden.contiguous(), threads)

    def draft_layer(self, index: int, rows: StepRows, hidden: Tensor) -> Tensor:
        """See ForwardPass: has the bits of the layers' module with `InvariantOps`."""
        weights, count = self._draft_weights, len(rows.tokens)
        assert weights is not None and self._drafts is not None, "made with draft layers"
        threads = self._threads_for(count * weights.work_per_row // len(weights.layers))
        self._reserve(count, threads, weights)
        hidden = hidden.contiguous().clone()
        routes = self._empty_routes(self._drafts.config, count)
        step = self._step(rows, hidden, routes)
        step.adapters = None
        self._library.etude_draft_layer(
            ctypes.byref(weights.model),
            weights.layers,
            weights.entrances,
            ctypes.c_int64(index),
            ctypes.byref(step),
            ctypes.c_int64(threads),
            pointer(self._scratch),
        )
        return hidden

    def _threads_for(self, work: int) -> int:
        """Number of threads for `work` multiplications."""
        return max(1, min(self._num_threads, work // MIN_WORK_PER_THREAD))

    @staticmethod
    def _empty_routes(config: ModelConfig, count: int) -> NDArray[Any]:
        return np.empty((count, config.num_moe_layers, config.routes_per_token), dtype=config.route_dtype)

    def _step(self, rows: StepRows, hidden: Tensor, routes: NDArray[Any]) -> Step:
        """`hidden` and `routes`: what the native code writes to."""
        return Step(
            rows=len(rows.tokens),
            max_pages=rows.tables.shape[1],
            route_layers=routes.shape[-2],
            route_bytes=routes.itemsize,
            tokens=rows.tokens.ctypes.data,
            sequences=rows.sequence.ctypes.data,
            positions=rows.positions.ctypes.data,
            tables=rows.tables.ctypes.data,
            hidden=hidden.data_ptr(),
            routes=routes.ctypes.data,
            adapters=None if rows.adapters is None else rows.adapters.ctypes.data,
        )

    def _reserve(self, count: int, threads: int, weights: NativeWeights | NativeDraftWeights) -> None:
        needed = self._library.etude_scratch_bytes(
            ctypes.byref(weights.model), ctypes.c_int64(count), ctypes.c_int64(threads)
        )
        if len(self._scratch) < needed:
            self._scratch = aligned((needed,), torch.uint8)

    def _reserve_sampling(self, threads: int) -> None:
        vocabulary = ctypes.c_int64(self._model.vocab_size)
        needed = self._library.etude_sample_floats(vocabulary, ctypes.c_int64(threads))
        if len(self._sample_scratch) < needed:
            self._sample_scratch = aligned((needed,))
