"""The verdict on what an agent left behind.

Enforces that the agent can neither see nor bend the verifier:

1. Every process of the agent is dead before anything is looked at.
2. Judged is a *fresh* sandbox: the task's pristine files plus the agent's changes as far as the task
   allows them. Regular files only: links, bytecode and everything outside the workspace stay behind.
3. Hidden tests enter now, win over the agent's files, and enter as probes: the code under test meets calls
   and inputs, never an expected value or a comparison (see `hidden_tests`).
4. Which tests there are and what each must have recorded is known from outside. A process that exits
   early, hangs, dies or patches its runner produces too little, and fails.

Honest limits. Inputs of hidden tests are visible to the code under test while it runs. An assertion between
two computed values (`assert f(x) == g(x)`), an ordering (`assert f(x) < 3`) or a loop over a table
of expected values leaves inside what is needed to forge it; `open_assertions` lists those of a task. Values
that are not plain data satisfy no comparison with a literal. And a function may recognise its inputs:
against that only many and varied hidden inputs help.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from etude.agent.tools.state import is_harness_path
from etude.environment.hidden_tests import HiddenFile, take_apart
from etude.errors import AgentError, TaskError
from etude.records import Task
from etude.sandbox.interface import SandboxBackend
from etude.sandbox.template import Template
from etude.sandbox.types import ProbeReport, Resources

GRADING_TIMEOUT_S = 5.0
"""Wall time for the hidden tests; they take milliseconds, so who needs this long hangs."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether the hidden tests pass. `cause` tells the first reason why not."""

    passed: bool
    num_passed: int
    num_failed: int
    cause: str | None
    duration_s: float
    lints: int = 0
    """Findings of a linter that the agent's changes added; 0 where nobody looked."""
    style: int = 0
    """Added lines in another style than their file's; 0 where nobody looked."""


async def judge_changes(
    task: Task,
    changes: Mapping[str, bytes | None],
    backend: SandboxBackend,
    limits: Resources | None = None,
    timeout_s: float = GRADING_TIMEOUT_S,
) -> Verdict:
    """Judges what `allowed_changes` gave, in a fresh sandbox.

    Raises SandboxError if our own machinery failed, which is no verdict, and TaskError for hidden tests that
    are none.
    """
    start_s = time.perf_counter()
    hidden = _hidden_tests(task)
    num_tests = count_hidden_tests(task)
    try:
        report = await _probe(task, changes, hidden, backend, limits, timeout_s)
    except AgentError as error:
        return Verdict(False, 0, num_tests, str(error), time.perf_counter() - start_s)
    failures = _failures(hidden, report)
    cause = f"{failures[0][0]}: {failures[0][1]}" if failures else None
    if failures and (report.error or report.timed_out):
        cause = report.error or "timeout"
    num_passed = num_tests - len(failures)
    return Verdict(not failures, num_passed, len(failures), cause, time.perf_counter() - start_s)


def count_hidden_tests(task: Task) -> int:
    """How many hidden tests a task has. Raises TaskError for files that hold none."""
    return sum(len(file.tests) for file in _hidden_tests(task))


def open_assertions(task: Task) -> list[str]:
    """`path:line` of hidden assertions that code under test could forge, for authors of tasks."""
    return [
        f"{file.path}:{expectation.line}"
        for file in _hidden_tests(task)
        for expectation in file.expectations
        if not expectation.sealed
    ]


def allowed_changes(task: Task, changes: Mapping[str, bytes | None]) -> dict[str, bytes | None]:
    """The agent's changes that reach grading: allowed paths, no bytecode, nothing that hidden files claim,
    nothing of the harness's own."""
    claimed = set(task.hidden_files)
    return {
        path: data
        for path, data in changes.items()
        if not _is_bytecode(path)
        and not is_harness_path(path)
        and matches_any(path, task.allowed_paths)
        and not _collides(path, claimed)
    }


def matches_any(path: str, patterns: Iterable[str]) -> bool:
    """Whether a path matches a glob: `*` and `?` within one level, `**` over any number of levels."""
    return any(_compiled_glob(pattern).fullmatch(path) for pattern in patterns)


@lru_cache(maxsize=1024)
def _compiled_glob(pattern: str) -> re.Pattern[str]:
    parts: list[str] = []
    for token in re.split(r"(\*\*/|\*\*|\*|\?)", pattern):
        translated = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
        parts.append(translated.get(token, re.escape(token)))
    return re.compile("".join(parts), re.DOTALL)


def _is_bytecode(path: str) -> bool:
    return path.endswith((".pyc", ".pyo")) or "__pycache__" in path.split("/")


def _collides(path: str, claimed: set[str]) -> bool:
    """Whether `path` is a hidden file, or stands as a file where a hidden file's folder must be."""
    return path in claimed or any(
        name.startswith(path + "/") or path.startswith(name + "/") for name in claimed
    )


_take_apart = lru_cache(maxsize=256)(take_apart)
"""The members of a group are judged by the same files."""


def _hidden_tests(task: Task) -> list[HiddenFile]:
    if not task.hidden_test_paths:
        raise TaskError("a task needs hidden tests to be graded", field="hidden_test_paths", received=task.id)
    for path in task.hidden_test_paths:
        if path not in task.hidden_files:
            raise TaskError("is not among hidden_files", field="hidden_test_paths", received=path)
    return [_take_apart(path, task.hidden_files[path]) for path in task.hidden_test_paths]


async def _probe(
    task: Task,
    changes: Mapping[str, bytes | None],
    hidden: list[HiddenFile],
    backend: SandboxBackend,
    limits: Resources | None,
    timeout_s: float,
) -> ProbeReport:
    """Runs the probes over the agent's changes in a sandbox of their own."""
    template = Template(task.files, task.id)
    fresh = await backend.create(template, limits)
    try:
        for path in _removals(template, changes):
            await fresh.files.remove(path)
        entering: dict[str, str | bytes] = {path: data for path, data in changes.items() if data is not None}
        entering.update(task.hidden_files)
        entering.update({file.path: file.probe for file in hidden})
        await fresh.files.write_many(entering)
        return await fresh.run_probes([file.path for file in hidden], timeout_s)
    finally:
        await fresh.kill()


def _removals(template: Template, changes: Mapping[str, bytes | None]) -> list[str]:
    """What has to go before the changes fit: deleted files, and folders that became files."""
    folders = [
        path
        for path, data in changes.items()
        if data is not None and any(name.startswith(path + "/") for name in template.contents)
    ]
    deleted = [
        path
        for path, data in changes.items()
        if data is None and not any(path.startswith(folder + "/") for folder in folders)
    ]
    return folders + deleted


def _failures(hidden: list[HiddenFile], report: ProbeReport) -> list[tuple[str, str]]:
    """(test, reason) of every hidden test that did not demonstrably pass."""
    found = {(result.path, result.name): result for result in report.results}
    failures: list[tuple[str, str]] = []
    for file in hidden:
        for position, (name, _) in enumerate(file.tests):
            reason = file.judge(found.get((file.path, name)), position)
            if reason is not None:
                failures.append((name, reason))
    return failures
