"""Finds changed tests that a project's own text fails, from which the exams of its tasks are made.

In each round every test function is changed in one place (in a parametrization, one in each row), and all
tests run on the project's own text. A test that then fails by a comparison of its own has a *twin*: a
submission that passes it has read the expected value, or forges the verdict (see `etude.environment.twins`).
Every task of a project has the same solution, so the twins are found once for all of them.

    rounds ──> function -> its twins ──> exams of a task: each function that fails with its change is a twin
                                         in one, two or three of four, beside some others
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations
from random import Random

from etude.environment.making.changing import TestChanger, TwinKind
from etude.environment.making.projects import Project
from etude.environment.making.suites import Baseline, Suite, SuiteRun
from etude.errors import TaskError
from etude.kit.tasks import gather_bounded
from etude.tasks.exams import Exam, ExamSet

ROUNDS = 10
MIXED_ROUNDS = 8
"""Rounds in which a random half of the functions is changed, as in an exam."""
_EXAMS = 4
_PATTERNS = tuple(places for size in range(1, _EXAMS) for places in combinations(range(_EXAMS), size))
"""The exams in which a function is a twin are one of these: neither none nor all."""
_MOST_OTHERS = 8
"""Functions in an exam whose tests pass with the task's change too."""
_OWN = ("AssertionError", "assert ", "Failed: DID NOT")
"""Beginnings of the message of a test that failed by its own assertion."""


@dataclass(frozen=True, slots=True)
class Twin:
    """A test function that one round changed, and the results of its tests on the project's own text."""

    number: int
    """Number of the round."""
    kind: TwinKind
    passing: tuple[str, ...]
    failing: tuple[str, ...]
    """Failing tests by their names in the changed file, which include parameters."""
    turned: tuple[str, ...]
    """The failing tests, by their names in the project's own file."""
    others: tuple[str, ...] = ()
    """Tests with an error before the comparison: run, so that their number reveals nothing; not judged."""


@dataclass(frozen=True, slots=True)
class ProjectTwins:
    """The twins of a project's tests."""

    tests: Mapping[str, tuple[str, ...]]
    """Function -> its tests that pass with the project's own text."""
    twins: Mapping[str, tuple[Twin, ...]]
    files: tuple[str, ...]
    """Test files whose tests also all pass if the file is written from its syntax tree."""

    @property
    def turned(self) -> frozenset[str]:
        """Guarded tests: those that some twin turns by more than a negation."""
        return _guarded(chain(*self.twins.values()))

    def write_exams(
        self, failing: Sequence[str], passing: Sequence[str], changer: TestChanger, seed: str
    ) -> ExamSet:
        """The exams of a task with whose change the tests `failing` fail and `passing` pass."""
        rng, wanted = Random(seed), set(failing)
        mine = sorted(one for one, tests in self.tests.items() if wanted.intersection(tests))
        others = sorted(self.twins.keys() - set(mine))
        used = [*mine, *sorted(rng.sample(others, min(_MOST_OTHERS, len(others))))]
        plan: list[dict[str, Twin]] = [{} for _ in range(_EXAMS)]
        for function in used:
            places = rng.choice(_PATTERNS)
            twins = _choose(self.twins.get(function, ()), wanted, len(places))
            for place, twin in zip(rng.sample(places, len(twins)), twins, strict=True):
                plan[place][function] = twin
        exams = [Exam({}, tuple(sorted({*failing, *passing})))]
        exams += [self._exam(used, chosen, changer) for chosen in plan]
        guarded = _guarded(twin for chosen in plan for twin in chosen.values())
        reason = "no exam changes a value or exception in it such that the project's own code fails it"
        common = {f"hidden/{path}": changer.unchanged[path] for path in self.files}
        return ExamSet(tuple(exams), dict.fromkeys(sorted(wanted - guarded), reason), common)

    def _exam(self, used: Sequence[str], chosen: Mapping[str, Twin], changer: TestChanger) -> Exam:
        passing = [test for one in used if one not in chosen for test in self.tests[one]]
        passing += chain(*(twin.passing for twin in chosen.values()))
        failing = list(chain(*(twin.failing for twin in chosen.values())))
        files = changer.change({function: twin.number for function, twin in chosen.items()})
        ids = sorted([*passing, *failing, *chain(*(twin.others for twin in chosen.values()))])
        asked = {
            "ids": ids,
            "paths": sorted({test.partition("::")[0] for test in ids}),
            "options": changer.options,
        }
        overlay = {f"hidden/{path}": text for path, text in files.items()}
        return Exam(
            {**overlay, "expected.json": json.dumps(asked)}, tuple(sorted(passing)), tuple(sorted(failing))
        )


async def find_project_twins(
    suite: Suite,
    baseline: Baseline,
    changer: TestChanger,
    at_once: int,
    advance: Callable[[int], None] = lambda step: None,
) -> ProjectTwins:
    """Runs the tests once unchanged, in ROUNDS changed states and in MIXED_ROUNDS partly changed ones.

    Raises SandboxError, and TaskError if the unchanged tests, or all changed ones, give no result.
    """
    suite = replace(suite, timeout_s=baseline.timeout_s)

    async def run(number: int | None) -> tuple[SuiteRun, dict[str, TwinKind]]:
        files, kinds = await asyncio.to_thread(changer.change_all, number)
        return await suite.run(files=files), kinds

    stable = set(baseline.stable)
    (base, _), *rounds = await gather_bounded(run, (None, *range(ROUNDS)), at_once, advance)
    if base.problem is not None or all(found.problem is not None for found, _ in rounds):
        raise TaskError(
            "has tests that gave results before, but give none when their files are rewritten from their "
            "syntax trees", field="REPO", received=str(base.problem or rounds[0][0].problem),
            fix="run it again; if the tests hang, with less load on the machine",
        )  # fmt: skip
    ran = _tests_of(base)
    spoiled = {test.partition("::")[0] for test in stable if base.outcomes.get(test) != "passed"}
    spoiled |= {
        name.partition("::")[0] for name, own in ran.items() if not stable.intersection(own) <= base.passed
    }
    files = tuple(path for path in changer.unchanged if path not in spoiled)
    tests = {
        name: tuple(test for test in own if test in stable)
        for name, own in ran.items()
        if name.partition("::")[0] in files
    }
    twins: dict[str, list[Twin]] = {}
    for number, (found, kinds) in enumerate(rounds):
        ended = _tests_of(found)
        for name in kinds.keys() & tests.keys():
            if len(ran[name]) != len(ended.get(name, ())):
                continue
            known = [(was, test) for was, test in zip(ran[name], ended[name], strict=True) if was in stable]
            if twin := _find_twin(number, kinds[name], known, found, suite.project):
                twins.setdefault(name, []).append(twin)
    found = ProjectTwins(tests, {name: tuple(known) for name, known in sorted(twins.items())}, files)
    unsettled = await _find_unsettled(suite, changer, found, at_once, lambda step: advance(1 + ROUNDS + step))
    return ProjectTwins(
        {name: own for name, own in found.tests.items() if name not in unsettled},
        {name: known for name, known in found.twins.items() if name not in unsettled},
        files,
    )


async def _find_unsettled(
    suite: Suite, changer: TestChanger, twins: ProjectTwins, at_once: int, advance: Callable[[int], None]
) -> set[str]:
    """Functions whose tests have other outcomes if only some functions are changed, because they depend on
    state that a test failing midway leaves. Exams do not use them."""

    async def run(number: int) -> set[str]:
        rng = Random(number)
        chosen = {name: rng.choice(known) for name, known in twins.twins.items() if rng.random() < 0.5}
        numbers = {name: twin.number for name, twin in chosen.items()}
        files = {path: changer.unchanged[path] for path in twins.files}
        files |= await asyncio.to_thread(changer.change, numbers)
        found = await suite.run(files=files)
        return {name for name in twins.tests if not found.problem and not _ended(found, name, chosen)}

    def _ended(found: SuiteRun, name: str, chosen: Mapping[str, Twin]) -> bool:
        twin = chosen.get(name)
        passing, failing = (twin.passing, twin.failing) if twin is not None else (twins.tests[name], ())
        ends = {**dict.fromkeys(passing, "passed"), **dict.fromkeys(failing, "failed")}
        return all(found.outcomes.get(test) == end for test, end in ends.items())

    rounds = await gather_bounded(run, range(MIXED_ROUNDS), at_once, advance)
    return set().union(*rounds)


def _find_twin(
    number: int, kind: TwinKind, tests: Sequence[tuple[str, str]], run: SuiteRun, project: Project
) -> Twin | None:
    """The twin that a round's change of one function made, if any. `tests`: old and new names."""
    turned = {test: before for before, test in tests if _fails_by_itself(run, test, kind, project)}
    passing = tuple(test for _, test in tests if run.outcomes[test] == "passed")
    others = tuple(test for _, test in tests if test not in turned and test not in passing)
    return Twin(number, kind, passing, tuple(turned), tuple(turned.values()), others) if turned else None


def _fails_by_itself(run: SuiteRun, test: str, kind: TwinKind, project: Project) -> bool:
    """Whether a test failed by its own assertion, not by an error before it."""
    failure = run.failures.get(test)
    if failure is None or run.outcomes[test] != "failed":
        return False
    is_in_tests = failure.innermost is not None and failure.innermost.path in project.tests
    return kind is not TwinKind.VALUE or (is_in_tests and failure.message.startswith(_OWN))


def _guarded(twins: Iterable[Twin]) -> frozenset[str]:
    """The tests that some of these turn by more than a negation, which a forged equality fails as well."""
    return frozenset(test for twin in twins if twin.kind is not TwinKind.OPPOSITE for test in twin.turned)


def _tests_of(run: SuiteRun) -> dict[str, list[str]]:
    """The tests of each function, in the order in which they ran."""
    found: dict[str, list[str]] = {}
    for test, (path, name) in run.functions.items():
        found.setdefault(f"{path}::{name}", []).append(test)
    return found


def _choose(twins: Sequence[Twin], wanted: set[str], number: int) -> list[Twin]:
    """The twins of one function for its exams: changed values before negations, then those that turn most of
    the wanted tests, then most others."""
    chosen: list[Twin] = []
    missing = wanted
    for _ in range(number if twins else 0):
        rest = [one for one in twins if one not in chosen] or chosen
        best = max(
            rest,
            key=lambda one: (
                one.kind is not TwinKind.OPPOSITE, len(missing.intersection(one.turned)), len(one.turned)
            ),
        )  # fmt: skip
        chosen.append(best)
        missing = missing - set(best.turned)
    return chosen
