"""Runs a function on every rank of a world of processes over gloo."""

from __future__ import annotations

import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from etude.config.parallel import ParallelConfig
from etude.training.parallel.mesh import Mesh
from etude.training.parallel.mesh_ranks import MeshRanks

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    ["torch", "torch._dynamo", "torch.distributed.fsdp", "etude.training", "tests.training.parallel.bodies"]
)


def on_ranks(function: Callable[..., Any], config: ParallelConfig, *arguments: Any) -> list[Any]:
    """What `function(ranks, *arguments)` returns on each rank: an importable function, plain data."""
    results: SimpleQueue[tuple[int, Any, str]] = _CONTEXT.SimpleQueue()
    with tempfile.TemporaryDirectory() as directory:
        store = f"file://{Path(directory) / 'store'}"
        processes = [
            _CONTEXT.Process(target=_body, args=(results, store, rank, config, function, arguments))
            for rank in range(config.ranks)
        ]
        for process in processes:
            process.start()
        answers = sorted(results.get() for _ in processes)
        for process in processes:
            process.join()
    for rank, _, error in answers:
        assert not error, f"rank {rank}: {error}"
    return [answer for _, answer, _ in answers]


def _body(
    results: SimpleQueue[tuple[int, Any, str]],
    store: str,
    rank: int,
    config: ParallelConfig,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", init_method=store, rank=rank, world_size=config.ranks, timeout=timedelta(seconds=60)
        )
        results.put((rank, function(MeshRanks(Mesh(config)), *arguments), ""))
        dist.destroy_process_group()
    except BaseException:
        results.put((rank, None, traceback.format_exc()))
