"""Worker: one rank that reads its part of a checkpoint, publishes it twice and reports its memory.

python rank_memory.py CHECKPOINT DIRECTORY RANK RANKS
"""

# ruff: noqa: E402  (what is imported after torch counts)
from __future__ import annotations

from pathlib import Path

import torch


def peak_bytes() -> int:
    """Peak resident memory of this process, including mapped files."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    line = next(line for line in lines if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


BEFORE = peak_bytes()

import json
import sys

import torch.distributed as dist

from etude.config.parallel import ParallelConfig
from etude.model.huggingface import outline_model, read_fields
from etude.records import PolicyVersion
from etude.training.parallel.mesh import Mesh
from etude.training.parallel.mesh_ranks import MeshRanks
from etude.training.parallel.places import local_part
from etude.weights import StoreWeights
from etude.weights.store import WeightStore


@torch.no_grad()
def main() -> None:
    checkpoint, directory = Path(sys.argv[1]), Path(sys.argv[2])
    rank, num_ranks = int(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{directory / 'group'}", rank=rank, world_size=num_ranks
    )
    ranks = MeshRanks(Mesh(ParallelConfig(ranks=num_ranks, fsdp=num_ranks)))
    peaks = {"libraries": peak_bytes() - BEFORE}
    model = outline_model(read_fields(checkpoint / "config.json"), torch.bfloat16)
    model.unread = checkpoint
    ranks.place(model)
    peaks["loading"] = peak_bytes() - BEFORE
    store = WeightStore.open(str(directory / "store"))
    with StoreWeights(store, peers=ranks.peers, scratch=directory / "scratch") as publisher:
        for step in range(2):
            publisher.publish(PolicyVersion("bench", step), ranks.parts(model))
            for parameter in model.parameters():  # in bfloat16 an update changes few of the numbers
                local_part(parameter.data)[::20].mul_(1.01)
    peaks["publishing"] = peak_bytes() - BEFORE
    print(json.dumps(peaks))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
