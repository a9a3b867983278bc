"""Splits hidden tests into probes, which enter the sandbox, and expected values, which never do.

The code under test shares a process with the tests that call it. It can read everything in a test file there
(frames, `gc`, `co_consts`), and can manipulate every comparison made there. So each assertion that is a
statement of a test function is split: `assert tally([1, 2]) == 3` becomes `__record__(0, tally([1, 2]))`
inside, while `3` stays outside; the recorded value is sent out as plain data and compared here. To forge
records, code would have to compute the expected values.

Only a literal can stay outside. Of any other assertion the truth value is recorded, and the expected value
enters the sandbox: such tests are also run with changed expectations (see `twins`).
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
    """The condition of one assertion on the value that its probe records."""

    line: int
    wanted: object
    operator: str
    """`Eq` or `Is`: `wanted` is compared with the value; `Truth`: the assertion's truth value is recorded."""

    @property
    def is_outside(self) -> bool:
        """Whether the expected value stays outside."""
        return self.operator != "Truth"

    def failure(self, value: object) -> str | None:
        """Why `value` fails the assertion, like `12 != 14`; None if it passes."""
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
    """Indices of the expectations that it must reach: those of all its assertions."""

    def __str__(self) -> str:
        return f"{self.path}::{self.name}"


@dataclass(frozen=True)
class HiddenFile:
    """One hidden test file: its probe for the sandbox, its expectations for us."""

    path: str
    segments: tuple[tuple[str, str], ...]
    """(name, source) of each test function and, with the name "", of the code between them; without comments,
    docstrings, messages and the expected values that can stay outside."""
    expectations: tuple[Expectation, ...]
    tests: tuple[HiddenTest, ...]
    """In order."""
    solution_names: frozenset[str]
    """Names in it that are imported from the code under test."""

    @property
    def probe(self) -> str:
        """The source that enters the sandbox."""
        return "\n".join(source for _, source in self.segments)

    def keeps_secret(self, test: HiddenTest) -> bool:
        """Whether passing a test requires a value that stays outside."""
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
    """A value that is not plain data: equal to nothing."""

    description: str

    def __eq__(self, other: object) -> bool:
        return False

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<{self.description}>"


@lru_cache(maxsize=4096)
def split_tests(
    path: str, text: str, workspace: frozenset[str] = frozenset(), hidden: frozenset[str] = frozenset()
) -> HiddenFile:
    """Splits a hidden test file. Raises TaskError if it does not parse or has no plain test functions.

    `workspace`: top-level names of the workspace's modules, `hidden`: paths of all hidden files. They
    determine which imports of a file are code under test.
    """
    try:
        return _split_tests(path, text, workspace, hidden)
    except (SyntaxError, ValueError) as error:
        raise TaskError(f"does not parse: {error}", field="hidden_files", received=path) from error
    except (RecursionError, MemoryError) as error:
        raise TaskError(
            "has expressions that are nested too deeply for Python",
            field="hidden_files",
            received=path,
            fix="build the value with a loop, or read it from a file",
        ) from error


def _split_tests(path: str, text: str, workspace: frozenset[str], hidden: frozenset[str]) -> HiddenFile:
    tree = parse_python(text, path)
    names = solution_names(tree, workspace, hidden)
    expectations: list[Expectation] = []
    tests: list[HiddenTest] = []
    for node in tree.body:
        if isinstance(node, ast.Assert) or _is_async_test(node):
            raise TaskError(
                "assertions must be in plain test functions",
                field="hidden_files",
                received=f"{path}:{node.lineno}",
            )
        if is_test(node):
            tests.append(HiddenTest(path, node.name, _cut_assertions(node, names, expectations)))
    if not tests:
        raise TaskError("no top-level test functions", field="hidden_files", received=path)
    if len({test.name for test in tests}) < len(tests):
        raise TaskError("two tests have the same name", field="hidden_files", received=path)
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
    """(path, name) of a test -> values of its oracles."""
    return {
        (result.path, result.name): read_oracles(map(read_row, result.values)) for result in report.results
    }


def is_test(node: ast.AST) -> TypeGuard[ast.FunctionDef]:
    """Whether a statement of a module is a test function."""
    return isinstance(node, ast.FunctionDef) and node.name.startswith("test")


def solution_names(tree: ast.Module, workspace: Collection[str], hidden: Collection[str]) -> frozenset[str]:
    """Names that a module imports from the code under test and never rebinds."""
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
    """Whether an expression is what the code under test returns for constants, unmodified.

    The constants are inputs of the solution. `names`: see `solution_names`.
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
    """Names that a node binds."""
    match node:
        case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name):
            return [name]
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return [name]
        case _:
            return []


def _root(node: ast.expr, names: Collection[str]) -> bool:
    """Whether an expression is a name imported from the solution, or an attribute of an answer."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id in names if isinstance(node, ast.Name) else is_answer(node, names)


def _is_solution(name: str, workspace: Collection[str], hidden: Collection[str]) -> bool:
    """Whether a dotted name is, or is in, a module of the workspace that is not a hidden file."""
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


def _cut_assertions(
    test: ast.FunctionDef, names: Collection[str], expectations: list[Expectation]
) -> tuple[int, ...]:
    """Replaces assertions of a test by records, in place, if they are statements of it and must be reached.
    Appends their conditions to `expectations` and returns the indices of these."""
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
    """The expectation whose wanted value stays outside, and the other side; None if it cannot.

    An easily guessed value is no secret if the other side may be a comparison itself; a value that is not
    plain data would equal no answer.
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
    """(index, value) of one record; index -1 for a row that no probe would send."""
    if not isinstance(row, list) or len(row) != 2:
        return -1, None
    index = decode_value(row[0])
    return (index if type(index) is int else -1), decode_value(row[1])


def decode_value(value: Value) -> object:
    """Plain data from its wire form (`testrunner.encode_value`); Opaque for everything else.

    The data comes from a process that ran the agent's code and is untrusted.
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
    """Items of a set, or keys of a dict. Raises an error for many with one hash, which an attacker can
    choose: building such a set would block all sessions for minutes."""
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
