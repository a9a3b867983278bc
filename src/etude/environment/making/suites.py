"""Runs a project's tests, in a fresh sandbox each time: with the project's own text, or with changes.

project's files + changes ──> sandbox without network ──> pytest ──> how each test ended, and where it failed

The baseline consists of the tests that pass in every run. Each run has another order, hash seed and time
zone, no network, and other runs in parallel. A test that ever has another outcome is excluded from all
verdicts. Coverage is measured in one additional run.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from etude.environment.grading import apply_changes
from etude.environment.making.projects import Project
from etude.errors import AgentError, TaskError
from etude.kit.tasks import gather_bounded
from etude.records import TaskImage
from etude.sandbox.interface import SandboxBackend
from etude.sandbox.template import Image, Template
from etude.sandbox.types import CommandResult, Resources
from etude.tasks.making.changes import Place, TestFailure

PROGRAM = Path(__file__).with_name("suite_inside.py")
MEMORY_BYTES, DISK_BYTES = 1 << 30, 1 << 30
_MOST_BYTES = 32 << 20
_NO_RESULT = (3, 4)
"""Exit statuses of pytest: internal error, usage error."""
_ZONES = ("UTC0", "EST5EDT", "JST-9", "<+1345>-13:45", "<-0930>9:30")
LOAD = 2
"""Concurrent runs per core."""
_SLOWER = 8.0
"""Time limit of a run with a change, in units of the first run, which ran alone."""
_LEAST_S = 20.0


@dataclass(frozen=True, slots=True)
class Coverage:
    """Which tests run which lines."""

    tests: tuple[str, ...]
    lines: Mapping[str, Mapping[int, str]]
    """Path -> line -> its tests, as bits of a hexadecimal number; 0 for a line that only the import runs."""

    def tests_of(self, places: Iterable[Place]) -> set[str] | None:
        """The tests that run any line of these places; None if no line of them is run at all."""
        lines = ((place.path, line) for place in places for line in place.lines)
        found = [bits for path, line in lines if (bits := self.lines.get(path, {}).get(line)) is not None]
        if not found:
            return None
        every = reduce(or_, (int(bits, 16) for bits in found))
        return {test for number, test in enumerate(self.tests) if every >> number & 1}

    def count_common_lines(self, tests: Collection[str]) -> int:
        """Number of lines that all of these tests run."""
        numbers = {test: number for number, test in enumerate(self.tests)}
        wanted = sum(1 << numbers[test] for test in tests if test in numbers)
        rows = (int(bits, 16) for known in self.lines.values() for bits in known.values())
        return sum(wanted != 0 and bits & wanted == wanted for bits in rows)


@dataclass(frozen=True, slots=True)
class SuiteRun:
    """The result of one run of the tests."""

    outcomes: Mapping[str, str]
    """Test -> passed, failed or skipped."""
    failures: Mapping[str, TestFailure] = field(default_factory=dict[str, TestFailure])
    errors: Mapping[str, str] = field(default_factory=dict[str, str])
    """File whose tests could not be collected -> why."""
    functions: Mapping[str, tuple[str, str]] = field(default_factory=dict[str, "tuple[str, str]"])
    """Test -> file and qualified name of its function."""
    coverage: Coverage | None = None
    problem: str | None = None
    """Why there is no result: a hang, a crash, no output."""
    duration_s: float = 0.0

    @property
    def passed(self) -> set[str]:
        """Tests that passed."""
        return {test for test, outcome in self.outcomes.items() if outcome == "passed"}


_RUN = TypeAdapter(SuiteRun)
"""The output of suite_inside.py has the names of its fields."""


@dataclass(frozen=True, slots=True)
class Suite:
    """The tests of one project in one image."""

    project: Project
    backend: SandboxBackend
    timeout_s: float
    """Wall time limit of one run."""
    base: Template

    @classmethod
    def of(cls, project: Project, image: TaskImage, backend: SandboxBackend, timeout_s: float) -> Suite:
        """The suite of a project."""
        run_in = Image(image.name, image.layers, {"HOME": "/root", **image.env}, image.workdir, image.user)
        return cls(project, backend, timeout_s, Template(project.files, project.name, run_in))

    async def run(
        self,
        seed: int | None = None,
        cover: bool = False,
        files: Mapping[str, str] | None = None,
        explain: bool = False,
    ) -> SuiteRun:
        """Runs the tests on the project's own text, with `files` replaced; an empty text removes a file.

        `seed`: determines order, hash seed and time zone; None: those of grading. `cover`: also measure which
        tests run which lines. `explain`: failures include the compared values, for which pytest has to
        rewrite the tests. Faults that the tests cause are the `problem` of the result. Raises SandboxError if
        our own machinery failed.
        """
        sources = [pattern.replace("**", "*") for pattern in self.project.source_patterns]
        request: dict[str, Any] = {"seed": seed, "cover": sources if cover else [], "explain": explain}
        return _RUN.validate_python(await self._run_program(files or {}, request, seed or 0, self.timeout_s))

    async def run_rounds(
        self, files: Mapping[str, str], rounds: Sequence[Sequence[str] | None], stable: Sequence[str]
    ) -> list[SuiteRun]:
        """Runs the tests with `files` replaced several times in one sandbox, in different orders; an empty
        text removes a file. The project is imported and its tests are collected once.

        A round runs the tests that it names, until one fails, or all for None. The last round is the first in
        which all of its `stable` tests pass. Raises as `run`.
        """
        rows = [{"ids": ids, "seed": seed} for seed, ids in enumerate(rounds)]
        request = {"rounds": rows, "stable": stable, "limit_s": self.timeout_s}
        found = await self._run_program(files, request, 1, self.timeout_s * (1 + len(rows)))
        return [_RUN.validate_python(row) for row in found.get("rounds", [found])]

    async def _run_program(
        self, files: Mapping[str, str], request: dict[str, Any], seed: int, limit_s: float
    ) -> dict[str, Any]:
        """Runs the program in a fresh sandbox; returns its output, or a problem without one."""
        request |= {"paths": self.project.test_files, "options": self.project.options}
        env = {"PYTHONHASHSEED": str(seed % 1000), "TZ": _ZONES[seed % len(_ZONES)]}
        program = f"{PROGRAM.read_text()}\nanswer(json.loads({json.dumps(request)!r}))\n"
        changes = {path: text or None for path, text in files.items()}
        resources = Resources(
            memory_bytes=MEMORY_BYTES, disk_bytes=DISK_BYTES, file_bytes=DISK_BYTES, num_processes=256,
            open_files=1024, cpu_s=math.ceil(self.timeout_s) * (os.cpu_count() or 1),
        )  # fmt: skip
        async with await self.backend.create(self.base, resources) as sandbox:
            try:
                await apply_changes(changes, sandbox)
                result = await sandbox.commands.run(
                    "python3 -", limit_s, env, limit_bytes=_MOST_BYTES, stdin=program
                )
            except AgentError as error:
                return {"outcomes": {}, "problem": str(error)}
        return _read_answer(result, limit_s)


def _read_answer(result: CommandResult, limit_s: float) -> dict[str, Any]:
    failed = {"outcomes": {}, "duration_s": result.duration_s}
    if result.timed_out:
        return {**failed, "problem": f"hangs: the tests did not end within {limit_s:.0f} s"}
    try:
        found: dict[str, Any] = json.loads(result.stdout)
    except ValueError:
        words = " ".join(result.stderr.split())[-300:] or "nothing was said"
        return {**failed, "problem": f"dies: pytest ended with {result.exit_code}: {words}"}
    if found["broken"] is not None or found["status"] in _NO_RESULT:
        words = " ".join((found["broken"] or f"exit status {found['status']}").split())[-300:]
        return {**failed, "problem": f"pytest fails: {words}"}
    return {**found, "duration_s": result.duration_s}


@dataclass(frozen=True, slots=True)
class Baseline:
    """The results of the tests on the project's own text."""

    stable: tuple[str, ...]
    """Tests that passed in every run, sorted."""
    unstable: dict[str, str]
    """Other tests -> how they ended."""
    coverage: Coverage
    duration_s: float
    """Duration of the first run."""

    @property
    def timeout_s(self) -> float:
        """Wall time after which a run with a change counts as hanging."""
        return max(_LEAST_S, _SLOWER * self.duration_s)


async def measure_baseline(
    suite: Suite, num_runs: int, at_once: int, advance: Callable[[int], None] = lambda step: None
) -> Baseline:
    """Runs the tests `num_runs` times, `at_once` concurrently, and once more for coverage.

    `advance` is called with the number of finished runs. Raises TaskError if no test passes in every run, or
    if the tests hang.
    """
    first = await suite.run(seed=0, explain=True)
    _check_first(first, suite)
    advance(1)
    loaded = replace(suite, timeout_s=max(suite.timeout_s, _SLOWER * first.duration_s))

    async def run(seed: int) -> SuiteRun:
        if seed == num_runs:
            return await suite.run(cover=True)
        return await loaded.run(seed=seed, explain=seed % 2 == 0)  # some tests depend on that

    others = await gather_bounded(
        run, range(1, num_runs + 1), at_once, lambda num_done: advance(1 + num_done)
    )
    *runs, covered = [first, *others]
    coverage = covered.coverage
    if coverage is None:
        raise _refused("its tests do not run under coverage", suite, covered.problem or "no data")
    stable, unstable = compare_runs(runs)
    if not stable:
        shown = "; ".join(f"{test}: {how}" for test, how in list(unstable.items())[:3])
        raise _refused("none of its tests passes in every run", suite, shown)
    return Baseline(tuple(stable), unstable, coverage, first.duration_s)


def compare_runs(runs: Sequence[SuiteRun]) -> tuple[list[str], dict[str, str]]:
    """(tests that passed in every run, other tests and how they ended)."""
    problem = next((run.problem for run in runs if run.problem is not None), None)
    if problem is not None:
        return [], {"all tests": f"in one of {len(runs)} runs: {problem}"}
    stable: list[str] = []
    unstable: dict[str, str] = {}
    for test in sorted({test for run in runs for test in run.outcomes}):
        ended = Counter(run.outcomes.get(test, "not run") for run in runs)
        if ended["passed"] == len(runs):
            stable.append(test)
        else:
            unstable[test] = ", ".join(f"{how} {count} times" for how, count in ended.most_common())
    return stable, unstable


def _check_first(first: SuiteRun, suite: Suite) -> None:
    """Raises TaskError for a first run in which no test passed."""
    if first.problem is not None:
        raise _refused("its tests cannot be run", suite, first.problem)
    if first.passed:
        return
    if not first.outcomes and not first.errors:
        raise _refused("pytest finds no tests", suite, ", ".join(suite.project.test_files[:3]))
    reasons = [*first.errors.values(), *(one.message for one in first.failures.values())]
    words = " ".join(reasons[0].split())[-300:] if reasons else "all are skipped"
    raise _refused("none of its tests passes as it is", suite, words)


def _refused(message: str, suite: Suite, received: str) -> TaskError:
    return TaskError(
        f"{suite.project.name}: {message}", field="REPO", received=received,
        fix="check that its tests pass without a network, with the packages that its test group names",
    )  # fmt: skip
