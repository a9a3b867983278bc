"""The comparison of `async_rl.py` as real runs: one checkpoint, trained synchronously and asynchronously."""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

import matplotlib as mpl
from common import Figures

from etude.config import RunConfig
from etude.controller.train import train
from etude.observe import RunDirectory
from etude.observe.metrics import read_metrics
from etude.observe.observer import SilentObserver

mpl.use("agg")
import matplotlib.pyplot as plt

_BOUND = 2
_STATES = ("train", "publish", "parity", "save", "wait")


def compare_real(
    config: RunConfig, num_steps: int, num_seeds: int, figure: Path | None
) -> tuple[Figures, dict[str, Any]]:
    """(figures over all seeds, rows of every run). Pairs run one after the other, all from the
    configuration's checkpoint."""
    rows: dict[str, list[dict[str, float]]] = {"sync": [], "async": []}
    timelines: dict[str, list[dict[str, Any]]] = {}
    modes = [("sync", 0), ("async", _BOUND)]
    for seed in range(num_seeds):
        for name, bound in modes if seed % 2 else modes[::-1]:
            row, timeline = _run(config, num_steps, seed, bound)
            rows[name].append(row)
            timelines.setdefault(name, timeline)
            print(f"seed {seed} {name:6s} {row}", flush=True)
    if figure is not None:
        draw(figure, {name: timelines[name] for name in rows})
    figures: Figures = {}
    for name, key in (("", "trained_per_s"), ("_reward_per_s", "reward_per_s")):
        ratios = _ratios(rows, key)
        figures[f"async_vs_sync_real_run{name}"] = statistics.median(ratios)
        figures[f"async_vs_sync_real_run{name}_least"] = min(ratios)
        figures[f"async_vs_sync_real_run{name}_most"] = max(ratios)
    for name, found in rows.items():
        for key in found[0]:
            figures[f"real_{key}_{name}"] = statistics.median(row[key] for row in found)
    return figures, {"real runs": rows}


def _ratios(rows: dict[str, list[dict[str, float]]], key: str) -> list[float]:
    """Asynchronous over synchronous, seed by seed, without pairs whose synchronous value is 0."""
    pairs = zip(rows["async"], rows["sync"], strict=True)
    return [ours[key] / theirs[key] for ours, theirs in pairs if theirs[key] > 0] or [0.0]


def _run(
    base: RunConfig, num_steps: int, seed: int, bound: int
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """(figures of one run's RL stage, its utilisation rows)."""
    with tempfile.TemporaryDirectory(prefix="etude-async-") as directory:
        tree = base.model_dump(mode="json") | {"runs_directory": directory, "seed": seed}
        tree["rl"] |= {"num_steps": num_steps, "max_staleness": bound}
        tree |= {"evaluation": {"num_tasks": 2}, "checkpoint": {"every_s": 1e6, "curve_every_steps": 0}}
        config = RunConfig.model_validate(tree)
        run = RunDirectory.create(config)
        report = train(config, run, SilentObserver(), resume=False)
        rows = read_metrics(run.metrics_file)
    steps = [row for row in rows if row["kind"] == "rl"]
    elapsed_s = report["throughput"]["elapsed_s"]
    episodes = sum(row["episodes"] for row in steps)
    reward = sum(row["reward"] * row["episodes"] for row in steps)
    figures = {
        "elapsed_s": elapsed_s,
        "trained_per_s": sum(row["trained_groups"] for row in steps) * config.rl.group_size / elapsed_s,
        "episodes_per_s": episodes / elapsed_s,
        "reward_per_s": reward / elapsed_s,
        "last_reward": statistics.fmean(row["reward"] for row in steps[-3:]),
        "trainer_busy_share": report["throughput"]["trainer_busy_share"],
        "engine_busy_share": report["throughput"].get("engine_busy_share", 0.0),
        "largest_lag": max(row.get("version_lag_max", 0.0) for row in steps),
    }
    return figures, [row for row in rows if row["kind"] == "utilisation"]


def draw(path: Path, timelines: dict[str, list[dict[str, Any]]]) -> None:
    """Draws the trainer's seconds in each state, step by step; the path's suffix gives the format."""
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "async", "font.size": 9}):
        figure, places = plt.subplots(
            len(timelines), 1, figsize=(9, 2 * len(timelines)), layout="constrained"
        )
        for axes, (name, rows) in zip(places, timelines.items(), strict=True):
            left = 0.0
            for row in rows:
                for number, state in enumerate(_STATES):
                    seconds = float(row.get(f"trainer_{state}_s", 0.0))
                    axes.barh(0, seconds, left=left, color=f"C{number}")
                    left += seconds
            axes.set_yticks([0], [name])
        for number, state in enumerate(_STATES):
            places[0].barh(0, 0, color=f"C{number}", label=state)
        places[0].legend(loc="lower left", bbox_to_anchor=(0, 1.02), ncols=len(_STATES), frameon=False)
        places[-1].set_xlabel("seconds of the trainer")
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
        plt.close(figure)
