"""The verdict on what an agent left behind.

Enforces that the agent can neither see nor bend the verifier:

1. Every process of the agent is dead before anything is looked at.
2. Judged is a *fresh* sandbox: the task's pristine files plus the agent's changes as far as the task
   allows them. Regular files only: links, bytecode and everything outside the workspace stay behind.
3. Hidden tests enter now, win over the agent's files, and enter as probes: expected values stay outside where
   they can (see `hidden_tests`).
4. Which tests there are and what each must have recorded is known from outside. A process that exits
   early, hangs, dies or patches its runner produces too little, and fails.
5. What passed must fail the same tests where they expect something else (see `twins`), and tests must have
   computed for themselves what they do beside the reference solution (see `oracles`).

Honest limits. Inputs of hidden tests are visible to the code under test while it runs. Values that are not
plain data equal no literal. A function may recognise its inputs: against that only many and varied hidden
inputs help. Code that forges one comparison of a test that makes many inside is caught only if its twin
changes that one. Tests that need a twin and have none, or that expect what the code under test can change,
are listed (`Twins.open_tests`).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from etude.agent.globs import compile_path_pattern
from etude.agent.tools.state import is_harness_path
from etude.environment.hidden_tests import HiddenFile, HiddenTest, judge_report, oracles_in, take_apart
from etude.environment.oracles import OracleValues, spare_arguments
from etude.environment.twins import TwinFinder, Twins
from etude.errors import AgentError, SandboxError, TaskError
from etude.kit.tasks import off_loop
from etude.records import Task
from etude.sandbox.errors import PathKindError, PathMissingError, SandboxKilledByAgentError
from etude.sandbox.inside.testrunner import shorten
from etude.sandbox.interface import Sandbox, SandboxBackend
from etude.sandbox.template import Template
from etude.sandbox.types import ProbeReport, Resources

GRADING_TIMEOUT_S = 5.0
"""Wall time for the hidden tests; they take milliseconds, so who needs this long hangs."""
CAUSE_CHARS = 400
_BYTES_PER_CHARACTER = 100
"""What takes the time of a character of a test apart is worth as many characters of plain text."""
_MOST_REFERENCE_S = 60.0
"""Wall time for changed tests on the reference solution, however many there are in one run."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether the hidden tests pass. `cause` tells the first reason why not, in 400 characters at most."""

    passed: bool
    num_passed: int
    num_failed: int
    cause: str | None
    duration_s: float
    lints: int = 0
    """Findings of a linter that the agent's changes added; 0 where nobody looked."""
    style: int = 0
    """Added lines in another style than their file's; 0 where nobody looked."""
    reward: float | None = None
    """What the task's own `tests/test.sh` gave; None where hidden tests were judged by their values."""
    rewards: Mapping[str, float] | None = None
    """All that it gave, by name; None where it gave nothing."""

    def __post_init__(self) -> None:
        if self.cause is not None:
            object.__setattr__(self, "cause", shorten(self.cause, CAUSE_CHARS))


@dataclass(frozen=True, slots=True)
class Judge:
    """Runs hidden tests over changes, each time in a fresh sandbox.

    Its methods raise SandboxError if our own machinery failed, which is no verdict, and TaskError for hidden
    tests that are none.
    """

    backend: SandboxBackend
    limits: Resources | None = None
    timeout_s: float = GRADING_TIMEOUT_S
    partial_counts: bool = False
    """Whether a submission earns something by some of the tests: then these have their twins too."""

    async def judge(
        self,
        task: Task,
        changes: Mapping[str, bytes | None],
        twins_of: Callable[[Task], Awaitable[Twins]],
    ) -> Verdict:
        """Judges what `allowed_changes` gave; asks for the task's twins if it passes."""
        start_s = time.perf_counter()
        hidden = await _take_tests_apart(task)
        num_tests = sum(len(file.tests) for file in hidden)
        failures, cause, oracles = await self._sit(
            task, changes, hidden, {file.path: file.probe for file in hidden}
        )
        if not failures or (self.partial_counts and len(failures) < num_tests):
            twins = await twins_of(task)
            forged = _bent(twins, failures, oracles)
            if forged is not None and await self._passes_with_copies(task, changes, hidden, failures, twins):
                forged = None
            for exam in twins.exams:
                if forged is not None:
                    break
                found, _, _ = await self._sit(task, changes, hidden, exam.files)
                ended = {
                    str(test): "failed" if test in found else "passed"
                    for file in hidden
                    for test in file.tests
                }
                forged = exam.judge(ended, set(map(str, failures)))
            if forged is not None:
                return Verdict(False, 0, num_tests, forged, time.perf_counter() - start_s)
        num_passed = num_tests - len(failures)
        return Verdict(not failures, num_passed, len(failures), cause, time.perf_counter() - start_s)

    async def _passes_with_copies(
        self,
        task: Task,
        changes: Mapping[str, bytes | None],
        hidden: Sequence[HiddenFile],
        failures: Mapping[HiddenTest, str],
        twins: Twins,
    ) -> bool:
        """Whether the tests pass, and compute what they should, where the solution cannot change their own
        values: then it has changed its arguments, and answered right for what they were."""
        files = {file.path: spare_arguments(file.probe, file.solution_names) for file in hidden}
        found, _, oracles = await self._sit(task, changes, hidden, files)
        return found.keys() == failures.keys() and _bent(twins, found, oracles) is None

    async def find_twins(self, task: Task) -> Twins:
        """The exams that a submission has to sit which passed, and the tests that they leave open."""
        hidden = await _take_tests_apart(task)
        others = {
            path: text for path, text in task.hidden_files.items() if path not in task.hidden_test_paths
        }
        finder = await asyncio.to_thread(TwinFinder, hidden, others)
        if not finder.questionable:
            return Twins()
        if not task.solution_files:
            reason = "the task has no reference solution on which changes could be tried"
            return Twins(open_tests={str(test): reason for test in finder.questionable})
        solution = allowed_changes(
            task, {path: text.encode(errors="surrogatepass") for path, text in task.solution_files.items()}
        )

        async def run(files: Mapping[str, str], paths: Sequence[str], times: int) -> ProbeReport:
            timeout_s = min(self.timeout_s * times, max(self.timeout_s, _MOST_REFERENCE_S))
            try:
                return await self._probe(task, solution, files, paths, timeout_s)
            except SandboxKilledByAgentError as error:
                raise SandboxError(f"the reference solution's sandbox died: {error}") from error
            except AgentError as error:
                return ProbeReport((), str(error), False, 0.0)

        return await finder.find(run)

    async def _sit(
        self,
        task: Task,
        changes: Mapping[str, bytes | None],
        hidden: Sequence[HiddenFile],
        files: Mapping[str, str],
    ) -> tuple[dict[HiddenTest, str], str | None, dict[tuple[str, str], OracleValues]]:
        """(reason of every test that did not demonstrably pass, the first in words, what the tests computed
        for themselves)."""
        try:
            report = await self._probe(task, changes, files, [file.path for file in hidden], self.timeout_s)
        except AgentError as error:
            return {test: str(error) for file in hidden for test in file.tests}, str(error), {}
        failures = judge_report(hidden, report)
        cause = None
        if failures:
            test, reason = next(iter(failures.items()))
            cause = report.error or f"{test.name}: {reason}"
        if failures and report.timed_out:
            cause = f"timeout: the hidden tests did not end within {self.timeout_s:g} s"
        return failures, cause, oracles_in(report)

    async def _probe(
        self,
        task: Task,
        changes: Mapping[str, bytes | None],
        files: Mapping[str, str],
        paths: Sequence[str],
        timeout_s: float,
    ) -> ProbeReport:
        """Runs test files in a sandbox of their own, over the changes, the hidden files and `files`."""
        async with await self.backend.create(Template(task.files, task.id), self.limits) as fresh:
            await lay_files({**changes, **task.hidden_files, **files}, fresh)
            return await fresh.run_probes(paths, timeout_s)


async def count_hidden_tests(task: Task) -> int:
    """How many hidden tests a task has. Raises TaskError for files that hold none."""
    return sum(len(file.tests) for file in await _take_tests_apart(task))


def allowed_changes(task: Task, changes: Mapping[str, bytes | None]) -> dict[str, bytes | None]:
    """The agent's changes that reach grading: allowed paths, no bytecode, nothing that hidden files claim,
    nothing of the harness's own."""
    claimed = set(task.hidden_files)
    folders = {folder for path in claimed for folder in folders_above(path)}
    return {
        path: data
        for path, data in changes.items()
        if not is_bytecode(path)
        and not is_harness_path(path)
        and matches_any(path, task.allowed_paths)
        and not _collides(path, claimed, folders)
    }


def matches_any(path: str, patterns: Iterable[str]) -> bool:
    """Whether a path matches a glob: `*` and `?` within one level, `**` over any number of levels."""
    return any(_compiled_pattern(pattern)(path) for pattern in patterns)


_compiled_pattern = lru_cache(maxsize=1024)(compile_path_pattern)


def is_bytecode(path: str) -> bool:
    """Whether a file is Python's own, made from sources."""
    return path.endswith((".pyc", ".pyo")) or "__pycache__" in path.split("/")


def _collides(path: str, claimed: set[str], folders: set[str]) -> bool:
    """Whether `path` is a hidden file, stands where a hidden file's folder must be, or lies below one."""
    return path in claimed or path in folders or any(folder in claimed for folder in folders_above(path))


def folders_above(path: str) -> Iterator[str]:
    """The folders above a path, the nearest first."""
    while "/" in path:
        path = path.rpartition("/")[0]
        yield path


async def lay_files(files: Mapping[str, str | bytes | None], fresh: Sandbox) -> None:
    """Makes changes of files in a sandbox that is as the agent's was at first; None: the file is removed."""
    for path in (path for path, data in files.items() if data is None):
        with contextlib.suppress(PathMissingError, PathKindError):
            await fresh.files.remove(path)
    entering = {path: data for path, data in files.items() if data is not None}
    try:
        await fresh.files.write_many(entering)
    except PathKindError:
        for path, data in entering.items():  # one of them stands where a directory or a link was
            try:
                await fresh.files.write(path, data)
            except PathKindError:
                await fresh.files.remove(path)
                await fresh.files.write(path, data)


async def _take_tests_apart(task: Task) -> list[HiddenFile]:
    """The hidden test files, in a thread where they are large. Raises TaskError for files that hold none."""
    size = sum(len(task.hidden_files.get(path, "")) for path in task.hidden_test_paths)
    return await off_loop(_BYTES_PER_CHARACTER * size, _hidden_tests, task)


def _hidden_tests(task: Task) -> list[HiddenFile]:
    if not task.hidden_test_paths:
        raise TaskError("a task needs hidden tests to be graded", field="hidden_test_paths", received=task.id)
    for path in task.hidden_test_paths:
        if path not in task.hidden_files:
            raise TaskError("is not among hidden_files", field="hidden_test_paths", received=path)
    workspace = frozenset(
        path.partition("/")[0].removesuffix(".py") for path in (*task.files, *task.solution_files)
    )
    hidden = frozenset(task.hidden_files)
    return [take_apart(path, task.hidden_files[path], workspace, hidden) for path in task.hidden_test_paths]


def _bent(
    twins: Twins, failures: Mapping[HiddenTest, str], found: Mapping[tuple[str, str], OracleValues]
) -> str | None:
    """Which test that passed computed something else for itself than beside the reference solution."""
    for test, known in twins.oracles.items():
        here = found.get((test.path, test.name), {})
        if test not in failures and any(here.get(index) != values for index, values in known.items()):
            return f"{test.name}: computes something else than beside the reference solution: it is forged"
    return None
