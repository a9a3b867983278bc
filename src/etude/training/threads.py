"""A step's micro-batches on several threads of one process, whose number changes no bit.

    micro-batches, cut by lengths alone ──> one thread each ──> gradients, added in their order

Each is computed with one compute thread from its first operation to its last gradient, so threads meet once
per micro-batch and not inside of each product: on cores that are shared with others, one that is away for
some milliseconds would be waited for at every such meeting.
"""

from __future__ import annotations

import functools
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor, nn

from etude.kit.memory import return_free_memory
from etude.model import LanguageModel
from etude.observe.machine import available_memory_bytes, total_memory_bytes
from etude.training.parallel.ranks import Ranks

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")

_LEAST_TOKENS = 768
"""Of a micro-batch that is cut for threads alone: in smaller ones, what each costs by itself counts."""
_MOST_BATCHES = 16
_SCARCE = 0.25
"""Share of the machine's memory: where less is left, what a step leaves free is given back."""


def count_batches(num_sequences: int, num_tokens: int, shared_tokens: int = 0) -> int:
    """Into how many micro-batches a step is cut at least, so that threads have something to share.

    `shared_tokens`, with which all sequences begin, are computed once in each: where there are more than two
    micro-batches, a fifth of all rows at most.
    """
    most = min(num_sequences, num_tokens // _LEAST_TOKENS, _MOST_BATCHES)
    if shared_tokens:
        own = num_tokens - num_sequences * shared_tokens
        most = min(most, max(2, own // (4 * shared_tokens)))
    return max(1, most)


def is_cut(model: nn.Module, ranks: Ranks) -> bool:
    """Whether threads share micro-batches: on a CPU where this process trains alone, of models whose forward
    pass is known to leave nothing behind. Elsewhere the threads are those of PyTorch's operators."""
    on_cpu = all(parameter.device.type == "cpu" for parameter in model.parameters())
    return isinstance(model, LanguageModel) and on_cpu and ranks.world_size == 1


@contextmanager
def share_threads(*, cut: bool) -> Iterator[int]:
    """Yields how many threads share the micro-batches: the compute threads that are set. While it lasts, an
    operation has one. Without `cut`, operations keep them all. Afterwards, where memory is scarce, what was
    freed goes back to the system: between tensors of unlike sizes more of it stays from step to step."""
    num_threads = torch.get_num_threads()
    shared = cut and num_threads > 1
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
    """`compute` of each, in their order, on this many threads with one compute thread each. Of what is ready,
    about one result a thread waits to be taken."""
    if num_threads == 1 or len(items) == 1:
        yield from map(compute, items)
        return
    pool = _pool(num_threads, os.getpid())
    pending: deque[Future[ResultT]] = deque()
    try:
        for item in items:
            if len(pending) == 2 * num_threads:
                yield pending.popleft().result()
            pending.append(pool.submit(compute, item))
        while pending:
            yield pending.popleft().result()
    finally:
        for future in pending:  # after an error nothing goes on computing with the caller's tensors
            if not future.cancel():
                future.exception()


def add_gradients(
    learning: nn.Module,
    compute: Callable[[ItemT], tuple[Tensor, ResultT]],
    items: Sequence[ItemT],
    num_threads: int,
) -> list[ResultT]:
    """Adds the gradient of each item's loss to the parameters, in the order of items. `compute` gives the
    loss, a scalar, and what is returned of it; several threads call it at the same time."""
    results: list[ResultT] = []
    if num_threads == 1:
        for item in items:
            loss, result = compute(item)
            loss.backward()
            results.append(result)
        return results
    parameters = [parameter for parameter in learning.parameters() if parameter.requires_grad]
    # PyTorch makes the node that accumulates a parameter's gradient under a lock of the parameter's, and
    # waits there for the interpreter's (2.13), which `backward` holds as it waits for that lock. The nodes
    # that these views hold are made by now, and have no object in Python, which would be counted there.
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
    """`process`: a fork has none of its parent's threads."""
    return ThreadPoolExecutor(num_threads, "micro-batch", torch.set_num_threads, (1,))
