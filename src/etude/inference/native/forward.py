"""Calls the native pass with the engine's model, cache and rows."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from etude.config import ModelConfig
from etude.errors import ResourceError
from etude.inference.cache import PagedCache, StepRows
from etude.inference.native.structures import Draw, Layer, Model, Step
from etude.inference.paged_attention import PagedAttention
from etude.model import Block, DenseMlp, Experts, GroupedQueryBlock, LanguageModel
from etude.model.kernels.native import calls, load_library
from etude.model.kernels.native.matrices import PackedMatrices, WeightType, address, aligned, pack, pointer
from etude.protocols import Attention
from etude.records import SamplingParams

MAX_HEAD_DIM = 256
"""MAX_DIM of the source."""
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
        float32. Raises ResourceError if it cannot be compiled here or the model is not of its kind."""
        _check(model.config)
        self._library = load_library()
        self._model = model
        self._cache = cache
        self._num_threads = num_threads
        self._weights: WeightType = weights
        self._scratch = aligned((64,), torch.uint8)
        self._sample_scratch = torch.empty(0)
        self.load_weights()

    @torch.no_grad()
    def load_weights(self) -> None:
        """See ForwardPass: copies of the weights, packed for the products."""
        model, config = self._model, self._model.config
        held: list[Tensor | PackedMatrices] = []
        self._head = self._packed(held, [model.head.t()])
        self._native = Model(
            width=config.hidden_size,
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            dim=config.head_dim,
            layers=config.num_layers,
            experts=config.num_experts if config.num_moe_layers else 0,
            top_k=config.experts_per_token,
            expert_size=config.expert_size if config.num_moe_layers else 0,
            inner=0 if config.num_moe_layers == config.num_layers else config.intermediate_size,
            normalise=config.norm_topk_prob,
            eps=config.rms_norm_eps,
            embedding=_keep(held, model.embedding),
            cosine=_keep(held, cast(Tensor, model.cosine)),
            signed_sine=_keep(held, cast(Tensor, model.signed_sine)),
            final_norm=_keep(held, model.final_norm),
        )
        self._layers = (Layer * config.num_layers)()
        for index, block in enumerate(model.blocks):
            assert isinstance(block, GroupedQueryBlock), "checked at the beginning"
            self._layers[index] = self._layer(held, block, index)
        self._held = held
        """What the native structures point into."""
        self._work_per_row = sum(_work(item, config.experts_per_token) for item in _matrices(held[1:]))

    def __call__(self, rows: StepRows) -> tuple[Tensor, Tensor]:
        """See ForwardPass."""
        config, count = self._model.config, len(rows.tokens)
        hidden = torch.empty((count, config.hidden_size))
        routes = np.empty((count, config.num_moe_layers, config.routes_per_token), dtype=config.route_dtype)
        threads = self._threads_for(count * self._work_per_row)
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
            ctypes.byref(self._native),
            self._layers,
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
        head = ctypes.byref(self._head.native[0])
        self._library.etude_sample(
            ctypes.byref(draw), head, ctypes.c_int64(threads), pointer(self._sample_scratch)
        )
        return tokens, logprobs

    def logits(self, hidden: Tensor) -> Tensor:
        """See ForwardPass: of the same bits as those that `sample` draws from."""
        threads = self._threads_for(len(hidden) * self._model.head.numel())
        return calls.linear(self._head, hidden.contiguous(), threads)

    def attention(self, cache: PagedCache, rows: StepRows) -> Attention[Tensor]:
        """See ForwardPass: operator by operator."""
        return PagedAttention(cache, rows)

    def _threads_for(self, work: int) -> int:
        """Threads for so many multiplications."""
        return max(1, min(self._num_threads, work // MIN_WORK_PER_THREAD))

    def _reserve(self, count: int, threads: int) -> None:
        needed = self._library.etude_scratch_bytes(
            ctypes.byref(self._native), ctypes.c_int64(count), ctypes.c_int64(threads)
        )
        if len(self._scratch) < needed:
            self._scratch = aligned((needed,), torch.uint8)

    def _packed(self, held: list[Tensor | PackedMatrices], weights: Sequence[Tensor]) -> PackedMatrices:
        packed = pack(weights, self._weights)
        held.append(packed)
        return packed

    def _layer(self, held: list[Tensor | PackedMatrices], block: GroupedQueryBlock, index: int) -> Layer:
        layer = Layer(
            attention_norm=_keep(held, block.attention_norm),
            query_norm=_keep(held, block.query_norm),
            key_norm=_keep(held, block.key_norm),
            experts_norm=_keep(held, block.experts_norm),
            qkv=self._packed(held, [block.qkv.t()]).native[0],
            out=self._packed(held, [block.out.t()]).native[0],
            keys=self._cache.keys[index].data_ptr(),
            values=cast(Tensor, self._cache.values)[index].data_ptr(),
            route_layer=max(-1, block.route_layer),
        )
        if block.experts is not None:
            router = pack([block.experts.router.t()])  # float32, as the module has it
            held.append(router)
            layer.router = router.native[0]
        gate_up, down = _feed_forward(block)
        layer.gate_up = address(self._packed(held, gate_up).native)
        layer.down = address(self._packed(held, down).native)
        return layer


def _feed_forward(block: Block) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Matrices [inputs, outputs] of the dense layer or of each expert."""
    if isinstance(block.experts, Experts):
        return block.experts.gate_up.unbind(0), block.experts.down.unbind(0)
    mlp = cast(DenseMlp, block.mlp)
    return [mlp.gate_up.t()], [mlp.down.t()]


def _matrices(held: Sequence[Tensor | PackedMatrices]) -> list[PackedMatrices]:
    return [item for item in held if isinstance(item, PackedMatrices)]


def _work(matrices: PackedMatrices, top_k: int) -> int:
    """Multiplications of one row: all of a single matrix, those of `top_k` among experts."""
    first = matrices.native[0]
    return min(len(matrices), top_k) * first.inputs * first.outputs


def _keep(held: list[Tensor | PackedMatrices], tensor: Tensor) -> int:
    """Address of the tensor's contiguous float32 values, which are kept."""
    kept = tensor.detach().float().contiguous()
    held.append(kept)
    return kept.data_ptr()


def _check(config: ModelConfig) -> None:
    if config.is_latent:
        raise ResourceError(
            "native kernels compute Qwen3, dense or a mixture of experts",
            field="model.architecture",
            received=config.architecture,
            fix="set engine.kernels=eager",
        )
    if config.head_dim > MAX_HEAD_DIM:
        raise ResourceError(
            f"native kernels take heads of up to {MAX_HEAD_DIM}",
            field="model.head_dim",
            received=config.head_dim,
            fix="set engine.kernels=eager",
        )
