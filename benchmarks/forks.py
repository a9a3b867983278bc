"""Forked groups (from the middle of a session) against plain groups at equal sampled tokens, in real runs.

    python benchmarks/forks.py CHECKPOINT --json FILE --figure docs/figures/forks.svg

Arms: plain groups only, and half of the groups forked at a message chosen by its surprise (`--turns`: also at
random, or at the first edit). All start from the same mid-trained checkpoint with the same seeds. The arms of
a seed are compared at equal sampled tokens (of all sessions, also of dropped groups and siblings) by the mean
reward of whole sessions over the last quarter of the smallest budget among them, and at the end of the run by
the pass rate on held-out tasks.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from common import Figures, print_table, write_result
from numpy.typing import NDArray

from etude.config import ForkConfig, RunConfig
from etude.controller.train import train
from etude.evaluation.comparison import bootstrap_interval
from etude.observe import RunDirectory
from etude.observe.metrics import read_metrics
from etude.observe.observer import SilentObserver
from etude.store.trajectories import TrajectoryLog

mpl.use("agg")
import matplotlib.pyplot as plt

Curve = list[tuple[float, float]]
"""(tokens sampled so far, mean reward of the step's whole sessions)."""


def main() -> None:
    """Prints a table and writes JSON and figure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--figure", type=Path)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--groups", type=int, default=4, help="that a step trains on")
    parser.add_argument("--share", type=float, default=0.5, help="of groups that are forked")
    parser.add_argument("--turns", default="entropy", help="entropy, random or first_edit, with commas")
    parser.add_argument("--heldout", type=int, default=40, help="tasks of each evaluation")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="no run begins after these")
    options = parser.parse_args()
    rows: dict[str, list[dict[str, float]]] = {}
    curves: dict[str, list[Curve]] = {}
    for name, row, curve in run_all(options):
        rows.setdefault(name, []).append(row)
        curves.setdefault(name, []).append(curve)
        print(f"{name:10s} {row}", flush=True)
        if name != tuple(arms_of(options))[-1]:
            continue
        # Written after each seed, so that a stopped script keeps its results.
        figures = compare(rows, curves)
        if options.json is not None:
            write_result(options.json, figures, {"runs": rows, "curves": curves})
        if options.figure is not None:
            draw(options.figure, curves)
        print_table(f"figures of {len(curves[PLAIN])} seeds", figures)


PLAIN = "plain"


def arms_of(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Arm -> its `rl.forks` settings."""
    turns = options.turns.split(",")
    return {PLAIN: {}, **{turn: {"share": options.share, "turn": turn} for turn in turns}}


def run_all(options: argparse.Namespace) -> Iterator[tuple[str, dict[str, float], Curve]]:
    """Runs every arm of each seed while the time left exceeds the longest run so far."""
    began, longest_s = time.monotonic(), 0.0
    for seed in range(1, options.seeds + 1):
        for name, forks in arms_of(options).items():
            since = time.monotonic()
            if since - began + longest_s > 60.0 * options.minutes:
                print(f"no time for {name} of seed {seed}", flush=True)
                return
            yield name, *run_arm(options, seed, forks)
            longest_s = max(longest_s, time.monotonic() - since)


def run_arm(options: argparse.Namespace, seed: int, forks: dict[str, Any]) -> tuple[dict[str, float], Curve]:
    """(figures of one run, its reward curve by sampled tokens)."""
    with tempfile.TemporaryDirectory(prefix="etude-forks-") as directory:
        config = RunConfig.model_validate(
            {
                "name": "forks",
                "runs_directory": directory,
                "initial_checkpoint": str(options.checkpoint),
                "seed": seed,
                "device": "cpu",
                "agent": {"max_turns": 7, "max_message_tokens": 128},
                "evaluation": {
                    "num_tasks": options.heldout,
                    "num_family_tasks": 1,
                    "num_samples": 1,
                    "num_repeated_tasks": 1,
                },
                "checkpoint": {"every_s": 1e6, "curve_every_steps": 0},
                "rl": {
                    "num_steps": options.steps,
                    "groups_per_step": options.groups,
                    "forks": forks,
                    "loss": {"kind": "cispo", "normalizer": "tokens"},
                    "optimizer": {"learning_rate": 5e-4},
                },
            }
        )
        run = RunDirectory.create(config)
        report = train(config, run, SilentObserver(), resume=False)
        steps = [row for row in read_metrics(run.metrics_file) if row["kind"] == "rl"]
        tokens = tokens_by_part(TrajectoryLog(run.trajectories))
    assert len(tokens) == len(steps), "one part of the log for each step"
    curve, total = list[tuple[float, float]](), 0.0
    for row, count in zip(steps, tokens, strict=True):
        curve.append((total, row["reward"]))
        total += count
    names = (
        *("forks", "forks_trained", "fork_sessions", "fork_sessions_failed", "fork_tokens"),
        *("fork_prefix_tokens", "fork_prefix_cached_tokens"),
    )
    row = {name: sum(step.get(name, 0.0) for step in steps) for name in names}
    refused = {key for step in steps for key in step if key.startswith("forks_refused")}
    row |= {name: sum(step.get(name, 0.0) for step in steps) for name in sorted(refused)}
    row |= {
        "sampled_tokens": total,
        "trained_groups": sum(step["trained_groups"] for step in steps),
        "heldout_before": report["heldout_before"]["sampled"]["pass_rate"],
        "heldout_after": report["heldout_after"]["sampled"]["pass_rate"],
        "rl_s": report["throughput"]["elapsed_s"],
    }
    return row, curve


def tokens_by_part(log: TrajectoryLog) -> list[float]:
    """Sampled tokens of each step."""
    parts = (log.read_part(part) for part in log.part_names())
    return [float(sum(m.num_sampled_tokens for group in part for m in group.members)) for part in parts]


def compare(rows: dict[str, list[dict[str, float]]], curves: dict[str, list[Curve]]) -> Figures:
    """Means over seeds; ratios and differences of rewards at equal sampled tokens, differences with 95 %
    intervals over seeds. `fork_vs_plain_reward`: ratio of the arm with the default choice of a message."""
    rewards: dict[str, list[float]] = {name: [] for name in curves}
    for of_seed in zip(*curves.values(), strict=True):
        budget = min(curve[-1][0] for curve in of_seed)
        for name, curve in zip(curves, of_seed, strict=True):
            within = [(at, reward) for at, reward in curve if at <= budget]
            late = [reward for at, reward in within if at >= 0.75 * budget] or [within[-1][1]]
            rewards[name].append(statistics.mean(late))
    plain = statistics.mean(rewards[PLAIN])
    ratios = {name: statistics.mean(found) / plain for name, found in rewards.items() if name != PLAIN}
    figures = {f"{name}_vs_plain_reward": ratio for name, ratio in ratios.items()}
    figures |= {"fork_vs_plain_reward": ratios.get(ForkConfig().turn, next(iter(ratios.values())))}
    figures |= {"seeds": float(len(rewards[PLAIN]))}
    for name in ratios:
        pairs = zip(rewards[name], rewards[PLAIN], strict=True)
        differences = [ours - theirs for ours, theirs in pairs]
        figures[f"{name}_minus_plain_reward"] = statistics.mean(differences)
        interval = bootstrap_interval(differences, [str(seed) for seed in range(len(differences))])
        if interval is not None:
            low, high = interval
            figures |= {f"{name}_minus_plain_reward_low": low, f"{name}_minus_plain_reward_high": high}
    for name, found in rewards.items():
        figures[f"{name}_reward"] = statistics.mean(found)
        figures[f"{name}_reward_least"], figures[f"{name}_reward_most"] = min(found), max(found)
        for key in rows[name][0]:
            figures[f"{name}_{key}"] = statistics.mean(row[key] for row in rows[name])
    return figures


def draw(path: Path, curves: dict[str, list[Curve]]) -> None:
    """Draws reward by sampled tokens: a thin line per seed and a thick one for their mean, each of its points
    averaged over the last four steps; the path's suffix gives the format."""
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "forks", "font.size": 9}):
        figure, axes = plt.subplots(figsize=(7, 3.5), layout="constrained")
        for number, (name, found) in enumerate(curves.items()):
            grid = np.linspace(0.0, min(curve[-1][0] for curve in found), 50)
            smooth: list[NDArray[np.float64]] = []
            for curve in found:
                tokens, rewards = (np.array(values) for values in zip(*curve, strict=True))
                axes.plot(tokens, rewards, color=f"C{number}", alpha=0.25, linewidth=0.7)
                recent = [rewards[max(0, place - 3) : place + 1].mean() for place in range(len(rewards))]
                smooth.append(np.interp(grid, tokens, recent))
            axes.plot(grid, np.mean(smooth, axis=0), color=f"C{number}", linewidth=2.0, label=name)
        axes.set_xlabel("sampled tokens")
        axes.set_ylabel("mean reward of whole sessions")
        axes.legend(frameon=False)
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
        plt.close(figure)


if __name__ == "__main__":
    main()
