"""The quickstart's claim: from random weights to an agent that fixes functions it never saw, seed by seed.

    python benchmarks/quickstart.py runs/seed-0 runs/seed-1 runs/seed-2 --json FILE --plot PNG

Reads finished runs, and evaluates their intermediate checkpoints (greedy and at temperature 1, on frozen
held-out tasks) for the learning curves. Evaluation is not part of the runs' wall time.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt
from common import Figures, print_table, write_result

from etude.controller.evaluation import EvaluationRequest, evaluate
from etude.controller.evaluation_targets import TargetOptions
from etude.observe import RunDirectory, SilentObserver, read_metrics

SPLIT = "heldout"


@dataclass(frozen=True, slots=True)
class Point:
    """A point of the learning curve: one checkpoint's wall time and pass rates."""

    name: str
    wall_s: float
    greedy: float
    sampled: float


def main() -> None:
    arguments = parse_arguments()
    runs = [RunDirectory.open(path) for path in arguments.runs]
    reports = [run.read_json(run.report_file) for run in runs]
    figures = summarize_reports(reports)
    print_table("quickstart, medians over seeds unless named otherwise", figures)
    curves = {run.name: learning_curve(run, arguments.tasks) for run in runs} if arguments.tasks else {}
    for name, points in curves.items():
        print(f"\n{name}")
        for point in points:
            rates = f"{point.greedy:6.1%} greedy  {point.sampled:6.1%} at temperature 1"
            print(f"  {point.name:16s} {point.wall_s:6.0f} s  {rates}")
    if arguments.plot and curves:
        plot_curves(curves, arguments.plot)
    if arguments.json:
        seeds = {str(report["seed"]): seed_figures(report) for report in reports}
        rows = {
            name: [[p.name, p.wall_s, p.greedy, p.sampled] for p in points] for name, points in curves.items()
        }
        write_result(arguments.json, figures, {"seeds": seeds, "curves": rows})


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, help="finished run directories, one per seed")
    parser.add_argument("--tasks", type=int, default=240, help="tasks per snapshot; 0 leaves the curves out")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--plot", type=Path, help="where to draw the curves (PNG)")
    return parser.parse_args()


def seed_figures(report: dict[str, Any]) -> Figures:
    """One seed's figures, from its report."""
    before, after = report["heldout_before"], report["heldout_after"]
    family = report["heldout_family_after"]
    return {
        "wall_s": report["wall_s"],
        "greedy_before": before["greedy"]["pass_rate"],
        "greedy_after": after["greedy"]["pass_rate"],
        "sampled_before": before["sampled"]["pass_rate"],
        "sampled_after": after["sampled"]["pass_rate"],
        "greedy_failures_ratio": _failures_ratio(before["greedy"], after["greedy"]),
        "sampled_gain_ratio": after["sampled"]["pass_rate"] / max(before["sampled"]["pass_rate"], 1e-9),
        "family_greedy_after": family["greedy"]["pass_rate"],
        "family_sampled_after": family["sampled"]["pass_rate"],
        "first_edit_right_before": report["first_edit_right_before"],
        "first_edit_right_after": report["first_edit_right_after"],
        "parallel_turns_before": report["behaviour_before"]["parallel_turns"],
        "parallel_turns_after": report["behaviour_after"]["parallel_turns"],
        "malformed_before": report["behaviour_before"]["malformed"],
        "malformed_after": report["behaviour_after"]["malformed"],
        "parity_k3": report["parity"]["k3"],
        "parity_max_abs_dlogp": report["parity"]["max_abs_dlogp"],
        "decode_tokens_per_s": report["throughput"]["decode_tokens_per_s"],
        "prefill_tokens_per_s": report["throughput"]["prefill_tokens_per_s"],
        "training_tokens_per_s": report["throughput"]["training_tokens_per_s"],
    }


def summarize_reports(reports: Sequence[dict[str, Any]]) -> Figures:
    """Medians over seeds, and the worst seed for requirements that every seed must meet."""
    seeds = [seed_figures(report) for report in reports]
    medians = {name: statistics.median(seed[name] for seed in seeds) for name in seeds[0]}
    return medians | {
        "wall_s_worst": max(seed["wall_s"] for seed in seeds),
        "greedy_after_worst": min(seed["greedy_after"] for seed in seeds),
        "sampled_after_worst": min(seed["sampled_after"] for seed in seeds),
        "sampled_gain_ratio_worst": min(seed["sampled_gain_ratio"] for seed in seeds),
        "greedy_failures_ratio_worst": max(seed["greedy_failures_ratio"] for seed in seeds),
    }


def learning_curve(run: RunDirectory, num_tasks: int) -> list[Point]:
    """Points of all intermediate checkpoints, with the mid-trained and the final one from the report."""
    report = run.read_json(run.report_file)
    rows = read_metrics(run.metrics_file)
    points: list[Point] = []
    for row in rows:
        if row["kind"] == "curve":
            options = TargetOptions(checkpoint=str(row["name"]))
            request = EvaluationRequest(str(run.path), SPLIT, num_tasks, options=options)
            measured = evaluate(request, SilentObserver()).to_json()
            points.append(_point(str(row["name"]), float(row["wall_s"]), measured))
    evaluations = {row["split"]: float(row["wall_s"]) for row in rows if row["kind"] == "evaluation"}
    points.append(_point("midtrained", evaluations["before"], report["heldout_before"]))
    points.append(_point("final", evaluations["after"], report["heldout_after"]))
    return sorted(points, key=lambda point: point.wall_s)


def plot_curves(curves: dict[str, list[Point]], path: Path) -> None:
    """Plots held-out pass rate by wall time, one colour per seed; a marker shows where RL begins."""
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), sharey=True)
    for colour, (name, points) in zip(
        ("#2a5d9f", "#c4532d", "#2a8c82", "#b8a17a"), curves.items(), strict=False
    ):
        times = [point.wall_s / 60 for point in points]
        for axis, mode in zip(axes, ("greedy", "sampled"), strict=True):
            rates = [getattr(point, mode) for point in points]
            axis.plot(times, rates, color=colour, label=name, linewidth=1.6)
            begin = next(i for i, point in enumerate(points) if point.name == "midtrained")
            axis.plot(times[begin], rates[begin], "o", color=colour, markersize=5)
    for axis, title in zip(axes, ("greedy", "temperature 1"), strict=True):
        axis.set_title(title, loc="left", fontsize=10)
        axis.set_xlabel("minutes")
        axis.set_ylim(0, 1)
        axis.grid(color="#e4e7eb")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("held-out tasks solved")
    axes[0].legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(0, -0.2), ncols=4)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def _point(name: str, wall_s: float, measured: dict[str, Any]) -> Point:
    return Point(name, wall_s, measured["greedy"]["pass_rate"], measured["sampled"]["pass_rate"])


def _failures_ratio(before: dict[str, Any], after: dict[str, Any]) -> float:
    return (1 - after["pass_rate"]) / max(1 - before["pass_rate"], 1e-9)


if __name__ == "__main__":
    main()
