"""Is it RL that helps? The same wall time spent on more mid-training, or on rejection-sampled fine-tuning.

    python benchmarks/controls.py runs/seed-0 [runs/seed-1 ...] [--only midtraining|rejection] --json FILE

For each finished run two controls with its own configuration, seed and time:

- **midtraining**: from nothing, with as many more steps as fit into the time that RL took; the schedule is
  stretched over all of them. No RL.
- **rejection**: from the run's own mid-trained weights, the same loop for as long, but trained by maximum
  likelihood on the solved sessions alone.

The controls are ordinary runs beside the given ones, named after them.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from common import Figures, print_table, write_result

from etude.config import RunConfig
from etude.controller.train import MIDTRAINED, train
from etude.observe import RunDirectory, SilentObserver

CONTROLS = ("midtraining", "rejection")


def main() -> None:
    arguments = parse_arguments()
    rows: dict[str, dict[str, Figures]] = {}
    for path in arguments.runs:
        run = RunDirectory.open(path)
        report = run.read_json(run.report_file)
        rows[run.name] = {"reinforcement": result_of(report)}
        for control in CONTROLS if arguments.only is None else [arguments.only]:
            rows[run.name][control] = result_of(run_control(run, report, control))
            print_table(f"{run.name}: {control}", rows[run.name][control])
    figures = compare(rows)
    print_table("reinforcement against the controls, worst seed", figures)
    if arguments.json:
        write_result(arguments.json, figures, {"runs": rows})


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, help="finished run directories, one per seed")
    parser.add_argument("--only", choices=CONTROLS, help="run this control alone")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    return parser.parse_args()


def run_control(run: RunDirectory, report: dict[str, Any], control: str) -> dict[str, Any]:
    """The report of a control of `run`; one that is there already is read."""
    make = midtraining_control if control == "midtraining" else rejection_control
    config = make(run, report["stages"])
    directory = run.path.parent / config.name
    if directory.exists():
        return RunDirectory.open(directory).read_json(directory / "report.json")
    return train(config, RunDirectory.create(config), SilentObserver(), resume=False)


def midtraining_control(run: RunDirectory, stages: dict[str, float]) -> RunConfig:
    """Mid-training for the time of mid-training and RL together."""
    config = run.config
    seconds = stages["midtrain_s"] + stages["rl_s"]
    num_steps = round(config.midtrain.num_steps * seconds / stages["midtrain_s"])
    return config.model_copy(
        update={
            "name": f"{run.name}-midtraining",
            "runs_directory": str(run.path.parent),
            "max_wall_s": 0.0,
            "midtrain": config.midtrain.model_copy(update={"num_steps": num_steps}),
            "rl": config.rl.model_copy(update={"num_steps": 0}),
        }
    )


def rejection_control(run: RunDirectory, stages: dict[str, float]) -> RunConfig:
    """Rejection sampling from the run's mid-trained weights, for as many seconds as RL took.

    The first evaluation is part of a run's clock, and of this control's.
    """
    config = run.config
    return config.model_copy(
        update={
            "name": f"{run.name}-rejection",
            "runs_directory": str(run.path.parent),
            "initial_checkpoint": str(run.checkpoints / MIDTRAINED),
            "max_wall_s": stages["rl_s"] + stages["evaluation_s"] / 3,
            "rl": config.rl.model_copy(update={"algorithm": "rejection_sampling"}),
        }
    )


def result_of(report: dict[str, Any]) -> Figures:
    """What is compared."""
    after = report["heldout_after"]
    return {
        "wall_s": report["wall_s"],
        "rl_steps": report["rl_steps"],
        "greedy": after["greedy"]["pass_rate"],
        "sampled": after["sampled"]["pass_rate"],
        "family_greedy": report["heldout_family_after"]["greedy"]["pass_rate"],
    }


def compare(rows: dict[str, dict[str, Figures]]) -> Figures:
    """Least lead of RL over each control, in pass rate."""
    return {
        f"{mode}_lead_over_{control}": min(
            row["reinforcement"][mode] - row[control][mode] for row in rows.values()
        )
        for control in CONTROLS
        if all(control in row for row in rows.values())
        for mode in ("greedy", "sampled")
    }


if __name__ == "__main__":
    main()
