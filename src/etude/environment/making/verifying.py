"""Verifies that a change makes a task: the same tests notice it each time, and nothing hangs.

covered lines ──> covering tests, until one fails ──> the whole suite: twice in other orders, in forks of one
     |                      |                         process, and in a fresh sandbox as it is graded
  not covered           no test notices                                  |
                                                        which fail, which pass, which differ
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from random import Random
from typing import Any

from pydantic import TypeAdapter

from etude.environment.making.suites import Baseline, Suite, SuiteRun
from etude.environment.making.twinning import ProjectTwins
from etude.tasks.making.changes import Change, TestFailure

_ROUNDS = 2
"""Rounds of the whole suite in one sandbox, with another hash seed and time zone than in grading."""
_MOST_GUARDS = 8
_FAILURES = TypeAdapter(tuple[TestFailure, ...])
_MOST_COVERING = 300
"""Most covering tests that are run first; if there are more, the whole suite is run at once."""


@dataclass(frozen=True, slots=True)
class Noticed:
    """A change that tests notice."""

    failures: tuple[TestFailure, ...]
    """Failures of tests that fail each time, and pass without the change; for a smell see `choose_guards`."""
    passing: tuple[str, ...]
    """Tests that pass each time, with and without the change."""
    num_suspect_lines: int

    def to_document(self, baseline: Baseline) -> dict[str, Any]:
        """Plain JSON values. Instead of `passing`, which has nearly all stable tests, it has the stable tests
        that are neither there nor in `failures`: their outcome differs between runs with the change."""
        known = {one.test for one in self.failures} | set(self.passing)
        return {
            "failures": [asdict(one) for one in self.failures],
            "num_suspect_lines": self.num_suspect_lines,
            "differing": [test for test in baseline.stable if test not in known],
        }

    @classmethod
    def from_document(cls, document: Mapping[str, Any], baseline: Baseline) -> Noticed:
        """Inverse of `to_document`."""
        failures = _FAILURES.validate_python(document["failures"])
        left_out = {one.test for one in failures} | set(document["differing"])
        passing = tuple(test for test in baseline.stable if test not in left_out)
        return cls(failures, passing, document["num_suspect_lines"])


async def verify_change(change: Change, suite: Suite, baseline: Baseline) -> Noticed | str:
    """Runs the tests on a change; returns what they notice, or why it is rejected. Raises SandboxError if our
    own machinery failed.

    The project's own tests decide, including those that the workspace lacks.
    """
    running = baseline.coverage.tests_of(change.places)
    if running is None:
        return "not covered: no test runs the lines"
    covering = sorted(running.intersection(baseline.stable))
    rounds = [covering] if 0 < len(covering) <= _MOST_COVERING else []
    suite = replace(suite, timeout_s=baseline.timeout_s)
    if change.smell:
        return await _verify_smell(change, suite, baseline)
    runs = await suite.run_rounds(change.files, [*rounds, *[None] * _ROUNDS], baseline.stable)
    problem = next((run.problem for run in runs if run.problem is not None), None)
    if problem is not None:
        return problem
    if len(runs) < len(rounds) + _ROUNDS:
        which = "the tests that run the lines" if rounds and len(runs) == 1 else "all tests"
        return f"not noticed: {which} pass"
    graded = await suite.run(files=change.files, explain=True)
    if graded.problem is not None:
        return graded.problem
    return _compare(change, [*runs[-_ROUNDS:], graded], baseline)


async def _verify_smell(change: Change, suite: Suite, baseline: Baseline) -> Noticed | str:
    """Verifies that all tests pass on the text that is not the project's own: with or without the smell."""
    for seed in (1, None):
        run = await suite.run(seed, files=change.solution or change.files)
        if run.problem is not None:
            return run.problem
        if missed := sorted(set(baseline.stable) - run.passed):
            return f"behaves otherwise: {missed[0]} does not pass"
    return Noticed((), baseline.stable, 0)


def choose_guards(noticed: Noticed, change: Change, baseline: Baseline, twins: ProjectTwins) -> Noticed:
    """Chooses tests to be treated as failing for a smell, which makes none fail; the workspace lacks them and
    exams change them: of half of the functions that run its lines and that exams can change, at most 8."""
    covering = (baseline.coverage.tests_of(change.places) or set()).intersection(baseline.stable)
    names = sorted(name for name, tests in twins.tests.items() if covering & twins.turned.intersection(tests))
    chosen = Random(change.id).sample(names, min(_MOST_GUARDS, (len(names) + 1) // 2))
    guards = {test: name.split("::") for name in sorted(chosen) for test in twins.tests[name]}
    return Noticed(
        tuple(TestFailure(test, "", file=path, function=name) for test, (path, name) in guards.items()),
        tuple(test for test in noticed.passing if test not in guards),
        noticed.num_suspect_lines,
    )


def _compare(change: Change, runs: Sequence[SuiteRun], baseline: Baseline) -> Noticed | str:
    stable = set(baseline.stable)
    passing = stable.intersection(*(run.passed for run in runs))
    failing = stable.difference(*(run.passed for run in runs))
    if not failing:
        return "flaky with the change: no test fails each time"
    if not passing:
        return "breaks everything: no test passes"
    last = runs[-1]
    # A file that is not collected without the change either has no test that could fail.
    if _files(last.errors).intersection(_files(failing)) and change.kind in ("planted_bug", "combined"):
        return "breaks the import: tests cannot be collected"
    failures = tuple(
        last.failures.get(test) or TestFailure(test, _why_missing(test, last)) for test in sorted(failing)
    )
    suspects = baseline.coverage.count_common_lines(failing)
    return Noticed(failures, tuple(sorted(passing)), suspects)


def _why_missing(test: str, run: SuiteRun) -> str:
    """Why a test did not run: why its file could not be collected."""
    said = run.errors.get(test.partition("::")[0], "")
    lines = [line.removeprefix("E").strip() for line in said.splitlines() if line.startswith("E ")]
    return lines[-1] if lines else said.strip() or run.outcomes.get(test, "not collected")


def _files(tests: Iterable[str]) -> set[str]:
    return {test.partition("::")[0] for test in tests}
