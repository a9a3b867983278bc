"""Gathers matrices of which several ranks have parts, each on one rank, and returns the parts.

parts of matrices ──all-to-all──> whole matrices, dealt out in turn ──function──> all-to-all ──> parts
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from etude.training.parallel.collectives import group_rank, group_size
from etude.training.parallel.cuts import Cut, run_of
from etude.training.parallel.layout import batched
from etude.training.parallel.mesh import Mesh
from etude.training.parallel.places import Places

Function = Callable[[Tensor], Tensor]
"""[B, m, n] -> [B, m, n]."""


@dataclass(frozen=True, slots=True)
class _Seam:
    """How one matrix is sharded: by tensor ranks first, then its rows by FSDP."""

    cut: Cut | None
    tensor: int
    fsdp: int

    def split(self, whole: Tensor) -> list[Tensor]:
        """The parts of all ranks, in their order."""
        by_tensor = [
            whole if self.cut is None else self.cut.part(whole, self.tensor, i) for i in range(self.tensor)
        ]
        return [run_of(part, self.fsdp, i) for i in range(self.fsdp) for part in by_tensor]

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """The inverse of `split`."""
        by_tensor = [torch.cat(tuple(parts[i :: self.tensor])) for i in range(self.tensor)]
        return by_tensor[0] if self.cut is None else self.cut.join(by_tensor)


def map_matrices(
    names: Sequence[str],
    parts: Sequence[Tensor],
    shape: torch.Size,
    function: Function,
    places: Places,
    mesh: Mesh,
) -> list[Tensor]:
    """See Layout.map_matrices; `shape`: [m, n] of all matrices, unsharded. Collective."""
    results = list(parts)
    kinds: dict[tuple[str, ...], list[int]] = {}
    for i, (name, part) in enumerate(zip(names, parts, strict=True)):
        kinds.setdefault(_axes_within(name, part, places, mesh), []).append(i)
    here = [i for i in kinds.pop((), []) if len(parts[i])]
    for i, result in zip(here, batched([parts[i] for i in here], function), strict=True):
        results[i] = result
    for axes, chosen in sorted(kinds.items()):
        stacks = [parts[i] if parts[i].ndim == 3 else parts[i][None] for i in chosen]
        seams = [
            seam
            for i, stack in zip(chosen, stacks, strict=True)
            for seam in [_seam(names[i], parts[i], axes, places, mesh)] * len(stack)
        ]
        matrices = [matrix for stack in stacks for matrix in stack]
        mapped = iter(_map_cut(matrices, seams, shape, function, mesh, axes))
        for i, stack in zip(chosen, stacks, strict=True):
            if len(stack):
                results[i] = torch.stack([next(mapped) for _ in stack]).view(parts[i].shape)
    return results


def _axes_within(name: str, part: Tensor, places: Places, mesh: Mesh) -> tuple[str, ...]:
    """The axes that cut single matrices of a parameter; other axes cut stacks between matrices."""
    cut = places.cut(name)
    axes = {"fsdp"} if part.ndim == 2 else set()
    if cut is not None and (part.ndim == 2 or cut.dim > 0):
        axes.add("tensor")
    return tuple(axis for axis in ("fsdp", "tensor") if axis in axes and mesh.sizes[axis] > 1)


def _seam(name: str, part: Tensor, axes: tuple[str, ...], places: Places, mesh: Mesh) -> _Seam:
    cut = places.cut(name) if "tensor" in axes else None
    if cut is not None and part.ndim == 3:
        cut = replace(cut, dim=cut.dim - 1)
    sizes = {axis: mesh.sizes[axis] if axis in axes else 1 for axis in ("fsdp", "tensor")}
    return _Seam(cut, **sizes)


def _map_cut(
    parts: Sequence[Tensor],
    seams: Sequence[_Seam],
    shape: torch.Size,
    function: Function,
    mesh: Mesh,
    axes: tuple[str, ...],
) -> list[Tensor]:
    """Matrices of which every rank along `axes` has a part: matrix i is computed by rank i % ranks."""
    if not parts:
        return []
    group = mesh.group(*axes)
    size, own_rank = group_size(group), group_rank(group)
    whole = torch.empty(shape, device="meta")
    shapes = {seam: [part.shape for part in seam.split(whole)] for seam in set(seams)}
    longest = max(part.numel() for found in shapes.values() for part in found)
    order = sorted(range(len(parts)), key=lambda i: (i % size, i))
    counts = [len(range(rank, len(parts), size)) for rank in range(size)]
    sent = torch.stack([F.pad(parts[i].reshape(-1), (0, longest - parts[i].numel())) for i in order])
    arrived = sent.new_empty((size * counts[own_rank], longest))
    dist.all_to_all_single(arrived, sent, [counts[own_rank]] * size, counts, group=group)
    if counts[own_rank]:
        by_rank = arrived.view(size, counts[own_rank], longest)
        own = [seams[i] for i in range(own_rank, len(parts), size)]
        results = function(
            torch.stack([seam.join(_unpad(by_rank[:, j], shapes[seam])) for j, seam in enumerate(own)])
        )
        for j, seam in enumerate(own):
            for place, part in zip(by_rank[:, j], seam.split(results[j]), strict=True):
                place[: part.numel()] = part.reshape(-1)
    dist.all_to_all_single(sent, arrived, counts, [counts[own_rank]] * size, group=group)
    places = {i: place for place, i in enumerate(order)}
    return [sent[places[i], : part.numel()].view(part.shape) for i, part in enumerate(parts)]


def _unpad(flat: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """flat [ranks, longest] -> each rank's part."""
    return [row[: shape.numel()].view(shape) for row, shape in zip(flat, shapes, strict=True)]
