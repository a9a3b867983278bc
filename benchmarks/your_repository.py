"""Tasks from real repositories: whether Harbor's own code and ours give the same verdicts.

    python benchmarks/your_repository.py --harbor-python VENV/bin/python --json FILE

Ten tasks that were written from Harbor's documentation alone, three with separate verifiers, artifacts, a
health check and files elsewhere in the image, and two with steps (`harbor_tasks`), each with its solution,
with nothing and with a wrong solution (`wrong.sh` beside `solve.sh`), are graded by Harbor's trials in
containers of podman (`harbor_judge.py`) and by ours. VENV holds Harbor 0.25, which needs Python 3.12; podman
has the base image under the name that the tasks use.

    harbor_verdicts_equal     share of the verdicts whose rewards are equal, or missing on both sides

    python benchmarks/your_repository.py --project NAME --work DIR --json FILE

makes tasks from a published project (`your_repository_projects`: name and version) by `etude tasks make`, and
verifies them again by what `etude tasks check` does, a thief and a search for leaks. The file joins several
projects under `parts`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from common import merge_result, print_table, write_result
from your_repository_projects import PROJECTS, Budget, measure_project

from etude.config import load_config
from etude.controller.backends import open_run_backend
from etude.environment.checking import judge_nothing, judge_solution
from etude.environment.task_images import TaskImages
from etude.environment.verdicts import Grader
from etude.records import Task
from etude.sandbox.types import Resources
from etude.tasks.harbor import find_directories, read_harbor

TASKS = Path(__file__).parent / "harbor_tasks"
_KINDS = ("solution", "nothing", "wrong")
Rewards = dict[str, float | None]
"""Reward by task and kind; None: the verifier gave none."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tasks", type=Path, default=TASKS, help="Harbor task directories.")
    parser.add_argument("--harbor-python", type=Path, help="Python of an environment that has Harbor.")
    parser.add_argument("--backend", default="local", help="Our sandboxes: local or podman.")
    parser.add_argument("--json", type=Path, help="Where the figures are written.")
    parser.add_argument("--project", choices=PROJECTS, help="Make tasks from this project instead.")
    parser.add_argument(
        "--work", type=Path, help="Directory for a project; one that was begun is gone on with."
    )
    parser.add_argument("--num-tasks", type=int, default=12, help="Tasks to make from a project.")
    parser.add_argument("--runs", type=int, default=10, help="Runs of its tests, to find flaky ones.")
    parser.add_argument("--minutes", type=float, default=15.0, help="No change is tested after so long.")
    options = parser.parse_args()
    if options.project:
        budget = Budget(options.num_tasks, options.runs, options.minutes)
        work = options.work or Path(tempfile.mkdtemp(prefix="your-repository-"))
        measured, found = measure_project(options.project, work, budget)
        print_table(options.project, measured)
        if options.json:
            named = {f"{options.project}_{key}": value for key, value in measured.items()}
            merge_result(options.json, [options.project], named, {options.project: found})
        return
    with tempfile.TemporaryDirectory() as folder:
        wrong = Path(folder) / "wrong"
        copy_with_wrong_solutions(options.tasks, wrong)
        ours = asyncio.run(judge_by_etude(options.tasks, wrong, options.backend))
        theirs: Rewards = {}
        if options.harbor_python:
            theirs = judge_by_harbor(options.tasks, wrong, options.harbor_python)
    for name, reward in sorted(ours.items()):
        print(f"{name:32s} ours {reward}   Harbor {theirs.get(name, 'not run')}", file=sys.stderr)
    figures = {"verdicts": float(len(ours))}
    if theirs:
        figures["harbor_verdicts_equal"] = sum(ours[name] == theirs[name] for name in ours) / len(ours)
    print_table("your repository", figures)
    if options.json:
        write_result(options.json, figures, {"harbor": theirs, "etude": ours})


def copy_with_wrong_solutions(tasks: Path, target: Path) -> None:
    """Copies tasks, with what is wrong in the place of each solution."""
    shutil.copytree(tasks, target, symlinks=True)
    for script in target.rglob("solution/wrong.sh"):
        script.rename(script.with_name("solve.sh"))


async def judge_by_etude(tasks: Path, wrong: Path, backend_name: str) -> Rewards:
    """Rewards by our grading."""
    config = load_config(None, [f"sandbox.backend={backend_name}"])
    images, rewards = TaskImages(backend_name), Rewards()
    backend = open_run_backend(config.sandbox)
    grader = Grader(backend)
    try:
        for directory in find_directories(tasks, "--tasks"):
            task = await images.find(read_harbor(directory))
            nothing = await judge_nothing(task, grader, backend, Resources())
            rewards[f"{directory.name} nothing"] = nothing.reward
            for kind, place in (("solution", tasks), ("wrong", wrong)):
                asked = with_solutions_of(read_harbor(place / directory.name), task)
                verdict = await judge_solution(asked, grader, backend, Resources())
                if isinstance(verdict, str):
                    print(f"ours, {directory.name} {kind}: {verdict}", file=sys.stderr)
                rewards[f"{directory.name} {kind}"] = None if isinstance(verdict, str) else verdict.reward
            shown = {name: reward for name, reward in rewards.items() if name.startswith(directory.name)}
            print(f"ours: {shown}", file=sys.stderr, flush=True)
    finally:
        await backend.close()
    return rewards


def with_solutions_of(other: Task, task: Task) -> Task:
    """The task, whose images were found, with the solutions of the same one elsewhere."""
    pairs = zip(task.steps, other.steps, strict=True)
    steps = tuple(replace(step, solution=another.solution) for step, another in pairs)
    return replace(task, solution=other.solution, steps=steps)


def judge_by_harbor(tasks: Path, wrong: Path, python: Path) -> Rewards:
    """Rewards by Harbor's own code. Raises CalledProcessError if that fails as a whole."""
    names = [directory.name for directory in find_directories(tasks, "--tasks")]
    agents = {"solution": (tasks, "oracle"), "nothing": (tasks, "nop"), "wrong": (wrong, "oracle")}
    keys = [(name, kind) for name in names for kind in _KINDS]
    wanted = [f"{agents[kind][0] / name}:{agents[kind][1]}" for name, kind in keys]
    program = Path(__file__).with_name("harbor_judge.py")
    ran = subprocess.run([python, program, *wanted], check=True, stdout=subprocess.PIPE, text=True)
    rows = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
    found: Rewards = {}
    for (name, kind), row in zip(keys, rows, strict=True):
        rewards = row["rewards"]
        if rewards is None:
            print(f"Harbor, {name} {kind}: {row['failure']}", file=sys.stderr)
        found[f"{name} {kind}"] = None if rewards is None else float(rewards["reward"])
    return found


if __name__ == "__main__":
    main()
