"""Extracts the symptom of a failing test as a user sees it: a call, its actual and its expected result."""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from etude.kit.syntax import parse_expression, parse_python
from etude.tasks.making.changes import TestFailure
from etude.tasks.making.reproductions import Failing, find_failing, write_script
from etude.tasks.making.slicing import is_raises

_MOST_VALUE = 120
_WHERE = re.compile(r"^\s*\+\s+where (?P<value>.+?) = (?P<call>.+)$", re.MULTILINE)
_EXCEPTION = re.compile(r"^(?P<kind>[\w.]+)(?:: (?P<text>.*))?$")
_NOT_RAISED = re.compile(r"DID NOT (?:RAISE|WARN)[^<]*<class '(?:[\w.]*\.)?(?P<kind>\w+)'>")

Call = tuple[str, str]
"""Preceding statements, and an expression with a call."""


@dataclass(frozen=True, slots=True)
class Symptom:
    """The part of a failure that an instruction may reveal: the call as code, values as their `repr`."""

    kind: Literal["wrong value", "untrue", "raises", "not raised"]
    script: str
    """Preceding statements; may be empty."""
    call: str
    """An expression, or statements."""
    seen: str = ""
    wanted: str = ""

    @property
    def subject(self) -> str:
        """The called function; symptoms with the same subject are described once."""
        return self.call.rpartition("\n")[2].strip().partition("(")[0]

    @property
    def is_statement(self) -> bool:
        """Whether `call` is not a single-line expression."""
        try:
            parse_expression(self.call)
        except SyntaxError:
            return True
        return "\n" in self.call


def find_calls(symptom: Symptom) -> frozenset[Call]:
    """The calls of a symptom, independent of the expected results."""
    return frozenset((symptom.script, call) for call in _outermost_calls(parse_python(symptom.call)))


def _outermost_calls(node: ast.AST) -> list[str]:
    """The outermost calls, looking through those of builtins; for operators and statements the whole node."""
    inner = [child for child in ast.iter_child_nodes(node) if has_call(child)]
    is_own = isinstance(node, ast.Call) and not hasattr(builtins, ast.unparse(node.func))
    is_whole = is_own or not inner or isinstance(node, ast.BinOp)
    if isinstance(node, ast.Module | ast.Expr | ast.Assert | ast.expr) and not is_whole:
        return [call for child in inner for call in _outermost_calls(child)]
    return [ast.unparse(node)]


def find_symptom(failure: TestFailure, tests: Mapping[str, str]) -> Symptom | None:
    """The symptom of a failure; None if statement and message show nothing that a user could reproduce."""
    failing = find_failing(failure, tests)
    if failing is None or not failure.message.strip():
        return None
    message = re.sub(r"^(AssertionError: )?assert ", "assert ", failure.message.strip())
    not_raised = _NOT_RAISED.search(message)
    if not_raised:
        return _not_raised(f"`{not_raised['kind']}`", failing)
    raised = _EXCEPTION.match(message.split("\n")[0])
    asserted = None if failing.is_nested else as_assert(failing.statement)
    if asserted is not None and (message.startswith(("assert ", "AssertionError")) or raised is None):
        return _wrong(message, asserted, failing)
    if message.startswith("assert "):
        alone = write_script(failing, failing.block[-1])
        return alone and Symptom("untrue", *alone)
    if raised is None or raised["kind"] == "Failed":
        return None
    kind, text = raised["kind"].rpartition(".")[2], raised["text"] or ""
    shown = text and len(text) <= _MOST_VALUE and not re.search(r"\b_[a-z]\w*|0x[0-9a-f]{6}|/\w+/|`", text)
    seen = f"`{kind}`" + (f" ({text})" if shown and kind != "AssertionError" else "")
    pieces = [failing.block[-1]] if failing.is_nested else [_called(failing.statement), failing.block[-1]]
    for piece in pieces:
        alone = write_script(failing, piece) if piece is not None else None
        if alone is not None:
            return Symptom("raises", *alone, seen)
    return None


def as_assert(statement: ast.stmt) -> ast.Assert | None:
    """An assertion as an `assert` statement, also one of unittest; None for any other statement."""
    if isinstance(statement, ast.Assert):
        return statement
    call = statement.value if isinstance(statement, ast.Expr) else None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
        return None
    form = _UNITTEST.get(call.func.attr)
    if form is None or ast.unparse(call.func.value) != "self" or len(call.args) < form.count("{}"):
        return None
    text = form.format(*(f"({ast.unparse(one)})" for one in call.args))
    return ast.Assert(parse_expression(text))


_UNITTEST = {
    "assertEqual": "{} == {}",
    "assertEquals": "{} == {}",
    "assertNotEqual": "{} != {}",
    "assertTrue": "{}",
    "assertFalse": "not {}",
    "assertIs": "{} is {}",
    "assertIsNone": "{} is None",
    "assertIsNotNone": "{} is not None",
    "assertIn": "{} in {}",
    "assertNotIn": "{} not in {}",
    "assertIsInstance": "isinstance({}, {})",
    "assertLess": "{} < {}",
    "assertGreater": "{} > {}",
}


def _called(statement: ast.stmt) -> ast.expr | None:
    """The expression that a statement evaluates: the call, without the use of its result."""
    if is_raises(statement):
        return _called(statement.body[-1]) if isinstance(statement, ast.With) else None
    asserted = as_assert(statement)
    if asserted is not None:
        test = asserted.test
        sides = [test.left, *test.comparators] if isinstance(test, ast.Compare) else [test]
        calling = [side for side in sides if has_call(side)]
        return calling[0] if len(calling) == 1 else None  # which of them raised is not known
    value = getattr(statement, "value", None)
    if not isinstance(value, ast.expr) or not (isinstance(statement, ast.Expr) or has_call(value)):
        return None  # such as `a.b = 1`, whose value is no call
    return value


def _not_raised(wanted: str, failing: Failing) -> Symptom | None:
    """The symptom of an exception that was not raised by the last statement of the block."""
    outer = failing.block[-1]
    body = outer.body if isinstance(outer, ast.With) and is_raises(outer) else [failing.statement]
    value = body[-1].value if isinstance(body[-1], ast.Expr) else None
    failing = replace(failing, block=[*failing.block[:-1], *body], statement=body[-1])
    alone = write_script(failing, value) if value is not None else None
    alone = alone or write_script(failing, body[-1])
    return alone and Symptom("not raised", *alone, wanted=wanted)


def _wrong(message: str, asserted: ast.Assert, failing: Failing) -> Symptom | None:
    """The symptom of a failed `assert`: with pytest's values if they are plain, else `untrue`."""
    test, negated = asserted.test, False
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        test, negated = test.operand, True
    first = message.removeprefix("assert ").removeprefix("AssertionError: ").split("\n")[0]
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.Eq | ast.Is):
        piece: ast.expr = test.left
        sides = re.split(r" == | is | != ", first)
        seen, wanted = sides if len(sides) == 2 else ("", "")
    else:
        piece = test
        where = _WHERE.search(message)
        seen = where["value"] if where else first.removeprefix("not ")
        wanted = "a false value" if negated else "a true value"
        wanted = str(not negated) if seen in ("True", "False") else wanted
        seen = "" if isinstance(test, ast.Compare | ast.BoolOp) else seen
    if has_call(piece) and seen != wanted and _is_plain(seen) and _is_plain(wanted):
        alone = write_script(failing, piece)
        if alone is not None:
            seen, wanted = (text if text.startswith("a ") else f"`{text}`" for text in (seen, wanted))
            return Symptom("wrong value", *alone, seen, wanted)
    alone = write_script(failing, asserted.test) if has_call(asserted.test) else None
    alone = alone or write_script(failing, asserted)
    return alone and Symptom("untrue", *alone)


def has_call(node: ast.AST) -> bool:
    """Whether a node contains a call."""
    return any(isinstance(entry, ast.Call) for entry in ast.walk(node))


def _is_plain(value: str) -> bool:
    """Whether a value is shown completely and deterministically."""
    return (
        bool(value) and len(value) <= _MOST_VALUE and not re.search(r"\.\.\.|0x[0-9a-f]{6}|`|\b_[a-z]", value)
    )
