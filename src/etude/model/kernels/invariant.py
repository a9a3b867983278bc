"""Batch-invariant operations: the trainer's module with them computes the engine's bits.

Forward passes are the native blocks of which the engine's own pass is made, each with a fixed order of every
sum, so a row's result depends neither on the other rows nor on threads. So are gradients of products; other
backward passes are PyTorch's, of the reference operation, computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, cast

import torch
from torch import Tensor

from etude.errors import ResourceError
from etude.model.attention import PackedAttention
from etude.model.kernels.native import calls, load_library
from etude.model.kernels.native.matrices import pack
from etude.model.ops import Ops, TorchOps

_TORCH = TorchOps()


class InvariantOps(Ops):
    """`Ops` of which every result is a fixed function of its row. Float32 on a CPU only."""

    def __init__(self) -> None:
        """Raises ResourceError where the native kernels cannot be compiled."""
        load_library()

    def linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """See Ops."""
        return cast(Tensor, _Linear.apply(_checked(x), weight))

    def linear_add(self, residual: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """See Ops."""
        return residual + self.linear(x, weight)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See Ops."""
        return _compute(
            lambda a, w: calls.rms_norm(a, w, eps, _threads()),
            lambda a, w: _TORCH.rms_norm(a, w, eps),
            x,
            weight,
        )

    def rotate(self, x: Tensor, cosine: Tensor, signed_sine: Tensor) -> Tensor:
        """See Ops."""
        tables = cosine.expand(len(x), 1, x.shape[-1]).contiguous(), signed_sine.contiguous()
        return _compute(
            lambda a: calls.rotate(a, *tables, _threads()), lambda a: _TORCH.rotate(a, cosine, signed_sine), x
        )

    def silu_gate(self, gate: Tensor, up: Tensor) -> Tensor:
        """See Ops."""
        return _compute(lambda a, b: calls.swiglu(a, b, _threads()), _TORCH.silu_gate, gate, up)

    def router(self, x: Tensor, weight: Tensor) -> Tensor:
        """See Ops."""
        return self.linear(x, weight)

    def activate(self, scores: Tensor, activation: Literal["softmax", "sigmoid"]) -> Tensor:
        """See Ops."""
        if activation == "sigmoid":
            return _compute(lambda x: calls.sigmoid(x, _threads()), torch.sigmoid, scores)
        return _compute(lambda x: calls.softmax(x, _threads()), lambda x: x.softmax(dim=-1), scores)

    def gates(self, activated: Tensor, chosen: Tensor, normalise: bool, scale: float) -> Tensor:
        """See Ops."""
        gates = activated.gather(-1, chosen)
        if normalise:
            total = gates[:, :1]
            for column in range(1, gates.shape[1]):  # one by one: the order of the native pass
                total = total + gates[:, column : column + 1]
            gates = gates / total
        return gates if scale == 1.0 else gates * scale

    def experts(self, x: Tensor, gate_up: Tensor, down: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """See Ops."""

        def native(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor) -> Tensor:
            packed = pack(gate_up.unbind(0)), pack(down.unbind(0))
            return calls.experts(x, *packed, chosen.contiguous(), weights, _threads())

        def reference(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor) -> Tensor:
            return _TORCH.experts(x, gate_up, down, chosen, weights)

        return _compute(native, reference, x, gate_up, down, weights)

    def logits(self, hidden: Tensor, head: Tensor) -> Tensor:
        """See Ops."""
        return self.linear(hidden, head)

    def log_softmax(self, logits: Tensor) -> Tensor:
        """See Ops."""
        return _compute(lambda x: calls.log_softmax(x, _threads()), lambda x: x.log_softmax(dim=-1), logits)

    def packed_attention(self, attention: PackedAttention) -> InvariantPackedAttention:
        """See Ops."""
        return InvariantPackedAttention(attention.lengths, attention)


class InvariantPackedAttention:
    """Causal attention within each sequence of a packed batch, page by page as the engine does it."""

    def __init__(self, lengths: Sequence[int], reference: PackedAttention | None = None) -> None:
        """`lengths`: tokens of each sequence, falling; `reference`: whose gradients are taken."""
        self._lengths = list(lengths)
        self._reference = reference or PackedAttention(lengths)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """query [T, heads, dim], key [T, kv_heads, dim], value [T, kv_heads, value_dim] -> [T, heads,
        value_dim]. Values that are narrower must be a view of the beginning of the only key head."""
        is_prefix = value.shape[-1] < key.shape[-1]
        if is_prefix and not _begins(key, value):
            raise ResourceError(
                "batch-invariant attention takes narrower values only as the beginning of one key head",
                field="value",
                received=f"keys of {tuple(key.shape[1:])}, values of {tuple(value.shape[1:])}",
                fix="use the default operations",
            )

        def native(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            given = None if is_prefix else v
            return calls.attention(q, k, given, self._lengths, _threads(), v.shape[-1])

        return _compute(native, lambda q, k, v: self._reference.attend(layer, q, k, v), query, key, value)


def _begins(key: Tensor, value: Tensor) -> bool:
    """Whether `value` is a view of the first entries of a single key head."""
    return key.shape[1] == 1 and value.data_ptr() == key.data_ptr() and value.stride() == key.stride()


class _Linear(torch.autograd.Function):
    """x [T, in], weight [out, in] -> [T, out]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return calls.linear(pack([weight.t()]), x.contiguous(), _threads())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        (gradient,) = gradients
        to_x = to_weight = None
        if ctx.needs_input_grad[0]:
            to_x = calls.linear(pack([weight]), gradient.contiguous(), _threads())
        if ctx.needs_input_grad[1]:
            to_weight = calls.linear(pack([x]), gradient.t().contiguous(), _threads())
        return to_x, to_weight


class _Computed(torch.autograd.Function):
    """`native(*inputs)`, with the gradients of `reference(*inputs)`."""

    @staticmethod
    def forward(
        ctx: Any, native: Callable[..., Tensor], reference: Callable[..., Tensor], *inputs: Tensor
    ) -> Tensor:
        ctx.reference = reference
        ctx.save_for_backward(*inputs)
        return native(*(tensor.contiguous() for tensor in inputs))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[2:]
        inputs = [x.detach().requires_grad_(n) for x, n in zip(ctx.saved_tensors, needed, strict=True)]
        with torch.enable_grad():
            out = ctx.reference(*inputs)
        wanted = [x for x, n in zip(inputs, needed, strict=True) if n]
        found = iter(torch.autograd.grad(out, wanted, gradients[0]))
        return None, None, *(next(found) if n else None for n in needed)


def _compute(native: Callable[..., Tensor], reference: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    _checked(inputs[0])
    return cast(Tensor, _Computed.apply(native, reference, *inputs))


def _checked(x: Tensor) -> Tensor:
    """Raises ResourceError for what the native blocks do not compute."""
    if x.dtype != torch.float32 or x.device.type != "cpu":
        raise ResourceError(
            "batch-invariant operations compute float32 on a CPU",
            field="model.ops",
            received=f"{x.dtype} on {x.device}",
            fix="use float32 weights on the CPU, or the default operations",
        )
    return x


def _threads() -> int:
    """As many as PyTorch's own operators use."""
    return torch.get_num_threads()
