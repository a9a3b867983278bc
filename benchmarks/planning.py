"""Accuracy of `etude plan`: predicted against measured memory of a run's processes and time of its steps.

    python benchmarks/planning.py --checkpoint DIR [--config FILE] [--steps 5] [--case NAME ...]
        [--set KEY=VALUE ...] [--json FILE]

Each case is a real `etude train` from a mid-trained checkpoint. Measured are the peak of the anonymous memory
of all its processes, without sandboxes and Ray's own, and the wall time per step. The prediction is a plan of
the same configuration, given the statistics of the run's sessions (tokens, turns, tools); its speeds are
those that it measures itself, before and after the run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import Figures, merge_result, print_table

from etude.observe import RunDirectory, read_metrics
from etude.store.trajectories import TrajectoryLog

_ROOM = [f"cluster.{part}.cpus=0.25" for part in ("trainer", "engine", "worker", "evaluation")]
CASES: dict[str, list[str]] = {
    "local": [],
    "ranks": ["parallel.ranks=2", "parallel.fsdp=2"],
    "ranks_store": ["parallel.ranks=2", "parallel.fsdp=2", "weights.url={directory}/weights"],
    "ray": ["executor=ray", *_ROOM],
    "ray_beside": [
        "executor=ray",
        "rl.max_staleness=2",
        "cluster.workers=1",
        "evaluation.every_steps=2",
        *_ROOM,
    ],
}
_LOOK_S = 0.25


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, required=True, help="a model with its tokenizer")
    parser.add_argument("--config", type=Path, default=Path("configs/quickstart.toml"))
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of every case")
    parser.add_argument("--case", action="append", choices=list(CASES), help="default: all")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    for name in asked.case or CASES:
        figures = _measure(asked, CASES[name])
        print_table(name, figures)
        if asked.json is not None:
            named = {f"{name}_{key}": value for key, value in figures.items()}
            merge_result(asked.json, [name], named, {})


def _measure(asked: argparse.Namespace, case: list[str]) -> Figures:
    with tempfile.TemporaryDirectory(prefix="etude-planning-") as directory:
        overrides = [
            "name=measured",
            f"runs_directory={directory}",
            f"initial_checkpoint={asked.checkpoint.resolve()}",
            f"rl.num_steps={asked.steps}",
            "max_wall_s=0",
            "evaluation.num_tasks=32",
            *(one.format(directory=directory) for one in case),
            *asked.set,
        ]
        rates = [_plan(asked.config, overrides)["rates"]]
        peak_bytes = _run(asked.config, overrides)
        rates.append(_plan(asked.config, overrides)["rates"])
        run = RunDirectory(Path(directory) / "measured")
        supposed = _sessions(run) | {
            "peak_tflops": statistics.fmean(each["flops_per_s"] for each in rates) / 1e12,
            "bandwidth_gb_per_s": statistics.fmean(each["bytes_per_s"] for each in rates) / 1e9,
        }
        given = [*overrides, *(f"plan.{name}={value:g}" for name, value in supposed.items())]
        return _compare(run, peak_bytes, _plan(asked.config, given)) | supposed


def _compare(run: RunDirectory, peak_bytes: float, plan: dict[str, Any]) -> Figures:
    rows = [row for row in read_metrics(run.metrics_file) if row["kind"] == "rl"]
    walls = [float(row["wall_s"]) for row in rows]
    parts = plan["memory"][0]["parts"]
    libraries = _library_bytes()
    counted = sum(value for name, value in parts.items() if name not in ("processes", "object store"))
    pairs = {  # the first step warms up
        "models_mb": (counted / 1e6, (peak_bytes - libraries * plan["processes_here"]) / 1e6),
        "memory_mb": ((counted + parts.get("processes", 0.0) + libraries) / 1e6, peak_bytes / 1e6),
        "step_s": (
            plan["step"]["step_s"],
            statistics.median(after - before for before, after in itertools.pairwise(walls)),
        ),
        "train_s": (plan["step"]["train_s"], statistics.median(row["train_s"] for row in rows[1:])),
        "rollout_s": (plan["step"]["rollout_s"], statistics.median(row["rollout_s"] for row in rows[1:])),
    }
    figures: Figures = {"load": os.getloadavg()[0]}
    for name, (predicted, measured) in pairs.items():
        figures |= {f"predicted_{name}": predicted, f"measured_{name}": measured}
        figures[f"ratio_{name}"] = predicted / measured
    return figures


def _plan(config: Path, overrides: list[str]) -> dict[str, Any]:
    """The output of `etude plan`."""
    output = _etude("plan", str(config), "--json", *_sets(overrides), stdout=subprocess.PIPE).communicate()[0]
    plan = json.loads(output)
    processes = plan["processes"]
    kinds = ("ranks", "engines", "evaluations", "workers")
    several = 1 + sum(processes[kind] for kind in kinds)
    return plan | {"processes_here": several if processes["apart"] else processes["ranks"]}


def _library_bytes() -> float:
    """Memory of a process after its imports."""
    code = (
        "import etude.controller.train, etude.controller.remote.arrangement\n"
        "from etude.controller.planning.machine import process_bytes; print(process_bytes())"
    )
    return float(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stdout)


def _run(config: Path, overrides: list[str]) -> float:
    """Runs the training; returns the peak of its processes' anonymous memory."""
    peak = 0.0
    with _etude("train", "--config", str(config), *_sets(overrides), stdout=sys.stderr) as train:
        while train.poll() is None:
            peak = max(peak, sum(map(_anonymous_bytes, _processes(train.pid))))
            time.sleep(_LOOK_S)
    if train.returncode:
        raise SystemExit(f"the run has failed: {train.returncode}")
    return peak


def _etude(*arguments: str, stdout: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", "from etude.cli import main; main()", *arguments]
    return subprocess.Popen(command, stdout=stdout, text=True)


def _sets(overrides: list[str]) -> list[str]:
    return [word for one in overrides for word in ("--set", one)]


def _processes(root: int) -> list[int]:
    """The run's processes: `root`, and those of its descendants that are trainers, engines or workers."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue  # has ended meanwhile
    found = [root]
    for process in sorted(parents):
        above = process
        while above in parents and above != root:
            above = parents[above]
        if above == root and process != root and _is_part(process):
            found.append(process)
    return found


def _is_part(process: int) -> bool:
    try:
        command = (Path("/proc") / str(process) / "cmdline").read_bytes()
    except OSError:
        return False
    actor = command.startswith(b"ray::") and not command.startswith(b"ray::IDLE")
    return actor or b"multiprocessing.spawn" in command


def _anonymous_bytes(process: int) -> float:
    try:
        lines = (Path("/proc") / str(process) / "smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0
    return float(next(int(line.split()[1]) for line in lines if line.startswith("Anonymous:")) << 10)


def _sessions(run: RunDirectory) -> Figures:
    """Statistics of the sessions of all steps, under the keys of `[plan]`."""
    groups = list(TrajectoryLog(run.trajectories).read())
    sessions = [member for group in groups for member in group.members if member.segments]
    rows = [row for row in read_metrics(run.metrics_file) if row["kind"] == "rl"]
    dropped = sum(row["dropped_all_passed"] + row["dropped_all_failed"] for row in rows)
    trained = sum(row["trained_groups"] for row in rows)
    turns = sum(len(one.turns) for one in sessions)
    prompts = sum(one.segments[0].turn_spans[0].end for one in sessions)
    sampled = sum(one.num_sampled_tokens for one in sessions)
    tokens = sum(len(segment.tokens) for one in sessions for segment in one.segments)
    waited = sum(one.timings["tools_s"] + one.timings["grade_s"] for one in sessions)
    return {
        "turns": turns / len(sessions),
        "prompt_tokens": round(prompts / len(sessions)),
        "sampled_tokens": sampled / len(sessions),
        "observation_tokens": (tokens - sampled - prompts) / len(sessions),
        "tool_s": waited / turns,
        "useful_share": trained / (trained + dropped),
    }


if __name__ == "__main__":
    main()
