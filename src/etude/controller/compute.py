"""How many compute threads: more are not always faster on small models and shared machines."""

from __future__ import annotations

import os
import time

import torch

from etude.config import ModelConfig, RunConfig
from etude.model import PackedAttention, Qwen3Moe

_LENGTHS = [160] * 12


def choose_threads(configured: int, model: ModelConfig, vocab_size: int) -> int:
    """Sets and returns the number of compute threads; 0 probes a training step at 1, 2, 4, ... cores."""
    if configured:
        torch.set_num_threads(configured)
        return configured
    cores = len(os.sched_getaffinity(0))
    candidates = [count for count in (1, 2, 4, 8, 16) if count <= cores]
    probe = Qwen3Moe(model, vocab_size)
    probe.initialise(0)
    times = {count: _time_step(probe, count) for count in candidates}
    best = min(times, key=lambda count: times[count])
    torch.set_num_threads(best)
    return best


def use_sampling_threads(config: RunConfig) -> None:
    """Sets the compute threads for stages that sample. Training calls bring their own count."""
    if config.engine.num_threads:
        torch.set_num_threads(config.engine.num_threads)


def _time_step(model: Qwen3Moe, num_threads: int, repeats: int = 4) -> float:
    torch.set_num_threads(num_threads)
    tokens = torch.arange(sum(_LENGTHS)) % model.vocab_size
    positions = torch.cat([torch.arange(length) for length in _LENGTHS])
    times: list[float] = []
    for _ in range(repeats):
        began = time.perf_counter()
        hidden = model(tokens, positions, PackedAttention(_LENGTHS))
        model.logits(hidden).logsumexp(-1).mean().backward()
        times.append(time.perf_counter() - began)
    return min(times)
