"""Tasks from real repositories: agreement of verdicts by Harbor's own code and by ours.

    python benchmarks/your_repository.py --harbor-python VENV/bin/python --json FILE

Fifteen tasks (`harbor_tasks`) are graded by Harbor's trials in podman containers (`harbor_judge.py`) and by
ours, each with its solution, with no change and with a wrong solution (`wrong.sh` next to `solve.sh`). Ten
were written from Harbor's documentation alone, three have separate verifiers, artifacts, a health check and
files outside of the workspace, and two have steps. VENV has Harbor 0.25, which needs Python 3.12; podman has
the base image under the name that the tasks use.

    harbor_verdicts_equal     share of the verdicts whose rewards are equal, or missing on both sides

    python benchmarks/your_repository.py --made DIR/NAME --harbor-python VENV/bin/python --json FILE

does the same with tasks that the last command (`--project`) made from a project in DIR, with their solutions
and with no change. Our verdicts come from exams, Harbor's from `tests/test.sh`. `--made` can be repeated.

    made_tasks                     number of these tasks
    made_harbor_verdicts_equal     as above, of two verdicts on each

    python benchmarks/your_repository.py --overhead --backend local --json FILE

measures the overhead of grading and of a tool call over the bare command (`your_repository_overhead`).

    python benchmarks/your_repository.py --learn TASKS --seed 0 --directory DIR --json FILE

trains SmolLM2-135M on made tasks (`made_learning`: hours a seed; it needs what `your_model.py` does).

    python benchmarks/your_repository.py --project NAME --work DIR --json FILE

makes tasks from a published project (`your_repository_projects`: name and version) with `etude tasks make`,
and verifies them independently: by the checks of `etude tasks check`, by a solution thief and by a search for
leaks. The file collects several projects under `parts`; `--table DOCUMENT --json FILE` updates the document's
table, and that of results/made_learning_*.json.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from common import merge_result, print_table, put_table
from made_learning import MadeLearning, learned_table
from your_repository_overhead import measure_overhead
from your_repository_projects import PROJECTS, Budget, images_of, measure_project, table_of

from etude.config import load_config
from etude.config.images import ImagesConfig
from etude.controller.backends import open_run_backend
from etude.environment.checking import judge_nothing, judge_solution
from etude.environment.task_images import TaskImages
from etude.environment.verdicts import Grader
from etude.records import Task
from etude.tasks.harbor import find_directories, read_harbor

TASKS = Path(__file__).parent / "harbor_tasks"
_BASE = "python:3.11-slim"
_AT_ONCE = 3
"""Made tasks graded concurrently."""
Rewards = dict[str, float | None]
"""Task and kind of solution -> reward; None: the verifier gave none."""


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
    parser.add_argument("--num-tasks", type=int, default=200, help="Tasks to make from a project.")
    parser.add_argument("--runs", type=int, default=20, help="Runs of its tests, to find flaky ones.")
    parser.add_argument(
        "--minutes",
        type=float,
        default=30.0,
        help="No change is tested, and no made task begun, after so long.",
    )
    parser.add_argument(
        "--again", type=int, default=60, help="Tasks, drawn at random, that are verified again; 0: all."
    )
    parser.add_argument(
        "--made", type=Path, action="append", help="A project's directory below --work: judge its tasks."
    )
    parser.add_argument("--learn", type=Path, help="Train on the made tasks in this directory.")
    parser.add_argument("--seed", type=int, default=0, help="Of what is trained.")
    parser.add_argument("--directory", type=Path, default=Path("runs/made"), help="Of what is trained.")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="For its runs.")
    parser.add_argument("--overhead", action="store_true", help="Measure steps and grading instead.")
    parser.add_argument("--table", type=Path, help="Document whose table is made anew from --json.")
    options = parser.parse_args()
    if options.table:
        put_table(options.table, Path(__file__).name, table_of(json.loads(options.json.read_text())))
        kept = (Path(__file__).parent / "results").glob("made_learning_*.json")
        learned = [json.loads(path.read_text(encoding="utf-8"))["figures"] for path in kept]
        put_table(options.table, "made_learning.py", learned_table(learned))
        return
    if options.overhead:
        figures, found = asyncio.run(measure_overhead())
        print_table("overhead", figures)
        if options.json:
            merge_result(options.json, ["overhead"], figures, {"overhead": found})
        return
    if options.learn:
        from your_model import find_gguf  # and with it transformers

        shown = MadeLearning(
            options.directory, find_gguf(), options.seed, options.set, tasks=options.learn.resolve()
        )
        figures = {f"learning_{name}": value for name, value in shown.measure().items()}
        print_table("made tasks, trained on", figures)
        if options.json:
            merge_result(options.json, ["learning"], figures, {})
        return
    if options.made:
        if not options.harbor_python:
            parser.error("--made needs --harbor-python")
        asyncio.run(compare_made(options.made, options))
        return
    if options.project:
        budget = Budget(options.num_tasks, options.runs, options.minutes, options.again)
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
        directories = find_directories(options.tasks, "--tasks")
        ours = asyncio.run(judge_by_etude(directories, wrong, options.backend))
        theirs: Rewards = {}
        if options.harbor_python:
            theirs = judge_by_harbor(directories, wrong, options.harbor_python)
    for name, reward in sorted(ours.items()):
        print(f"{name:32s} ours {reward}   Harbor {theirs.get(name, 'not run')}", file=sys.stderr)
    figures = {"verdicts": float(len(ours))}
    if theirs:
        figures["harbor_verdicts_equal"] = sum(ours[name] == theirs[name] for name in ours) / len(ours)
    print_table("your repository", figures)
    if options.json:
        merge_result(options.json, ["harbor"], figures, {"harbor": theirs, "etude": ours})


async def compare_made(folders: Sequence[Path], options: argparse.Namespace) -> None:
    """Grades tasks made from projects, with their solutions and with no change, alternating between projects;
    starts none after `options.minutes`."""
    ours, theirs, base = Rewards(), Rewards(), await load_base(folders[0])
    places, until = asyncio.Semaphore(_AT_ONCE), time.monotonic() + 60 * options.minutes

    async def play(directory: Path, images: ImagesConfig) -> None:
        async with places:
            if time.monotonic() < until:
                mine = judge_by_etude([directory], None, options.backend, images)
                volumes = [f"--volume={source}:{target}:ro" for target, source in images.volumes.items()]
                words = [f"--from={base}", *volumes]
                other = asyncio.to_thread(judge_by_harbor, [directory], None, options.harbor_python, words)
                for rewards, found in zip((ours, theirs), await asyncio.gather(mine, other), strict=True):
                    rewards.update(found)

    listed = [find_directories(folder / "tasks", "--made") for folder in folders]
    settings = [images_of(folder) for folder in folders]
    turns = itertools.chain.from_iterable(itertools.zip_longest(*listed))
    pairs = zip(turns, itertools.cycle(settings), strict=False)
    await asyncio.gather(*(play(directory, images) for directory, images in pairs if directory is not None))
    differing = {name: [ours[name], theirs[name]] for name in ours if ours[name] != theirs[name]}
    print(f"differing: {differing}", file=sys.stderr)
    figures = {
        "made_tasks": len(ours) / 2,
        "made_verdicts": float(len(ours)),
        "made_harbor_verdicts_equal": 1 - len(differing) / len(ours),
    }
    print_table("made tasks", figures)
    if options.json:
        merge_result(options.json, ["made"], figures, {"made_harbor": theirs, "made_etude": ours})


async def load_base(folder: Path) -> str:
    """Loads the base image of made tasks' images into podman; returns its name there."""
    task = read_harbor(find_directories(folder / "tasks", "--made")[0])
    assert task.machine is not None, "it has a Dockerfile"
    task = replace(task, machine=replace(task.machine, docker_image=_BASE))
    found = await TaskImages("podman").find(task)
    assert found.machine is not None and found.machine.image is not None
    return found.machine.image.name


def copy_with_wrong_solutions(tasks: Path, target: Path) -> None:
    """Copies tasks, replacing each solution by the wrong one."""
    shutil.copytree(tasks, target, symlinks=True)
    for script in target.rglob("solution/wrong.sh"):
        script.rename(script.with_name("solve.sh"))


async def judge_by_etude(
    directories: Sequence[Path],
    wrong: Path | None,
    backend_name: str,
    settings: ImagesConfig | None = None,
) -> Rewards:
    """Rewards by our grading. `wrong`: directory of the same tasks with wrong solutions, if any."""
    config = load_config(None, [f"sandbox.backend={backend_name}"])
    images, rewards = TaskImages(backend_name, settings), Rewards()
    backend = open_run_backend(config.sandbox)
    grader = Grader(backend)
    try:
        for directory in directories:
            task = await images.find(read_harbor(directory))
            nothing = await judge_nothing(task, grader)
            rewards[f"{directory.name} nothing"] = nothing.reward
            for kind, place in (("solution", directory.parent), ("wrong", wrong)):
                if place is None:
                    continue
                asked = with_solutions_of(read_harbor(place / directory.name), task)
                verdict = await judge_solution(asked, grader)
                if isinstance(verdict, str):
                    print(f"ours, {directory.name} {kind}: {verdict}", file=sys.stderr)
                rewards[f"{directory.name} {kind}"] = None if isinstance(verdict, str) else verdict.reward
            shown = {name: reward for name, reward in rewards.items() if name.startswith(directory.name)}
            print(f"ours: {shown}", file=sys.stderr, flush=True)
    finally:
        await backend.close()
    return rewards


def with_solutions_of(other: Task, task: Task) -> Task:
    """`task`, whose images are resolved, with the solution of `other`."""
    pairs = zip(task.steps, other.steps, strict=True)
    steps = tuple(replace(step, solution=another.solution) for step, another in pairs)
    return replace(task, solution=other.solution, steps=steps)


def judge_by_harbor(
    directories: Sequence[Path], wrong: Path | None, python: Path, build: Sequence[str] = ()
) -> Rewards:
    """Rewards by Harbor's own code. `build`: options of `podman build`.

    Raises CalledProcessError if it fails as a whole.
    """
    keys: list[tuple[str, str]] = []
    wanted: list[str] = []
    for directory in directories:
        kinds = {"solution": (directory, "oracle"), "nothing": (directory, "nop")}
        kinds |= {"wrong": (wrong / directory.name, "oracle")} if wrong is not None else {}
        keys += [(directory.name, kind) for kind in kinds]
        wanted += [f"{place}:{agent}" for place, agent in kinds.values()]
    program = Path(__file__).with_name("harbor_judge.py")
    ran = subprocess.run([python, program, *wanted, *build], check=True, stdout=subprocess.PIPE, text=True)
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
