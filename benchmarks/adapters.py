"""Low-rank adapters against training all weights: memory and time of a step, the log-probability difference
of engine and trainer, and, from a given run, the gain in pass rate.

    python benchmarks/adapters.py [--json FILE] [--rank N] [--tokens N] [--quick]
    python benchmarks/adapters.py --gain runs/quickstart --json FILE [--seeds N]        (hours)

`lora_parity_max`: the largest difference between engine and trainer log-probabilities of the tokens that the
engine sampled with one adapter while sessions of other adapters ran, with batch-invariant numerics.

`lora_gain_vs_full`: the quickstart's reinforcement learning from that run's mid-trained checkpoint, with
equal numbers of steps and sessions: the rise of the pass rate on held-out tasks with adapters, over the rise
with all weights. Means over seeds, each at the learning rate with the highest pass rate in the last quarter
of training (two seeds). Existing runs are read, not repeated.

Memory: each method runs in a process of its own, which builds the model, takes two optimiser steps on the
same random sequences and reports its peak memory above an interpreter with the libraries. The second step is
timed: the first creates the optimiser's states.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch
from common import Figures, merge_result, print_table, write_result
from torch import nn

from etude.config import AdapterConfig, ModelConfig, OptimizerConfig, load_config
from etude.controller.train import train
from etude.inference import Engine
from etude.model import LanguageModel, build_model
from etude.model.kernels.invariant import InvariantOps
from etude.model.lora import Adapters
from etude.model.scoring import PackedSequences, packed_logprobs, score_sequences
from etude.observe import RunDirectory, SilentObserver, read_metrics
from etude.records import PolicyVersion, SampleRequest, SamplingParams
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
_SMALL = QUICK.model_copy(update={"num_heads": 4, "num_kv_heads": 2, "head_dim": 16})
_EXPERTS = {"num_experts": 8, "experts_per_token": 2, "expert_size": 32}
_LATENT = {
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "q_lora_rank": 24,
}
PARITY = {
    "qwen3": _SMALL,
    "llama": _SMALL.model_copy(update={"architecture": "llama"}),
    "qwen3_moe": _SMALL.model_copy(update={"architecture": "qwen3_moe", **_EXPERTS}),
    "deepseek_v3": _SMALL.model_copy(update={"architecture": "deepseek_v3", **_EXPERTS, **_LATENT}),
}
_SAMPLED = 64
RATES = {0: (5e-4, 1e-3, 2e-3), 16: (1e-3, 3e-3)}
"""Rank of the adapters -> learning rates to try; 0: all weights. At 1e-2 adapters no longer learn: after ten
steps a twentieth of the sessions pass."""
TUNING_SEEDS = 2


@dataclass(frozen=True, slots=True)
class Method:
    """A training method: an optimiser, with adapters or all weights."""

    optimizer: str
    rank: int
    """Rank of the adapters; 0: all weights are trained."""

    @property
    def name(self) -> str:
        """Its name in tables and JSON."""
        return f"{self.optimizer}_{f'rank{self.rank}' if self.rank else 'all'}"


def peak_bytes() -> int:
    """Peak resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(method: Method, config: ModelConfig, num_tokens: int, answer: Connection) -> None:
    """Trains in this process and sends the figures through `answer`."""
    torch.set_num_threads(1)
    before = peak_bytes()
    model = build_model(config, VOCAB)
    model.initialise(0)
    adapters = Adapters(model, AdapterConfig(rank=method.rank)) if method.rank else None
    learning: nn.Module = adapters or model
    settings = OptimizerConfig.model_validate({"matrix_optimizer": method.optimizer})
    optimizer = Optimizer(learning, settings, 10)
    step(model, optimizer, num_tokens)
    began = time.process_time()
    step(model, optimizer, num_tokens)
    answer.send(
        {
            "memory_mib": (peak_bytes() - before) / _MEBIBYTE,
            "step_cpu_s": time.process_time() - began,
            "weights_millions": sum(p.numel() for p in model.parameters()) / 1e6,
            "trained_millions": sum(p.numel() for p in learning.parameters()) / 1e6,
        }
    )


def step(model: LanguageModel, optimizer: Optimizer, num_tokens: int) -> None:
    """One optimiser step on one sequence."""
    tokens = torch.randint(0, VOCAB, (num_tokens,), generator=torch.Generator().manual_seed(0))
    batch = PackedSequences.pack([tokens.int().numpy()])
    logprobs, _ = packed_logprobs(model, batch, torch.arange(1, num_tokens))
    (-logprobs.mean()).backward()
    optimizer.step()


def parity(config: ModelConfig) -> float:
    """Largest log-probability difference of trainer and engine over sessions of two adapters in one batch."""
    engine = Engine(config, VOCAB, 8, 2 * _SAMPLED, kernels="native", native_threads=2)
    models: dict[str, LanguageModel] = {}
    versions: dict[str, PolicyVersion] = {}
    for seed, name in enumerate(("a", "b"), 1):
        models[name] = build_model(config, VOCAB)
        models[name].initialise(0)
        models[name].ops = InvariantOps()
        adapters = Adapters(models[name], AdapterConfig(rank=8 * seed, seed=seed))
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for factor in adapters.parameters():
                factor.normal_(0.0, 0.05, generator=generator)
        versions[name] = PolicyVersion(name, 0, name, adapter=name)
        tensors = {n: p.detach() for n, p in models[name].named_parameters()} | adapters.published()
        engine.stage(versions[name], tensors, "the same base")
        engine.activate(versions[name])
    prompts = np.random.default_rng(0).integers(0, VOCAB, (8, _SAMPLED // 2)).astype(np.int32)
    for number, prompt in enumerate(prompts):
        name, params = "ab"[number % 2], SamplingParams(max_tokens=_SAMPLED)
        key, version = str(number), versions["ab"[number % 2]]
        engine.submit(SampleRequest(key, key, prompt, params, frozenset(), (number,), version=version))
    worst, ended = 0.0, 0
    while engine.has_work:
        for answer in engine.step(8):
            number, (chunk,) = int(answer.request.id), answer.chunks
            whole = np.concatenate((prompts[number], chunk.tokens))
            scored = score_sequences(models["ab"[number % 2]], [whole])[0][-len(chunk.tokens) :]
            worst, ended = max(worst, float(np.abs(scored - chunk.logprobs).max())), ended + 1
    assert ended == len(prompts)
    return worst


def play(begun: Path, rank: int, rate: float, seed: int) -> RunDirectory:
    """The RL run from the mid-trained checkpoint of `begun`; trained unless its directory exists."""
    settings = {
        "name": json.dumps(f"rank{rank}-rate{rate:g}-seed{seed}"),
        "runs_directory": json.dumps(str(begun.parent / "gains")),
        "initial_checkpoint": json.dumps(str(begun / "checkpoints" / "midtrained")),
        "seed": str(seed),
        "rl.num_steps": "24",
        "rl.adapter.rank": str(rank),
        "rl.optimizer.learning_rate": str(rate),
        "evaluation.num_tasks": "100",
        "max_wall_s": "0",
    }
    config = load_config(
        Path("configs/quickstart.toml"), [f"{name}={value}" for name, value in settings.items()]
    )
    path = Path(config.runs_directory) / config.name
    run = RunDirectory.open(path) if path.exists() else RunDirectory.create(config)
    if "heldout_after" not in (run.read_json(run.report_file) or {}):
        train(config, run, SilentObserver(), resume=path.exists())
    print(f"{run.name}: {late_pass_rate(run):.1%} of the last sessions, gain {gain(run):+.1%}", flush=True)
    return run


def late_pass_rate(run: RunDirectory) -> float:
    """Pass rate of the last quarter of training: learning rates are chosen by it, not by held-out tasks."""
    rates = [row["pass_rate"] for row in read_metrics(run.metrics_file) if row["kind"] == "rl"]
    return float(np.mean(rates[-len(rates) // 4 :]))


def gain(run: RunDirectory) -> float:
    """Rise of the sampled pass rate on held-out tasks over the run."""
    report = run.read_json(run.report_file) or {}
    before, after = (report[f"heldout_{when}"]["sampled"]["pass_rate"] for when in ("before", "after"))
    return float(after - before)


def gains(begun: Path, num_seeds: int) -> tuple[Figures, dict[str, list[float]]]:
    """(mean gain of each method at its best learning rate, and their ratio; gains by method and seed)."""
    found: Figures = {}
    values: dict[str, list[float]] = {}
    for rank, rates in RATES.items():
        for rate in rates:
            tuned = [late_pass_rate(play(begun, rank, rate, seed)) for seed in range(TUNING_SEEDS)]
            found[f"late_pass_rate_rank{rank}_{rate:g}"] = float(np.mean(tuned))
        best = max(rates, key=lambda rate: found[f"late_pass_rate_rank{rank}_{rate:g}"])
        name = f"gain_rank{rank}_{best:g}"
        values[name] = [gain(play(begun, rank, best, seed)) for seed in range(num_seeds)]
        found[name] = float(np.mean(values[name]))
    full, adapters = values.values()
    found["lora_gain_vs_full"] = float(np.mean(adapters) / np.mean(full))
    rng = np.random.default_rng(0)
    picks = rng.integers(0, num_seeds, (10_000, num_seeds))  # bootstrap over seeds, paired
    ratios = np.array(adapters)[picks].mean(1) / np.array(full)[picks].mean(1)
    found["lora_gain_low"], found["lora_gain_high"] = map(float, np.quantile(ratios, (0.025, 0.975)))
    return found, values


def measure_in_process(method: Method, config: ModelConfig, num_tokens: int) -> Figures:
    """Figures of `measure` in a fresh process."""
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    process = context.Process(target=measure, args=(method, config, num_tokens, theirs))
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
    parser.add_argument("--gain", type=Path, help="a quickstart run: measure what adapters gain, from it")
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    if options.gain:
        found, values = gains(options.gain, options.seeds)
        print_table("gain", found)
        if options.json:
            merge_result(options.json, ["gain"], found, {"gain": values})
        return
    config = QUICK if options.quick else LARGE
    methods = [Method(optimizer, rank) for optimizer in ("adamw", "muon") for rank in (0, options.rank)]
    found = {method.name: measure_in_process(method, config, options.tokens) for method in methods}
    for name, figures in found.items():
        print_table(name, figures)
    flat = {f"{name}_{key}": value for name, figures in found.items() for key, value in figures.items()}
    for optimizer in ("adamw", "muon"):
        ratio = flat[f"{optimizer}_rank{options.rank}_memory_mib"] / flat[f"{optimizer}_all_memory_mib"]
        flat[f"{optimizer}_memory_of_adapters_over_all"] = ratio
    differences = {name: parity(config) for name, config in PARITY.items()}
    print_table("difference of trainer and engine", differences)
    flat["lora_parity_max"] = max(differences.values())
    if options.json:
        write_result(options.json, flat, {"config": config.model_dump(mode="json"), "tokens": options.tokens})


if __name__ == "__main__":
    main()
