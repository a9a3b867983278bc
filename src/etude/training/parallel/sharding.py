"""Shards a model over the mesh, in place, and reduces its gradients.

First tensor ranks keep their heads, inner units and tokens, and expert ranks their experts. Then FSDP2 shards
every weight of a block along its first dimension; blocks are gathered for their computation and resharded
afterwards. Gradients are summed along FSDP in each backward pass, and along all other axes once per update.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from etude.model import Experts, LanguageModel
from etude.model.ops import Ops
from etude.training.parallel.collectives import (
    OrderedReduceScatter,
    group_rank,
    group_size,
    sum_all_in_order,
    sum_in_order,
)
from etude.training.parallel.context import ContextParallelOps
from etude.training.parallel.cuts import is_seen_in_parts
from etude.training.parallel.division import check_division
from etude.training.parallel.experts import ExpertParallelOps
from etude.training.parallel.layout import Layout
from etude.training.parallel.matrices import map_matrices
from etude.training.parallel.mesh import Mesh
from etude.training.parallel.places import Places, is_expert_weight, local_part
from etude.training.parallel.tensor import cut_model
from etude.training.parallel.wrapped import plain_ops

ReadRows = Callable[[str, int, int], Tensor]
"""(name, start, stop) -> these rows of an unsharded parameter."""


def place_model(model: LanguageModel, mesh: Mesh) -> None:
    """Shards a model with rank 0's weights. Collective; called once, after `model.ops` is set and before the
    optimiser is created. A rank whose model has no storage (device `meta`) never holds all weights.

    Raises ConfigError if the model cannot be divided as configured.
    """
    check_division(model.config, mesh.config)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    if not model.embedding.is_meta:
        for parameter in model.parameters():
            dist.broadcast(parameter.data, src=0)
        _cut(model, mesh)
        return
    for name, part in _empty_parts(model, mesh).items():
        whole = torch.empty(shapes[name], dtype=part.dtype, device=part.device)
        dist.broadcast(whole, src=0)
        part.copy_(Places(model, mesh).part(name, whole))


@torch.no_grad()
def fill_model(model: LanguageModel, mesh: Mesh, read: ReadRows) -> None:
    """Shards a model without storage, and fills this rank's parts with rows from `read`. See also
    `place_model`."""
    check_division(model.config, mesh.config)
    parts, places = _empty_parts(model, mesh), Places(model, mesh)
    for name, parameter in model.named_parameters():
        if places.lies_in_rows(name):
            run = places.run(name, parameter)
            part = read(name, run.start, run.stop)
        else:
            part = places.part(name, read(name, 0, places.shape(name, parameter)[0]))
        parts[name].copy_(part)


@torch.no_grad()
def copy_placed(model: LanguageModel, mesh: Mesh) -> LanguageModel:
    """A copy that is sharded like the model and requires no gradients; made without communication."""
    with torch.device("meta"):
        copied = LanguageModel(model.config, model.vocab_size).cast(model.embedding.dtype)
    copied.ops = plain_ops(model.ops)
    copied.requires_grad_(requires_grad=False)
    release(model)
    own = dict(model.named_parameters())
    for name, part in _empty_parts(copied, mesh).items():
        part.copy_(local_part(own[name].data))
    return copied


def _empty_parts(model: LanguageModel, mesh: Mesh) -> dict[str, Tensor]:
    """Shards a model without storage, and allocates this rank's parts: by name, uninitialised."""
    _cut(model, mesh)
    model.to_empty(device=mesh.device).reset_rotation()
    return {name: local_part(parameter.data) for name, parameter in model.named_parameters()}


def _cut(model: LanguageModel, mesh: Mesh) -> None:
    if mesh.sizes["tensor"] > 1:
        cut_model(model, mesh.group("tensor"))
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
    for module in model.modules():
        if isinstance(module, Experts):
            for name in ("gate_up", "down"):
                whole = cast(nn.Parameter, getattr(module, name))
                own = whole.detach().chunk(group_size(group))[group_rank(group)].clone()
                setattr(module, name, nn.Parameter(own, requires_grad=whole.requires_grad))
    model.ops = cast(Ops, ExpertParallelOps(model.ops, group, count))


def _shard(model: LanguageModel, mesh: Mesh) -> None:
    """FSDP2, block by block. The root stays gathered after its forward pass, since the head is used again."""
    whole = mesh.fsdp_mesh()
    for block in model.blocks:
        fully_shard(block, mesh=whole)
    fully_shard(model, mesh=whole, reshard_after_forward=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(enable=True)
            module.set_custom_reduce_scatter(cast(Any, OrderedReduceScatter()))


class MeshLayout(Layout):
    """The layout of a sharded model. All methods but `part_index`, `gradients` and `clear_gradients` are
    collective."""

    def __init__(self, model: nn.Module, mesh: Mesh) -> None:
        self._mesh = mesh
        self._places = Places(model, mesh)
        release(model)
        super().__init__(model)
        self.parts = {name: local_part(part) for name, part in self.parts.items()}
        self.shapes = {name: self._places.shape(name, p) for name, p in self._parameters.items()}

    def part_index(self, name: str) -> int:
        return self._places.index_along(*self._places.axes(name))[1]

    def gradients(self) -> dict[str, Tensor | None]:
        return {name: g if g is None else local_part(g) for name, g in super().gradients().items()}

    def clip_norm(self, max_norm: float) -> float:
        """See Layout. Without sharding, the result is bitwise that of one process."""
        sizes = self._mesh.sizes
        gradients = {name: g for name, g in self.gradients().items() if g is not None}
        if sizes["fsdp"] == sizes["expert"] == sizes["tensor"] == 1:
            return super().clip_norm(max_norm)
        device = next(iter(gradients.values())).device if gradients else None
        squares = {
            axes: torch.zeros(1, dtype=torch.float64, device=device)
            for axes in sorted({self._places.axes(name) for name in self._parameters})
        }
        for name, gradient in gradients.items():
            squares[self._places.axes(name)] += gradient.float().norm().double().square()
        for axes, square in squares.items():
            sum_in_order(square, self._mesh.group(*axes))
        norm = float(torch.cat(list(squares.values())).sum().sqrt())
        factor = min(1.0, max_norm / (norm + 1e-6))
        if factor < 1.0:
            for gradient in gradients.values():
                gradient.mul_(factor)
        return norm

    def map_matrices(
        self, names: Sequence[str], parts: Sequence[Tensor], function: Callable[[Tensor], Tensor]
    ) -> list[Tensor]:
        """See Layout. FSDP and experts cut stacks of matrices between matrices; any matrix that is cut itself
        is gathered on one of its ranks, in turn."""
        if not names:
            return []
        shape = torch.Size(self.shapes[names[0]][-2:])
        return map_matrices(names, parts, shape, function, self._places, self._mesh)

    def stored(self, name: str, part: Tensor) -> Tensor:
        return self._places.shard(name, part, self.shapes[name])

    def gather(self, name: str, part: Tensor) -> Tensor:
        return self._places.whole(name, part)

    def cut(self, name: str, whole: Tensor) -> Tensor:
        return self._places.part(name, whole)


def release(model: nn.Module) -> None:
    """Reshards weights that a scoring pass left gathered, so that parameters are parts again."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def sum_gradients(model: nn.Module, mesh: Mesh) -> None:
    """Sums gradients along the axes that FSDP has not summed over. Collective."""
    places = Places(model, mesh)
    dense: list[Tensor] = []
    expert: list[Tensor] = []
    repeated: list[Tensor] = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if parameter.grad is None:  # every rank sums the same tensors
            parameter.grad = torch.zeros_like(parameter)
        gradient = local_part(parameter.grad)
        (expert if is_expert_weight(name) else dense).append(gradient)
        if mesh.sizes["tensor"] > 1 and places.cut(name) is None:
            assert isinstance(model, LanguageModel)
            if mesh.coordinates["tensor"] and not is_seen_in_parts(name, model.config):
                gradient.zero_()  # only the first rank's is used, so copies can never diverge
            repeated.append(gradient)
    sum_all_in_order(repeated, mesh.group("tensor"))
    sum_all_in_order(dense, mesh.group("replicate", "expert", "context"))
    sum_all_in_order(expert, mesh.group("replicate", "context"))
