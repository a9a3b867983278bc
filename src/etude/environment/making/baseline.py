"""Which of a project's tests can be trusted: those that pass in every run, whatever differs between runs.

Each run has another order, hash seed and time zone, no network, and others beside it. What ever ends
otherwise than before is out of every verdict. Coverage is measured in one run more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from etude.environment.making.suites import Coverage, Suite, SuiteRun
from etude.errors import TaskError
from etude.kit.tasks import gather_bounded

LOAD = 2
"""Runs at the same time, for each core."""
_SLOWER = 8.0
"""A run with a change may take as many times as long as the first one, which was alone."""
_LEAST_S = 20.0


@dataclass(frozen=True, slots=True)
class Baseline:
    """What the tests say of the project's own text."""

    stable: tuple[str, ...]
    """Tests that passed in every run, sorted."""
    unstable: dict[str, str]
    """Other tests -> how they ended."""
    coverage: Coverage
    duration_s: float
    """Of the first run."""

    @property
    def timeout_s(self) -> float:
        """Wall time after which a run with a change counts as hanging."""
        return max(_LEAST_S, _SLOWER * self.duration_s)


async def measure_baseline(
    suite: Suite, num_runs: int, at_once: int, advance: Callable[[int], None] = lambda step: None
) -> Baseline:
    """Runs the tests `num_runs` times, `at_once` at the same time, and once more for coverage.

    `advance` is called with the number of runs that are done. Raises TaskError where no test passes in every
    run, or the tests hang.
    """
    first = await suite.run(seed=0, explain=True)
    _check(first, suite)
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


def _check(first: SuiteRun, suite: Suite) -> None:
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
        fix="see that its tests pass without a network, with the packages that its test group names",
    )  # fmt: skip
