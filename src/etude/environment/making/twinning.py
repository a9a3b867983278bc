"""Changed tests of a project, which its own text fails: what exams of its tasks are made of.

In each round every test function is changed in one place (of a parametrization, one in each of its rows), and
all tests run with the project's own text. A test that then fails by a comparison of its own has a *twin*:
what passes it has read what it expects, or forges the verdict (see `etude.environment.twins`). Every task of
a project has the same solution, so the twins are found once for all of them.

    rounds ──> function -> its twins ──> exams of a task: each function that fails with its change is a twin
                                         in two of four, beside some others
"""

from __future__ import annotations

import ast
import asyncio
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain, zip_longest
from random import Random
from typing import Any

from pydantic import TypeAdapter

from etude.environment.hidden_tests import solution_names
from etude.environment.making.baseline import Baseline
from etude.environment.making.projects import Project
from etude.environment.making.suites import Suite, SuiteRun
from etude.environment.twin_sites import Kind, Place, find_places, operand_places
from etude.tasks.exams import Exam, ExamSet
from etude.tasks.making.source import Function, Source

ROUNDS = 10
_EXAMS = 4
_TURNED = 2
"""Exams in which a function is a twin: half of them, so that neither forging nor failing at random pays."""
_MOST_OTHERS = 8
"""Functions in an exam whose tests pass with the task's change too."""
_OWN = ("AssertionError", "assert ", "Failed: DID NOT")
"""How the message of a test begins that failed by its own judgement."""
_NEGATIONS = {
    "assertTrue": "assertFalse",
    "assertEqual": "assertNotEqual",
    "assertIs": "assertIsNot",
    "assertIn": "assertNotIn",
    "assertIsNone": "assertIsNotNone",
    "assertIsInstance": "assertNotIsInstance",
}
_OPPOSITES = {**_NEGATIONS, **{other: one for one, other in _NEGATIONS.items()}}
_Site = tuple[Kind, Callable[[], None]]


@dataclass(frozen=True, slots=True)
class Twin:
    """A test function that one round changed, and how its tests then ended with the project's own text."""

    number: int
    """Of the round."""
    kind: int
    passing: tuple[str, ...]
    failing: tuple[str, ...]
    """As they are called in the changed file: parameters are part of their names."""
    turned: tuple[str, ...]
    """The failing ones, as they are called in the project's own file."""


class TestChanger:
    """The test files of a project, with changed test functions. A function is called `PATH::NAME`."""

    __test__ = False

    def __init__(self, project: Project, seed: int) -> None:
        self._texts = {
            path: text
            for path, text in project.test_texts.items()
            if path.endswith(".py") and "def test" in text
        }
        self._tests = project.tests
        self._seed, self.options = seed, project.options
        prefix = f"{project.source_root}/" if project.source_root else ""
        self._tops = frozenset(
            path.removeprefix(prefix).partition("/")[0].removesuffix(".py") for path in project.sources
        )

    def change_all(self, number: int | None) -> tuple[dict[str, str], dict[str, Kind]]:
        """All test files as a round changes them, or unchanged and without comments; the functions that are
        changed, and of what kind the change is."""
        files: dict[str, str] = {}
        kinds: dict[str, Kind] = {}
        for path in self._texts:
            text, found = self._change(path, lambda function: number)
            if text is not None:
                files[path], kinds = text, kinds | found
        return files, kinds

    def change(self, functions: Mapping[str, int]) -> dict[str, str]:
        """Test files in which some functions are as a round changes them."""
        paths = {function.partition("::")[0] for function in functions}
        found = {path: self._change(path, functions.get)[0] for path in sorted(paths)}
        return {path: text for path, text in found.items() if text is not None}

    def _change(
        self, path: str, number_of: Callable[[str], int | None]
    ) -> tuple[str | None, dict[str, Kind]]:
        source = Source.parse(path, self._texts[path])
        if source is None:
            return None, {}
        names = solution_names(source.tree, self._tops, self._tests)
        kinds: dict[str, Kind] = {}
        chosen: list[_Site] = []
        for scope, name in source.scopes.items():
            number = number_of(f"{path}::{name}")
            if number is not None and isinstance(scope, Function) and scope.name.startswith("test"):
                rng = Random(f"{self._seed} {path} {name}")
                sites = _sites_of_round(scope, names, number, rng)
                chosen += sites
                if sites:
                    kinds[f"{path}::{name}"] = max(kind for kind, _ in sites)
        for _, change in chosen:
            change()
        return ast.unparse(ast.fix_missing_locations(source.tree)), kinds


@dataclass(frozen=True, slots=True)
class ProjectTwins:
    """The twins of a project's tests."""

    tests: Mapping[str, tuple[str, ...]]
    """Function -> its tests that pass with the project's own text."""
    twins: Mapping[str, tuple[Twin, ...]]

    @property
    def turned(self) -> frozenset[str]:
        """Tests that some twin turns."""
        return frozenset(test for found in self.twins.values() for twin in found for test in twin.turned)

    def write_exams(
        self, failing: Sequence[str], passing: Sequence[str], changer: TestChanger, seed: str
    ) -> ExamSet:
        """The exams of a task with whose change `failing` fail, and `passing` pass."""
        rng, wanted, stable = Random(seed), set(failing), {*failing, *passing}
        mine = sorted(one for one, tests in self.tests.items() if wanted.intersection(tests))
        others = sorted(self.twins.keys() - set(mine))
        used = [*mine, *sorted(rng.sample(others, min(_MOST_OTHERS, len(others))))]
        plan: list[dict[str, Twin]] = [{} for _ in range(_EXAMS)]
        turned: set[str] = set()
        for function in used:
            twins = _choose(self.twins.get(function, ()), wanted)
            for place, twin in zip(rng.sample(range(_EXAMS), len(twins)), twins, strict=True):
                plan[place][function] = twin
                turned |= set(twin.turned)
        exams = [Exam({}, tuple(sorted(stable)))]
        exams += [self._exam(used, chosen, stable, changer) for chosen in plan]
        reason = "no change of it was found that the project's own text fails by the test's own comparison"
        return ExamSet(tuple(exams), dict.fromkeys(sorted(wanted - turned), reason))

    def _exam(
        self, used: Sequence[str], chosen: Mapping[str, Twin], stable: set[str], changer: TestChanger
    ) -> Exam:
        passing: list[str] = []
        failing: list[str] = []
        for function in used:
            twin = chosen.get(function)
            passing += stable.intersection(self.tests[function]) if twin is None else twin.passing
            failing += () if twin is None else twin.failing
        files = changer.change({function: twin.number for function, twin in chosen.items()})
        ids = sorted([*passing, *failing])
        asked = {
            "ids": ids,
            "paths": sorted({test.partition("::")[0] for test in ids}),
            "options": changer.options,
        }
        overlay = {f"hidden/{path}": text for path, text in files.items()}
        return Exam(
            {**overlay, "expected.json": json.dumps(asked)}, tuple(sorted(passing)), tuple(sorted(failing))
        )

    def to_document(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> ProjectTwins:
        """The inverse of `to_document`."""
        return TypeAdapter(cls).validate_python(document)


async def find_project_twins(
    suite: Suite,
    baseline: Baseline,
    changer: TestChanger,
    at_once: int,
    advance: Callable[[int], None] = lambda step: None,
) -> ProjectTwins:
    """Runs the tests once as they are and in ROUNDS changed states. Raises SandboxError."""
    places, done = asyncio.Semaphore(at_once), 0
    suite = suite.within(baseline.timeout_s)

    async def run(number: int | None) -> tuple[SuiteRun, dict[str, Kind]]:
        nonlocal done
        async with places:
            files, kinds = await asyncio.to_thread(changer.change_all, number)
            found = await suite.run(files=files)
        done += 1
        advance(done)
        return found, kinds

    stable = set(baseline.stable)
    (base, _), *rounds = await asyncio.gather(*map(run, (None, *range(ROUNDS))))
    tests = _tests_of(base)
    twins: dict[str, list[Twin]] = {}
    for number, (found, kinds) in enumerate(rounds):
        ended = _tests_of(found)
        for name, kind in kinds.items():
            pairs = list(zip(tests.get(name, ()), ended.get(name, ()), strict=False))
            if len(pairs) == len(tests.get(name, ())):
                known = [(before, test) for before, test in pairs if before in stable]
                twin = _find_twin(number, kind, known, found, suite.project)
                twins.setdefault(name, []).extend([twin] if twin is not None else [])
    passing = {
        name: tuple(test for test in own if base.outcomes[test] == "passed" and test in stable)
        for name, own in tests.items()
    }
    return ProjectTwins(passing, {name: tuple(found) for name, found in twins.items() if found})


def _find_twin(
    number: int, kind: Kind, tests: Sequence[tuple[str, str]], run: SuiteRun, project: Project
) -> Twin | None:
    """The twin that a round's change of one function made, if any. `tests`: as they were called, and are."""
    turned = {test: before for before, test in tests if _fails_by_itself(run, test, kind, project)}
    passing = tuple(test for _, test in tests if run.outcomes[test] == "passed")
    return Twin(number, int(kind), passing, tuple(turned), tuple(turned.values())) if turned else None


def _fails_by_itself(run: SuiteRun, test: str, kind: Kind, project: Project) -> bool:
    """Whether a test failed by what it expects, not by an error on the way to a comparison."""
    failure = run.failures.get(test)
    if failure is None or run.outcomes[test] != "failed":
        return False
    is_in_tests = failure.innermost is not None and failure.innermost.path in project.tests
    return kind is Kind.JUDGEMENT or (is_in_tests and failure.message.startswith(_OWN))


def _tests_of(run: SuiteRun) -> dict[str, list[str]]:
    """The tests of each function, in the order in which they ran."""
    found: dict[str, list[str]] = {}
    for test, (path, name) in run.functions.items():
        found.setdefault(f"{path}::{name}", []).append(test)
    return found


def _choose(twins: Sequence[Twin], wanted: set[str]) -> list[Twin]:
    """As many twins of one function as exams have it: those that turn most of the tests that matter, and what
    else they turn; constants first, which also show who equals everything."""
    chosen: list[Twin] = []
    missing = wanted
    for _ in range(_TURNED):
        rest = [one for one in twins if one not in chosen] or chosen
        if not rest:
            return []
        best = max(rest, key=lambda one: (len(missing.intersection(one.turned)), -one.kind, len(one.turned)))
        chosen.append(best)
        missing = missing - set(best.turned)
    return chosen


def _sites_of_round(function: Function, names: frozenset[str], number: int, rng: Random) -> list[_Site]:
    """What a round changes in a test function: a place of what it judges by; in every second round, a place
    in each row of its parametrization."""
    rows = [row for decorator in function.decorator_list for row in _rows(decorator)]
    if rows and number % 2:
        lists = [_in_turn(find_places(row, names), rng) for row in rows]
    else:
        lists = [_in_turn(chain(*(_places(node, names) for node in _judging(function))), rng)]
    number = number // 2 if rows else number
    return [sites[number % len(sites)] for sites in lists if sites]


def _in_turn(places: Iterable[Place], rng: Random) -> list[_Site]:
    """Ways to change places, in random order: constants and others in turn."""
    sites = [(kind, change) for kind, changes in places for change in changes]
    rng.shuffle(sites)
    constants = [site for site in sites if site[0] is Kind.CONSTANT]
    others = [site for site in sites if site[0] is not Kind.CONSTANT]
    return [site for site in chain(*zip_longest(constants, others)) if site is not None]


def _rows(decorator: ast.expr) -> list[ast.expr]:
    """The values of a parametrization, without what names them."""
    match decorator:
        case ast.Call(
            func=ast.Attribute(attr="parametrize"), args=[_, ast.List() | ast.Tuple() as values, *_]
        ):
            params = [row for row in values.elts if isinstance(row, ast.Call)]
            plain = [row for row in values.elts if not isinstance(row, ast.Call)]
            return plain + [ast.Tuple(row.args) for row in params if row.args]
        case _:
            return []


def _judging(function: Function) -> list[ast.AST]:
    """What in a test says what it expects: assertions, methods named assert..., exceptions that are caught;
    where there is none, all of its body."""
    found: list[ast.AST] = []
    for node in ast.walk(function):
        match node:
            case ast.Assert() | ast.Call(func=ast.Attribute(attr="raises" | "warns")):
                found.append(node)
            case ast.Call(func=ast.Attribute(attr=name)) if name.startswith("assert"):
                found.append(node)
            case _:
                pass
    is_docstring = bool(function.body) and isinstance(function.body[0], ast.Expr)
    return found or list(function.body[is_docstring:])


def _places(node: ast.AST, names: frozenset[str]) -> Iterator[Place]:
    """The places of a node, and of a call of unittest's those that it judges by."""
    match node:
        case ast.Call(func=ast.Attribute(attr=name) as method, args=arguments) if name in _OPPOSITES:
            yield Kind.JUDGEMENT, [partial(setattr, method, "attr", _OPPOSITES[name])]
            if name == "assertEqual" and len(arguments) > 1:
                yield from operand_places(arguments, 1)
        case _:
            pass
    yield from find_places(node, names)
