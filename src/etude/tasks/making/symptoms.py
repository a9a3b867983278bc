"""The symptom of a failing test as a user meets it: a call, what it gave, what it should have given."""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from etude.tasks.making.changes import TestFailure
from etude.tasks.making.source import read_tree

_MOST_CALL = 120
_MOST_VALUE = 120
_WHERE = re.compile(r"^\s*\+\s+where (?P<value>.+?) = (?P<call>.+)$", re.MULTILINE)
_EXCEPTION = re.compile(r"^(?P<kind>[\w.]+)(?:: (?P<text>.*))?$")
_NOT_RAISED = re.compile(r"DID NOT (?:RAISE|WARN)[^<]*<class '(?:[\w.]*\.)?(?P<kind>\w+)'>")


@dataclass(frozen=True, slots=True)
class Symptom:
    """What of a failure may be told: the call in code, values as their `repr`."""

    kind: Literal["wrong value", "raises", "not raised"]
    call: str
    seen: str
    wanted: str
    subject: str
    """What is called; symptoms of one subject are told once."""


def find_symptom(failure: TestFailure, tests: Mapping[str, str]) -> Symptom | None:
    """None where the failing statement or the message shows nothing that a user could repeat."""
    path = failure.test.partition("::")[0]
    statement, scope = _statement(tests.get(path, ""), failure)
    if statement is None or scope is None:
        return None
    closed = _Closed(tests[path], scope)
    message = re.sub(r"^(AssertionError: )?assert ", "assert ", failure.message.strip())
    not_raised = _NOT_RAISED.search(message)
    if not_raised:
        call = closed.text(_called(statement))
        kind = not_raised["kind"]
        return (call and Symptom("not raised", call, "", f"`{kind}`", call.partition("(")[0])) or None
    if message.startswith("assert "):
        return _wrong_value(message, statement, closed)
    raised = _EXCEPTION.match(message.split("\n")[0])
    call = closed.text(_called(statement))
    if raised is None or not call or raised["kind"] == "Failed":
        return None
    text = raised["text"] or ""
    shown = text and len(text) <= _MOST_VALUE and not re.search(r"\b_[a-z]\w*|0x[0-9a-f]{6}|/\w+/", text)
    seen = f"`{raised['kind'].rpartition('.')[2]}`" + (f" ({text})" if shown else "")
    return Symptom("raises", call, seen, "", call.partition("(")[0])


def _statement(text: str, failure: TestFailure) -> tuple[ast.stmt | None, ast.AST | None]:
    """The innermost statement at the failing line, and the test function that it is in."""
    tree = read_tree(text)
    name = failure.test.rpartition("::")[2].partition("[")[0]
    for scope in ast.walk(tree) if tree is not None else ():
        if not isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef) or scope.name != name:
            continue
        if not scope.lineno <= failure.test_line <= (scope.end_lineno or 0):
            continue
        found = [
            entry
            for entry in ast.walk(scope)
            if isinstance(entry, ast.stmt)
            and entry is not scope
            and entry.lineno <= failure.test_line <= (entry.end_lineno or 0)
        ]
        if found:
            return max(found, key=lambda entry: entry.lineno), scope
    return None, None


def _called(statement: ast.stmt) -> ast.expr | None:
    """The expression that a statement works out: the call, not what is done with its result."""
    if isinstance(statement, ast.With | ast.AsyncWith):
        return _called(statement.body[-1])
    if isinstance(statement, ast.Assert):
        test = statement.test
        sides = [test.left, *test.comparators] if isinstance(test, ast.Compare) else [test]
        return next((side for side in sides if any(isinstance(e, ast.Call) for e in ast.walk(side))), None)
    value = getattr(statement, "value", None)
    return value if isinstance(value, ast.expr) else None


def _wrong_value(message: str, statement: ast.stmt, closed: _Closed) -> Symptom | None:
    """From the values that pytest shows of a failed `assert`."""
    if not isinstance(statement, ast.Assert):
        return None
    test, negated = statement.test, False
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        test, negated = test.operand, True
    first = message.removeprefix("assert ").split("\n")[0]
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq | ast.Is):
        sides = re.split(r" == | is ", first)
        call = closed.text(test.left)
        if len(sides) != 2 or not call:
            return None
        seen, wanted = sides
    elif isinstance(test, ast.Compare):
        return None
    else:
        call = closed.text(test)
        where = next((found for found in _WHERE.finditer(message)), None)
        seen = where["value"] if where else first.removeprefix("not ")
        wanted = "a false value" if negated else "a true value"
        wanted = str(not negated) if seen in ("True", "False") else wanted
    if not call or any(not _is_plain(value) for value in (seen, wanted)) or seen == wanted:
        return None
    values = [value if value.startswith("a ") else f"`{value}`" for value in (seen, wanted)]
    return Symptom("wrong value", call, values[0], values[1], call.partition("(")[0])


def _is_plain(value: str) -> bool:
    """Whether a value is shown whole and the same each time."""
    return (
        bool(value) and len(value) <= _MOST_VALUE and not re.search(r"\.\.\.|0x[0-9a-f]{6}|`|\b_[a-z]", value)
    )


class _Closed:
    """Writes expressions of a test so that they stand alone: simple locals replaced by their values."""

    def __init__(self, text: str, scope: ast.AST) -> None:
        tree = read_tree(text)
        assert tree is not None
        self.known = set(dir(builtins))
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                self.known |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        self.values = dict[str, ast.expr]()
        names = [node.id for node in ast.walk(scope) if isinstance(node, ast.Name) and _stores(node)]
        for node in ast.walk(scope):
            if isinstance(node, ast.Assign) and len(node.targets) == 1:
                target = node.targets[0]
                if isinstance(target, ast.Name) and names.count(target.id) == 1:
                    self.values[target.id] = node.value

    def text(self, expression: ast.expr | None) -> str:
        """Empty where it is too long, or depends on what only the test knows."""
        if expression is None:
            return ""
        for _ in range(3):
            expression = _Substitution(self.values).visit(
                ast.parse(ast.unparse(expression), mode="eval").body
            )
            assert expression is not None
        names = {node.id for node in ast.walk(expression) if isinstance(node, ast.Name) and not _stores(node)}
        bound = {node.id for node in ast.walk(expression) if isinstance(node, ast.Name) and _stores(node)}
        text = ast.unparse(expression)
        calls = any(isinstance(node, ast.Call) for node in ast.walk(expression))
        plain = calls and len(text) <= _MOST_CALL and "`" not in text and "\n" not in text
        return text if plain and names <= self.known | bound else ""


def _stores(node: ast.Name) -> bool:
    return isinstance(node.ctx, ast.Store)


class _Substitution(ast.NodeTransformer):
    def __init__(self, values: Mapping[str, ast.expr]) -> None:
        self.values = values

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self.values.get(node.id, node) if isinstance(node.ctx, ast.Load) else node
