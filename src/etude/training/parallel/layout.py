"""Which part of each parameter lies in this process, for an optimiser that updates parts.

Element-wise rules (AdamW, decay, momentum) work on the part as it is. A rule that needs whole matrices (Muon)
asks the layout to bring rows together, each matrix on one rank. States are saved under the
parameter's name, with their place in the whole, so that any other number of ranks can take them up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn


class Layout(Protocol):
    """Where the parameters of one model lie. Parameters go by their names in the model."""

    @property
    def parts(self) -> Mapping[str, Tensor]:
        """The trainable parameters' parts in this process: plain tensors that share the model's memory."""
        ...

    @property
    def shapes(self) -> Mapping[str, torch.Size]:
        """The trainable parameters' shapes, whole."""
        ...

    def part_index(self, name: str) -> int:
        """Which part of the parameter `name` lies here: equal on processes that hold the same."""
        ...

    def gradients(self) -> dict[str, Tensor | None]:
        """The gradients of `parts`, sharing memory with the model's; None where there is none."""
        ...

    def clear_gradients(self) -> None:
        """Drops all gradients."""
        ...

    def clip_norm(self, max_norm: float) -> float:
        """Scales all gradients down to a global norm, which is returned as it was before."""
        ...

    def map_matrices(
        self, names: Sequence[str], parts: Sequence[Tensor], function: Callable[[Tensor], Tensor]
    ) -> list[Tensor]:
        """Applies `function` ([B, m, n] -> [B, m, n]) to the whole matrices of which `parts` are parts.

        `parts[i]` is shaped like this process' part of the parameter `names[i]`, [m, n] or [B, m, n]; so is
        what comes back. All of one call have the same m and n when whole.
        """
        ...

    def stored(self, name: str, part: Tensor) -> Tensor:
        """A tensor shaped like this process' part of the parameter `name` -> what a checkpoint takes: with
        its place in the whole, which it shares memory with where that can be."""
        ...

    def gather(self, name: str, part: Tensor) -> Tensor:
        """A tensor shaped like this process' part of the parameter `name` -> the whole one."""
        ...

    def cut(self, name: str, whole: Tensor) -> Tensor:
        """A whole tensor shaped like the parameter `name`, or what `stored` gives -> this process' part."""
        ...


class WholeLayout:
    """Everything lies here. Implements Layout."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.parts: Mapping[str, Tensor] = {name: p.data for name, p in self._parameters.items()}
        self.shapes: Mapping[str, torch.Size] = {name: p.shape for name, p in self._parameters.items()}

    def part_index(self, name: str) -> int:
        return 0

    def gradients(self) -> dict[str, Tensor | None]:
        return {name: parameter.grad for name, parameter in self._parameters.items()}

    def clear_gradients(self) -> None:
        for parameter in self._parameters.values():
            parameter.grad = None

    def clip_norm(self, max_norm: float) -> float:
        return float(nn.utils.clip_grad_norm_(self._parameters.values(), max_norm, foreach=True))

    def map_matrices(
        self, names: Sequence[str], parts: Sequence[Tensor], function: Callable[[Tensor], Tensor]
    ) -> list[Tensor]:
        """See Layout. All matrices go through `function` in one batch: small ones cost more to start than
        to compute."""
        return batched(parts, function)

    def stored(self, name: str, part: Tensor) -> Tensor:
        return part

    def gather(self, name: str, part: Tensor) -> Tensor:
        return part

    def cut(self, name: str, whole: Tensor) -> Tensor:
        return whole


def batched(matrices: Sequence[Tensor], function: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Applies `function` to matrices [m, n] and stacks of them [B, m, n] of one size, in one batch."""
    if not matrices:
        return []
    stacks = [matrix.reshape(-1, *matrix.shape[-2:]) for matrix in matrices]
    results = function(torch.cat(stacks)).split([len(stack) for stack in stacks])
    return [result.view(matrix.shape) for result, matrix in zip(results, matrices, strict=True)]
