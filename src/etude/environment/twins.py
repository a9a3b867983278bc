"""Twins: hidden tests with changed expectations, which only a forging submission passes.

A test that compares inside the sandbox reveals its expectations to the code under test. So a submission that
passed is run again, in clean sandboxes, with twins of such tests: one constant of a test is changed, or one
assertion negated. An honest submission answers as before, and fails them. One that reads the expected value,
equals everything or forges the verdict passes them, whatever syntax the test uses.

    sites of a probe ---> changes that turn a test ---> exams ---> a submission fails the twins, and them only
     constants, ...        reference: same calls,        reference,
                           another verdict               clean sandbox

A change is used only if the reference solution then fails the test *with the same inputs*: changed inputs
would penalise other right solutions. An exam mixes twins of some tests with unchanged tests, so that forging
at random fails as well. A test that compares outside (`hidden_tests`) and has no usable change needs no twin:
it contains nothing for a forger to read.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import cycle
from pathlib import Path
from random import Random

from etude.environment.hidden_tests import HiddenFile, HiddenTest, judge_report, oracles_in, read_row
from etude.environment.oracles import OracleValues, stable_oracles
from etude.environment.twin_sites import Kind, change_sites, find_sites
from etude.environment.watch_inside import CALLS, COMPARED
from etude.sandbox.inside.testrunner import RECORD, Value
from etude.sandbox.types import ProbeReport, ProbeResult
from etude.tasks.exams import Exam, ExamSet

_MOST_CHANGES = 64
"""Most changes within one test that are tried."""
_MOST_TOGETHER = 400
"""Most changes within all tests that are tried; each test has its share."""
_MOST_SHARED = 16
"""Most changes of shared code that are tried, if a test has no constant of its own that turns it."""
_MOST_EXAMS = 6
_MOST_AT_ONCE = 32
"""Changed files in one run: the calls of each take 50 kB of a report, which is limited to 4 MiB."""
_FEWEST_TOGETHER = 4
"""Fewest exams if every change turns all tests that have twins: one test, or one table for all."""
_TRIES = 20
_WATCH = "watch_inside.py"
_WATCHING = {_WATCH: Path(__file__).with_name(_WATCH).read_text(encoding="utf-8")}
_CLOCK = re.compile(r"\b(?:perf_counter|process_time|thread_time|monotonic|time\.time)(?:_ns)?\b")
_BENDABLE = (
    "what it expects is computed from what the solution can change: itself, a clock, the shared generator"
)

RunReference = Callable[[Mapping[str, str], Sequence[str], int], Awaitable[ProbeReport]]
"""(files, paths of those to run, factor of the usual time limit) -> report. Runs in a clean sandbox, on the
reference solution: the task's hidden files, replaced by these. Its errors are in the report."""


@dataclass(frozen=True, slots=True)
class Twins(ExamSet):
    """The exams of a task, and the tests that they do not protect."""

    oracles: Mapping[HiddenTest, OracleValues] = field(default_factory=dict[HiddenTest, OracleValues])
    """Values that hidden tests compute themselves, recorded with the reference solution (see `oracles`)."""


@dataclass(frozen=True, slots=True)
class _Change:
    """A change of one site in one part of the hidden files. A part is a segment of a test file, or (number 0)
    another file."""

    part: tuple[str, int]
    site: int
    kind: Kind
    place: int


@dataclass(frozen=True, slots=True)
class _Seen:
    """The behaviour of the reference solution in one test."""

    failure: str | None
    calls: list[int] | None
    """Digests of the calls to it; None if they were not recorded."""
    compared: bool
    """Whether the test failed by a comparison of its own, not by an error before one."""


class TwinFinder:
    """Finds the twins of one task's tests; deterministic for the same files."""

    def __init__(self, hidden: Sequence[HiddenFile], others: Mapping[str, str]) -> None:
        """`hidden`: the test files; `others`: further hidden files, modules and data."""
        self._rng = Random("\0".join([*(file.probe for file in hidden), *others.values()]))
        self._files = {file.path: file for file in hidden}
        self._tests = [test for file in hidden for test in file.tests]
        self._most_own = min(_MOST_CHANGES, max(1, _MOST_TOGETHER // len(self._tests)))
        self._own: dict[HiddenTest, list[_Change]] = {}
        self._shared: list[_Change] = []
        self._timed: set[HiddenTest] = set()
        self._source = {(path, 0): text for path, text in others.items()}
        for path in others:
            self._shared += self._changes((path, 0))
        for file in hidden:
            test_of = {test.name: test for test in file.tests}
            for number, (name, source) in enumerate(file.segments):
                self._source[file.path, number] = source
                if name:
                    self._own[test_of[name]] = self._changes((file.path, number))
                    if _CLOCK.search(source):
                        self._timed.add(test_of[name])
                else:
                    self._shared += self._changes((file.path, number))
        self._shared = [change for change in self._shared if change.kind is Kind.CONSTANT]
        self._turning: dict[HiddenTest, list[_Change]] = {test: [] for test in self._tests}

    @property
    def questionable(self) -> list[HiddenTest]:
        """The tests that may need a twin, judging by the files; running the reference solution decides."""
        return [
            test
            for test in self._tests
            if self._shared or self._own[test] or not self._files[test.path].keeps_secret(test)
        ]

    async def find(self, run: RunReference) -> Twins:
        """Tries changes on the reference solution. Raises what `run` raises."""
        base = await self._try_own(run)
        if isinstance(base, str):
            return Twins(open_tests={str(test): base for test in self._tests})
        await self._try_shared(run, base)
        exams = await self._make_exams(run)
        known = await self._find_oracles(run)
        if isinstance(known, str):
            return Twins(tuple(exams), {str(test): known for test in self._tests})
        twinned = {test for exam in exams for test in exam.failing}
        reasons = {test: self._open_reason(test, base) for test in self._tests if str(test) not in twinned}
        reasons |= {test: _BENDABLE for test in self._tests if self._is_bendable(test, known)}
        found = {str(test): reason for test, reason in reasons.items() if reason is not None}
        return Twins(tuple(exams), found, oracles=known)

    async def _try_own(self, run: RunReference) -> dict[HiddenTest, _Seen] | str:
        """Records which changes within a test turn it: many in one run, each in its own file. Returns the
        behaviour of the reference solution in each unchanged test, or why it is not known."""
        files, tried = await asyncio.to_thread(self._variants)
        results: dict[tuple[str, str], ProbeResult] = {}
        for first in range(0, len(files), _MOST_AT_ONCE):
            paths = list(files)[first : first + _MOST_AT_ONCE]
            report = await run(_WATCHING | {path: files[path] for path in paths}, paths, len(paths))
            if report.error is not None:
                return f"the reference solution does not complete it: {report.error}"
            results |= {(result.path, result.name): result for result in report.results}
        base = {test: self._observe(results.get((test.path, test.name)), test) for test in self._tests}
        for path, (test, change) in tried.items():
            self._record(test, change, self._observe(results.get((path, test.name)), test), base[test])
        return base

    def _variants(self) -> tuple[dict[str, str], dict[str, tuple[HiddenTest, _Change]]]:
        """The test files and a file for each change within a test; and the test and change of the latter."""
        files = {path: self._watched(file, {}) for path, file in self._files.items()}
        tried: dict[str, tuple[HiddenTest, _Change]] = {}
        for test, changes in self._own.items():
            for change in self._drawn(changes, self._most_own):
                path = f"{test.path.removesuffix('.py')}_{len(tried)}.py"
                files[path] = self._watched(self._files[test.path], self._changed([change]), test.name)
                tried[path] = test, change
        return files, tried

    async def _try_shared(self, run: RunReference, base: Mapping[HiddenTest, _Seen]) -> None:
        """Records which changes of shared code turn any test, while some test has no turning change."""
        for change in self._drawn(self._shared, _MOST_SHARED):
            if all(any(one.kind is Kind.CONSTANT for one in self._turning[test]) for test in self._tests):
                return
            changed = self._changed([change])
            files = {path: self._watched(file, changed) for path, file in self._files.items()}
            if change.part[0] not in files:
                files[change.part[0]] = changed[change.part]
            report = await run(_WATCHING | files, list(self._files), 1)
            results = {(result.path, result.name): result for result in report.results}
            seen = {test: self._observe(results.get((test.path, test.name)), test) for test in self._tests}
            if report.error is None and all(_asked_the_same(seen[test], base[test]) for test in self._tests):
                for test in self._tests:
                    self._record(test, change, seen[test], base[test])

    def _is_bendable(self, test: HiddenTest, known: Collection[HiddenTest]) -> bool:
        """Whether a test measures time, or compares only with values that cannot be known beforehand."""
        kinds = {change.kind for change in self._turning[test]}
        is_computed = test not in known and Kind.OPERAND in kinds and Kind.CONSTANT not in kinds
        return is_computed or test in self._timed

    async def _find_oracles(self, run: RunReference) -> dict[HiddenTest, OracleValues] | str:
        """The oracles of each test that are equal in two runs, or why they are not known."""
        files = {path: file.probe for path, file in self._files.items()}
        if not any(f"{RECORD}(-" in probe for probe in files.values()):
            return {}
        reports = [await run(files, list(files), 1) for _ in range(2)]
        for report in reports:
            if report.error is not None or report.timed_out:
                return f"what it computes is unknown: {report.error or 'the reference solution hangs'}"
        one, other = map(oracles_in, reports)
        known = {
            test: stable_oracles(one.get((test.path, test.name), {}), other.get((test.path, test.name), {}))
            for test in self._tests
        }
        return {test: values for test, values in known.items() if values}

    async def _make_exams(self, run: RunReference) -> list[Exam]:
        """Exams in which each test that has twins is a twin in some and unchanged in others."""
        exams: list[Exam] = []
        for chosen in self._plan_exams():
            changed = self._changed(chosen)
            files = {path: self._assembled(file, changed) for path, file in self._files.items()}
            files |= {path: text for (path, _), text in changed.items() if path not in files}
            report = await run(files, list(self._files), 1)
            twins = frozenset(judge_report([*self._files.values()], report))
            if report.error is None and twins == self._turned_by(chosen):
                passing = tuple(str(test) for test in self._tests if test not in twins)
                exams.append(Exam(files, passing, tuple(str(test) for test in self._tests if test in twins)))
        return exams

    def _plan_exams(self) -> list[list[_Change]]:
        """The changes of each exam. One exam changes each test at most once, so more changes need more exams;
        if all tests have their twins together, several exams are needed for one with an unchanged test."""
        able = {test: self._ordered(changes) for test, changes in self._turning.items() if changes}
        if not able:
            return []
        together = all(self._turned_by([one]) == able.keys() for changes in able.values() for one in changes)
        fewest = _FEWEST_TOGETHER if together else 2
        number = min(max(fewest, 1 + max(map(len, able.values()))), _MOST_EXAMS)
        plan: list[list[_Change]] = []
        for _ in range(_TRIES):
            plan = [[] for _ in range(number)]
            for changes in able.values():
                times = self._rng.randint(min(len(changes), number - 1), number - 1)
                for place, change in zip(
                    self._rng.sample(range(number), times), cycle(changes), strict=False
                ):
                    plan[place].append(change)
            if any(self._turned_by(chosen) != able.keys() for chosen in plan):
                break
        return plan

    def _ordered(self, changes: Sequence[_Change]) -> list[_Change]:
        """One change for each place, in random order; constants first, as they also detect reading."""
        one_each = {(change.part, change.place): change for change in self._drawn(changes, len(changes))}
        return sorted(one_each.values(), key=lambda change: change.kind)

    def _turned_by(self, changes: Iterable[_Change]) -> set[HiddenTest]:
        chosen = set(changes)
        return {test for test, turning in self._turning.items() if chosen.intersection(turning)}

    def _open_reason(self, test: HiddenTest, base: Mapping[HiddenTest, _Seen]) -> str | None:
        """Why a test without a twin is not protected; None if it needs no twin."""
        if base[test].failure is not None:
            return f"the reference solution fails it: {base[test].failure}"
        if self._turning[test]:
            return "the reference solution gives different outcomes for a changed test"
        all_tried = len(self._own[test]) <= self._most_own and len(self._shared) <= _MOST_SHARED
        if all_tried and self._files[test.path].keeps_secret(test):
            return None
        number = len(self._own[test]) + len(self._shared)
        kind = "changes" if all_tried else "changes, as far as they were tried,"
        return f"none of {number} {kind} makes the reference solution fail it"

    def _record(self, test: HiddenTest, change: _Change, seen: _Seen, base: _Seen) -> None:
        fails = base.failure is None and seen.failure is not None and _asked_the_same(seen, base)
        if fails and (seen.compared or change.kind is Kind.JUDGEMENT):
            self._turning[test].append(change)

    def _observe(self, result: ProbeResult | None, test: HiddenTest) -> _Seen:
        if result is None:
            return _Seen("not run", None, False)
        watched: dict[int, object] = {}
        records: list[Value] = []
        for row in result.values:
            index, value = read_row(row)
            if index in (CALLS, COMPARED):
                watched[index] = value
            else:
                records.append(row)
        failure = self._files[test.path].judge(replace(result, values=tuple(records)), test)
        calls = watched.get(CALLS)
        compared = failure != result.error or watched.get(COMPARED) is True
        return _Seen(failure, calls if isinstance(calls, list) else None, compared)

    def _changes(self, part: tuple[str, int]) -> list[_Change]:
        sites = find_sites(part[0], self._source[part], self._names(part))
        return [_Change(part, number, *site) for number, site in enumerate(sites)]

    def _changed(self, changes: Iterable[_Change]) -> dict[tuple[str, int], str]:
        """The text of each part that is changed."""
        sites: dict[tuple[str, int], set[int]] = {}
        for change in changes:
            sites.setdefault(change.part, set()).add(change.site)
        return {
            part: change_sites(part[0], self._source[part], self._names(part), numbers)
            for part, numbers in sites.items()
        }

    def _names(self, part: tuple[str, int]) -> frozenset[str]:
        file = self._files.get(part[0])
        return frozenset() if file is None else file.solution_names

    def _drawn(self, changes: Sequence[_Change], most: int) -> list[_Change]:
        return self._rng.sample(changes, min(len(changes), most))

    def _watched(self, file: HiddenFile, changed: Mapping[tuple[str, int], str], only: str = "") -> str:
        """A test file that also records the calls of its tests; `only`: include this test alone."""
        lines = self._assembled(file, changed, only).split("\n")
        place = next(n for n, line in enumerate([*lines, ""]) if not line.startswith("from __future__"))
        hidden = sorted({_WATCH, *self._files, *(path for path, _ in self._source)})
        begin = f"__wrap__ = __import__('watch_inside').watch(__record__, {{__file__, *{hidden!r}}})"
        return "\n".join([*lines[:place], begin, *lines[place:], "__wrap__(globals())"])

    def _assembled(self, file: HiddenFile, changed: Mapping[tuple[str, int], str], only: str = "") -> str:
        return "\n".join(
            changed.get((file.path, number), source)
            for number, (name, source) in enumerate(file.segments)
            if not only or name in ("", only)
        )


def _asked_the_same(seen: _Seen, base: _Seen) -> bool:
    """Whether a test made the same calls to the solution as in the unchanged run, up to its end."""
    if seen.calls is None or base.calls is None:
        return False
    return seen.calls == (base.calls if seen.failure is None else base.calls[: len(seen.calls)])
