"""What adapters save: memory and time of training steps, low-rank against all weights.

    python benchmarks/adapters.py [--json FILE] [--rank N] [--tokens N] [--quick]

Each way runs in a process of its own, which makes the model, takes two optimiser steps on the same random
sequences and says how far its memory rose above what an interpreter with the libraries takes. The second step
is timed: the first makes the optimiser's states.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from common import Figures, print_table, write_result
from torch import nn

from etude.config import AdapterConfig, ModelConfig, OptimizerConfig
from etude.model import LanguageModel, build_model
from etude.model.lora import Adapters
from etude.model.scoring import PackedSequences, packed_logprobs
from etude.training.optimizer import Optimizer

VOCAB = 8192
LARGE = ModelConfig(
    architecture="qwen3",
    hidden_size=768,
    num_layers=14,
    num_heads=12,
    num_kv_heads=4,
    head_dim=64,
    intermediate_size=2560,
    max_positions=1024,
)
QUICK = LARGE.model_copy(update={"hidden_size": 64, "num_layers": 2, "intermediate_size": 128})
_MEBIBYTE = 1 << 20


@dataclass(frozen=True, slots=True)
class Way:
    """One way of training."""

    optimizer: str
    rank: int
    """Of the adapters; 0: all weights."""

    @property
    def name(self) -> str:
        """For tables and JSON."""
        return f"{self.optimizer}_{f'rank{self.rank}' if self.rank else 'all'}"


def peak_bytes() -> int:
    """The most memory that this process ever had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(way: Way, config: ModelConfig, num_tokens: int, answer: Connection) -> None:
    """Trains in this process and sends the figures."""
    torch.set_num_threads(1)
    before = peak_bytes()
    model = build_model(config, VOCAB)
    model.initialise(0)
    adapters = Adapters(model, AdapterConfig(rank=way.rank)) if way.rank else None
    learning: nn.Module = adapters or model
    settings = OptimizerConfig.model_validate({"matrix_optimizer": way.optimizer})
    optimizer = Optimizer(learning, settings, 10)
    step(model, adapters, optimizer, num_tokens)
    began = time.process_time()
    step(model, adapters, optimizer, num_tokens)
    answer.send(
        {
            "memory_mib": (peak_bytes() - before) / _MEBIBYTE,
            "step_cpu_s": time.process_time() - began,
            "weights_millions": sum(p.numel() for p in model.parameters()) / 1e6,
            "trained_millions": sum(p.numel() for p in learning.parameters()) / 1e6,
        }
    )


def step(model: LanguageModel, adapters: Adapters | None, optimizer: Optimizer, num_tokens: int) -> None:
    """One optimiser step on one sequence."""
    tokens = torch.randint(0, VOCAB, (num_tokens,), generator=torch.Generator().manual_seed(0))
    batch = PackedSequences.pack([tokens.int().numpy()])
    logprobs, _ = packed_logprobs(model, batch, torch.arange(1, num_tokens))
    (-logprobs.mean()).backward()
    optimizer.step()
    if adapters is not None:
        adapters.merge()


def measured(way: Way, config: ModelConfig, num_tokens: int) -> Figures:
    """What a fresh process finds."""
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=measure, args=(way, config, num_tokens, theirs))
    process.start()
    theirs.close()
    figures = mine.recv()
    process.join()
    return figures


def main() -> None:
    """Measures, prints, and writes what was asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--quick", action="store_true", help="a tiny model")
    options = parser.parse_args()
    config = QUICK if options.quick else LARGE
    ways = [Way(optimizer, rank) for optimizer in ("adamw", "muon") for rank in (0, options.rank)]
    found = {way.name: measured(way, config, options.tokens) for way in ways}
    for name, figures in found.items():
        print_table(name, figures)
    flat = {f"{name}_{key}": value for name, figures in found.items() for key, value in figures.items()}
    for optimizer in ("adamw", "muon"):
        ratio = flat[f"{optimizer}_rank{options.rank}_memory_mib"] / flat[f"{optimizer}_all_memory_mib"]
        flat[f"{optimizer}_memory_of_adapters_over_all"] = ratio
    if options.json:
        write_result(options.json, flat, {"config": config.model_dump(mode="json"), "tokens": options.tokens})


if __name__ == "__main__":
    main()
