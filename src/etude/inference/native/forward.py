"""Calls `forward.c` with the engine's model, cache and rows."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from etude.errors import ResourceError
from etude.inference.cache import KvCache
from etude.inference.forward import StepRows
from etude.inference.native.build import load_library
from etude.inference.sampling import sample
from etude.model import Qwen3Moe
from etude.records import SamplingParams

MAX_HEAD_DIM = 256
"""MAX_DIM of the source."""
MIN_ROWS_PER_THREAD = 64
"""With fewer, waking a thread costs more than it computes."""


_SIZES = ("width", "heads", "kv_heads", "dim", "experts", "top_k", "inner", "layers", "max_tokens")


class _Model(ctypes.Structure):
    """`Model` of the source, field by field."""

    _fields_: ClassVar = [
        *(
            (name, ctypes.c_int64)
            for name in (
                "width",
                "heads",
                "kv_heads",
                "dim",
                "experts",
                "top_k",
                "inner",
                "layers",
                "max_tokens",
            )
        ),
        ("eps", ctypes.c_float),
        *((name, ctypes.c_void_p) for name in ("embedding", "cosine", "signed_sine", "final_norm")),
    ]


_MATRICES = (
    "attention_norm",
    "qkv",
    "query_norm",
    "key_norm",
    "out",
    "experts_norm",
    "router",
    "gate_up",
    "down",
)


class _Layer(ctypes.Structure):
    """`Layer` of the source."""

    _fields_: ClassVar = [(name, ctypes.c_void_p) for name in (*_MATRICES, "keys", "values")]


class _Step(ctypes.Structure):
    """`Step` of the source."""

    _fields_: ClassVar = [
        ("num_rows", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("tokens", "slots", "positions", "hidden", "routes")),
    ]


class NativeForward:
    """One native call per step and thread, without the interpreter's lock.

    Sessions do not see each other, so a step of many rows is cut between two of them and its parts run side
    by side. A row's bits depend neither on what else is in the step nor on the number of threads. Against
    `EagerForward` and the trainer, results differ by float32 rounding.
    """

    def __init__(self, model: Qwen3Moe, cache: KvCache, num_threads: int = 1) -> None:
        """Raises ResourceError if it cannot be compiled here or the model is not of its kind."""
        config = model.config
        if config.head_dim > MAX_HEAD_DIM:
            raise ResourceError(
                f"native kernels take heads of up to {MAX_HEAD_DIM}",
                field="model.head_dim",
                received=config.head_dim,
                fix="set engine.kernels=eager",
            )
        assert cache.max_tokens <= config.max_positions + 1, "positions lie within the rotary tables"
        self._library = load_library()
        self._model = model
        self._cache = cache
        self._layers = (_Layer * config.num_layers)()
        self._held: list[Tensor] = []
        """Tensors that the native structures point into."""
        self._num_threads = num_threads
        self._scratch = [torch.empty(0) for _ in range(num_threads)]
        self._pool = ThreadPoolExecutor(max(1, num_threads - 1), "etude-forward")
        self.load_weights()

    @torch.no_grad()
    def load_weights(self) -> None:
        """See ForwardPass: copies of the weights, matrices as [inputs, outputs]."""
        model, config = self._model, self._model.config
        self._held = []
        self._head = model.embedding.detach().float().t().contiguous()
        point = self._point
        self._native = _Model(
            config.hidden_size,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            config.num_experts,
            config.experts_per_token,
            config.expert_size,
            config.num_layers,
            self._cache.max_tokens,
            config.rms_norm_eps,
            point(model.embedding),
            point(model.cosine),  # type: ignore[arg-type]
            point(model.signed_sine),  # type: ignore[arg-type]
            point(model.final_norm),
        )
        for index, block in enumerate(model.blocks):
            tensors = (
                block.attention_norm,
                block.qkv.t(),  # type: ignore[operator]
                block.query_norm,
                block.key_norm,
                block.out.t(),  # type: ignore[operator]
                block.experts_norm,
                block.experts.router,  # type: ignore[union-attr]
                block.experts.gate_up,  # type: ignore[union-attr]
                block.experts.down,  # type: ignore[union-attr]
            )
            strips = (self._cache.keys[index], self._cache.values[index])
            pointers = [point(tensor) for tensor in tensors]  # type: ignore[arg-type]
            self._layers[index] = _Layer(*pointers, *(strip.data_ptr() for strip in strips))

    def _point(self, tensor: Tensor) -> int:
        """Address of the tensor's contiguous float32 values, which are kept."""
        kept = tensor.detach().float().contiguous()
        self._held.append(kept)
        return kept.data_ptr()

    def __call__(
        self, tokens: Tensor, slots: Tensor, positions: Tensor, rows: StepRows
    ) -> tuple[Tensor, Tensor]:
        """See ForwardPass."""
        config, count = self._model.config, len(tokens)
        hidden = torch.empty((count, config.hidden_size))
        routes = torch.empty((count, config.num_layers, config.experts_per_token), dtype=torch.uint8)
        tensors = (tokens, slots, positions, hidden, routes)
        edges = self._edges(rows.counts)
        parts = [
            (tuple(tensor[first:end] for tensor in tensors), scratch)
            for scratch, (first, end) in enumerate(itertools.pairwise(edges))
        ]
        others = [self._pool.submit(self._run, *part) for part in parts[1:]]
        self._run(*parts[0])
        for other in others:
            other.result()
        return hidden, routes

    def sample(
        self, hidden: Tensor, params: Sequence[SamplingParams], draws: NDArray[np.float64]
    ) -> tuple[Tensor, Tensor]:
        """See ForwardPass. Rows of which some are truncated (top-k and the like) go operator by operator."""
        if any(param.truncated and param.temperature > 0 for param in params):
            return sample(self._model.logits(hidden), params, draws)
        count, vocabulary = len(hidden), self._model.vocab_size
        tokens, logprobs = torch.empty(count, dtype=torch.int64), torch.empty(count)
        inputs = (
            hidden.contiguous(),
            self._head,
            torch.tensor([param.temperature for param in params], dtype=torch.float32),
            torch.from_numpy(draws),
            torch.empty((count, vocabulary)),
        )
        sizes = (count, hidden.shape[1], vocabulary)
        self._library.etude_sample(
            *(ctypes.c_int64(size) for size in sizes),
            *(ctypes.c_void_p(tensor.data_ptr()) for tensor in (*inputs, tokens, logprobs)),
        )
        return tokens, logprobs

    def _edges(self, counts: NDArray[np.int64]) -> list[int]:
        """Rows at which the parts of a step begin, and the end: between sessions, of about equal size."""
        ends = np.cumsum(counts)
        num_parts = min(self._num_threads, int(ends[-1]) // MIN_ROWS_PER_THREAD)
        wanted = ends[-1] * np.arange(1, max(1, num_parts)) / max(1, num_parts)
        cuts = ends[np.searchsorted(ends, wanted)]
        return [0, *sorted({*cuts.tolist(), int(ends[-1])})]

    def _run(self, tensors: tuple[Tensor, ...], scratch: int) -> None:
        """Computes tokens, slots, positions [R] into hidden and routes, with a scratch buffer of its own."""
        count = len(tensors[0])
        needed = self._library.etude_scratch_floats(ctypes.byref(self._native), ctypes.c_int64(count))
        if len(self._scratch[scratch]) < needed:
            self._scratch[scratch] = torch.empty(needed)
        step = _Step(count, *(tensor.data_ptr() for tensor in tensors))
        self._library.etude_forward(
            ctypes.byref(self._native),
            self._layers,
            ctypes.byref(step),
            ctypes.c_void_p(self._scratch[scratch].data_ptr()),
        )
