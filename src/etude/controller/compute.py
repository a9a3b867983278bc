"""What computes on this machine: threads (more are not always faster) and the engine's kernels.

Both decide the last bits of a run, so a run keeps what it was begun with.
"""

from __future__ import annotations

import os
import time
from typing import Literal

import torch

from etude.config import ModelConfig, RunConfig
from etude.errors import ResourceError
from etude.inference.engine import Kernels
from etude.inference.native import load_library
from etude.model import PackedAttention, Qwen3Moe
from etude.observe import Observer, RunDirectory

_LENGTHS = [160] * 12


def settle_compute(run: RunDirectory, config: RunConfig, observer: Observer) -> RunConfig:
    """The configuration with threads and kernels settled: as configured, else as the run was begun with,
    else as they suit this machine. Sets the compute threads and stores both with the run.

    Raises ResourceError for native kernels that are asked for, or that the run was begun with, and cannot
    be had.
    """
    threads = _begun_threads(run, config)
    kernels = config.engine.kernels
    begun = run.environment.get("kernels", "auto")
    kernels = choose_kernels(begun if kernels == "auto" else kernels, observer, config.model)
    run.update_environment({"compute_threads": threads, "kernels": kernels})
    return _settled(config, threads, kernels)


def settle_evaluation(run: RunDirectory) -> RunConfig:
    """As `settle_compute`, for judging a run's policies: stores nothing, and where native kernels cannot be
    had, eager ones do."""
    config = run.config
    begun = run.environment.get("kernels", config.engine.kernels)
    kernels = choose_kernels("eager" if begun == "eager" else "auto", model=config.model)
    return _settled(config, _begun_threads(run, config), kernels)


def _begun_threads(run: RunDirectory, config: RunConfig) -> int:
    """Sets and returns the compute threads: as configured, as the run was begun with, or the fastest."""
    configured = config.num_threads or int(run.environment.get("compute_threads") or 0)
    return choose_threads(configured, config.model, config.tokenizer.vocab_size)


def _settled(config: RunConfig, threads: int, kernels: Kernels) -> RunConfig:
    engine = config.engine.model_copy(update={"kernels": kernels})
    return config.model_copy(update={"num_threads": threads, "engine": engine})


def choose_kernels(
    configured: Literal["auto", "eager", "native"],
    observer: Observer | None = None,
    model: ModelConfig | None = None,
) -> Kernels:
    """`native` where it compiles and computes `model`, if the choice is open; says why not. Raises
    ResourceError if it must be and does not compile."""
    if configured == "eager" or (configured == "auto" and model is not None and model.is_latent):
        return "eager"
    try:
        load_library()
    except ResourceError as error:
        if configured == "native":
            raise
        if observer is not None:
            observer.say(f"sampling operator by operator, which is several times slower: {error}")
        return "eager"
    return "native"


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
