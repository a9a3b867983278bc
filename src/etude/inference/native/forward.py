"""Calls the native pass with the engine's model, cache and rows."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from etude.inference.cache import PagedCache, StepRows
from etude.inference.native.structures import Draw, Step
from etude.inference.native.weights import NativeWeights
from etude.inference.paged_attention import PagedAttention
from etude.model import LanguageModel
from etude.model.kernels.native import calls, load_library
from etude.model.kernels.native.matrices import WeightType, aligned, pointer
from etude.protocols import Attention
from etude.records import SamplingParams

MIN_WORK_PER_THREAD = 8_000_000
"""Multiplications below which another thread is taken to cost more than it computes: judged, not fitted."""


class NativeForward:
    """One native call per step, without the interpreter's lock.

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
    ) -> None:
        """`weights`: how the matrices are kept; `bfloat16` halves what decoding reads, and computes in
        float32. Raises ResourceError if it cannot be compiled here."""
        self._library = load_library()
        self._model = model
        self._cache = cache
        self._num_threads = num_threads
        self._weight_type: WeightType = weights
        self._scratch = aligned((64,), torch.uint8)
        self._sample_scratch = torch.empty(0)
        self.load_weights()

    def load_weights(self) -> None:
        """See ForwardPass: copies of the weights, packed for the products."""
        self._weights = NativeWeights(self._model, self._cache, self._weight_type)

    def __call__(self, rows: StepRows) -> tuple[Tensor, Tensor]:
        """See ForwardPass."""
        config, count = self._model.config, len(rows.tokens)
        hidden = torch.empty((count, config.hidden_size))
        routes = np.empty((count, config.num_moe_layers, config.routes_per_token), dtype=config.route_dtype)
        threads = self._threads_for(count * self._weights.work_per_row)
        self._reserve(count, threads)
        step = Step(
            rows=count,
            max_pages=rows.tables.shape[1],
            route_layers=config.num_moe_layers,
            route_bytes=routes.itemsize,
            tokens=rows.tokens.ctypes.data,
            sequences=rows.sequence.ctypes.data,
            positions=rows.positions.ctypes.data,
            tables=rows.tables.ctypes.data,
            hidden=hidden.data_ptr(),
            routes=routes.ctypes.data,
        )
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
        """See ForwardPass."""
        count, vocabulary = len(hidden), self._model.vocab_size
        tokens, logprobs = torch.empty(count, dtype=torch.int64), torch.empty(count)
        threads = self._threads_for(count * hidden.shape[1] * vocabulary)
        needed = self._library.etude_sample_floats(ctypes.c_int64(vocabulary), ctypes.c_int64(threads))
        if len(self._sample_scratch) < needed:
            self._sample_scratch = torch.empty(needed)
        columns = [[p.temperature for p in params], [p.top_p for p in params], [p.min_p for p in params]]
        temperatures, top_p, min_p = np.array(columns, dtype=np.float32)
        top_k = np.array([p.top_k for p in params], dtype=np.int64)
        hidden, draws = hidden.contiguous(), np.ascontiguousarray(draws)
        logits = torch.empty((count, vocabulary))
        draw = Draw(
            rows=count,
            vocabulary=vocabulary,
            hidden=hidden.data_ptr(),
            temperatures=temperatures.ctypes.data,
            top_p=top_p.ctypes.data,
            min_p=min_p.ctypes.data,
            top_k=top_k.ctypes.data,
            draws=draws.ctypes.data,
            logits=logits.data_ptr(),
            tokens=tokens.data_ptr(),
            logprobs=logprobs.data_ptr(),
            raw_logprobs=None,
        )
        head = ctypes.byref(self._weights.head.native[0])
        self._library.etude_sample(
            ctypes.byref(draw), head, ctypes.c_int64(threads), pointer(self._sample_scratch)
        )
        return tokens, logprobs

    def logits(self, hidden: Tensor) -> Tensor:
        """See ForwardPass: of the same bits as those that `sample` draws from."""
        threads = self._threads_for(len(hidden) * self._model.head.numel())
        return calls.linear(self._weights.head, hidden.contiguous(), threads)

    def attention(self, cache: PagedCache, rows: StepRows) -> Attention[Tensor]:
        """See ForwardPass: operator by operator."""
        return PagedAttention(cache, rows)

    def _threads_for(self, work: int) -> int:
        """Threads for so many multiplications."""
        return max(1, min(self._num_threads, work // MIN_WORK_PER_THREAD))

    def _reserve(self, count: int, threads: int) -> None:
        needed = self._library.etude_scratch_bytes(
            ctypes.byref(self._weights.model), ctypes.c_int64(count), ctypes.c_int64(threads)
        )
        if len(self._scratch) < needed:
            self._scratch = aligned((needed,), torch.uint8)
