"""From a project to a directory of verified tasks, resumable at every point.

    project ──> image ──> baseline ──> twins ──> changes, tested ──> selection ──> leaks ──> checks ──> OUT/
                  |           |          |               |
    OUT/.making/image.json, baseline.json, twins.json, journal (one line for each change that was tested)

If it is killed, the next call with the same project and settings resumes from these files. A change without a
task is a reject with its reason; only a project that cannot be used at all is an error.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter
from xxhash import xxh3_64_hexdigest

from etude.config.images import ImagesConfig
from etude.environment.checking import TaskReport
from etude.environment.making.changing import TestChanger
from etude.environment.making.images import BASE, ProjectImage, build_project_image, find_project_image
from etude.environment.making.lints import find_disagreement, find_smells
from etude.environment.making.planning import Planner
from etude.environment.making.projects import STATE, Project
from etude.environment.making.reports import MakeReport
from etude.environment.making.suites import LOAD, Baseline, Suite, measure_baseline
from etude.environment.making.twinning import MIXED_ROUNDS, ROUNDS, ProjectTwins, find_project_twins
from etude.environment.making.verifying import Noticed, choose_guards, verify_change
from etude.environment.making.writing import MadeTask, task_files
from etude.errors import TaskError
from etude.kit.durable import make_directory, publish_directory, remove_directory, write_json
from etude.kit.journal import LineJournal
from etude.kit.leftovers import ScratchDirectory
from etude.kit.tasks import end_tasks, gather_bounded
from etude.observe import Observer, show_stage
from etude.sandbox.images.built import BuildOptions
from etude.sandbox.images.image_store import ImageStore
from etude.sandbox.interface import SandboxBackend
from etude.sandbox.types import Network
from etude.tasks.exams import Exam
from etude.tasks.harbor import write_files
from etude.tasks.making import structure_inside
from etude.tasks.making.changes import Change, Quotas, Verified
from etude.tasks.making.instructions import find_refusal
from etude.tasks.making.leaks import scan_layers, scan_workspace
from etude.tasks.making.undoing import PastChange

Result = TypeVar("Result", ProjectImage, Baseline, ProjectTwins)
_TITLES = {
    "image": "building the project's image",
    "baseline": "running the tests to find flaky ones",
    "twins": "finding variants of tests for hidden exams",
}
Advance = Callable[[int], None]
"""Called with the number of finished steps of the stage."""
CheckTask = Callable[[Path], Awaitable[TaskReport]]
"""Checks the task in a directory in the same way as a run that plays it."""
FIRST_RUN_S = 600.0
"""Wall time of the first run of a project's tests."""
VERSION = 12
"""Version of task making: raised by every change that alters the task, or the verdict, of the same change."""
_VERIFIER_S = 60.0
_AHEAD = 2
"""Changes per sandbox that are planned before their predecessors' results are known."""


@dataclass(frozen=True, slots=True)
class MakeSettings:
    """Settings of task making. Those that do not affect earlier results may differ when it is resumed."""

    quotas: Quotas = field(default_factory=lambda: Quotas(most_tasks=200))
    num_runs: int = 20
    """Runs of the project's tests, to find flaky ones."""
    seed: int = 0
    image: str | None = None
    """Existing image with the dependencies; None: it is built."""
    at_once: int = 2
    """Sandboxes in which changes are tested concurrently."""
    budget_s: float = 2700.0
    """Time for testing changes, after the baseline is known; after it no further change is tested."""


@dataclass(slots=True)
class TaskMaker:
    """Makes the tasks of one project in `out`, one directory each, with `report.json`."""

    project: Project
    out: Path
    settings: MakeSettings
    backend: SandboxBackend
    store: ImageStore
    images: ImagesConfig
    check: CheckTask
    observer: Observer
    past: Iterable[PastChange] = ()
    """Changes of the project's past, newest first."""
    _changer: TestChanger = field(init=False)

    def __post_init__(self) -> None:
        self._changer = TestChanger(self.project, self.settings.seed)

    async def make(self) -> MakeReport:
        """Makes the tasks, or resumes. Raises TaskError for a project whose tests cannot be used, and if
        `out` was made from another project or with other settings; SandboxError, ResourceError, OSError."""
        began, settings = time.monotonic(), self.settings
        make_directory(self.out / STATE)
        self._check_resumable()
        image = await self._load_or_compute("image", ProjectImage, 0, self._find_image)
        if not all(map(self.store.layers.has, image.image.layers)):
            (self.out / STATE / "image.json").unlink()
            image = await self._load_or_compute("image", ProjectImage, 0, self._find_image)
        suite = Suite.of(self.project, image.image, self.backend, FIRST_RUN_S)
        baseline = await self._load_or_compute(
            "baseline", Baseline, settings.num_runs + 1,
            lambda advance: measure_baseline(suite, settings.num_runs, LOAD * settings.at_once, advance),
        )  # fmt: skip
        twins = await self._load_or_compute(
            "twins", ProjectTwins, 1 + ROUNDS + MIXED_ROUNDS,
            lambda advance: find_project_twins(suite, baseline, self._changer, settings.at_once, advance),
        )  # fmt: skip
        report = await self._make(image, suite, baseline, twins)
        report.duration_s = time.monotonic() - began
        write_json(self.out / "report.json", report.to_document())
        return report

    def _check_resumable(self) -> None:
        """Raises TaskError if `out` was begun from another project or with other settings."""
        seed, num_runs, image = self.settings.seed, self.settings.num_runs, self.settings.image
        key = {"project": _digest(self.project.files, 16), "seed": seed, "num_runs": num_runs}
        key |= {"base": BASE, "image": image, "version": VERSION}
        path = self.out / STATE / "key.json"
        if not path.exists():
            if any(one for one in self.out.iterdir() if one.name != STATE):
                raise TaskError(
                    "is not empty, and was not begun by this command", field="--out", received=str(self.out),
                    fix="name a new or empty directory",
                )  # fmt: skip
            write_json(path, key)
        if json.loads(path.read_bytes()) != key:
            raise TaskError(
                "was begun from another project, with another seed, image or number of runs, or by another "
                "version of this command", field="--out", received=str(self.out),
                fix="name a new directory, or use the same arguments",
            )  # fmt: skip

    async def _find_image(self, advance: Advance) -> ProjectImage:
        images = self.images
        if self.settings.image is not None:
            return await find_project_image(self.project, self.settings.image, self.store, images.bases)
        network, private = Network(tuple(images.allow)), tuple(images.allow_private)
        options = BuildOptions(images.bases, network, private, images.volumes)
        return await build_project_image(self.project, self.store, options, self.backend)

    async def _load_or_compute(
        self, name: str, kind: type[Result], num_runs: int, find: Callable[[Advance], Awaitable[Result]]
    ) -> Result:
        """The stored result of an earlier call, else that of a new computation."""
        path = self.out / STATE / f"{name}.json"
        if path.exists():
            return TypeAdapter(kind).validate_python(json.loads(path.read_bytes()))
        with show_stage(self.observer, _TITLES[name], num_runs, "run") as advance:
            found = await find(advance)
        write_json(path, asdict(found))
        return found

    async def _make(
        self, image: ProjectImage, suite: Suite, baseline: Baseline, twins: ProjectTwins
    ) -> MakeReport:
        """Tests changes, selects tasks, scans for leaks, checks and writes them."""
        project, settings = self.project, self.settings
        report = MakeReport(project, baseline, len(twins.turned))
        smells = await find_smells(project.sources, settings.seed)
        if smells is None:
            why = "there is no ruff on this machine (pip install ruff)"
            report.impossible = {"planted_smell": why, "found_smell": why}
        planner = Planner(
            project.sources, project.test_texts, settings.seed, settings.quotas, self.past, smells or ()
        )
        path = self.out / STATE / "journal"
        journal, lines = _open_journal(path)
        known = {line["id"]: line for line in lines}
        try:
            search = _Search(suite, baseline, twins, planner, journal, known, report)
            limit_s = max(_VERIFIER_S, baseline.timeout_s)
            until, num_tested = time.monotonic() + self.settings.budget_s, -1
            made, is_short = list[MadeTask](), True
            # Rejected tasks are replaced as long as there are changes and time.
            while is_short and report.num_tested > num_tested:
                name = "testing changes" if num_tested < 0 else "testing more changes"
                num_tested = report.num_tested
                with show_stage(self.observer, name, 0, "candidate") as advance:
                    await search.run(settings.at_once, until, advance)
                asked = [self._made(one, image, twins, limit_s) for one in planner.select()]
                made = await self._check_and_write(asked, report)
                names = {one.id for one in made}
                is_short = planner.reject(one.verified.change.id for one in asked if one.id not in names)
        finally:
            journal.close()
        for verified, reason in planner.selection.rejected:
            report.reject(verified.change, "selection", reason)
        report.missed = planner.selection.missed
        for one in made:
            report.count_check(one, None)
        return report

    def _made(self, verified: Verified, image: ProjectImage, twins: ProjectTwins, limit_s: float) -> MadeTask:
        failing, seed = [one.test for one in verified.failures], seed_exams(self.project, verified)
        exams = twins.write_exams(failing, verified.passing, self._changer, seed)
        if verified.change.smell:
            # In the first one no code of the agent's runs, so that its outcome cannot be forged.
            exams = replace(exams, exams=(Exam({"suite.py": ""}, (structure_inside.NAME,)), *exams.exams))
        return MadeTask(self.project, image, verified, exams, limit_s)

    async def _check_and_write(self, asked: Sequence[MadeTask], report: MakeReport) -> list[MadeTask]:
        """Checks and writes tasks; returns those written now or before. Reasons of others go to `report`."""
        names = {one.id for one in asked}
        for folder in [one for one in self.out.iterdir() if (one / "task.toml").is_file()]:
            if folder.name not in names:
                remove_directory(folder)  # of an earlier call, and not selected any more

        new = [one for one in asked if not (self.out / one.id).exists()]
        if new:  # tasks written earlier were scanned then
            layers = [self.store.layers.path(digest) for digest in new[0].image.image.layers]
            changes = [one.verified.change for one in new]
            with show_stage(self.observer, "scanning the image for solutions", 0):
                reasons = await asyncio.to_thread(scan_layers, layers, changes, self.project.files)
            for change in changes:
                if change.id in reasons:
                    report.reject(change, "leaks", reasons[change.id])
            new = [one for one in new if one.verified.change.id not in reasons]
        if new:
            with show_stage(self.observer, "checking tasks", len(new), "task") as advance:
                write = partial(self._write_if_verified, report=report)
                await gather_bounded(write, new, self.settings.at_once, advance)
        return [one for one in asked if (self.out / one.id).exists()]

    async def _write_if_verified(self, made: MadeTask, report: MakeReport) -> None:
        """Writes the task if its workspace does not reveal the solution, and if the grader gives the solution
        1 and doing nothing 0, twice; else the reason goes to `report`."""
        with ScratchDirectory(self.out / STATE, "check-") as scratch:
            draft = scratch / made.id
            await asyncio.to_thread(write_files, task_files(made), draft)
            top = draft / "environment/workspace"
            leak = await asyncio.to_thread(scan_workspace, top, made.verified, made.workspace)
            if leak is not None:
                report.reject(made.verified.change, "leaks", leak)
                return
            found = await self.check(draft)
            if found.reason is not None:
                report.count_check(made, found.reason)
                return
            publish_directory(draft, self.out / made.id)


def seed_exams(project: Project, verified: Verified) -> str:
    """The random seed of a task's exams: its solution and the removed tests, which the workspace lacks, so
    that an agent cannot reproduce them."""
    tests = {path: project.files[path] for path in verified.change.removed_tests}
    solved = {path: text.encode() for path, text in verified.reference.items()}
    return _digest(tests | solved, 32)


def _digest(files: Mapping[str, bytes], size: int) -> str:
    """Hexadecimal digest of `size` bytes of files and their paths."""
    digest = blake2b(digest_size=size)
    for path, data in sorted(files.items()):
        digest.update(f"{path}\0{len(data)}\0".encode(errors="surrogateescape") + data)
    return digest.hexdigest()


@dataclass(slots=True)
class _Search:
    """Tests changes until enough of them are noticed by tests."""

    _suite: Suite
    _baseline: Baseline
    _twins: ProjectTwins
    _planner: Planner
    _journal: LineJournal
    _known: dict[str, dict[str, Any]]
    _report: MakeReport

    async def run(self, at_once: int, until: float, advance: Advance) -> None:
        """Tests the planner's changes, `at_once` concurrently, until it has enough or the time is up; results
        of an earlier call are used whatever the time.

        `advance` is called with the number of candidates. The planner gets results in the order of its
        changes, so that a change depends on the results before it, and not on which tests ended first.
        """
        places = asyncio.Semaphore(at_once)
        under_way: deque[tuple[Change, asyncio.Task[dict[str, Any]]]] = deque()
        is_late = False

        async def test(change: Change) -> dict[str, Any]:
            async with places:
                return self._known.get(change.id) or await self._test(change)

        try:
            while True:
                while not is_late and len(under_way) < _AHEAD * at_once:
                    if (change := self._planner.next_change()) is None:
                        break
                    if is_late := change.id not in self._known and time.monotonic() >= until:
                        break
                    under_way.append((change, asyncio.create_task(test(change))))
                if not under_way:
                    return
                await self._add_result(under_way[0][0], await under_way[0][1])
                under_way.popleft()
                advance(self._planner.num_found)
        finally:
            await end_tasks(*(testing for _, testing in under_way))

    async def _test(self, change: Change) -> dict[str, Any]:
        sources = self._suite.project.sources
        found = find_refusal(change, sources) or await find_disagreement(change, sources)
        found = found or await verify_change(change, self._suite, self._baseline)
        line: dict[str, Any] = {"id": change.id}
        if isinstance(found, str):
            line["reason"] = found
        else:
            line |= found.to_document(self._baseline)
        self._journal.append(line)
        return line

    async def _add_result(self, change: Change, line: dict[str, Any]) -> None:
        reason = line.get("reason")
        if reason is None:
            noticed = Noticed.from_document(line, self._baseline)
            if change.smell:
                noticed = choose_guards(noticed, change, self._baseline, self._twins)
            reason = "forgeable: no exam can change a failing test, or one that runs the lines of a smell"
            if any(failure.test in self._twins.turned for failure in noticed.failures):
                reason = await asyncio.to_thread(self._planner.add, change, noticed)
        self._report.count_change(change, reason)


def _open_journal(path: Path) -> tuple[LineJournal, list[dict[str, Any]]]:
    try:
        if path.exists():
            return LineJournal.resume(path, xxh3_64_hexdigest)
        return LineJournal.create(path, xxh3_64_hexdigest), []
    except BlockingIOError as error:
        raise TaskError(
            "is being made by another process", field="--out", received=str(path.parent.parent),
            fix="wait for it, or name another directory",
        ) from error  # fmt: skip
