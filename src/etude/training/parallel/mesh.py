"""The device mesh: the arrangement of ranks along the axes of parallelism.

    rank = (((replicate * F + fsdp) * E + expert) * C + context) * T + tensor

Neighbouring ranks communicate the most: tensor ranks sum the parts of every product, context ranks hold parts
of the same sequences, expert ranks exchange tokens in every layer, FSDP ranks gather weights layer by layer,
replicas communicate once per update.
"""

from __future__ import annotations

from datetime import timedelta
from typing import cast

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from etude.config.parallel import ParallelConfig
from etude.errors import ConfigError
from etude.training.parallel.collectives import Group, group_rank, group_size

AXES = ("replicate", "fsdp", "expert", "context", "tensor")
STORAGE_AXES = ("expert", "tensor", "fsdp", "replicate", "context")
_WRITING = timedelta(hours=1)
"""How long a rank waits for another to write its part of a checkpoint, or of a published version."""


class Mesh:
    """One rank's view of the mesh. Its constructor is collective over all ranks."""

    def __init__(self, config: ParallelConfig, device: str = "cpu") -> None:
        """`device`: type of the device that holds the weights. Raises ConfigError if the world has another
        number of processes than configured."""
        if dist.get_world_size() != config.ranks:
            raise ConfigError(
                f"must equal the number of processes, which is {dist.get_world_size()}",
                field="parallel.ranks",
                received=config.ranks,
                fix="start as many processes as the configuration names",
            )
        self.config = config
        self.device = device
        self.rank = dist.get_rank()
        self.sizes = {axis: int(getattr(config, axis)) for axis in AXES}
        grid = np.arange(config.ranks).reshape(tuple(self.sizes.values()))
        self._groups: dict[tuple[str, ...], Group] = {
            axes: _make_group(grid, axes, config.timeout_s) for axes in _USED
        }
        coordinates = np.argwhere(grid == self.rank)[0].tolist()
        self.coordinates: dict[str, int] = dict(zip(AXES, coordinates, strict=True))
        """This rank's coordinate along each axis."""
        self.saving = cast(dist.ProcessGroup, dist.new_group(timeout=_WRITING, backend="gloo"))
        """Group of all ranks for checkpoints, which a separate thread writes."""
        self.publishing = cast(dist.ProcessGroup, dist.new_group(timeout=_WRITING, backend="gloo"))
        """Group of all ranks for publishing weights, which a separate thread uploads."""
        self.storage = DeviceMesh(
            "cpu",
            torch.from_numpy(grid).permute([AXES.index(axis) for axis in STORAGE_AXES]),
            mesh_dim_names=STORAGE_AXES,
        )
        """Mesh of all ranks with the axes in the order in which checkpoints are cut: by experts first."""
        data = self.group("replicate", "fsdp", "expert")
        self.data_rank = group_rank(data)
        """Rank among those that train on different sequences."""
        self.num_data_ranks = group_size(data)

    def group(self, *axes: str) -> Group:
        """The ranks that differ from this one along `axes` only, in rank order; None if it is alone."""
        return self._groups[tuple(axis for axis in AXES if axis in axes)]

    def fsdp_mesh(self) -> DeviceMesh:
        """The FSDP ranks as PyTorch's mesh."""
        group = self.group("fsdp")
        assert group is not None, "a mesh of one rank shards nothing"
        return DeviceMesh.from_group(group, self.device, mesh_dim_names=("fsdp",))


_USED = (  # combinations of axes that collective operations use
    ("fsdp",),
    ("expert",),
    ("context",),
    ("tensor",),
    ("fsdp", "expert"),
    ("fsdp", "tensor"),
    ("fsdp", "expert", "tensor"),
    ("replicate", "context"),
    ("replicate", "expert", "context"),
    ("replicate", "fsdp", "expert"),
)


def _make_group(grid: np.ndarray, axes: tuple[str, ...], timeout_s: float) -> Group:
    """Creates the groups along `axes` for all ranks, and returns this rank's."""
    inside = [AXES.index(axis) for axis in axes]
    outside = [axis for axis in range(len(AXES)) if axis not in inside]
    members = grid.transpose(*outside, *inside).reshape(-1, int(np.prod([grid.shape[a] for a in inside])))
    if members.shape[1] == 1:
        return None
    group, _ = dist.new_subgroups_by_enumeration(members.tolist(), timeout=timedelta(seconds=timeout_s))
    assert isinstance(group, dist.ProcessGroup), "every rank is in one of them"
    return group
