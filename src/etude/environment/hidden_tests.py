"""Hidden tests taken apart: what may enter the sandbox, and the expected values that never do.

The code under test shares a process with the tests that call it. Whatever a test file says there can be read
by that code (frames, `gc`, `co_consts`), and every judgement made there can be bent. So each assertion that
is a statement of a test function is cut in two: `assert tally([1, 2]) == 3` becomes
`__record__(0, tally([1, 2]))` inside, while `3` stays outside; the recorded value crosses as plain data, and
is compared here. Who forges records must know the values, and has to compute them.

Only a literal can stay outside. Of any other assertion the truth is recorded, and what it compares with
enters: such tests are run with changed expectations as well (see `twins`).
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import Any, TypeGuard

from etude.environment.oracles import OracleValues, mark_oracles, read_oracles
from etude.errors import TaskError
from etude.kit.syntax import parse_python
from etude.sandbox.inside.testrunner import (
    FIRST_ORACLE,
    MAX_VALUES,
    RECORD,
    Value,
    encode_value,
    failed_comparison,
)
from etude.sandbox.types import ProbeReport, ProbeResult

_MAX_ALIKE = 100


@dataclass(frozen=True)
class Expectation:
    """What one assertion demands of the value that its probe records."""

    line: int
    wanted: object
    operator: str
    """`Eq` or `Is`, where `wanted` is compared with the value; `Truth` where the assertion's truth is
    recorded."""

    @property
    def is_outside(self) -> bool:
        """Whether what is recorded is compared with a value that stays outside."""
        return self.operator != "Truth"

    def failure(self, value: object) -> str | None:
        """Why `value` does not do, like `12 != 14`; None if it does."""
        if self.wanted == value and (self.operator == "Eq" or type(value) is type(self.wanted)):
            return None
        if not self.is_outside:
            return f"assertion in line {self.line} does not hold"
        try:
            return failed_comparison("!=" if self.operator == "Eq" else "is not", value, self.wanted)
        except ValueError:  # a number of more digits than Python writes out
            return f"assertion in line {self.line} does not hold"


@dataclass(frozen=True)
class HiddenTest:
    """One test function of a hidden file."""

    path: str
    name: str
    required: tuple[int, ...]
    """Indices of the expectations that it must reach: all of its own assertions."""

    def __str__(self) -> str:
        return f"{self.path}::{self.name}"


@dataclass(frozen=True)
class HiddenFile:
    """One hidden test file: its probe for the sandbox, its expectations for us."""

    path: str
    segments: tuple[tuple[str, str], ...]
    """(name, source) of each test function and, with the name "", of what stands between them; without
    comments, docstrings, messages and the expected values that can stay outside."""
    expectations: tuple[Expectation, ...]
    tests: tuple[HiddenTest, ...]
    """In order."""
    solution_names: frozenset[str]
    """Names in it that stand for what it imports from the code under test."""

    @property
    def probe(self) -> str:
        """What enters."""
        return "\n".join(source for _, source in self.segments)

    def keeps_secret(self, test: HiddenTest) -> bool:
        """Whether passing a test takes a value that stays outside."""
        return any(self.expectations[index].is_outside for index in test.required)

    def judge(self, result: ProbeResult | None, test: HiddenTest) -> str | None:
        """Why a test failed; None if it passed."""
        if result is None:
            return "not run"
        reached: set[int] = set()
        for row in result.values:
            index, value = read_row(row)
            if index <= FIRST_ORACLE:
                continue
            if not 0 <= index < len(self.expectations):
                return "not a record of this test"
            failure = self.expectations[index].failure(value)
            if failure is not None:
                return failure
            reached.add(index)
        if result.error is not None:
            return result.error
        missing = [self.expectations[index].line for index in test.required if index not in reached]
        if missing and len(result.values) >= MAX_VALUES:
            return f"{test.name} compares more than {MAX_VALUES} values"
        return f"{test.name} ended before line {missing[0]}" if missing else None


@dataclass(frozen=True)
class Opaque:
    """A value that is no plain data: equal to nothing."""

    description: str

    def __eq__(self, other: object) -> bool:
        return False

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<{self.description}>"


@lru_cache(maxsize=4096)
def take_apart(
    path: str, text: str, workspace: frozenset[str] = frozenset(), hidden: frozenset[str] = frozenset()
) -> HiddenFile:
    """Splits a hidden test file. Raises TaskError if it does not parse or has no plain test functions.

    `workspace`: top-level names of the workspace's modules, `hidden`: paths of all hidden files. They say
    what of a file's imports is code under test.
    """
    try:
        return _take_apart(path, text, workspace, hidden)
    except (SyntaxError, ValueError) as error:
        raise TaskError(f"does not parse: {error}", field="hidden_files", received=path) from error
    except (RecursionError, MemoryError) as error:
        raise TaskError(
            "has expressions that are nested too deeply for Python",
            field="hidden_files",
            received=path,
            fix="build the value with a loop, or read it from a file",
        ) from error


def _take_apart(path: str, text: str, workspace: frozenset[str], hidden: frozenset[str]) -> HiddenFile:
    tree = parse_python(text, path)
    names = solution_names(tree, workspace, hidden)
    expectations: list[Expectation] = []
    tests: list[HiddenTest] = []
    for node in tree.body:
        if isinstance(node, ast.Assert) or _is_async_test(node):
            raise TaskError(
                "assertions belong into plain test functions",
                field="hidden_files",
                received=f"{path}:{node.lineno}",
            )
        if is_test(node):
            tests.append(HiddenTest(path, node.name, _cut(node, names, expectations)))
    if not tests:
        raise TaskError("no top-level test functions", field="hidden_files", received=path)
    if len({test.name for test in tests}) < len(tests):
        raise TaskError("two tests of one name", field="hidden_files", received=path)
    functions = [node for node in tree.body if is_test(node)]
    mark_oracles(tree, functions, names, lambda index: expectations[index].is_outside)
    ast.fix_missing_locations(tree)
    segments = tuple(
        (name, "\n".join(map(ast.unparse, nodes)))
        for name, nodes in groupby(
            (node for node in tree.body if not _is_docstring(node)),
            lambda node: node.name if is_test(node) else "",
        )
    )
    file = HiddenFile(path, segments, tuple(expectations), tuple(tests), names)
    compile(file.probe, path, "exec", dont_inherit=True)  # raises here what would be raised inside
    return file


def judge_report(hidden: Sequence[HiddenFile], report: ProbeReport) -> dict[HiddenTest, str]:
    """The reason of every hidden test that did not demonstrably pass."""
    results = {(result.path, result.name): result for result in report.results}
    reasons = {
        test: file.judge(results.get((file.path, test.name)), test) for file in hidden for test in file.tests
    }
    return {test: reason for test, reason in reasons.items() if reason is not None}


def oracles_in(report: ProbeReport) -> dict[tuple[str, str], OracleValues]:
    """What the oracles of each test were, by its path and name."""
    return {
        (result.path, result.name): read_oracles(map(read_row, result.values)) for result in report.results
    }


def is_test(node: ast.AST) -> TypeGuard[ast.FunctionDef]:
    """Whether a statement of a module is a test function."""
    return isinstance(node, ast.FunctionDef) and node.name.startswith("test")


def solution_names(tree: ast.Module, workspace: Collection[str], hidden: Collection[str]) -> frozenset[str]:
    """Names that stand for what a module imports from the code under test, and for nothing else."""
    imported: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom) and not getattr(node, "level", 0):
            package = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            imported |= {
                alias.asname or alias.name.partition(".")[0]
                for alias in node.names
                if _is_solution(package + alias.name, workspace, hidden)
            }
    return frozenset(imported - {name for node in ast.walk(tree) for name in _bound(node)})


def is_answer(node: ast.expr, names: Collection[str]) -> bool:
    """Whether an expression is what the code under test returns for constants, and nothing made of it.

    Its constants are inputs: what the solution is asked. `names`: see `solution_names`.
    """
    match node:
        case ast.Call(func=function, args=arguments, keywords=keywords):
            given = [*arguments, *(keyword.value for keyword in keywords)]
            return _root(function, names) and all(_is_literal(one) or is_answer(one, names) for one in given)
        case ast.Attribute():
            return _root(node, names)
        case _:
            return False


def _bound(node: ast.AST) -> list[str]:
    """Names that a node gives another meaning."""
    match node:
        case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
            return [name]
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return [name]
        case _:
            return []


def _root(node: ast.expr, names: Collection[str]) -> bool:
    """Whether an expression is a name of the solution's, or an attribute of an answer."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id in names if isinstance(node, ast.Name) else is_answer(node, names)


def _is_solution(name: str, workspace: Collection[str], hidden: Collection[str]) -> bool:
    """Whether a dotted name is a module of the workspace, or in one, and no hidden file's."""
    top = name.partition(".")[0]
    if top not in workspace or top in sys.stdlib_module_names:
        return False
    parts = name.split(".")
    bases = ["/".join(parts[:length]) for length in range(1, len(parts) + 1)]
    return not any(path in hidden for base in bases for path in (f"{base}.py", f"{base}/__init__.py"))


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _is_async_test(node: ast.stmt) -> bool:
    return isinstance(node, ast.AsyncFunctionDef) and node.name.startswith("test")


def _cut(test: ast.FunctionDef, names: Collection[str], expectations: list[Expectation]) -> tuple[int, ...]:
    """Replaces the assertions of a test by records, in place, as far as they are statements of it and must be
    reached; what was cut off is added to `expectations`. The indices of these."""
    first = len(expectations)
    body: list[ast.stmt] = []
    may_have_returned = False
    for node in test.body:
        if isinstance(node, ast.Assert) and not may_have_returned:
            index = ast.Constant(len(expectations))
            expectation, value = _secret(node, names) or (
                Expectation(node.lineno, True, "Truth"),
                ast.UnaryOp(ast.Not(), ast.UnaryOp(ast.Not(), node.test)),
            )
            expectations.append(expectation)
            body.append(ast.Expr(ast.Call(ast.Name(RECORD, ast.Load()), [index, value], [])))
        elif not _is_docstring(node):
            body.append(node)
            may_have_returned |= any(isinstance(below, ast.Return) for below in ast.walk(node))
    test.body = body or [ast.Pass()]
    return tuple(range(first, len(expectations)))


def _secret(node: ast.Assert, names: Collection[str]) -> tuple[Expectation, ast.expr] | None:
    """The expectation whose wanted value stays outside, and the other side; None where there is none.

    A value that anyone would guess is no secret where the other side may be a comparison itself; one that
    cannot cross as plain data would equal no answer.
    """
    if not (isinstance(node.test, ast.Compare) and len(node.test.ops) == 1):
        return None
    operator, sides = type(node.test.ops[0]).__name__, (node.test.comparators[0], node.test.left)
    if operator not in ("Eq", "Is"):
        return None
    for literal, other in (sides, sides[::-1]):
        if _is_literal(literal):
            wanted = ast.literal_eval(literal)
            is_guessable = not wanted or wanted == 1
            crosses = decode_value(encode_value(wanted)) == wanted
            if crosses and (not is_guessable or is_answer(other, names)):
                return Expectation(node.lineno, wanted, operator), other
    return None


def _is_literal(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError):
        return False
    return True


def read_row(row: Value) -> tuple[int, object]:
    """(index, value) of one record; index -1 for what no probe would send."""
    if not isinstance(row, list) or len(row) != 2:
        return -1, None
    index = decode_value(row[0])
    return (index if type(index) is int else -1), decode_value(row[1])


def decode_value(value: Value) -> object:
    """Plain data from its wire form (`testrunner.encode_value`); Opaque for everything else.

    The bytes come from a process that the agent's code ran in: nothing about them is trusted.
    """
    try:
        kind, content = value
        return _DECODERS[kind](content)
    except _TooAlikeError as error:
        return Opaque(str(error))
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError):
        return Opaque("malformed value")


def _items(content: Sequence[Value]) -> list[object]:
    return [decode_value(item) for item in content]


def _keys(content: Sequence[Value]) -> list[object]:
    """Items of a set, or keys of a dict. Raises an error for many that have one hash, as numbers can be
    chosen: to put so many together would hold up all sessions for minutes."""
    keys = _items(content)
    if max(Counter(map(hash, keys)).values(), default=0) > _MAX_ALIKE:
        raise _TooAlikeError(f"a set of more than {_MAX_ALIKE} items of one hash")
    return keys


class _TooAlikeError(ValueError):
    pass


_DECODERS: dict[str, Callable[[Any], object]] = {
    "none": lambda content: None,
    "bool": bool,
    "int": lambda content: int(content, 16),
    "float": float.fromhex,
    "str": str,
    "bytes": bytes.fromhex,
    "list": _items,
    "tuple": lambda content: tuple(_items(content)),
    "set": lambda content: set(_keys(content)),
    "dict": lambda content: dict(
        zip(_keys([key for key, _ in content]), _items([item for _, item in content]), strict=True)
    ),
    "opaque": lambda content: Opaque(str(content)[:60]),
}
