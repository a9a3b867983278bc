"""Our inference engine against its peers on agent sessions, and measurements of our engine alone.

    python benchmarks/inference.py [--only ours,vllm] [--scenarios moe,dense,large] [--parts peers,own,router]
                                   [--choices FILE] [--rounds 3] [--slow-turns N] [--coefficients FILE]
                                   [--quick] [--json FILE]

Every peer is a process with the same checkpoint loaded; in each round all of them play the same new workload
one after the other (A B C, B C A, ...), and a ratio is the median of the ratios of the rounds. Lengths are
forced. Peers choose the likeliest token and return only tokens, which is the least work; ours samples at
temperature 1 with log-probabilities and routes. Each peer's settings are tried first, and its fastest are
used. `--slow-turns N`: transformers, which needs minutes, plays only the first N turns of separate sessions,
and so does ours for that comparison.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import inference_own
import inference_router
import torch
from benchmarks.simulation.router.step_cost import read_step_cost
from common import Figures, median_figures, median_ratio, print_table, write_result
from inference_peers import PEERS, PeerFailedError, Played, Variant, Worker, variants
from inference_work import Scenario, longest_tokens, scenarios

_CHOOSING, _WARMING = 0, 1
"""Seeds of uncounted workloads, for choosing settings and for warming up; the rounds use the next ones."""
_SHORT = 1000
"""Offset of the seeds of workloads for slow peers."""
_SLOW = ("transformers_generate", "transformers_continuous")
_SMALL = ("moe", "dense")


@dataclass(slots=True)
class PeerResult:
    """Results of one peer on one scenario."""

    variant: str = ""
    absent: str = ""
    """Why it has no results; empty if it has."""
    tried_s: dict[str, float] = field(default_factory=dict)
    """Setting -> seconds of its trial."""
    rounds: list[Played] = field(default_factory=list)
    short_rounds: list[Played] = field(default_factory=list)
    """Our engine's rounds on the workload of slow peers, if that is a separate one."""


class PeerComparison:
    """Measures all peers on one scenario."""

    def __init__(self, scenario: Scenario, directory: Path, num_rounds: int, slow_turns: int | None) -> None:
        """`slow_turns`: how many turns of each session slow peers play; None: all."""
        self.scenario = scenario
        self.results: dict[str, PeerResult] = {}
        self._directory = directory
        self._seeds = range(_WARMING + num_rounds + 1)
        self._rounds = self._seeds[_WARMING + 1 :]
        self._slow_turns = slow_turns
        self._max_tokens = max(longest_tokens(scenario.sessions(seed)) for seed in self._seeds)
        self._limit_s = scenario.seconds_per_turn * max(len(s.turns) for s in scenario.sessions(0))
        scenario.write_checkpoint(directory / "checkpoint")
        for seed in self._seeds:
            scenario.write_workload(seed, self._workload(seed), 1 if seed == _WARMING else None)
            if slow_turns is not None:
                scenario.write_workload(
                    seed + _SHORT, self._workload(seed + _SHORT), 1 if seed == _WARMING else slow_turns
                )

    def run(self, peers: Sequence[str], choices: dict[str, str]) -> None:
        """Chooses each peer's settings, unless `choices` names them, and plays the rounds."""
        chosen: dict[str, Variant] = {}
        for peer in peers:
            variant = self._choose(peer, choices.get(peer))
            if variant is not None:
                chosen[peer] = variant
        with ExitStack() as stack:
            workers: dict[str, Worker] = {}
            for peer, variant in chosen.items():
                worker = self._start(peer, variant)
                if worker is not None:
                    workers[peer] = stack.enter_context(worker)
            for number, seed in enumerate(self._rounds):
                names = list(workers)
                first = number % max(1, len(names))
                for peer in names[first:] + names[:first]:
                    self._play(peer, workers, self._seed_for(peer, seed))
                    if peer == "ours" and self._slow_turns is not None:
                        self._play(peer, workers, seed + _SHORT)

    def ratios(self, peer: str) -> tuple[float, float] | None:
        """Our speed over the peer's: (by wall time, by processor time). None without results."""
        is_short = peer in _SLOW and self._slow_turns is not None
        own, theirs = self.results["ours"], self.results[peer].rounds
        ours = own.short_rounds if is_short else own.rounds
        count = min(len(ours), len(theirs))
        if not count:
            return None
        return (
            median_ratio([p.wall_s for p in theirs[:count]], [p.wall_s for p in ours[:count]]),
            median_ratio([p.processor_s for p in theirs[:count]], [p.processor_s for p in ours[:count]]),
        )

    def _seed_for(self, peer: str, seed: int) -> int:
        return seed + _SHORT if peer in _SLOW and self._slow_turns is not None else seed

    def _choose(self, peer: str, label: str | None) -> Variant | None:
        result = self.results[peer] = PeerResult()
        found = variants(peer, self.scenario.name, self._max_tokens, self.scenario.shape.num_sessions)
        if not found:
            result.absent = "does not take this model here"
            return None
        named = [variant for variant in found if label in (None, variant.label)]
        if len(named) > 1:
            for variant in named:
                try:
                    with self._worker(variant) as worker:
                        worker.play(self._workload(self._seed_for(peer, _WARMING)), self._limit_s)
                        seed = self._seed_for(peer, _CHOOSING)
                        played = worker.play(self._workload(seed), self._limit_s)
                    result.tried_s[variant.label] = played.wall_s
                    self._print_outcome(variant, played)
                except PeerFailedError as error:
                    result.absent = str(error)
                    self._print_outcome(variant, error)
            named = [variant for variant in named if variant.label in result.tried_s]
        if not named:
            return None
        result.absent = ""
        best = min(named, key=lambda variant: result.tried_s.get(variant.label, 0.0))
        result.variant = best.label
        return best

    def _start(self, peer: str, variant: Variant) -> Worker | None:
        worker = None
        try:
            worker = self._worker(variant)
            worker.play(self._workload(self._seed_for(peer, _WARMING)), self._limit_s)
        except PeerFailedError as error:
            if worker is not None:
                worker.close()
            self.results[peer].absent = str(error)
            self._print_outcome(variant, error)
            return None
        return worker

    def _play(self, peer: str, workers: dict[str, Worker], seed: int) -> None:
        try:
            played = workers[peer].play(self._workload(seed), self._limit_s)
        except PeerFailedError as error:
            self.results[peer].absent = str(error)
            self._print_outcome(workers.pop(peer).variant, error)
            return
        result = self.results[peer]
        is_short = peer == "ours" and seed >= _SHORT
        (result.short_rounds if is_short else result.rounds).append(played)
        self._print_outcome(workers[peer].variant, played)

    def _worker(self, variant: Variant) -> Worker:
        return Worker(variant, self._directory / "checkpoint", self._directory / f"{variant.peer}.log")

    def _workload(self, seed: int) -> Path:
        return self._directory / f"workload-{seed}.json"

    def _print_outcome(self, variant: Variant, outcome: Played | PeerFailedError) -> None:
        text = f"{self.scenario.name} {variant.peer} ({variant.label}): "
        if isinstance(outcome, Played):
            text += f"{outcome.tokens_per_s:,.0f} tokens/s, {outcome.wall_s:.2f} s, "
            text += f"{outcome.processor_s:.2f} s of processors; load {os.getloadavg()[0]:.1f}"
        else:
            text += str(outcome)[-400:]
        print(text, flush=True)


def comparison_figures(comparisons: dict[str, PeerComparison]) -> Figures:
    """Rates and ratios. A peer's headline figure is the worse of its ratios for the two small models."""
    figures: Figures = {}
    headlines: dict[str, list[tuple[float, float]]] = {}
    for name, comparison in comparisons.items():
        for peer, result in comparison.results.items():
            if not result.rounds:
                continue
            rate = statistics.median(played.tokens_per_s for played in result.rounds)
            figures[f"{name}_{peer}_tokens_s"] = rate
            per_processor = (played.output_tokens / played.processor_s for played in result.rounds)
            figures[f"{name}_{peer}_tokens_processor_s"] = statistics.median(per_processor)
            ratios = comparison.ratios(peer)
            if peer == "ours" or ratios is None:
                continue
            figures[f"{name}_tokens_vs_{peer}"], figures[f"{name}_processor_vs_{peer}"] = ratios
            if name in _SMALL:
                headlines.setdefault(peer, []).append(ratios)
    for peer, found in headlines.items():
        figures[f"tokens_vs_{peer}"] = min(wall for wall, _ in found)
        figures[f"processor_vs_{peer}"] = min(processor for _, processor in found)
    return figures


def own_figures(scenario: Scenario, quick: bool) -> Figures:
    """Figures of our engine alone. A part that fails is reported and left out."""
    repeats = 1 if quick else 7
    model = inference_own.make_model(scenario.config, scenario.vocab_size)
    parts: dict[str, Callable[[], Figures]] = {
        "second turn": lambda: {"second_turn_prefill_share": inference_own.second_turn_share(model, repeats)},
        "routes": lambda: {"route_capture_cost": inference_own.route_cost(scenario, 2 * repeats + 1)},
        "swap": lambda: asyncio.run(inference_own.swap_figures(scenario)),
        "invariance": lambda: inference_own.invariant_figures(scenario),
        "roofline": lambda: inference_own.roofline_figures(scenario, quick),
    }
    figures: Figures = {}
    for name, part in parts.items():
        try:
            found = part()
        except Exception:
            print(f"{name}: failed\n{traceback.format_exc()}", flush=True)
            continue
        print(f"{name}: {json.dumps(found)}", flush=True)
        figures |= found
    return figures


def router_figures(quick: bool, coefficients: Path | None) -> Figures:
    """Figures of the router, with step costs measured now or read from a file: medians over seeds."""
    if coefficients is None:
        cost = asyncio.run(inference_router.measure_step_cost())
    else:
        cost = read_step_cost(coefficients)
    blocks: list[Figures] = []
    for seed in range(1 if quick else 5):
        shape = inference_router.WorkloadShape(
            100 if quick else 700, inference_router.SHAPE.turns, tool_s=inference_router.SHAPE.tool_s
        )
        sessions = inference_router.synthetic_sessions(shape, seed)
        blocks.append(inference_router.play(cost, sessions, seed)[0])
    return median_figures(blocks)


def main() -> None:
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))
    torch.set_num_threads(1)
    choices = json.loads(options.choices.read_text(encoding="utf-8")) if options.choices else {}
    found = scenarios(options.quick)
    figures: Figures = {"load_average_before": os.getloadavg()[0]}
    comparisons: dict[str, PeerComparison] = {}

    def save_figures() -> Figures:
        """Called after each part, so that a stopped run keeps its results."""
        found = figures | comparison_figures(comparisons) | {"load_average_after": os.getloadavg()[0]}
        if options.json:
            write_result(options.json, found, {"slow_turns": options.slow_turns} | peer_results(comparisons))
        return found

    if "own" in options.parts:
        figures |= own_figures(found["moe"], options.quick)
        save_figures()
    if "router" in options.parts:
        figures |= router_figures(options.quick, options.coefficients)
        save_figures()
    with tempfile.TemporaryDirectory(prefix="etude-inference-") as directory:
        for name in options.scenarios if "peers" in options.parts else ():
            place = Path(directory) / name
            place.mkdir()
            comparisons[name] = PeerComparison(found[name], place, options.rounds, options.slow_turns)
            comparisons[name].run(options.only, choices.get(name, {}))
            save_figures()
    print_table("inference", save_figures())


def peer_results(comparisons: dict[str, PeerComparison]) -> dict[str, Any]:
    """Scenario -> peer -> its `PeerResult` as JSON values."""
    return {
        name: {peer: asdict(result) for peer, result in comparison.results.items()}
        for name, comparison in comparisons.items()
    }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    def several(text: str) -> list[str]:
        return text.split(",")

    parser.add_argument("--only", type=several, default=list(PEERS), help="peers, ours among them")
    parser.add_argument("--scenarios", type=several, default=["moe", "dense", "large"])
    parser.add_argument("--parts", type=several, default=["peers", "own", "router"])
    parser.add_argument("--choices", type=Path, help="JSON: {scenario: {peer: label of its settings}}")
    parser.add_argument("--slow-turns", type=int, help="turns of each session that transformers plays")
    parser.add_argument("--coefficients", type=Path, help="JSON of step costs for the router's simulation")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="short workloads: to see that all of it runs")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.only = [peer for peer in PEERS if peer == "ours" or peer in options.only]
    return options


if __name__ == "__main__":
    main()
