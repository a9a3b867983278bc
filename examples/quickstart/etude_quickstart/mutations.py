"""Bugs: changes of one node of the syntax tree, applied to one line of the source text.

The source is never printed back from its tree: a mutation replaces some columns of one line, so all
other bytes of the file stay as they are.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from etude.kit.syntax import parse_python

BugKind = Literal[
    "operator",
    "augmented",
    "comparison",
    "logical",
    "off_by_one",
    "boolean",
    "variable",
    "negation",
    "range_end",
    "missing_return",
    "builtin",
    "swapped",
]
"""The node that a mutation changes: an arithmetic operator, an augmented assignment, a comparison, `and` or
`or`, a number (by one), True or False, the variable read, a `not`, the end of a range, an omitted `return`, a
builtin (for its opposite), two operands or arguments (swapped)."""

BUG_KINDS: tuple[BugKind, ...] = get_args(BugKind)

_OPERATORS: dict[type[ast.operator], str] = {
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.FloorDiv: "//",
    ast.Mod: "%",
}
_COMPARISONS: dict[type[ast.cmpop], str] = {
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
    ast.Eq: "==",
    ast.NotEq: "!=",
}
_OPPOSITES = {
    "min": "max",
    "max": "min",
    "any": "all",
    "all": "any",
    "sum": "len",
    "len": "sum",
    "startswith": "endswith",
    "endswith": "startswith",
    "upper": "lower",
    "lower": "upper",
}
_SIMPLE = (ast.Name, ast.Constant)
_VARIABLES: tuple[frozenset[str], ...] = (
    frozenset(("a", "b", "c", "k", "m", "n", "x", "y", "i", "v", "total", "best", "p", "q", "r")),
    frozenset(("xs", "ys", "es")),
    frozenset(("s", "t", "ch", "w")),
    frozenset(("low", "high")),
)
"""Groups of interchangeable names, of one type each."""


@dataclass(frozen=True, slots=True)
class Mutation:
    """Replaces columns [start, end) of `line` (counted from 1) by `text`."""

    kind: BugKind
    line: int
    start: int
    end: int
    text: str

    def apply(self, source: str) -> str:
        """The source with this one change."""
        lines = source.split("\n")
        old = lines[self.line - 1]
        lines[self.line - 1] = old[: self.start] + self.text + old[self.end :]
        return "\n".join(lines)


def mutations(source: str) -> list[Mutation]:
    """Every mutation of the file's one function, in a fixed order. Docstring and imports are left alone.

    `source` is ASCII with one statement to a line, as the families write it.
    """
    tree = parse_python(source)
    function = next(node for node in tree.body if isinstance(node, ast.FunctionDef))
    context = _Context(source.split("\n"), function)
    found: list[Mutation] = []
    body = function.body[1:] if ast.get_docstring(function, clean=False) is not None else function.body
    for default in function.args.defaults:
        found.extend(_off_by_one(default, context))
    for statement in body:
        for node in ast.walk(statement):
            for rule in _RULES.get(type(node), ()):
                found.extend(rule(node, context))
    return sorted(found, key=lambda mutation: (mutation.line, mutation.start, mutation.kind, mutation.text))


class _Context:
    """The lines of the file, and where each of its names is defined."""

    def __init__(self, lines: list[str], function: ast.FunctionDef) -> None:
        self.lines = lines
        self.parameters = {argument.arg for argument in function.args.args}
        self.spans: dict[str, list[tuple[int, int]]] = {}
        self._find_spans(function, len(lines))
        self.methods_of = {id(node.value) for node in ast.walk(function) if isinstance(node, ast.Attribute)}
        self.called = {id(node.func) for node in ast.walk(function) if isinstance(node, ast.Call)}

    def _find_spans(self, node: ast.AST, end: int) -> None:
        """Records the lines on which a local certainly has a value: to the end of the loop that sets it."""
        if isinstance(node, ast.For):
            end = node.end_lineno or end
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            self.spans.setdefault(node.id, []).append((node.lineno + 1, end))
        for child in ast.iter_child_nodes(node):
            self._find_spans(child, end)

    def defined(self, name: str, line: int) -> bool:
        """Whether `name` has a value when `line` runs."""
        return name in self.parameters or any(
            first <= line <= last for first, last in self.spans.get(name, ())
        )

    def text(self, node: ast.expr) -> str:
        assert node.end_col_offset is not None
        return self.lines[node.lineno - 1][node.col_offset : node.end_col_offset]

    def replace(self, kind: BugKind, node: ast.expr | ast.stmt, text: str) -> Mutation:
        assert node.end_col_offset is not None
        return Mutation(kind, node.lineno, node.col_offset, node.end_col_offset, text)

    def between(self, kind: BugKind, left: ast.expr, right: ast.expr, old: str, new: str) -> Mutation:
        """Replaces `old` between two nodes."""
        assert left.end_col_offset is not None
        start = self.lines[left.lineno - 1].index(old, left.end_col_offset, right.col_offset)
        return Mutation(kind, left.lineno, start, start + len(old), new)


def _operator(node: ast.BinOp, context: _Context) -> Iterator[Mutation]:
    old = _OPERATORS.get(type(node.op))
    if old is None:
        return
    for new in _OPERATORS.values():
        if new != old:
            yield context.between("operator", node.left, node.right, old, new)


def _swapped_operands(node: ast.BinOp, context: _Context) -> Iterator[Mutation]:
    left, right = context.text(node.left), context.text(node.right)
    simple = isinstance(node.left, _SIMPLE) and isinstance(node.right, _SIMPLE)
    if simple and left != right and type(node.op) in _OPERATORS and not isinstance(node.op, ast.Mult):
        yield context.replace("swapped", node, f"{right} {_OPERATORS[type(node.op)]} {left}")


def _swapped_arguments(node: ast.Call, context: _Context) -> Iterator[Mutation]:
    if len(node.args) == 2 and not node.keywords and all(isinstance(entry, _SIMPLE) for entry in node.args):
        first, second = node.args
        if context.text(first) == context.text(second):
            return
        start, end = first.col_offset, second.end_col_offset
        assert end is not None
        yield Mutation("swapped", node.lineno, start, end, f"{context.text(second)}, {context.text(first)}")


def _augmented(node: ast.AugAssign, context: _Context) -> Iterator[Mutation]:
    assert isinstance(node.target, ast.Name)
    old = _OPERATORS[type(node.op)] + "="
    for new in ("+=", "-=", "*="):
        if new != old:
            yield context.between("augmented", node.target, node.value, old, new)


def _comparison(node: ast.Compare, context: _Context) -> Iterator[Mutation]:
    operator = node.ops[0]
    if isinstance(operator, ast.In):
        yield context.between("negation", node.left, node.comparators[0], " in ", " not in ")
    elif isinstance(operator, ast.NotIn):
        yield context.between("negation", node.left, node.comparators[0], " not in ", " in ")
    else:
        old = _COMPARISONS[type(operator)]
        for new in _COMPARISONS.values():
            if new != old:
                yield context.between("comparison", node.left, node.comparators[0], old, new)


def _logical(node: ast.BoolOp, context: _Context) -> Iterator[Mutation]:
    old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
    yield context.between("logical", node.values[0], node.values[1], f" {old} ", f" {new} ")


def _off_by_one(node: ast.expr, context: _Context) -> Iterator[Mutation]:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        for value in (node.value - 1, node.value + 1):
            if 0 <= value <= 9:
                yield context.replace("off_by_one", node, str(value))


def _boolean(node: ast.Constant, context: _Context) -> Iterator[Mutation]:
    if isinstance(node.value, bool):
        yield context.replace("boolean", node, str(not node.value))


def _variable(node: ast.Name, context: _Context) -> Iterator[Mutation]:
    if isinstance(node.ctx, ast.Store) or id(node) in context.methods_of or id(node) in context.called:
        return
    for group in _VARIABLES:
        if node.id in group:
            for name in sorted(group - {node.id}):
                if context.defined(name, node.lineno):
                    yield context.replace("variable", node, name)


def _negated_if(node: ast.If, context: _Context) -> Iterator[Mutation]:
    test = node.test
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yield context.replace("negation", test, context.text(test.operand))
    elif not isinstance(test, ast.BoolOp) and not _is_membership(test):
        yield context.replace("negation", test, f"not {context.text(test)}")


def _is_membership(test: ast.expr) -> bool:
    return isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.In | ast.NotIn)


def _range_end(node: ast.Call, context: _Context) -> Iterator[Mutation]:
    if not (isinstance(node.func, ast.Name) and node.func.id == "range"):
        return
    end = node.args[-1]
    if isinstance(end, ast.BinOp):
        yield context.replace("range_end", end, context.text(end.left))
    else:
        yield context.replace("range_end", end, f"{context.text(end)} + 1")
        yield context.replace("range_end", end, f"{context.text(end)} - 1")


def _missing_return(node: ast.Return, context: _Context) -> Iterator[Mutation]:
    if node.value is not None and not isinstance(node.value, ast.Constant):
        yield context.replace("missing_return", node, context.lines[node.lineno - 1][node.value.col_offset :])


def _builtin(node: ast.Call, context: _Context) -> Iterator[Mutation]:
    name = node.func
    old = name.id if isinstance(name, ast.Name) else name.attr if isinstance(name, ast.Attribute) else ""
    if old in _OPPOSITES:
        end = name.end_col_offset
        assert end is not None
        yield Mutation("builtin", node.lineno, end - len(old), end, _OPPOSITES[old])


_RULES: dict[type[ast.AST], tuple[Callable[..., Iterator[Mutation]], ...]] = {
    ast.BinOp: (_operator, _swapped_operands),
    ast.Call: (_swapped_arguments, _range_end, _builtin),
    ast.AugAssign: (_augmented,),
    ast.Compare: (_comparison,),
    ast.BoolOp: (_logical,),
    ast.Constant: (_off_by_one, _boolean),
    ast.Name: (_variable,),
    ast.If: (_negated_if,),
    ast.Return: (_missing_return,),
}
