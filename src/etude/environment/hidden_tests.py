"""Hidden tests taken apart: what may enter the sandbox, and the expectations that never do.

The code under test shares a process with the tests that call it. Whatever a test file says there can be read
by that code (frames, `gc`, `co_consts`), and every judgement made there can be bent. So each
assertion is cut in two: `assert tally([1, 2]) == 3` becomes `__record__(0, tally([1, 2]))` inside, while the
operator and `3` stay outside; the recorded value crosses as plain data, and is compared here. Whoever
forges records must know the values, and has to compute them.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from etude.errors import TaskError
from etude.sandbox.inside.testrunner import OPERATORS, RECORD, Value, failed_comparison
from etude.sandbox.types import ProbeResult

_MAX_ALIKE = 100
_SEALED = ("Eq", "NotEq", "Is", "IsNot", "In", "NotIn")


@dataclass(frozen=True)
class Expectation:
    """What one assertion demands of the value that its probe records."""

    line: int
    operator: str
    """Name of the comparison node; `Truth` where only the truth of an expression is recorded."""
    literal: object
    """The side that stays outside; the wanted truth for `Truth`."""
    literal_on_left: bool
    must_run: bool
    """Whether the test function cannot end without reaching it."""
    sealed: bool
    """False where the wanted value can be guessed from what is inside: such an assertion can be forged."""

    def failure(self, value: object) -> str | None:
        """Why `value` does not do, like `12 != 14`; None if it does."""
        unshown = f"assertion in line {self.line} does not hold"
        if self.operator == "Truth":
            return None if value is self.literal else unshown
        left, right = (self.literal, value) if self.literal_on_left else (value, self.literal)
        failed, _ = OPERATORS[self.operator]
        if _compare(self.operator, left, right):
            return None
        try:
            return failed_comparison(failed, left, right)
        except ValueError:  # a number of more digits than Python writes out
            return unshown


@dataclass(frozen=True)
class HiddenFile:
    """One hidden test file: its probe for the sandbox, its expectations for us."""

    path: str
    probe: str
    """Python source without comments, docstrings, messages and expectations."""
    expectations: tuple[Expectation, ...]
    tests: tuple[tuple[str, tuple[int, ...]], ...]
    """(function name, indices of the expectations that it must reach), in order."""

    def judge(self, result: ProbeResult | None, position: int) -> str | None:
        """Why test number `position` failed; None if it passed."""
        name, required = self.tests[position]
        if result is None:
            return "not run"
        reached: set[int] = set()
        for row in result.values:
            index, value = _row(row)
            if not 0 <= index < len(self.expectations):
                return "not a record of this test"
            failure = self.expectations[index].failure(value)
            if failure is not None:
                return failure
            reached.add(index)
        if result.error is not None:
            return result.error
        missing = [self.expectations[index].line for index in required if index not in reached]
        return f"{name} ended before line {missing[0]}" if missing else None


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
def take_apart(path: str, text: str) -> HiddenFile:
    """Splits a hidden test file. Raises TaskError if it does not parse or has no plain test functions."""
    try:
        tree = ast.parse(text, path)
    except (SyntaxError, ValueError) as error:
        raise TaskError(f"does not parse: {error}", field="hidden_files", received=path) from error
    cutter = _Cutter()
    tests: list[tuple[str, tuple[int, ...]]] = []
    for node in tree.body:
        if isinstance(node, ast.Assert) or _is_async_test(node):
            raise TaskError(
                "assertions belong into plain test functions",
                field="hidden_files",
                received=f"{path}:{node.lineno}",
            )
        first = len(cutter.expectations)
        cutter.cut_statement(node)
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test"):
            indices = range(first, len(cutter.expectations))
            required = tuple(index for index in indices if cutter.expectations[index].must_run)
            tests.append((node.name, required))
    tree.body = [node for node in tree.body if not _is_docstring(node)]
    if not tests:
        raise TaskError("no top-level test functions", field="hidden_files", received=path)
    if len({name for name, _ in tests}) < len(tests):
        raise TaskError("two tests of one name", field="hidden_files", received=path)
    probe = ast.unparse(ast.fix_missing_locations(tree))
    return HiddenFile(path, probe, tuple(cutter.expectations), tuple(tests))


_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def _always_runs(node: ast.AST, name: str) -> bool:
    """Whether control that reaches `node` always enters its block.

    A loop counts as entered: one over nothing would test nothing. `try` and `with` may be left early.
    """
    return name == "finalbody" or (name == "body" and isinstance(node, (*_DEFINITIONS, ast.For, ast.While)))


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _is_async_test(node: ast.stmt) -> bool:
    return isinstance(node, ast.AsyncFunctionDef) and node.name.startswith("test")


class _Cutter:
    """Replaces assertions by records, in place, and collects what was cut off."""

    def __init__(self) -> None:
        self.expectations: list[Expectation] = []

    def cut_statement(self, node: ast.AST, must_run: bool = True) -> None:
        """Cuts all assertions below a statement; `must_run`: whether control always passes through it."""
        for name in ("body", "orelse", "finalbody", "handlers", "cases"):
            block = getattr(node, name, None)
            if isinstance(block, list) and block:
                setattr(node, name, self._cut_block(block, must_run and _always_runs(node, name)))

    def _cut_block(self, block: list[Any], must_run: bool) -> list[Any]:
        result: list[Any] = []
        for node in block:
            if isinstance(node, ast.Assert):
                result.extend(self._cut_assertion(node.test, True, node.lineno, must_run))
            elif not _is_docstring(node):
                self.cut_statement(node, must_run and not isinstance(node, _DEFINITIONS))
                result.append(node)
        return result or [ast.Pass()]

    def _cut_assertion(self, test: ast.expr, wanted: bool, line: int, must_run: bool) -> list[ast.stmt]:
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            return self._cut_assertion(test.operand, not wanted, line, must_run)
        if wanted and isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
            return [cut for part in test.values for cut in self._cut_assertion(part, True, line, must_run)]
        if wanted and isinstance(test, ast.Compare) and len(test.ops) == 1:
            sides, operator = (test.left, test.comparators[0]), type(test.ops[0]).__name__
            for side, other, on_left in ((sides[1], sides[0], False), (sides[0], sides[1], True)):
                literal = _literal(side)
                if literal is not None:
                    found = Expectation(line, operator, literal[0], on_left, must_run, operator in _SEALED)
                    return [self._record(found, other)]
        open_comparison = isinstance(test, ast.Compare)
        truth = ast.UnaryOp(ast.Not(), ast.UnaryOp(ast.Not(), test))
        return [self._record(Expectation(line, "Truth", wanted, False, must_run, not open_comparison), truth)]

    def _record(self, expectation: Expectation, value: ast.expr) -> ast.stmt:
        index = ast.Constant(len(self.expectations))
        self.expectations.append(expectation)
        return ast.Expr(ast.Call(ast.Name(RECORD, ast.Load()), [index, value], []))


def _literal(node: ast.expr) -> tuple[object] | None:
    """The value of a literal, in a tuple; None for any other expression."""
    try:
        return (ast.literal_eval(node),)
    except (ValueError, TypeError, RecursionError, SyntaxError):
        return None


def _compare(operator: str, left: object, right: object) -> bool:
    if operator in ("Is", "IsNot"):
        same = type(left) is type(right) and left == right
        return same if operator == "Is" else not same
    if isinstance(left, Opaque) or isinstance(right, Opaque):
        # Nothing is known of such a value, so it satisfies nothing, `!=` included.
        return False
    try:
        return OPERATORS[operator][1](left, right)
    except TypeError:
        return False


def _row(row: Value) -> tuple[int, object]:
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
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError):
        return Opaque("malformed value")


def _items(content: Sequence[Value]) -> list[object]:
    return [decode_value(item) for item in content]


def _keys(content: Sequence[Value]) -> list[object]:
    """Items of a set, or keys of a dict. Raises ValueError for many that have one hash, as numbers can be
    chosen: to put so many together would hold up all sessions for minutes."""
    keys = _items(content)
    if max(Counter(map(hash, keys)).values(), default=0) > _MAX_ALIKE:
        raise ValueError("too many items of one hash")
    return keys


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
