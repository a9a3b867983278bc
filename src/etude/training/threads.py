"""Computes a step's micro-batches on several threads of one process; their number changes no bit.

    micro-batches, cut by lengths alone ──> one thread each ──> gradients, added in their order

Each is computed by one thread from its first operation to its last gradient, so threads synchronise once per
micro-batch and not inside each product: on cores shared with other processes, one that is descheduled for
some milliseconds would delay every such synchronisation.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor, nn

from etude.kit import threads
from etude.kit.memory import return_free_memory
from etude.model import LanguageModel
from etude.observe.machine import available_memory_bytes, total_memory_bytes
from etude.training.parallel.ranks import Ranks

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")

_LEAST_TOKENS = 768
"""Minimum size of a micro-batch that is split for threads: below it, the overhead of each is noticeable."""
_MOST_BATCHES = 16
_SCARCE = 0.25
"""Share of the machine's memory: if less is available after a step, freed memory goes back to the system."""


def count_batches(num_sequences: int, num_tokens: int, shared_tokens: int = 0) -> int:
    """The least number of micro-batches into which a step is split, so that threads can divide them.

    `shared_tokens`, a prefix of all sequences, is computed once in each: with more than two micro-batches,
    it is at most a fifth of all rows.
    """
    most = min(num_sequences, num_tokens // _LEAST_TOKENS, _MOST_BATCHES)
    if shared_tokens:
        own = num_tokens - num_sequences * shared_tokens
        most = min(most, max(2, own // (4 * shared_tokens)))
    return max(1, most)


def splits_batches(model: nn.Module, ranks: Ranks) -> bool:
    """Whether threads divide micro-batches: on a CPU, without other ranks, for models whose forward pass is
    known to keep no state. Otherwise, PyTorch's operators use the threads."""
    on_cpu = all(parameter.device.type == "cpu" for parameter in model.parameters())
    return isinstance(model, LanguageModel) and on_cpu and ranks.world_size == 1


@contextmanager
def share_threads(*, split: bool) -> Iterator[int]:
    """Yields the number of threads for micro-batches: PyTorch's compute threads, while operators use one. Not
    `split`: operators keep all threads. At the end, if memory is scarce, freed memory is returned to the
    system: fragmentation by tensors of different sizes would retain more of it with every step."""
    num_threads = torch.get_num_threads()
    shared = split and num_threads > 1
    if shared:
        torch.set_num_threads(1)
    try:
        yield num_threads if shared else 1
    finally:
        torch.set_num_threads(num_threads)
        if available_memory_bytes() < _SCARCE * total_memory_bytes():
            return_free_memory()


def map_in_order(
    compute: Callable[[ItemT], ResultT], items: Sequence[ItemT], num_threads: int
) -> Iterator[ResultT]:
    """Yields `compute` of each item, in order, on this many threads with one compute thread each."""
    num_threads = num_threads if len(items) > 1 else 1
    return threads.map_in_order(compute, items, num_threads, _pool(num_threads, os.getpid()))


def add_gradients(
    learning: nn.Module,
    compute: Callable[[ItemT], tuple[Tensor, ResultT]],
    items: Sequence[ItemT],
    num_threads: int,
) -> list[ResultT]:
    """Adds the gradient of each item's loss to the parameters, in the order of items. `compute` returns the
    loss, a scalar, and a result, which is returned; several threads call it at the same time."""
    results: list[ResultT] = []
    if num_threads == 1:
        for item in items:
            loss, result = compute(item)
            loss.backward()
            results.append(result)
        return results
    parameters = [parameter for parameter in learning.parameters() if parameter.requires_grad]
    # PyTorch creates the node that accumulates a parameter's gradient under the parameter's lock, and waits
    # there for the interpreter's (2.13), which `backward` holds while it waits for the parameter's: a
    # deadlock. These views create the nodes beforehand, without Python objects, whose counting needs the GIL.
    views = [parameter.expand_as(parameter) for parameter in parameters]

    def differentiate(item: ItemT) -> tuple[tuple[Tensor | None, ...], ResultT]:
        loss, result = compute(item)
        return torch.autograd.grad(loss, parameters, allow_unused=True), result

    for gradients, result in map_in_order(differentiate, items, num_threads):
        reached = [(p, g) for p, g in zip(parameters, gradients, strict=True) if g is not None]
        # As `backward` does it, with the parameters' hooks.
        torch.autograd.backward([p for p, _ in reached], [g for _, g in reached])
        results.append(result)
    del views
    return results


@functools.cache
def _pool(num_threads: int, process: int) -> ThreadPoolExecutor:
    """The threads of this process. `process`: its id, since a fork has none of its parent's threads."""
    return ThreadPoolExecutor(num_threads, "micro-batch", torch.set_num_threads, (1,))
