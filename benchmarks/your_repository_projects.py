"""Makes tasks from published projects, and verifies them again from the task directories alone."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import subprocess
import sys
import tarfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from etude.config import RunConfig, load_config
from etude.config.images import ImagesConfig
from etude.controller.backends import open_run_backend
from etude.controller.task_making import make_task_set
from etude.controller.task_sets import CheckedTask, check_task_set
from etude.environment.grading import allowed_changes
from etude.environment.making.pipeline import STATE, MakeSettings
from etude.environment.making.projects import Project, read_project, read_text
from etude.environment.making.reports import MakeReport
from etude.environment.origins import task_resources, task_template
from etude.environment.scripts import AgentDiff
from etude.environment.verdicts import Grader
from etude.evaluation.results import markdown_table
from etude.observe import SilentObserver
from etude.records import Task
from etude.sandbox.backends import IMAGES
from etude.sandbox.images.image_store import ImageStore
from etude.sandbox.interface import SandboxBackend
from etude.sandbox.migration import default_state_directory
from etude.sandbox.types import Resources
from etude.tasks.making.changes import Change, Quotas
from etude.tasks.making.leaks import scan_layers

PROJECTS = {
    "itsdangerous": "2.2.0",
    "click": "8.1.8",
    "mistune": "3.1.3",
    "sqlparse": "0.5.3",
    "marshmallow": "3.26.1",
    "wtforms": "3.2.1",
    "funcy": "2.1",
    "markdown": "3.11.3",
    "netaddr": "1.3.0",
    "colander": "2.0",
    "voluptuous": "0.16.0",
    "num2words": "0.5.14",
    "tinydb": "4.9.0",
    "toolz": "1.2.0",
    "boltons": "26.2.0",
    "glom": "25.12.0",
    "pathspec": "1.1.1",
    "h11": "0.16.0",
    "tomlkit": "0.13.2",
    "python-dateutil": "2.9.0.post0",
    "pyparsing": "3.2.0",
}
"""Project -> a version whose source distribution has the tests."""
_THIEF = Path(__file__).parents[1] / "tests/environment/making/thief.py"
_THIEVES = 8
"""Concurrent thieves: most of their time is waiting for pip, which retries."""
_SHOWN = ("tests", "changes_tested", "changes_noticed", "tasks", "make_s", "checked_again", "verified_again")
_SHOWN += ("forgeable", "paid_to_thief", "leaking")
_PIP_CONF = "[global]\nno-index = true\nfind-links = /wheels\n"


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits for making and verifying tasks of one project."""

    num_tasks: int
    num_runs: int
    minutes: float
    num_again: int
    """Number of randomly drawn tasks to verify again; 0: all."""


def measure_project(name: str, work: Path, budget: Budget) -> tuple[dict[str, float], dict[str, Any]]:
    """(figures, report and findings of the second verification) of one project; resumes in `work`."""
    folder = work / name
    repo = fetch_source(name, folder)
    project = read_project(repo)
    config = load_config(None, []).model_copy(update={"images": fetch_packages(project, folder)})
    settings = MakeSettings(
        Quotas(budget.num_tasks), budget.num_runs, at_once=2, budget_s=60 * budget.minutes
    )
    began = time.monotonic()
    report = make_task_set(repo, folder / "tasks", settings, config, SilentObserver())
    made_s = add_seconds(folder / "made_s.json", time.monotonic() - began)
    again = draw_tasks(folder, budget.num_again)
    shutil.rmtree(
        default_state_directory() / "task-checks", ignore_errors=True
    )  # findings of `etude tasks make` itself
    began = time.monotonic()
    checked = check_task_set(again, "--work", config) if report.written else []
    verified = [one.task for one in checked if one.task is not None and one.report.reason is None]
    stolen = asyncio.run(_steal_all(verified, project, config))
    leaked = find_leaking(verified, project, folder / "tasks")
    found = _figures(report, checked, stolen, leaked)
    found |= {"make_s": made_s, "again_s": time.monotonic() - began}
    document = {key: value for key, value in report.to_document().items() if key not in ("rejects", "tasks")}
    failures = {one.name: one.report.reason for one in checked if one.report.reason is not None}
    return found, {**document, "fails_again": failures, "stolen": stolen, "leaks": leaked}


def add_seconds(path: Path, seconds: float) -> float:
    """Adds to the total time of making a project's tasks, kept in a file; returns the total."""
    total = seconds + (json.loads(path.read_text()) if path.exists() else 0.0)
    path.write_text(json.dumps(total))
    return total


def fetch_source(name: str, folder: Path) -> Path:
    """Downloads and unpacks the source distribution. Raises CalledProcessError."""
    target = f"{name}=={PROJECTS[name]}"
    if not list(folder.glob("source/*.tar.gz")):
        words = ["--no-binary", ":all:", "--no-deps", "-d", str(folder / "source"), target]
        subprocess.run([sys.executable, "-m", "pip", "download", "-q", *words], check=True)
    [archive] = folder.glob("source/*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(folder / "repo", filter="data")
    [repo] = (folder / "repo").iterdir()
    return repo


def fetch_packages(project: Project, folder: Path) -> ImagesConfig:
    """Downloads the packages that the tests need, for image builds without network. Raises
    CalledProcessError."""
    wheels, settings = folder / "wheels", folder / "pip.conf"
    words = ["-w", str(wheels), *project.requirements]  # some are published only as source
    subprocess.run([sys.executable, "-m", "pip", "wheel", "-q", *words], check=True)
    settings.write_text(_PIP_CONF)
    return images_of(folder)


def images_of(folder: Path) -> ImagesConfig:
    """Configuration for building a project's task images from the packages in its directory."""
    places = {"/wheels": folder / "wheels", "/etc/pip.conf": folder / "pip.conf"}
    return ImagesConfig(volumes={target: place.resolve() for target, place in places.items()})


def draw_tasks(folder: Path, count: int) -> Path:
    """A directory with `count` of a project's tasks, drawn at random; 0: all."""
    tasks, drawn = folder / "tasks", folder / "again"
    paths = sorted(path.parent for path in tasks.glob("*/task.toml"))
    if not count or count >= len(paths):
        return tasks
    shutil.rmtree(drawn, ignore_errors=True)
    for path in random.Random(0).sample(paths, count):
        shutil.copytree(path, drawn / path.name, symlinks=True)
    return drawn


async def _steal_all(tasks: Sequence[Task], project: Project, config: RunConfig) -> list[str]:
    """Tasks that reward a thief, which searches the whole sandbox for the solution."""
    backend, places = open_run_backend(config.sandbox), asyncio.Semaphore(_THIEVES)

    async def steal(task: Task) -> float | None:
        async with places:
            return await _steal(task, project, backend)

    try:
        rewards = await asyncio.gather(*map(steal, tasks))
    finally:
        await backend.close()
    return [task.id for task, reward in zip(tasks, rewards, strict=True) if reward != 0.0]


async def _steal(task: Task, project: Project, backend: SandboxBackend) -> float | None:
    words = f"python3 - {project.source_root or '.'} {project.name} {project.version}"
    sandbox = await backend.create(task_template(task), task_resources(task, Resources()))
    try:
        await sandbox.commands.run(words, 300.0, stdin=_THIEF.read_text())
        changes = allowed_changes(task, await sandbox.final_diff())
    finally:
        await sandbox.kill()
    return (await Grader(backend).judge(task, AgentDiff(changes))).reward


def find_leaking(tasks: Sequence[Task], project: Project, out: Path) -> dict[str, str]:
    """Tasks whose solution is in an image layer that their Dockerfile adds. Layers searched when the
    tasks were made are skipped."""
    known = set(json.loads((out / STATE / "image.json").read_bytes())["image"]["layers"])
    store = ImageStore(default_state_directory() / IMAGES)
    found: dict[str, str] = {}
    for task in tasks:
        assert task.machine is not None and task.machine.image is not None and task.directory is not None
        change = _change_of(Path(task.directory))
        new = [store.layers.path(layer) for layer in task.machine.image.layers if layer not in known]
        if why := scan_layers(new, [change], project.files).get(change.id):
            found[task.id] = why
    return found


def _change_of(directory: Path) -> Change:
    solution, workspace = directory / "solution/files", directory / "environment/workspace"
    paths = [path.relative_to(solution) for path in solution.rglob("*") if path.is_file()]
    texts = {path.as_posix(): read_text((workspace / path).read_bytes()) or "" for path in paths}
    return Change("planted_bug", "", texts, ())


def table_of(result: Mapping[str, Any]) -> str:
    """A table with a row for each completely measured project of a result file."""
    heads = ("project", "tests", "suite", "changes", "noticed", "tasks", "made in", "quotas")
    rows = [[*heads, "verified again", "forgeable", "thief paid", "leaking"]]
    for name, found in result["peers"].items():
        figures = {key: result["figures"].get(f"{name}_{key}") for key in _SHOWN}
        if None not in figures.values():
            tests, changes, noticed, tasks, made_s, checked, verified, *rest = figures.values()
            cells = [f"{name} {found['version']}", f"{tests:.0f}", f"{found['suite_s']:.1f} s"]
            cells += [f"{changes:.0f}", f"{noticed:.0f}", f"**{tasks:.0f}**", f"{made_s / 60:.0f} min"]
            cells += ["few pairs" if found["missed_share"] else "met", f"{verified:.0f} of {checked:.0f}"]
            rows.append([*cells, *(f"{one:.0f}" for one in rest)])
    return markdown_table(rows)


def _figures(
    report: MakeReport, checked: Sequence[CheckedTask], stolen: Sequence[str], leaked: Mapping[str, str]
) -> dict[str, float]:
    stages = Counter(row["stage"] for row in report.rejects)
    verified = [one for one in checked if one.report.reason is None]
    return {
        "tests": len(report.baseline.stable),
        "tests_left_out": len(report.baseline.unstable),
        "tests_with_twins": report.num_twinned,
        "changes_tested": report.num_tested,
        "changes_noticed": report.num_noticed,
        "rejected_by_selection": stages["selection"],
        "rejected_by_leaks": stages["leaks"],
        "rejected_by_check": stages["check"],
        "tasks": len(report.written),
        "checked_again": len(checked),
        "verified_again": len(verified),
        "verified_again_low": 0.05 ** (1 / len(checked))
        if checked and len(verified) == len(checked)
        else 0.0,
        "forgeable": sum(bool(one.report.forgeable) for one in verified),
        "paid_to_thief": len(stolen),
        "leaking": len(leaked),
    }
