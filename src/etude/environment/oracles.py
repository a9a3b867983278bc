"""Oracles: values that a hidden test computes itself, independently of the solution.

`assert result == sorted(xs)` computes its expected value in the process of the code under test, which may
replace `sorted`, empty `xs`, or fix random inputs, so that its wrong answer is what the test then expects. So
operands of comparisons and arguments of checks that do not depend on the solution are *oracles*: they are
recorded like answers, and must equal those recorded with the reference solution.

    assert abs(f(x) - math.sqrt(x)) < 1e-9  --->  assert abs(f(x) - __record__(-10, math.sqrt(x))) < ...
    assert f(xs) == sorted(xs)              --->  assert __record__(-13, f(xs)) == __record__(-12, sorted(xs))

The value that is compared with an oracle is recorded under the next lower index: its data must equal the
oracle's, whatever its own `__eq__` says.

Recorded are only values that no right solution changes, and that are evaluated equally often with each: none
under a condition or in a loop over the solution's results, none from files, clocks or the shared random
generator.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from etude.kit.syntax import parse_python
from etude.sandbox.inside.testrunner import FIRST_ORACLE, RECORD

_PURE = frozenset((
    "array", "base64", "binascii", "bisect", "calendar", "cmath", "collections", "copy", "dataclasses",
    "difflib", "enum", "fractions", "functools", "hashlib", "heapq", "itertools", "json", "keyword",
    "math", "numbers", "operator", "re", "statistics", "string", "struct", "textwrap", "types",
    "typing", "unicodedata", "zlib",
))  # fmt: skip
"""Modules of the standard library without state that a right solution may change."""
_IMPURE = frozenset((
    "__import__", "compile", "dir", "eval", "exec", "globals", "hash", "id", "input", "locals", "open",
    "vars",
))  # fmt: skip
_CONDITIONS = (ast.BoolOp, ast.IfExp, ast.If, ast.Match, ast.Try, ast.While)
_SCOPES = (ast.ClassDef, ast.FunctionDef, ast.Lambda)

OracleValues = Mapping[int, object]
"""Index of an oracle -> digest of its values in all evaluations of a test, in order."""


def mark_oracles(
    tree: ast.Module,
    tests: Iterable[ast.FunctionDef],
    solution: Collection[str],
    is_outside: Callable[[int], bool],
) -> None:
    """Wraps the oracles of tests in records, in place.

    `solution`: names of the code under test, whose inputs are no oracles. `is_outside`: whether the value
    recorded under an index is compared outside, so that the test has no oracle for it.
    """
    foreign = {*_IMPURE, *_foreign_names(tree)}
    foreign |= tainted_names(tree.body, foreign)
    marker = _Marker(solution, foreign, is_outside)
    for test in tests:
        plain = [node for node in test.body if not isinstance(node, _SCOPES)]
        if any(isinstance(one, ast.Return) for node in plain for one in ast.walk(node)):
            continue
        marker.mark(test)


def stable_oracles(one: OracleValues, other: OracleValues) -> OracleValues:
    """The oracles that were equal in two runs of the reference solution, with answers equal to them."""
    return {
        index: digest
        for index, digest in one.items()
        if digest == other.get(index) and (index % 2 == 0 or digest == one.get(index + 1))
    }


def read_oracles(rows: Iterable[tuple[int, object]]) -> OracleValues:
    """The oracles among the records of a test."""
    return {index: digest for index, digest in rows if index <= FIRST_ORACLE}


def copy_arguments(probe: str, solution: Collection[str]) -> str:
    """The probe with arguments of the solution copied, so that it cannot change the test's own values.

    `solution`: names of the code under test.
    """
    tree = parse_python(probe)
    foreign = {*solution, *tainted_names(tree.body, solution)} - {RECORD}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and any(name in foreign for name in _used(node.func)):
            node.args = [_copied(argument) for argument in node.args]
            for keyword in node.keywords:
                keyword.value = _copied(keyword.value)
    return ast.unparse(ast.fix_missing_locations(tree))


def _copied(node: ast.expr) -> ast.expr:
    if isinstance(node, ast.Starred):
        return ast.Starred(_copied(node.value), node.ctx)
    if isinstance(node, ast.Constant | ast.GeneratorExp | ast.Lambda):  # generators cannot be copied
        return node
    copy = ast.Call(ast.Name("__import__", ast.Load()), [ast.Constant("copy")], [])
    return ast.Call(ast.Attribute(copy, "deepcopy", ast.Load()), [node], [])


class _Marker(ast.NodeTransformer):
    """Wraps oracles in records, except those that are evaluated conditionally or later."""

    def __init__(
        self, solution: Collection[str], foreign: Collection[str], is_outside: Callable[[int], bool]
    ) -> None:
        self._solution = solution
        self._foreign = foreign
        self._local: Collection[str] = ()
        self._known: dict[ast.AST, bool] = {}
        self._is_outside = is_outside
        self._next = FIRST_ORACLE

    def mark(self, test: ast.FunctionDef) -> None:
        """Wraps the oracles of one test."""
        self._local = tainted_names(test.body, self._foreign)
        self._known = {}
        self.generic_visit(test)

    def visit(self, node: ast.AST) -> ast.AST:
        match node:
            case ast.Compare(left=left, ops=[ast.Eq()], comparators=[right]):
                before = self._next
                node.left, node.comparators[0] = self._mark(left), self._mark(right)
                if self._next == before - 2 and _is_recorded(node.comparators[0]):
                    node.left = _recorded(before - 1, node.left)
                elif self._next == before - 2 and _is_recorded(node.left):
                    node.comparators[0] = _recorded(before - 1, node.comparators[0])
                return node
            case ast.Compare():
                node.left = self._mark(node.left)
                node.comparators = [self._mark(side) for side in node.comparators]
                return node
            case ast.BinOp():
                node.left, node.right = self._mark(node.left), self._mark(node.right)
                return node
            case ast.Call(func=ast.Name(id=name), args=[index, value]) if name == RECORD:
                if not self._is_outside(ast.literal_eval(index)):
                    node.args[1] = self.visit(value)  # type: ignore[assignment]
                return node
            case ast.Call(func=ast.Name(id="any" | "next")) | ast.comprehension(ifs=[_, *_]):
                return node
            case ast.For(iter=given) if self._is_foreign(given) or any(
                isinstance(one, ast.Break | ast.Continue | ast.Return) for one in ast.walk(node)
            ):
                return node
            case (
                ast.ListComp(generators=loops)
                | ast.SetComp(generators=loops)
                | ast.DictComp(generators=loops)
                | ast.GeneratorExp(generators=loops)
            ) if any(self._is_foreign(loop.iter) for loop in loops):
                return node
            case ast.Call():
                if not any(name in self._solution for name in _used(node.func)):
                    node.args = [self._mark(argument) for argument in node.args]
                return node
            case _:
                return node if isinstance(node, (*_CONDITIONS, *_SCOPES)) else self.generic_visit(node)

    def _mark(self, node: ast.expr) -> ast.expr:
        if self._is_foreign(node) or isinstance(node, ast.GeneratorExp | ast.NamedExpr):
            return self.visit(node)  # type: ignore[return-value]
        is_builtin = isinstance(node, ast.Name) and hasattr(builtins, node.id)
        is_literal = not any(isinstance(one, ast.Name) for one in ast.walk(node))
        if is_builtin or is_literal or isinstance(node, ast.Lambda | ast.Starred):
            return node
        self._next -= 2
        return _recorded(self._next + 2, node)

    def _is_foreign(self, node: ast.AST) -> bool:
        """Whether a node uses a foreign name. Memoised, so each node is visited once."""
        known = self._known.get(node)
        if known is None:
            if isinstance(node, ast.Name | ast.Lambda | ast.Attribute):
                known = any(name in self._local or name in self._foreign for name in _used(node))
            else:
                known = any(map(self._is_foreign, ast.iter_child_nodes(node)))
            self._known[node] = known
        return known


def _recorded(index: int, node: ast.expr) -> ast.Call:
    return ast.Call(ast.Name(RECORD, ast.Load()), [ast.Constant(index), node], [])


def _is_recorded(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == RECORD


def _foreign_names(tree: ast.Module) -> Iterator[str]:
    """Names that a module imports, except from pure modules of the standard library."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                module = node.module or "" if isinstance(node, ast.ImportFrom) else alias.name
                is_pure = module.partition(".")[0] in _PURE and not getattr(node, "level", 0)
                if not is_pure and (module, alias.name) != ("random", "Random"):
                    yield alias.asname or alias.name.partition(".")[0]


def tainted_names(body: Sequence[ast.stmt], foreign: Collection[str]) -> set[str]:
    """Further names to which the values of `foreign` names may flow in some statements. Takes linear time."""
    flows: dict[str, list[list[str]]] = {}
    found: set[str] = set()
    for node in (node for statement in body for node in ast.walk(statement)):
        value, targets = _flow(node)
        reached = [one.id for target in targets for one in ast.walk(target) if isinstance(one, ast.Name)]
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            reached = [node.name]
        if isinstance(node, ast.ExceptHandler) and node.name:
            found.add(node.name)
        for name in _used(value) if value is not None and reached else ():
            flows.setdefault(name, []).append(reached)
    waiting = [name for name in flows if name in foreign or name in found]
    while waiting:
        for reached in flows.pop(waiting.pop(), ()):
            new = [name for name in reached if name not in found]
            reached.clear()
            found.update(new)
            waiting += new
    return found


def _flow(node: ast.AST) -> tuple[ast.AST | None, Sequence[ast.expr]]:
    """(source, targets) of a node's data flow: an assignment's value and targets, or a call made for its
    effect and the arguments that it may change."""
    match node:
        case ast.Assign(targets=targets, value=value):
            return value, targets
        case (
            ast.AugAssign(target=target, value=value)
            | ast.AnnAssign(target=target, value=ast.expr() as value)
            | ast.NamedExpr(target=target, value=value)
            | ast.For(target=target, iter=value)
            | ast.comprehension(target=target, iter=value)
            | ast.withitem(context_expr=value, optional_vars=ast.expr() as target)
        ):
            return value, [target]
        case ast.Expr(value=ast.Call(func=function, args=arguments, keywords=keywords) as call):
            given = [*arguments, *(keyword.value for keyword in keywords), function]
            return call, [one for one in given if isinstance(one, ast.Name | ast.Attribute)]
        case ast.FunctionDef() | ast.ClassDef():
            return node, []
        case _:
            return None, []


def _used(node: ast.AST) -> Iterator[str]:
    """Names that a node uses, except its own parameters, and `random` in `random.Random`."""
    waiting: list[tuple[ast.AST, frozenset[str]]] = [(node, frozenset())]
    while waiting:
        node, own = waiting.pop()
        match node:
            case ast.Attribute(value=ast.Name(id="random"), attr="Random"):
                continue
            case ast.Name(id=name) if name not in own:
                yield name
            case ast.FunctionDef(args=parameters) | ast.Lambda(args=parameters):
                own |= {one.arg for one in ast.walk(parameters) if isinstance(one, ast.arg)}
            case _:
                pass
        waiting += [(child, own) for child in ast.iter_child_nodes(node)]
