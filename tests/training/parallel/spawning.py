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
    ["torch", "torch._dynamo", "torch.distributed.fsdp", "etude.training", "tests.training.parallel.storing"]
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


def exit_codes(function: Callable[..., Any], config: ParallelConfig, *arguments: Any) -> list[int | None]:
    """Lets `function(ranks, *arguments)` end each rank in its own way."""
    with tempfile.TemporaryDirectory() as directory:
        store = f"file://{Path(directory) / 'store'}"
        processes = [
            _CONTEXT.Process(target=_run, args=(store, rank, config, function, arguments))
            for rank in range(config.ranks)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(120.0)
        return [process.exitcode for process in processes]


def _run(
    store: str, rank: int, config: ParallelConfig, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> Any:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=store, rank=rank, world_size=config.ranks, timeout=timedelta(seconds=60)
    )
    result = function(MeshRanks(Mesh(config)), *arguments)
    dist.destroy_process_group()
    return result


def _body(
    results: SimpleQueue[tuple[int, Any, str]],
    store: str,
    rank: int,
    config: ParallelConfig,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    try:
        results.put((rank, _run(store, rank, config, function, arguments), ""))
    except BaseException:
        results.put((rank, None, traceback.format_exc()))
