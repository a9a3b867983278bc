"""Native kernels against PyTorch's operators: engine steps, and the trainer in batch-invariant mode.

    python benchmarks/kernels.py [--threads N] [--json FILE]

With one thread times are processor time, so that other work on the machine matters little; with more, wall
time. Pairs are measured one after the other and compared pair by pair. Shares of the roofline: bytes that
must be read (weights, keys and values) over the measured read rate; operations over the measured rate of the
best matrix product here, native or PyTorch's. A share above 1 means that the data was in a cache, as the
small model's weights are.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from common import Figures, median_ratio, print_table, write_result

from etude.config import ModelConfig
from etude.inference.cache import PagedCache, StepRows
from etude.inference.forward import EagerForward, ForwardPass
from etude.inference.native import NativeForward
from etude.model import LanguageModel, TorchOps, build_model
from etude.model.kernels.invariant import InvariantOps
from etude.model.kernels.native import calls
from etude.model.kernels.native.matrices import pack
from etude.model.scoring import PackedSequences, packed_logprobs
from etude.records import SamplingParams

REPEATS = 5
SESSIONS, CONTEXT, PREFILL = 32, 480, 512
DENSE = ModelConfig(
    architecture="qwen3",
    hidden_size=768,
    num_layers=12,
    num_heads=12,
    num_kv_heads=4,
    head_dim=64,
    intermediate_size=2304,
    max_positions=2048,
)
LATENT = ModelConfig(
    architecture="deepseek_v3",
    hidden_size=512,
    num_layers=6,
    num_heads=16,
    q_lora_rank=192,
    kv_lora_rank=128,
    qk_nope_head_dim=32,
    qk_rope_head_dim=16,
    v_head_dim=32,
    num_experts=32,
    experts_per_token=4,
    expert_size=192,
    n_group=4,
    topk_group=2,
    intermediate_size=1536,
    max_positions=2048,
)


@dataclass(frozen=True, slots=True)
class Case:
    """A model, and its operations and bytes per token."""

    name: str
    model: LanguageModel
    operations: float
    """Operations per token, without attention."""
    head_operations: float
    """Part of these for the output head, which only sampled positions need."""
    active_bytes: float
    """Bytes of weights that a step of one token reads."""
    weight_bytes: float
    """Bytes of weights that a step of many sessions reads: all experts."""
    cached_bytes: float
    """Bytes of the keys and values of one position."""

    @staticmethod
    def make(name: str, config: ModelConfig, vocab_size: int) -> Case:
        model = build_model(config, vocab_size)
        model.initialise(0)
        total = sum(p.numel() for p in model.parameters())
        idle = config.num_experts - config.experts_per_token
        unused = config.num_moe_layers * idle * 3 * config.hidden_size * config.expert_size
        cached_width = config.key_dim + (0 if config.value_is_key_prefix else config.value_dim)
        cached = config.num_layers * config.cache_heads * cached_width * 4
        return Case(
            name,
            model,
            2.0 * (total - unused),
            2.0 * model.head.numel(),
            4.0 * (total - unused),
            4.0 * total,
            float(cached),
        )


def seconds(work: Callable[[], object]) -> float:
    """Time of one call: processor time with one thread, wall time with more."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    start = clock()
    work()
    return clock() - start


def alternate(parts: dict[str, Callable[[], object]]) -> dict[str, list[float]]:
    """Seconds of each part, REPEATS rounds in turn after an uncounted one."""
    found: dict[str, list[float]] = {name: [] for name in parts}
    for repeat in range(REPEATS + 1):
        for name, work in parts.items():
            elapsed = seconds(work)
            if repeat:
                found[name].append(elapsed)
    return found


def machine() -> tuple[float, float, Figures]:
    """(peak bytes read per second, peak operations per second, the measured figures)."""
    threads = torch.get_num_threads()
    square, long = torch.randn(1024, 1024), torch.randn(60_000_000)
    matrix = pack([square])
    times = alternate(
        {
            "torch": lambda: torch.mm(square, square),
            "native": lambda: calls.linear(matrix, square, threads),
            "read": long.sum,
        }
    )
    rates = {name: 2 * 1024**3 / min(times[name]) for name in ("torch", "native")}
    read = 4 * len(long) / min(times["read"])
    figures = {
        "machine_read_gb_s": read / 1e9,
        "machine_matmul_torch_gflop_s": rates["torch"] / 1e9,
        "machine_matmul_native_gflop_s": rates["native"] / 1e9,
    }
    return read, max(rates.values()), figures


def step(case: Case, forward: ForwardPass, sessions: int, start: int, count: int) -> Callable[[], object]:
    """A forward pass over `count` rows of each session; with one row also samples the next token."""
    source = np.random.default_rng(0)
    vocab = case.model.vocab_size
    pages = -(-(CONTEXT + PREFILL) // 16)
    tables = np.arange(sessions * pages, dtype=np.int32).reshape(sessions, pages)
    rows = StepRows.plan(
        source.integers(0, vocab, sessions * count),
        tables,
        np.full(sessions, count),
        np.full(sessions, start),
    )
    params, draws = [SamplingParams()] * sessions, source.random(sessions)

    def work() -> None:
        hidden, _ = forward(rows)
        if count == 1:
            forward.sample(hidden, params, draws)

    return work


def engine_figures(case: Case, read: float, rate: float) -> Figures:
    """Decode and prefill: native kernels against the module, and shares of the roofline."""
    threads = torch.get_num_threads()
    cache = PagedCache(case.model.config, SESSIONS * (-(-(CONTEXT + PREFILL) // 16)))
    cache.keys.normal_()
    if cache.values is not None:
        cache.values.normal_()
    kinds: dict[str, ForwardPass] = {
        "eager": EagerForward(case.model, cache),
        "native": NativeForward(case.model, cache, threads),
        "bfloat16": NativeForward(case.model, cache, threads, "bfloat16"),
    }
    figures: Figures = {}
    for label, sessions, start, count in (
        ("decode_1", 1, CONTEXT, 1),
        ("decode_32", SESSIONS, CONTEXT, 1),
        ("prefill", 1, 0, PREFILL),
    ):
        times = alternate({kind: step(case, f, sessions, start, count) for kind, f in kinds.items()})
        name, best = f"{case.name}_{label}", statistics.median(times["native"])
        tokens = sessions * count
        figures[f"{name}_tokens_s"] = tokens / best
        figures[f"{name}_vs_eager"] = median_ratio(times["eager"], times["native"])
        figures[f"{name}_bfloat16_gain"] = median_ratio(times["native"], times["bfloat16"])
        if count > 1:
            figures[f"{name}_roofline_share"] = (
                tokens * (case.operations - case.head_operations) / rate / best
            )
        else:
            weights = case.active_bytes if sessions == 1 else case.weight_bytes
            needed = weights + sessions * start * case.cached_bytes
            figures[f"{name}_roofline_share"] = max(needed / read, tokens * case.operations / rate) / best
    return figures


def trainer_figures(case: Case) -> Figures:
    """Time in batch-invariant mode over time with PyTorch's operators."""
    source = np.random.default_rng(0)
    lengths = [int(x) for x in sorted(source.integers(60, 500, 6), reverse=True)]
    vocab = case.model.vocab_size
    batch = PackedSequences.pack([source.integers(0, vocab, n).astype(np.int32) for n in lengths])
    targets = torch.arange(1, lengths[0])

    def forward(invariant: bool) -> None:
        case.model.ops = InvariantOps() if invariant else TorchOps()
        with torch.no_grad():
            packed_logprobs(case.model, batch, targets)

    def both(invariant: bool) -> None:
        case.model.ops = InvariantOps() if invariant else TorchOps()
        case.model.zero_grad()
        packed_logprobs(case.model, batch, targets)[0].sum().backward()

    figures: Figures = {}
    for label, work in (("forward", forward), ("forward_backward", both)):
        times = alternate({"torch": lambda work=work: work(False), "invariant": lambda work=work: work(True)})
        figures[f"{case.name}_invariant_{label}_cost"] = median_ratio(times["invariant"], times["torch"])
    case.model.ops = TorchOps()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    read, rate, figures = machine()
    cases = (
        Case.make("moe", ModelConfig(), 1024),
        Case.make("latent_60m", LATENT, 8192),
        Case.make("dense_95m", DENSE, 16_384),
    )
    for case in cases:
        with torch.no_grad():
            figures |= engine_figures(case, read, rate)
        figures |= trainer_figures(case)
    print_table(f"Native kernels, {options.threads} thread(s)", figures)
    if options.json is not None:
        write_result(options.json, figures, {})


if __name__ == "__main__":
    main()
