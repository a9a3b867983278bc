"""Loads sets of tasks from directories: reads them, finds their images, and checks them before a run.

    DIR/*/task.toml ──read──> tasks ──images──> playable ──check, or a stored report──> verified
                        └─────────────┴──────────────────────────┴──> left out, by name, with the reason

Reports of verified tasks are stored in the state directory by a digest of everything that determines a task:
its files, its image, the backend, the version of Étude. Failed tasks are checked again by the next command: a
busy machine may be the cause.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

from etude import __version__
from etude.config import RunConfig
from etude.controller.backends import open_run_backend
from etude.environment.checking import TaskReport, check_tasks, has_solution
from etude.environment.episodes import EpisodeLimits
from etude.environment.wire import task_document
from etude.errors import SandboxError, TaskError, UserError
from etude.evaluation import EvaluationResult
from etude.evaluation.statistics import verdicts_by_task
from etude.kit.durable import write_json
from etude.kit.tasks import gather_bounded
from etude.observe import Observer, SilentObserver, show_stage
from etude.records import Task, TaskMachine
from etude.sandbox.interface import SandboxBackend
from etude.sandbox.machine_backend import default_state_directory
from etude.tasks.calibration import calibrate, find_difficulty
from etude.tasks.harbor import find_directories, read_harbor, read_id
from etude.tasks.making.selection import NOT_CALIBRATED

_NAMED = 5

_loaded: dict[str, tuple[list[Task], list[str]]] = {}
"""Results of `load_task_set` in this process: a run loads its tasks before it has a directory, as it starts
and once its steps are planned, and must get the same ones each time."""


@dataclass(frozen=True, slots=True)
class CheckedTask:
    """One directory of a set: its task, unless it could not be read, and the report of its check."""

    name: str
    """Name of the directory."""
    task: Task | None
    report: TaskReport

    def to_document(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"name": self.name, "verified": self.report.reason is None, **asdict(self.report)}


def check_task_set(
    directory: Path,
    field: str,
    config: RunConfig,
    observer: Observer | None = None,
    only: Mapping[str, object] | None = None,
) -> list[CheckedTask]:
    """Checks the tasks of a directory, in the order of their names; with `only`, those with these metadata.

    Raises TaskError where there are none; a faulty task's report has the reason. Of two tasks with one id the
    second is faulty.
    """
    return asyncio.run(_check(directory, field, config, observer or SilentObserver(), only or {}))


def load_task_set(
    directory: Path,
    field: str,
    config: RunConfig,
    observer: Observer | None = None,
    only: Mapping[str, object] | None = None,
) -> tuple[list[Task], list[str]]:
    """The verified tasks of a directory, with `only` those with these metadata, and a summary in a few lines:
    how many are verified, which are left out and why, how many are forgeable. Loaded once per process.

    Raises TaskError as `check_task_set`; where none is verified; and, with `tasks.check = "stop"`, where one
    is not.
    """
    limits = EpisodeLimits.from_config(config).sandbox
    asked = repr((directory.resolve(), field, only, config.tasks, config.sandbox, config.images, limits))
    if asked not in _loaded:
        _loaded[asked] = _load(directory, field, config, observer, only)
    tasks, words = _loaded[asked]
    return list(tasks), list(words)


def _load(
    directory: Path,
    field: str,
    config: RunConfig,
    observer: Observer | None,
    only: Mapping[str, object] | None,
) -> tuple[list[Task], list[str]]:
    checked = check_task_set(directory, field, config, observer, only)
    verified = [row.task for row in checked if row.task is not None and row.report.reason is None]
    forgeable = [row for row in checked if row.report.reason is None and row.report.forgeable]
    left_out = [f"{row.name}: {row.report.reason}" for row in checked if row.report.reason is not None]
    if left_out and (config.tasks.check == "stop" or not verified):
        shown = "".join(f"\n  {reason}" for reason in left_out[:_NAMED])
        raise TaskError(
            f"{len(left_out)} of {len(checked)} tasks are not verified:{shown}",
            field=field,
            received=str(directory),
            fix=f"correct or remove them; `etude tasks check {directory}` lists all",
        )
    share = len(forgeable) / len(verified)
    num_unsolved = sum(not has_solution(task) for task in verified)
    unsolved = [f"  {num_unsolved} have no solution, so it is not known whether they can be solved"]
    words = [
        f"tasks: {len(verified)} of {len(checked)} in {directory} are verified; "
        f"an agent could forge the verdict on {len(forgeable)} of these ({share:.0%})",
        *(unsolved if num_unsolved else []),
        *(f"  left out: {reason}" for reason in left_out),
        *(f"  forgeable: {row.name}: {row.report.forgeable[0]}" for row in forgeable[:_NAMED]),
    ]
    return verified, words


def calibrate_task_set(directory: Path, evaluation: Path) -> Counter[str]:
    """Writes into each task of a directory how many of an evaluation's sampled sessions solved it. Returns
    the number of tasks by difficulty, or `not calibrated`.

    Raises TaskError where there is no task, or none was evaluated; ConfigError, StoreError where `evaluation`
    is not the result of an evaluation.
    """
    modes = EvaluationResult.read(evaluation).modes
    verdicts = verdicts_by_task((modes.get("sampled") or modes["greedy"]).rows)
    levels = Counter[str]()
    for path in find_directories(directory, "DIRECTORY"):
        if not (path / "task.toml").is_file():
            continue
        if tried := verdicts.get(read_id(path)):
            calibrate(path, sum(tried), len(tried))
            levels[find_difficulty(sum(tried) / len(tried)) if any(tried) else NOT_CALIBRATED] += 1
    if not levels:
        raise TaskError(
            "holds none of the tasks that were evaluated", field="DIRECTORY", received=str(directory),
            fix="name the directory that was evaluated with --suite",
        )  # fmt: skip
    return levels


def read_with_images(directories: Sequence[Path], config: RunConfig) -> list[Task]:
    """Reads tasks and finds their images, as runs of `config` do, without checks. Raises TaskError, with the
    directory, where that fails, InfrastructureError."""
    checks = TaskChecks(config)

    async def read_all() -> list[Task]:
        tasks: list[Task] = []
        for directory in directories:
            try:
                tasks.append(await checks.find_images(checks.read(directory)))
            except UserError as error:
                words = f"{directory.name}: {error.message}"
                raise TaskError(words, field=error.field, received=error.received, fix=error.fix) from error
        return tasks

    return asyncio.run(read_all())


class TaskChecks:
    """Checks tasks as the runs of one configuration do, and stores the reports of those that pass."""

    def __init__(self, config: RunConfig) -> None:
        # Every run imports this module, and most have generated tasks.
        from etude.environment.task_images import TaskImages

        settings = config.sandbox
        is_elsewhere = bool(settings.server or settings.servers or settings.servers_file)
        self._config = config
        self._backend_name = settings.model_dump_json() if is_elsewhere else settings.backend
        self._images = TaskImages("a server" if is_elsewhere else settings.backend, config.images)
        self._state = default_state_directory()
        self.limits = EpisodeLimits.from_config(config).sandbox

    def read(self, directory: Path) -> Task:
        """Reads a task without its images. Raises TaskError."""
        settings = self._config.tasks
        return _with_network(read_harbor(directory, settings.host_env), tuple(settings.public_hosts))

    async def find_images(self, task: Task) -> Task:
        """The task with its images. Raises TaskError, TemplateError, ResourceError."""
        return await self._images.find(task)

    def find_report(self, task: Task) -> TaskReport | None:
        """The stored report of an earlier check; None if there is none, or it does not parse."""
        if self._config.tasks.require_solution and not has_solution(task):
            return None
        try:
            found: Mapping[str, Any] = json.loads(self._file(task).read_bytes())
            return TaskReport(**{**found, "forgeable": tuple(found["forgeable"])})
        except (OSError, ValueError, TypeError, KeyError):
            return None

    async def check_directory(self, directory: Path, backend: SandboxBackend) -> TaskReport:
        """Checks a task that was just written."""
        try:
            task = await self.find_images(self.read(directory))
        except (UserError, SandboxError) as error:
            return TaskReport(directory.name, str(error))
        [report] = await self.check([task], backend, at_once=1)
        return report

    async def check(
        self,
        tasks: Sequence[Task],
        backend: SandboxBackend,
        at_once: int,
        on_report: Callable[[TaskReport], None] = lambda report: None,
    ) -> list[TaskReport]:
        """Checks tasks with images; returns their reports in order, and stores each that passes at once."""
        by_id = {task.id: task for task in tasks}

        def on_checked(report: TaskReport) -> None:
            if report.reason is None:
                write_json(self._file(by_id[report.id]), asdict(report))
            on_report(report)

        needed = self._config.tasks.require_solution
        return await check_tasks(tasks, backend, self.limits, at_once, needed, on_checked)

    def _file(self, task: Task) -> Path:
        document = task_document(_without_names(replace(task, metadata={})))
        what = [__version__, document, self._backend_name, asdict(self.limits)]
        key = blake2b(json.dumps(what, sort_keys=True).encode(), digest_size=16).hexdigest()
        folder = self._state / "task-checks"
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"{key}.json"


async def _check(
    directory: Path, field: str, config: RunConfig, observer: Observer, only: Mapping[str, object]
) -> list[CheckedTask]:
    checks, at_once = TaskChecks(config), max(2, os.cpu_count() or 1)
    rows: list[CheckedTask] = []
    name_of: dict[str, str] = {}
    for path in find_directories(directory, field):
        try:
            task = checks.read(path)
            if all(task.metadata.get(key) == value for key, value in only.items()):
                if name_of.setdefault(task.id, path.name) != path.name:
                    raise TaskError(
                        f"{name_of[task.id]} has the same id", field="id of the task", received=task.id,
                        fix="give each its own",
                    )  # fmt: skip
                rows.append(CheckedTask(path.name, task, TaskReport(task.id, None)))
        except UserError as error:
            rows.append(CheckedTask(path.name, None, TaskReport(path.name, str(error))))
    if not rows:
        wanted = ", ".join(f"{key} = {value!r}" for key, value in only.items())
        raise TaskError(
            f"holds no task whose metadata have {wanted}", field=field, received=str(directory),
            fix="correct tasks.only",
        )  # fmt: skip

    async def find_images(row: CheckedTask) -> CheckedTask:
        try:
            return replace(row, task=row.task and await checks.find_images(row.task))
        except (UserError, SandboxError) as error:
            return CheckedTask(row.name, None, TaskReport(row.name, str(error)))

    bare = [row for row in rows if row.task is not None and _needs_image(row.task)]
    if bare:
        with show_stage(observer, "images of tasks", len(bare), "task") as advance:
            whole = {row.name: row for row in await gather_bounded(find_images, bare, at_once, advance)}
        rows = [whole.get(row.name, row) for row in rows]
    found = {row.task.id: checks.find_report(row.task) for row in rows if row.task is not None}
    unknown = [row.task for row in rows if row.task is not None and found[row.task.id] is None]
    if unknown:
        with show_stage(observer, "checks of tasks", len(unknown), "task") as advance:

            def on_checked(report: TaskReport) -> None:
                found[report.id] = report
                advance(sum(found[task.id] is not None for task in unknown))

            backend = open_run_backend(config.sandbox)
            try:
                await checks.check(unknown, backend, at_once, on_checked)
            finally:
                await backend.close()
    return [replace(row, report=(row.task and found[row.task.id]) or row.report) for row in rows]


def _needs_image(task: Task) -> bool:
    """Whether a task, or one of its verifiers, names an image of its own."""
    machines = (task.machine, *(script.machine for script in task.verifiers))
    return any(machine is not None and not machine.is_host for machine in machines)


def _with_network(task: Task, public: tuple[str, ...]) -> Task:
    """The task, with the run's public hosts where it requests a public network."""
    machine = task.machine
    if machine is not None and machine.hosts is None:
        machine = replace(machine, hosts=public)
    scripts = [replace(script, hosts=public) if script.hosts is None else script for script in task.verifiers]
    return replace(task, machine=machine).with_verifiers(scripts)


def _without_names(task: Task) -> Task:
    """The task without names of layered images, which depend on its directory."""

    def unnamed(machine: TaskMachine | None) -> TaskMachine | None:
        image = machine and machine.image
        if machine is None or image is None or not image.layers:
            return machine
        return replace(machine, image=replace(image, name=""))

    scripts = [replace(script, machine=unnamed(script.machine)) for script in task.verifiers]
    return replace(task, machine=unnamed(task.machine)).with_verifiers(scripts)
