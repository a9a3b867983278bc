"""Which part of each parameter this process holds, for an optimiser that updates parts.

Element-wise algorithms (AdamW, decay, momentum) update the part as it is. For one that needs whole matrices
(Muon), the layout gathers rows, each matrix on one rank. States are saved under the parameter's name, with
their position in the whole tensor, so that any other number of ranks can load them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn


class Layout:
    """The sharding of one model's parameters, which are identified by their names in the model. This class:
    that of an unsharded model; `MeshLayout`: over several ranks."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.parts: Mapping[str, Tensor] = {name: p.data for name, p in self._parameters.items()}
        """The trainable parameters' parts in this process: plain tensors that share the model's memory."""
        self.shapes: Mapping[str, torch.Size] = {name: p.shape for name, p in self._parameters.items()}
        """The trainable parameters' unsharded shapes."""

    def part_index(self, name: str) -> int:
        """Index of this process' part of the parameter `name`: equal on processes that hold the same part."""
        return 0

    def gradients(self) -> dict[str, Tensor | None]:
        """The gradients of `parts`, sharing memory with the model's; None for a part without one."""
        return {name: parameter.grad for name, parameter in self._parameters.items()}

    def clear_gradients(self) -> None:
        """Sets all gradients to None."""
        for parameter in self._parameters.values():
            parameter.grad = None

    def clip_norm(self, max_norm: float) -> float:
        """Clips the gradients to a global norm of `max_norm`; returns the norm before clipping."""
        return float(nn.utils.clip_grad_norm_(self._parameters.values(), max_norm, foreach=True))

    def map_matrices(
        self, names: Sequence[str], parts: Sequence[Tensor], function: Callable[[Tensor], Tensor]
    ) -> list[Tensor]:
        """Applies `function` ([B, m, n] -> [B, m, n]) to the whole matrices of which `parts` are parts.

        `parts[i]` is shaped like this process' part of the parameter `names[i]`, [m, n] or [B, m, n]; so is
        the result. All of one call have the same unsharded m and n. They are one batch: for small matrices,
        launching an operation costs more than its arithmetic.
        """
        return batched(parts, function)

    def stored(self, name: str, part: Tensor) -> Tensor:
        """A tensor shaped like this process' part of the parameter `name` -> a tensor for a checkpoint, with
        its position in the whole; shares memory with `part` if possible."""
        return part

    def gather(self, name: str, part: Tensor) -> Tensor:
        """A tensor shaped like this process' part of the parameter `name` -> the whole one."""
        return part

    def cut(self, name: str, whole: Tensor) -> Tensor:
        """A whole tensor shaped like the parameter `name`, or one from `stored` -> this process' part."""
        return whole


def batched(matrices: Sequence[Tensor], function: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Applies `function` to matrices [m, n] and stacks of them [B, m, n] of one size, in one batch."""
    if not matrices:
        return []
    stacks = [matrix.reshape(-1, *matrix.shape[-2:]) for matrix in matrices]
    results = function(torch.cat(stacks)).split([len(stack) for stack in stacks])
    return [result.view(matrix.shape) for result, matrix in zip(results, matrices, strict=True)]
