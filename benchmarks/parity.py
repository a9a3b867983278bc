"""Trainer-engine mismatch: its size and causes, its effect on learning, and the cost of exact parity.

    python benchmarks/parity.py [--json FILE] [--plot FILE] [--seeds N] [--steps N] [--quick]

1. A small mixture of experts, trained for a minute on the bytes of this project's own source, plays sessions
   in the engine. The trainer scores the same tokens: with different number formats and micro-batch sizes,
   with experts replayed or chosen anew, and with batch-invariant operations.
2. An RL run with an exact engine, and with inexact ones under different corrections in the trainer
   (`parity_learning.py`).
3. The cost of batch-invariant operations over rollout plus training, in pairs within this process.
"""

from __future__ import annotations

import argparse
import asyncio
import copy
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import parity_learning
import torch
from common import Figures, median_ratio, print_table, write_result
from numpy.typing import NDArray
from parity_plot import draw
from tests.fakes.half import HalfOps

import etude
from etude.config import ModelConfig, ParityConfig
from etude.controller.parity_report import REPLAYED, SAMPLED, ParityReport, PlayedSequence, compare, play
from etude.inference import Engine, EngineService
from etude.model import LanguageModel, TorchOps, build_model
from etude.model.kernels.invariant import InvariantOps
from etude.model.kernels.native.matrices import WeightType
from etude.model.scoring import PackedSequences, packed_logprobs, score_sequences
from etude.records import PolicyVersion
from etude.weights import MemoryWeights

VOCAB = 256
CONFIG = ModelConfig(
    hidden_size=128,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    num_experts=16,
    experts_per_token=2,
    expert_size=64,
    max_positions=512,
)
SEQUENCES, TOKENS, PROMPT = 16, 192, 32
MICRO_BATCHES = (1, 4, 16)
"""Numbers of sequences that the trainer scores in one pass."""
COST_PAIRS = 7
LIMIT = ParityConfig().limit
"""Limit of k3 in the parity gate."""
_VERSION = PolicyVersion("parity", 0)


@dataclass(frozen=True, slots=True)
class Pairing:
    """An engine and a trainer with the same weights in given number formats."""

    name: str
    engine_weights: WeightType
    trainer: Callable[[LanguageModel], LanguageModel]
    """Makes the trainer's model from a float32 model of its own."""


def _plain(model: LanguageModel) -> LanguageModel:
    return model


def _invariant(model: LanguageModel) -> LanguageModel:
    model.ops = InvariantOps()
    return model


def _half(model: LanguageModel) -> LanguageModel:
    return model.cast(torch.bfloat16)


def _half_throughout(model: LanguageModel) -> LanguageModel:
    model.ops = HalfOps()
    return model.cast(torch.bfloat16)


PAIRINGS = (
    Pairing("float32, invariant", "float32", _invariant),
    Pairing("float32", "float32", _plain),
    Pairing("bfloat16 engine, float32 trainer", "bfloat16", _plain),
    Pairing("bfloat16", "bfloat16", _half),
    Pairing("bfloat16, router and head too", "bfloat16", _half_throughout),
)


# ---- 1: mismatch -------------------------------------------------------------------------------


def corpus() -> NDArray[np.int32]:
    """The bytes of the package's source code."""
    files = sorted(Path(etude.__file__).parent.rglob("*.py"))
    return np.frombuffer(b"\n".join(file.read_bytes() for file in files), dtype=np.uint8).astype(np.int32)


def trained_model(num_steps: int, batch: int = 12, length: int = 160) -> LanguageModel:
    """A mixture of experts trained until it writes something like Python."""
    torch.manual_seed(0)
    data, rng = corpus(), np.random.default_rng(0)
    model = build_model(CONFIG, VOCAB)
    model.initialise(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(num_steps):
        starts = rng.integers(0, len(data) - length, batch)
        packed = PackedSequences.pack([data[start : start + length] for start in starts])
        rows = torch.arange(batch * length).view(batch, length)[:, 1:].flatten()
        logprobs, _ = packed_logprobs(model, packed, rows)
        optimizer.zero_grad()
        (-logprobs.mean()).backward()
        optimizer.step()
    return model.requires_grad_(requires_grad=False)


def prompts() -> list[NDArray[np.int32]]:
    """Prompts cut from the source code."""
    data, rng = corpus(), np.random.default_rng(1)
    return [data[start : start + PROMPT] for start in rng.integers(0, len(data) - PROMPT, SEQUENCES)]


def new_engine(weights: WeightType, max_tokens: int = TOKENS) -> Engine:
    """An engine with native kernels on one thread."""
    return Engine(CONFIG, VOCAB, SEQUENCES, max_tokens + 1, kernels="native", native_weights=weights)


def played_by(model: LanguageModel, weights: WeightType) -> list[PlayedSequence]:
    """Sessions sampled by the engine, with its log-probabilities."""

    async def body() -> list[PlayedSequence]:
        published = MemoryWeights()
        async with EngineService(new_engine(weights), published.fetch, None) as service:
            manifest = published.publish(_VERSION, dict(model.named_parameters()))
            await service.stage(manifest)
            await service.activate(manifest.version)
            return await play(service, prompts(), TOKENS)

    return asyncio.run(body())


def mismatch(model: LanguageModel) -> dict[str, Any]:
    """Pairing -> parity reports by micro-batch size, and the trainer's own difference between sizes."""
    found: dict[str, Any] = {}
    for pairing in PAIRINGS:
        played = played_by(model, pairing.engine_weights)
        trainer = pairing.trainer(copy.deepcopy(model))
        reports = {size: compare(trainer, played, size) for size in MICRO_BATCHES}
        found[pairing.name] = {
            "by_micro_batch": {str(size): report.to_json() for size, report in reports.items()},
            "between_micro_batches": between_sizes(trainer, [s.tokens for s in played]),
        }
        _print_pairing(pairing.name, reports, found[pairing.name]["between_micro_batches"])
    return found


def between_sizes(trainer: LanguageModel, tokens: Sequence[NDArray[np.int32]]) -> float:
    """Largest difference of a token's log-probability between the smallest and the largest micro-batch."""
    alone = [score_sequences(trainer, [one])[0] for one in tokens]
    together = score_sequences(trainer, tokens)
    return max(float(np.abs(a - b).max()) for a, b in zip(alone, together, strict=True))


def _print_pairing(name: str, reports: Mapping[int, ParityReport], between: float) -> None:
    print(f"\n{name}: the trainer differs from itself by {between:.1e} between micro-batches")
    for size, report in reports.items():
        for comparison in (SAMPLED, SAMPLED + REPLAYED):
            one = report.figures[comparison]
            print(
                f"  {size:3d} sequences, {comparison:24s} k3 {one.k3:8.1e}  99 % {one.p99:8.1e}  "
                f"most {one.max:8.1e}  experts elsewhere {report.routes_differing:8.2%}"
            )


# ---- 2: learning -------------------------------------------------------------------------------


def learning(seeds: int, steps: int, rate: float) -> dict[str, Any]:
    """Learning curves of every arm by seed."""
    first = parity_learning.initial_weights(200)
    found: dict[str, Any] = {}
    for name in parity_learning.ARMS:
        curves = [parity_learning.learn(name, seed, steps, first, rate) for seed in range(seeds)]
        found[name] = {
            "steps": curves[0].steps,
            "accuracy": [curve.accuracy for curve in curves],
            "ends": [curve.end for curve in curves],
            "median_k3": [statistics.median(curve.k3) for curve in curves],
        }
        ends = [curve.end for curve in curves]
        gap = statistics.median(found[name]["median_k3"])
        shown = " ".join(f"{end:.2f}" for end in ends)
        print(f"  {name:32s} right at the end {shown}   median k3 {gap:.1e}", flush=True)
    return found


# ---- 3: cost -----------------------------------------------------------------------------------


def invariant_cost(model: LanguageModel) -> Figures:
    """Ratios of processor time, invariant over fast: rollout plus training, and training alone.

    A step samples SEQUENCES sessions and trains one update on them (forward, backward, optimiser). Rollouts
    use native kernels in both modes, since the fast mode does too.
    """
    sides = {
        name: _Stepper(model, ops) for name, ops in (("fast", TorchOps()), ("invariant", InvariantOps()))
    }
    for stepper in sides.values():
        stepper.step()
    rows = [{name: stepper.step() for name, stepper in sides.items()} for _ in range(COST_PAIRS)]

    def ratio(part: Callable[[tuple[float, float]], float]) -> float:
        return median_ratio([part(row["invariant"]) for row in rows], [part(row["fast"]) for row in rows])

    return {
        "invariant_cost": ratio(sum) - 1.0,
        "invariant_cost_of_training": ratio(lambda times: times[1]) - 1.0,
        "rollout_share_of_fast_step": statistics.median(r["fast"][0] / sum(r["fast"]) for r in rows),
    }


class _Stepper:
    """One mode's engine and trainer."""

    def __init__(self, model: LanguageModel, ops: TorchOps | InvariantOps) -> None:
        self._model = copy.deepcopy(model).requires_grad_(requires_grad=True)
        self._model.ops = ops
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=0.0)
        self._engine = new_engine("float32")

    def step(self) -> tuple[float, float]:
        """Processor seconds of a rollout and of the update on it."""
        began = time.process_time()
        version = PolicyVersion("cost", 0)
        self._engine.stage(version, dict(self._model.named_parameters()))
        self._engine.activate(version, "recompute")
        tokens = parity_learning.sample_on(self._engine, prompts(), TOKENS - PROMPT)
        sampled = time.process_time()
        batch = PackedSequences.pack(tokens)
        rows = torch.arange(len(batch.tokens)).view(len(tokens), -1)[:, PROMPT:].flatten()
        logprobs, _ = packed_logprobs(self._model, batch, rows)
        self._optimizer.zero_grad()
        (-logprobs.mean()).backward()
        self._optimizer.step()
        return sampled - began, time.process_time() - sampled


# ---- all ---------------------------------------------------------------------------------------


def flat_figures(found: Mapping[str, Any], curves: Mapping[str, Any]) -> Figures:
    """The figures that the docs quote, by name."""
    figures: Figures = {}
    largest = str(MICRO_BATCHES[-1])
    for pairing, values in found.items():
        key = re.sub(r"\W+", "_", pairing)
        report = values["by_micro_batch"][largest]
        figures[f"k3_{key}"] = report["figures"][SAMPLED]["k3"]
        figures[f"k3_{key}_replayed"] = report["figures"][SAMPLED + REPLAYED]["k3"]
        figures[f"max_{key}"] = report["figures"][SAMPLED]["max"]
        figures[f"routes_differing_{key}"] = report["routes_differing"]
        figures[f"between_micro_batches_{key}"] = values["between_micro_batches"]
    for arm, values in curves.items():
        key = re.sub(r"\W+", "_", arm)
        figures[f"accuracy_{key}"] = statistics.mean(values["ends"])
        figures[f"worst_accuracy_{key}"] = min(values["ends"])
        figures[f"k3_while_learning_{key}"] = statistics.median(values["median_k3"])
    return figures | pooled_figures(curves)


def pooled_figures(curves: Mapping[str, Any]) -> Figures:
    """Means over all runs of a kind, since single runs of this task differ more than kinds do. `_error`:
    standard error of the mean."""
    pools: dict[str, list[float]] = {}
    for arm, values in curves.items():
        within = statistics.median(values["median_k3"]) <= LIMIT
        pools.setdefault("within_the_gate" if within else "beyond_the_gate", []).extend(values["ends"])
        if not within:
            pools.setdefault(f"beyond_by_{arm.partition(': ')[2]}", []).extend(values["ends"])
    figures: Figures = {}
    for name, ends in pools.items():
        key = re.sub(r"\W+", "_", name)
        figures[f"pooled_{key}"] = statistics.mean(ends)
        figures[f"pooled_{key}_error"] = statistics.stdev(ends) / len(ends) ** 0.5
        figures[f"pooled_{key}_runs"] = float(len(ends))
        figures[f"pooled_{key}_worst"] = min(ends)
    return figures


def main() -> None:
    """Measures, prints, and writes what was asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--plot", type=Path, help="where to draw them, as SVG or PNG")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rate", type=float, default=3e-3, help="learning rate of the RL runs")
    parser.add_argument("--quick", action="store_true", help="a model that is hardly trained, two short runs")
    options = parser.parse_args()
    seeds, steps, pretraining = (2, 10, 20) if options.quick else (options.seeds, options.steps, 400)
    torch.set_num_threads(1)
    model = trained_model(pretraining)
    found = mismatch(model)
    print(f"\nRL, {seeds} seeds, {steps} steps")
    curves = learning(seeds, steps, options.rate)
    figures = flat_figures(found, curves) | invariant_cost(model)
    print_table("figures", figures)
    if options.json:
        details = {"mismatch": found, "learning": curves, "learning_rate": options.rate}
        write_result(options.json, figures, details)
    if options.plot:
        draw(options.plot, found, curves)


if __name__ == "__main__":
    main()
