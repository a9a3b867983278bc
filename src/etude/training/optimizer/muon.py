"""Muon: momentum, orthogonalised by Newton-Schulz iterations (Jordan et al. 2024)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from etude.training.optimizer.rounding import Rounding
from etude.training.parallel.layout import Layout
from etude.training.threads import map_in_order

_MOMENTUM = 0.95
_NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
_NEWTON_SCHULZ_STEPS = 5
_VALUES_AT_ONCE = 1 << 17
"""Size in values of a batch of matrices on a CPU: it fits into a core's own cache."""


class Muon:
    """Muon for weight matrices. Momentum is sharded like the parameters; whole matrices are orthogonalised.

    Matrices of equal shape are updated in one batch: small models spend more time on launching an operation
    than on its arithmetic.
    """

    def __init__(
        self, layout: Layout, names: Sequence[str], state_dtype: torch.dtype = torch.float32
    ) -> None:
        """`names`: the parameters to update, of two dimensions, or three if they are stacked matrices."""
        self._layout = layout
        self._by_shape: dict[tuple[int, ...], list[str]] = {}
        for name in names:
            self._by_shape.setdefault(tuple(layout.shapes[name][-2:]), []).append(name)
        self.buffers = {name: torch.zeros_like(layout.parts[name], dtype=state_dtype) for name in names}
        """Momentum by name, shaped like the parts."""

    @torch.no_grad()
    def step(
        self,
        gradients: Mapping[str, Tensor | None],
        learning_rate: float,
        rounding: Rounding,
        num_threads: int = 1,
    ) -> None:
        """Updates every parameter; one without a gradient moves by its momentum alone. `num_threads`: number
        of threads that divide the matrices among them."""

        def update_directions(matrices: Tensor) -> Tensor:
            if matrices.device.type != "cpu":
                return orthogonalise(matrices)
            parts = matrices.split(max(1, _VALUES_AT_ONCE // matrices[0].numel()))
            return torch.cat(list(map_in_order(orthogonalise, parts, num_threads)))

        for shape, names in self._by_shape.items():
            directions = [self._direction(name, gradients[name], rounding) for name in names]
            updates = self._layout.map_matrices(names, directions, update_directions)
            scale = learning_rate * max(1.0, shape[0] / shape[1]) ** 0.5
            for name, update in zip(names, updates, strict=True):
                part = self._layout.parts[name]
                if part.dtype == torch.float32:
                    part.add_(update, alpha=-scale)
                else:
                    rounding.store(name, part, part.float().add_(update, alpha=-scale))

    def _direction(self, name: str, gradient: Tensor | None, rounding: Rounding) -> Tensor:
        """Updates the momentum with the gradient; returns Nesterov's look-ahead."""
        buffer = self.buffers[name]
        if gradient is None:
            gradient = torch.zeros_like(buffer)
        gradient = gradient.float()
        if buffer.dtype == torch.float32:
            buffer.lerp_(gradient, 1 - _MOMENTUM)
            return gradient.lerp(buffer, _MOMENTUM)
        mean = buffer.float().lerp_(gradient, 1 - _MOMENTUM)
        rounding.store(name, buffer, mean)
        return gradient.lerp(mean, _MOMENTUM)


def orthogonalise(matrices: Tensor) -> Tensor:
    """matrices [B, m, n] -> nearly orthogonal matrices with the same singular vectors."""
    a, b, c = _NEWTON_SCHULZ
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.transpose(-1, -2) if tall else matrices
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(_NEWTON_SCHULZ_STEPS):
        gram = x @ x.transpose(-1, -2)
        polynomial = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.baddbmm(x, polynomial, x, beta=a)
    return x.transpose(-1, -2) if tall else x
