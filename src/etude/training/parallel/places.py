"""Positions of a sharded model's parts within the whole weights.

Weights are cut by experts first, then by tensor ranks, then FSDP cuts the rows of the remaining part.
Checkpoints and published weights support runs of rows only: a weight with other parts is gathered and cut
into rows, one weight at a time.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from etude.model import LanguageModel
from etude.training.parallel.collectives import gather_rows
from etude.training.parallel.cuts import Cut, cuts_of, name_within, run_bounds, run_of
from etude.training.parallel.mesh import AXES, STORAGE_AXES, Mesh
from etude.weights.parts import Part

_EXPERT_WEIGHTS = (".experts.gate_up", ".experts.down")


def is_expert_weight(name: str) -> bool:
    """Whether a parameter has one matrix per expert, and so is divided by expert parallelism."""
    return name.endswith(_EXPERT_WEIGHTS)


@torch.no_grad()
def local_part(tensor: Tensor) -> Tensor:
    """This process' part of a tensor, sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Places:
    """The sharding of one model's parameters, which are identified by their names in the model."""

    def __init__(self, model: nn.Module, mesh: Mesh) -> None:
        self._mesh = mesh
        self._cuts: Mapping[str, Cut] = {}
        if mesh.sizes["tensor"] > 1:
            assert isinstance(model, LanguageModel), "others are trained whole"
            self._cuts = cuts_of(model.config, model.vocab_size)

    def cut(self, name: str) -> Cut | None:
        """How tensor parallelism divides a parameter; None if it does not."""
        return self._cuts.get(name_within(name))

    def lies_in_rows(self, name: str) -> bool:
        """Whether each part of a parameter is a contiguous run of the whole's rows."""
        cut = self.cut(name)
        return cut is None or cut.is_run

    def axes(self, name: str) -> tuple[str, ...]:
        """The axes along which a parameter is cut; ranks along the other axes hold the same part."""
        cut = {"fsdp"}
        if is_expert_weight(name):
            cut.add("expert")
        if self.cut(name) is not None:
            cut.add("tensor")
        return tuple(axis for axis in AXES if axis in cut)

    def index_along(self, *axes: str) -> tuple[int, int]:
        """The number of ranks along some axes, and this rank's index among them."""
        number, index = 1, 0
        for axis in axes:
            number *= self._mesh.sizes[axis]
            index = index * self._mesh.sizes[axis] + self._mesh.coordinates[axis]
        return number, index

    def copies(self, name: str) -> tuple[int, int]:
        """The number of ranks that hold the same part of a parameter, and this rank's index among them."""
        return self.index_along(*(axis for axis in AXES if axis not in self.axes(name)))

    def shape(self, name: str, parameter: Tensor) -> torch.Size:
        """The unsharded shape of a placed parameter."""
        shape = list(parameter.shape)
        if is_expert_weight(name):
            shape[0] *= self._mesh.sizes["expert"]
        if cut := self.cut(name):
            shape[cut.dim] = sum(cut.sections)
        return torch.Size(shape)

    def whole(self, name: str, part: Tensor) -> Tensor:
        """A part shaped like the parameter's -> the whole tensor, on every rank. Collective."""
        whole = self._whole_of_experts(name, part)
        return gather_rows(whole, self._mesh.group("expert")) if is_expert_weight(name) else whole

    def part(self, name: str, whole: Tensor) -> Tensor:
        """This rank's part of a whole tensor shaped like the parameter. Collective if `whole` is a DTensor
        from `shard`."""
        cut, at, sizes = self.cut(name), self._mesh.coordinates, self._mesh.sizes
        if isinstance(whole, DTensor):
            rows = whole.to_local()
            if self.lies_in_rows(name):
                return rows
            whole = gather_rows(gather_rows(rows, self._mesh.group("fsdp")), self._mesh.group("tensor"))
        elif is_expert_weight(name):
            whole = run_of(whole, sizes["expert"], at["expert"])
        if cut is not None:
            whole = cut.part(whole, sizes["tensor"], at["tensor"])
        return run_of(whole, sizes["fsdp"], at["fsdp"])

    def rows(self, name: str, part: Tensor) -> Tensor:
        """A part shaped like the parameter's -> this rank's run of rows of the whole: the part itself if it
        is such a run, otherwise a copy on the host. Collective among ranks that divide the parameter."""
        at, sizes = self._mesh.coordinates, self._mesh.sizes
        if self.lies_in_rows(name):
            return part
        rows = run_of(self._whole_of_experts(name, part), sizes["tensor"], at["tensor"])
        return run_of(rows, sizes["fsdp"], at["fsdp"]).to("cpu", copy=True)

    def run(self, name: str, parameter: Tensor) -> Part:
        """The range of the whole tensor's rows that `rows` returns; may be empty."""
        start, total = 0, self.shape(name, parameter)[0]
        stop = total
        for axis in ("expert", "tensor", "fsdp"):
            if axis in self.axes(name):
                first, last = run_bounds(stop - start, self._mesh.sizes[axis], self._mesh.coordinates[axis])
                start, stop = start + first, start + last
        return Part(name, start, stop, total)

    def shard(self, name: str, part: Tensor, shape: torch.Size) -> DTensor:
        """A part shaped like the parameter's -> this rank's `rows` as a DTensor of `shape`. Checkpoints are
        written from and read into such shards. Collective."""
        placements: list[Placement] = [
            Shard(0) if axis in self.axes(name) else Replicate() for axis in STORAGE_AXES
        ]
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            self.rows(name, part), self._mesh.storage, placements, run_check=False, shape=shape, stride=stride
        )

    def _whole_of_experts(self, name: str, part: Tensor) -> Tensor:
        """A part shaped like the parameter's -> the whole tensor, but only of this rank's experts."""
        whole = gather_rows(part, self._mesh.group("fsdp"))
        cut = self.cut(name)
        if cut is None:
            return whole
        together = gather_rows(whole, self._mesh.group("tensor"))
        return together if cut.is_run else cut.join(together.split(len(whole)))
