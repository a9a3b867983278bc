"""The training step and the whole RL step against transformers and TRL: speed, memory, exactness.

    python benchmarks/training.py --json FILE [--figure FILE] [--rounds 5] [--threads 2]
                                  [--only step memory rl rl_wide packing]

Parts can be measured separately: results of other parts stay in FILE, with machine and commit of each. Peers
run with the best settings of those tried, side by side with ours. TRL runs in an environment of its own
(`environments.py`), created on first use.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import Figures, median_ratio, merge_result, print_table, probe_roofline, token_cost
from environments import python_of
from training_plot import draw_curves
from training_step import MODELS, step_figures

from etude.config import ModelConfig
from etude.model import PackedAttention, build_model
from etude.model.huggingface import save_model
from etude.training.packing import Packing, pack_sequences, sequence_cost

_WORKERS = Path(__file__).parent / "training_workers"
_TIMEOUT_S = 900.0
_WARM_UP_STEPS = 3
_LARGE_VOCAB = 150_000
_RL_MODEL = ModelConfig(
    hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, expert_size=64, max_positions=512
)
_RL_VOCAB = 256
_DEFAULT_SHAPE = {"groups": 1, "group_size": 8, "completion_tokens": 256}
"""TRL's own defaults: per_device_train_batch_size, num_generations, max_completion_length."""
_WIDE_SHAPE = {"groups": 8, "group_size": 8, "completion_tokens": 32}
"""Many short samples of equal length, as suits TRL's padded batches; the learning curves use this shape."""
_TRL_VARIANTS: dict[str, dict[str, Any]] = {
    "grouped_mm": {"model": {"experts_implementation": "grouped_mm"}},
    "eager": {"model": {"experts_implementation": "eager"}},
    "batched_mm": {"model": {"experts_implementation": "batched_mm"}},
    "grouped_mm, bfloat16": {"model": {"experts_implementation": "grouped_mm", "dtype": "bfloat16"}},
}
"""Candidates for TRL's fastest settings on a CPU, all with `generate` and its key-value cache, the default.
(Continuous batching used 11 GB and did not finish five steps of the tiny model in two minutes.)"""


def work(python: Path | str, worker: str, asked: dict[str, Any]) -> dict[str, Any]:
    """Runs a worker; returns the JSON of its last line. Raises RuntimeError with the end of its output."""
    environment = os.environ | {"OMP_NUM_THREADS": str(asked["threads"])}
    command = [str(python), str(_WORKERS / worker), json.dumps(asked)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False, env=environment
    )
    if done.returncode:
        raise RuntimeError(f"{worker}: {done.stderr[-1500:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def memory_figures(threads: int, quick: bool) -> Figures:
    """Peak memory of a process for one step with a vocabulary of 150,000 tokens."""
    with tempfile.TemporaryDirectory() as directory:
        model = build_model(ModelConfig(), _LARGE_VOCAB)
        model.initialise(0)
        save_model(model, Path(directory))
        del model
        asked = {
            "checkpoint": directory,
            "threads": threads,
            "sequences": 2 if quick else 6,
            "length": 256,
            "vocab_size": _LARGE_VOCAB,
        }
        found = {side: work(sys.executable, "memory.py", asked | {"side": side}) for side in ("ours", "peer")}
    if abs(found["ours"]["loss"] - found["peer"]["loss"]) > 1e-3:
        raise RuntimeError(f"losses differ: {found}")
    return {
        "memory_vs_transformers_large_vocab": found["ours"]["peak_bytes"] / found["peer"]["peak_bytes"],
        "large_vocab_peak_gb": found["ours"]["peak_bytes"] / 1e9,
        "large_vocab_peak_transformers_gb": found["peer"]["peak_bytes"] / 1e9,
    }


def rl_figures(threads: int, quick: bool, wide: bool) -> tuple[Figures, dict[str, Any]]:
    """(samples per second of whole RL steps, ours and TRL's; learning curves seed by seed)."""
    with tempfile.TemporaryDirectory() as directory:
        model = build_model(_RL_MODEL, _RL_VOCAB)
        model.initialise(0)
        save_model(model, Path(directory))
        asked: dict[str, Any] = {
            "checkpoint": directory,
            "threads": threads,
            "learning_rate": 3e-3,
            "seed": 0,
        }
        seeds, steps = (1, 6) if quick else (3, 40)
        shape, suffix = (_WIDE_SHAPE, "_wide") if wide else (_DEFAULT_SHAPE, "")
        return _compare_loops(asked | shape | {"steps": steps}, seeds, suffix)


def _compare_loops(asked: dict[str, Any], seeds: int, suffix: str) -> tuple[Figures, dict[str, Any]]:
    """Compares one step shape: both loops and our batch-invariant one, in turn for each seed."""
    trl = python_of("trl")
    tried, failures = _try_variants(trl, asked | {"steps": _WARM_UP_STEPS + 2})
    best = min(tried, key=lambda label: tried[label])
    runs: dict[str, list[dict[str, Any]]] = {"ours": [], "invariant": [], "trl": []}
    for seed in range(seeds):
        one = asked | {"seed": seed}
        runs["ours"].append(work(sys.executable, "etude_rl.py", one))
        runs["invariant"].append(work(sys.executable, "etude_rl.py", one | {"invariant": True}))
        runs["trl"].append(work(trl, "trl_rl.py", one | _TRL_VARIANTS[best]))
    times = {side: [_step_s(run) for run in found] for side, found in runs.items()}
    processor = {side: [_step_s(run, "processor_s") for run in found] for side, found in runs.items()}
    gains = {side: statistics.median(_gain(run) for run in found) for side, found in runs.items()}
    samples = asked["groups"] * asked["group_size"]
    limit_s = _limit_s(runs["ours"][0]["tokens_per_step"], asked["completion_tokens"])
    figures = {
        "rl_samples_vs_trl": median_ratio(times["trl"], times["ours"]),
        "rl_samples_vs_trl_processor": median_ratio(processor["trl"], processor["ours"]),
        "rl_samples_per_s": samples / statistics.median(times["ours"]),
        "rl_samples_per_s_trl": samples / statistics.median(times["trl"]),
        "rl_step_ms": 1e3 * statistics.median(times["ours"]),
        "rl_step_limit_ms": 1e3 * limit_s,
        "batch_invariant_cost": median_ratio(times["invariant"], times["ours"]) - 1.0,
        "batch_invariant_cost_processor": median_ratio(processor["invariant"], processor["ours"]) - 1.0,
        "logprob_max_difference": max(run["largest_difference"] for run in runs["invariant"]),
        "logprob_max_difference_fast": max(run["largest_difference"] for run in runs["ours"]),
        "rl_reward_gain": gains["ours"],
        "rl_reward_gain_trl": gains["trl"],
    }
    curves = {side: [run["rewards"] for run in found] for side, found in runs.items()}
    peers = {"trl": best, "trl_step_s": tried, "trl_failures": failures, "curves": curves}
    return (
        {f"{name}{suffix}": value for name, value in figures.items()},
        {f"{name}{suffix}": value for name, value in peers.items()},
    )


def _limit_s(tokens: int, length: int) -> float:
    """Lower bound of the time of one of our steps with `tokens` tokens in sequences of about `length`: one
    forward pass for sampling and three for training, at the rate of the model's own products over 2,048 rows.
    It ignores that sampling proceeds token by token with few rows at a time."""
    flops = 4 * tokens * token_cost(_RL_MODEL, _RL_VOCAB, length / 2).forward_flops
    return flops / (probe_roofline(_RL_MODEL, _RL_VOCAB).model_matmul_gflops * 1e9)


def _try_variants(python: Path, asked: dict[str, Any]) -> tuple[dict[str, float], dict[str, str]]:
    """(seconds per step of each setting of TRL, why the others do not run here)."""
    tried: dict[str, float] = {}
    failures: dict[str, str] = {}
    for label, variant in _TRL_VARIANTS.items():
        try:
            tried[label] = _step_s(work(python, "trl_rl.py", asked | variant))
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            failures[label] = str(error)[-300:]
    if not tried:
        raise RuntimeError(f"TRL ran with no setting: {failures}")
    return tried, failures


def _step_s(run: dict[str, Any], clock: str = "times_s") -> float:
    return statistics.median(run[clock][_WARM_UP_STEPS:])


def _gain(run: dict[str, Any]) -> float:
    """Mean reward of the last five steps minus that of the first five, at equal numbers of samples."""
    return statistics.fmean(run["rewards"][-5:]) - statistics.fmean(run["rewards"][:5])


def packing_figures() -> Figures:
    """Padding and idle time in batches of 64 sessions per rank (median 3,000 tokens, up to 32,768)."""
    padded: list[float] = []
    waited: list[float] = []
    for seed in range(20):
        drawn = np.random.default_rng(seed).lognormal(8.0, 1.2, 64 * 8)
        lengths = np.clip(drawn, 16, 32_768).astype(int).tolist()
        packing = pack_sequences(lengths, 32_768, 8)
        padded.append(_padded_share(lengths, packing))
        waited.append(packing_waste(lengths, packing))
    return {"packing_waste": statistics.mean(padded), "packing_wait_8_ranks": statistics.mean(waited)}


def _padded_share(lengths: list[int], packing: list[list[list[int]]]) -> float:
    """Padding as a share of all computation. Only attention pads, and only without native blocks."""
    useful = sum(sequence_cost(length) for length in lengths)
    padding = sum(_padding_cost([lengths[i] for i in batch]) for batches in packing for batch in batches)
    return padding / (useful + padding)


def packing_waste(lengths: list[int], packing: Packing) -> float:
    """Share of the ranks' time spent waiting for the slowest rank of each round; 0 with one rank."""
    costs = [sequence_cost(length) for length in lengths]
    rounds = zip(*packing, strict=True)
    slowest = sum(max(sum(costs[i] for i in batch) for batch in batches) for batches in rounds)
    return 1.0 - sum(costs) / (len(packing) * slowest) if slowest else 0.0


def _padding_cost(lengths: list[int]) -> float:
    """Cost of attention's padding in a micro-batch, in units of a token's cost without attention."""
    buckets = PackedAttention(lengths)._buckets if lengths else []
    padded = [bucket.length for bucket in buckets for _ in range(bucket.num_sequences)]
    pairs = zip(lengths, padded, strict=True)
    return sum(sequence_cost(long) - sequence_cost(own) - (long - own) for own, long in pairs)


def main() -> None:
    """Measures the chosen parts, prints and writes the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parts = ("step", "memory", "rl", "rl_wide", "packing")
    parser.add_argument("--only", nargs="+", choices=parts, default=list(parts))
    parser.add_argument("--figure", type=Path, help="learning curves of what the JSON file holds")
    parser.add_argument("--quick", action="store_true", help="a trial of the script, not a measurement")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    figures: Figures = {}
    peers: dict[str, Any] = {}
    if "packing" in options.only:
        figures |= packing_figures()
    if "memory" in options.only:
        figures |= memory_figures(options.threads, options.quick)
    for part in {"rl", "rl_wide"}.intersection(options.only):
        found, described = rl_figures(options.threads, options.quick, part == "rl_wide")
        figures |= found
        peers |= described
    if "step" in options.only:
        found, described = step_figures(options.rounds, ["tiny"] if options.quick else list(MODELS))
        figures |= found
        peers |= described
    print_table(f"Training, {options.threads} thread(s)", figures)
    if options.json is not None:
        merge_result(options.json, options.only, figures, peers)
        if options.figure is not None:
            draw_curves(options.figure, json.loads(options.json.read_text(encoding="utf-8")))


if __name__ == "__main__":
    main()
