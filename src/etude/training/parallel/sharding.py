"""Spreads a model over the mesh, in place, and knows where its parts are.

Experts are cut first: a rank keeps only its own. Then FSDP2 cuts every weight of a block along its first
dimension; blocks are gathered when they are computed and let go of afterwards. Gradients are summed along
FSDP in each backward pass, and along all other axes once per update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from etude.model import Experts, LanguageModel
from etude.model.ops import Ops
from etude.training.parallel.collectives import (
    OrderedReduceScatter,
    gather_rows,
    group_rank,
    group_size,
    sum_all_in_order,
    sum_in_order,
)
from etude.training.parallel.context import ContextParallelOps
from etude.training.parallel.division import check_expert_parts
from etude.training.parallel.experts import ExpertParallelOps
from etude.training.parallel.layout import batched
from etude.training.parallel.mesh import STORAGE_AXES, Mesh
from etude.weights.parts import Part

_EXPERT_WEIGHTS = (".experts.gate_up", ".experts.down")


def is_expert_weight(name: str) -> bool:
    """Whether a parameter has one matrix per expert, and so is cut by experts."""
    return name.endswith(_EXPERT_WEIGHTS)


def place_model(model: LanguageModel, mesh: Mesh) -> None:
    """Takes rank 0's weights and keeps what belongs here. Collective; to be called once, before an optimiser
    is made and after `model.ops` is chosen.

    Raises ConfigError if the experts cannot be divided.
    """
    for parameter in model.parameters():
        dist.broadcast(parameter.data, src=0)
    if mesh.sizes["expert"] > 1:
        _cut_experts(model, mesh)
    if mesh.sizes["context"] > 1:
        model.ops = cast(
            Ops, ContextParallelOps(model.ops, mesh.group("context"), model.config.num_moe_layers)
        )
    if mesh.sizes["fsdp"] > 1:
        _shard(model, mesh)


def _cut_experts(model: LanguageModel, mesh: Mesh) -> None:
    group, count = mesh.group("expert"), model.config.num_experts
    check_expert_parts(model.config, group_size(group))
    for module in model.modules():
        if isinstance(module, Experts):
            for name in ("gate_up", "down"):
                whole = cast(nn.Parameter, getattr(module, name))
                own = whole.detach().chunk(group_size(group))[group_rank(group)].clone()
                setattr(module, name, nn.Parameter(own, requires_grad=whole.requires_grad))
    model.ops = cast(Ops, ExpertParallelOps(model.ops, group, count))


def _shard(model: LanguageModel, mesh: Mesh) -> None:
    """FSDP2, block by block. The root stays gathered after its forward pass: the head is used once more."""
    whole = mesh.fsdp_mesh()
    for block in model.blocks:
        fully_shard(block, mesh=whole)
    fully_shard(model, mesh=whole, reshard_after_forward=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(enable=True)
            module.set_custom_reduce_scatter(cast(Any, OrderedReduceScatter()))


class MeshLayout:
    """Where a placed model's parameters lie. Implements Layout; all methods but `parts`, `gradients` and
    `clear_gradients` are collective."""

    def __init__(self, model: nn.Module, mesh: Mesh) -> None:
        self._mesh = mesh
        release(model)
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.parts: Mapping[str, Tensor] = {n: local_part(p.data) for n, p in self._parameters.items()}
        self.shapes: Mapping[str, torch.Size] = {
            n: whole_shape(n, p, mesh) for n, p in self._parameters.items()
        }

    def part_index(self, name: str) -> int:
        """See Layout."""
        return group_rank(self._mesh.group(*(("fsdp", "expert") if is_expert_weight(name) else ("fsdp",))))

    def gradients(self) -> dict[str, Tensor | None]:
        """See Layout."""
        return {
            name: None if parameter.grad is None else local_part(parameter.grad)
            for name, parameter in self._parameters.items()
        }

    def clear_gradients(self) -> None:
        """See Layout."""
        for parameter in self._parameters.values():
            parameter.grad = None

    def clip_norm(self, max_norm: float) -> float:
        """See Layout. Where nothing is cut, the bits are those of one process."""
        sizes = self._mesh.sizes
        gradients = {name: g for name, g in self.gradients().items() if g is not None}
        if sizes["fsdp"] == sizes["expert"] == 1:
            return float(nn.utils.clip_grad_norm_(self._parameters.values(), max_norm, foreach=True))
        device = next(iter(gradients.values())).device if gradients else None
        squares = torch.zeros(2, dtype=torch.float64, device=device)
        for name, gradient in gradients.items():
            squares[int(is_expert_weight(name))] += gradient.float().norm().double().square()
        sum_in_order(squares[:1], self._mesh.group("fsdp"))
        sum_in_order(squares[1:], self._mesh.group("fsdp", "expert"))
        norm = float(squares.sum().sqrt())
        factor = min(1.0, max_norm / (norm + 1e-6))
        if factor < 1.0:
            for gradient in gradients.values():
                gradient.mul_(factor)
        return norm

    def map_matrices(
        self, names: Sequence[str], parts: Sequence[Tensor], function: Callable[[Tensor], Tensor]
    ) -> list[Tensor]:
        """See Layout. Stacks of matrices are cut between matrices; of single ones, each is brought together
        on one FSDP rank, in turn."""
        results = list(parts)
        cut = [
            i for i, part in enumerate(parts) if part.ndim == 2 and group_size(self._mesh.group("fsdp")) > 1
        ]
        here = [i for i in range(len(parts)) if i not in cut and len(parts[i])]
        for i, result in zip(here, batched([parts[i] for i in here], function), strict=True):
            results[i] = result
        if cut:
            rows = self.shapes[names[cut[0]]][0]
            whole = self._map_cut([parts[i] for i in cut], rows, function)
            for i, result in zip(cut, whole, strict=True):
                results[i] = result
        return results

    def _map_cut(
        self, parts: Sequence[Tensor], rows: int, function: Callable[[Tensor], Tensor]
    ) -> list[Tensor]:
        """Matrices [rows, n] of which every rank has some rows: matrix i is computed by rank i % ranks."""
        group = self._mesh.group("fsdp")
        size, own_rank = group_size(group), group_rank(group)
        height, width = -(-rows // size), parts[0].shape[1]
        order = sorted(range(len(parts)), key=lambda i: (i % size, i))
        counts = [len(range(rank, len(parts), size)) for rank in range(size)]
        padded = torch.stack([nn.functional.pad(parts[i], (0, 0, 0, height - len(parts[i]))) for i in order])
        arrived = padded.new_empty((size * counts[own_rank], height, width))
        dist.all_to_all_single(arrived, padded, [counts[own_rank]] * size, counts, group=group)
        if counts[own_rank]:
            stacked = arrived.view(size, counts[own_rank], height, width).transpose(0, 1)
            result = function(stacked.reshape(counts[own_rank], size * height, width)[:, :rows])
            result = nn.functional.pad(result, (0, 0, 0, size * height - rows))
            arrived = result.view(-1, size, height, width).transpose(0, 1).contiguous()
        dist.all_to_all_single(
            padded, arrived.view(-1, height, width), counts, [counts[own_rank]] * size, group=group
        )
        back = {i: padded[place, : len(parts[i])] for place, i in enumerate(order)}
        return [back[i] for i in range(len(parts))]

    def stored(self, name: str, part: Tensor) -> Tensor:
        """See Layout."""
        return shard_of(name, part, self.shapes[name], self._mesh)

    def gather(self, name: str, part: Tensor) -> Tensor:
        """See Layout."""
        return whole_of(name, part, self._mesh)

    def cut(self, name: str, whole: Tensor) -> Tensor:
        """See Layout."""
        return part_of(name, whole, self._mesh)


def plain_ops(ops: Ops) -> Ops:
    """What computes in one process, without what `place_model` has put around it."""
    while isinstance(ops, (ContextParallelOps, ExpertParallelOps)):
        ops = ops.inner
    return ops


def release(model: nn.Module) -> None:
    """Lets go of weights that a scoring pass left gathered, so that parameters are parts again."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@torch.no_grad()
def local_part(tensor: Tensor) -> Tensor:
    """What lies in this process, sharing memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole_shape(name: str, parameter: Tensor, mesh: Mesh) -> torch.Size:
    """The shape that a placed parameter has over all ranks."""
    experts = mesh.sizes["expert"] if is_expert_weight(name) else 1
    return torch.Size((parameter.shape[0] * experts, *parameter.shape[1:]))


def whole_of(name: str, part: Tensor, mesh: Mesh) -> Tensor:
    """A part shaped like the parameter's -> the whole tensor, on every rank."""
    rows = gather_rows(part, mesh.group("fsdp"))
    return gather_rows(rows, mesh.group("expert")) if is_expert_weight(name) else rows


def shard_of(name: str, part: Tensor, shape: torch.Size, mesh: Mesh) -> DTensor:
    """A part shaped like the parameter's, with its place in the whole tensor of this shape; on the host it
    shares the part's memory. What checkpoints are written from and read into."""
    placements: list[Placement] = [Replicate()] * len(STORAGE_AXES)
    placements[STORAGE_AXES.index("fsdp")] = Shard(0)
    if is_expert_weight(name):
        placements[STORAGE_AXES.index("expert")] = Shard(0)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(part, mesh.storage, placements, run_check=False, shape=shape, stride=stride)


def part_of(name: str, whole: Tensor, mesh: Mesh) -> Tensor:
    """What of a whole tensor shaped like the parameter belongs on this rank; a shard is that already."""
    if isinstance(whole, DTensor):
        return whole.to_local()
    if is_expert_weight(name):
        whole = _run(whole, group_size(mesh.group("expert")), group_rank(mesh.group("expert")))
    return _run(whole, group_size(mesh.group("fsdp")), group_rank(mesh.group("fsdp")))


def place_of(name: str, parameter: Tensor, mesh: Mesh) -> Part:
    """Which rows of the whole tensor lie on this rank; perhaps none."""
    rows, at = parameter.shape[0], mesh.coordinates
    first = rows * at["expert"] if is_expert_weight(name) else 0
    size = -(-rows // mesh.sizes["fsdp"])
    start, stop = (min(index * size, rows) for index in (at["fsdp"], at["fsdp"] + 1))
    return Part(name, first + start, first + stop, whole_shape(name, parameter, mesh)[0])


def copies_of(name: str, mesh: Mesh) -> tuple[int, int]:
    """How many ranks hold the same rows of this parameter, and which of them this one is."""
    axes = ("replicate", "context") if is_expert_weight(name) else ("replicate", "expert", "context")
    number, index = 1, 0
    for axis in axes:
        number *= mesh.sizes[axis]
        index = index * mesh.sizes[axis] + mesh.coordinates[axis]
    return number, index


def _run(whole: Tensor, count: int, index: int) -> Tensor:
    """Rows of part `index` of `count`, as `torch.chunk` cuts; perhaps none."""
    parts = whole.chunk(count)
    return parts[index] if index < len(parts) else whole[:0]


def sum_gradients(parameters: Iterable[tuple[str, nn.Parameter]], mesh: Mesh) -> None:
    """Adds up gradients along the axes that FSDP has not summed over. Collective."""
    dense: list[Tensor] = []
    expert: list[Tensor] = []
    for name, parameter in parameters:
        if parameter.requires_grad:
            if parameter.grad is None:  # every rank sums the same tensors
                parameter.grad = torch.zeros_like(parameter)
            (expert if is_expert_weight(name) else dense).append(local_part(parameter.grad))
    sum_all_in_order(dense, mesh.group("replicate", "expert", "context"))
    sum_all_in_order(expert, mesh.group("replicate", "context"))
