"""Extracts a part of a test as a self-contained script, with its dependencies.

failing statement ──> statements before it that matter ──> arguments by their values, fixtures by their bodies
                                                     └──> imports, constants and helpers of the test's file

A script is not run here: it has the test's own statements, in their order, with the values of the test.
"""

from __future__ import annotations

import ast
import builtins
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from etude.kit.syntax import parse_expression
from etude.tasks.making.changes import TestFailure
from etude.tasks.making.methods import flatten_method
from etude.tasks.making.slicing import bound_names, is_raises, loaded_names, slice_before
from etude.tasks.making.source import Function, read_tree

_MOST_LINES, _MOST_CHARS = 16, 900
_MOST_CALL = 120
Text = tuple[str, str]
"""Preceding statements, which may be empty, and an expression or statements."""


_read_tree = lru_cache(maxsize=64)(read_tree)


class NotSelfContainedError(Exception):
    """The code depends on values that only exist in the test's run."""


@dataclass(frozen=True, slots=True)
class Failing:
    """The place of a test's failure."""

    failure: TestFailure
    tests: Mapping[str, str]
    """Test files, path to text."""
    function: ast.FunctionDef
    block: Sequence[ast.stmt]
    """The function's statements up to the outermost one that failed."""
    statement: ast.stmt
    """The innermost failed statement."""

    @property
    def is_nested(self) -> bool:
        """Whether the statement is within a loop, a branch or the like, on which it depends."""
        outer = self.block[-1]
        inside = outer.body if isinstance(outer, ast.With) and is_raises(outer) else [outer]
        return self.statement is not outer and self.statement not in inside


def find_failing(failure: TestFailure, tests: Mapping[str, str]) -> Failing | None:
    """Finds the failed statement of a test; None if the failing line is not in one."""
    name = failure.name.rpartition(".")[2]
    tree, line = _read_tree(tests.get(failure.path, "")), failure.test_line
    if tree is None:
        return None
    for scope in ast.walk(tree):
        if not isinstance(scope, ast.FunctionDef) or scope.name != name or not _holds(scope, line):
            continue
        before, function = flatten_method(tree, scope)
        at = next((at for at, entry in enumerate(function.body) if _holds(entry, line)), None)
        if at is None:
            continue
        inner = [
            node for node in ast.walk(function.body[at]) if isinstance(node, ast.stmt) and _holds(node, line)
        ]
        statement = max(inner, key=lambda node: node.lineno)
        return Failing(failure, tests, function, [*before, *function.body[: at + 1]], statement)
    return None


def _holds(node: ast.stmt, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or 0)


def write_script(failing: Failing, piece: ast.AST) -> Text | None:
    """Statements that must run before a piece of the failing statement, and the piece itself; None if they
    are too long or not self-contained. Short values are substituted for their names."""
    arguments = {one.arg for one in ast.walk(failing.function.args) if isinstance(one, ast.arg)}
    before = slice_before(failing.block[:-1], piece, arguments)
    try:
        script = _Script(failing.failure, failing.tests)
        script.need(_free_names([*before, piece]), failing.failure.path, failing.function)
    except NotSelfContainedError:
        return None
    return _inline([*script.bindings, *before], piece) or _write(script, before, piece)


def _write(script: _Script, before: Sequence[ast.stmt], piece: ast.AST) -> Text | None:
    nodes: list[ast.AST] = [*script.bindings, *before, piece]
    stored = [name for node in nodes[:-1] for name in bound_names(node)]
    clashes = any(stored.count(name) > 1 for name in map(_target, script.bindings) if name)
    for at in reversed(range(len(nodes) - 1)):
        node = nodes[at]
        if isinstance(node, ast.With) and not node.body:
            if not isinstance(nodes[-1], ast.stmt):
                return None
            body = [one for one in nodes[at + 1 :] if isinstance(one, ast.stmt)]
            nodes[at:] = [ast.With(node.items, body, lineno=0)]
    first = "\n".join([*dict.fromkeys(script.imports), *map(ast.unparse, nodes[:-1])])
    last = ast.unparse(nodes[-1])
    too_long = len(f"{first}\n{last}".splitlines()) > _MOST_LINES or len(first) + len(last) > _MOST_CHARS
    if too_long or clashes or "`" in first + last or (isinstance(piece, ast.expr) and len(last) > _MOST_CALL):
        return None
    try:
        compile(f"{first}\n{last}", "script", "exec")
    except SyntaxError:  # such as a `return` of the test
        return None
    return first, last


def _inline(before: Sequence[ast.stmt], piece: ast.AST) -> Text | None:
    """The piece with names replaced by their values, if all statements before it only assign values."""
    if not isinstance(piece, ast.expr):
        return None
    values: dict[str, ast.expr] = {}
    for node in before:
        name = _target(node)
        if not name or name in values or not isinstance(node, ast.Assign):
            return None
        values[name] = node.value
    inner = [node for top in [*before, piece] for node in ast.walk(top)]
    uses = Counter(node.id for node in inner if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load))
    if any(uses[name] != 1 and not isinstance(value, ast.Constant) for name, value in values.items()):
        return None
    expression: ast.expr = piece
    for _ in range(4):
        expression = _Substitution(values).visit(parse_expression(ast.unparse(expression)))
    text = ast.unparse(expression)
    return ("", text) if len(text) <= _MOST_CALL and "`" not in text and "\n" not in text else None


def _target(node: ast.stmt) -> str:
    """The name that a plain assignment or a definition binds."""
    if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
        return node.targets[0].id
    return node.name if isinstance(node, Function | ast.ClassDef) else ""


class _Substitution(ast.NodeTransformer):
    """Replaces names, and attributes such as `request.param`, by their values."""

    def __init__(self, values: Mapping[str, ast.expr]) -> None:
        self.values = values

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self.values.get(node.id, node) if isinstance(node.ctx, ast.Load) else node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        return self.values.get(ast.unparse(node)) or self.generic_visit(node)


class _Script:
    """Collects the dependencies of a piece of a test: imports, and statements that bind names, in order."""

    def __init__(self, failure: TestFailure, tests: Mapping[str, str]) -> None:
        self._failure, self._tests = failure, tests
        self.imports: list[str] = []
        self.bindings: list[ast.stmt] = []
        self._places: dict[str, str] = {}
        """Name that is bound or being bound -> the file in which it was looked up."""
        for name, (path, line) in failure.fixtures.items():
            decorators = getattr(self._fixture(path, line), "decorator_list", ())
            if any("autouse=True" in ast.unparse(one) for one in decorators):
                self._places[name] = path
                self._bind_fixture(name, path, line)

    def need(self, names: set[str], path: str, function: ast.FunctionDef | None) -> None:
        """Binds names that code of a file uses, within a function or not. Raises NotSelfContainedError."""
        arguments = [*function.args.args, *function.args.kwonlyargs] if function is not None else []
        mine = {one.arg for one in arguments}
        for name in sorted(names):
            if hasattr(builtins, name) and name not in mine:
                continue
            if name in self._places:
                if self._places[name] != path and name not in self._failure.fixtures:
                    raise NotSelfContainedError
                continue
            self._places[name] = path
            if function is not None and name in mine:
                self._bind_argument(name, path, function)
            else:
                self._bind_global(name, path)

    def _bind_argument(self, name: str, path: str, function: ast.FunctionDef) -> None:
        failure = self._failure
        if name in failure.values:
            value = parse_expression(failure.values[name])
        else:
            value = _parametrized(function.decorator_list, name, failure.indices.get(name))
        if value is not None and ast.unparse(value) == name:
            self._bind_global(name, path)
        elif value is not None:
            self.need(_free_names([value]) - {name}, path, None)
            self.bindings.append(_assign(name, value))
        elif name in failure.fixtures:
            self._bind_fixture(name, *failure.fixtures[name])
        else:
            raise NotSelfContainedError

    def _bind_fixture(self, name: str, path: str, line: int) -> None:
        """Binds a name by the body of a fixture that ends in `return`, `yield` or a `with` around one."""
        function = self._fixture(path, line)
        body = [node for node in function.body if not _is_docstring(node)] if function is not None else []
        last = body[-1] if body else None
        around: list[ast.stmt] = []
        if isinstance(last, ast.With) and len(last.body) == 1:
            around = [ast.With(last.items, [])]
            last = last.body[0]
        value = last.value if isinstance(last, ast.Return | ast.Expr) else None
        if isinstance(last, ast.Expr):
            value = value.value if isinstance(value, ast.Yield) else None
        inner = [node for top in body[:-1] for node in ast.walk(top)]
        if function is None or value is None or any(isinstance(node, _LEAVING) for node in inner):
            raise NotSelfContainedError
        given = _fixture_value(function.decorator_list, self._failure.indices.get(name))
        if given is not None:
            value = _Substitution({"request.param": given}).visit(value)
        self.need(_free_names([*body[:-1], *around, value]), path, function)
        self.bindings += [*body[:-1], *around]
        if ast.unparse(value) != name:
            self.bindings.append(_assign(name, value))

    def _fixture(self, path: str, line: int) -> ast.FunctionDef | None:
        tree = _read_tree(self._tests.get(path, ""))
        for node in ast.walk(tree) if tree is not None else ():
            if isinstance(node, ast.FunctionDef):
                first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
                if line in (first, node.lineno):
                    return node
        return None

    def _bind_global(self, name: str, path: str) -> None:
        """Binds a name by an import or a top-level definition of the file."""
        tree = _read_tree(self._tests.get(path, ""))
        found = [node for node in tree.body if name in bound_names(node)] if tree is not None else []
        if not found or (len(found) > 1 and not all(isinstance(node, ast.FunctionDef) for node in found)):
            raise NotSelfContainedError
        node = found[-1]  # after its overloads
        if isinstance(node, ast.Import | ast.ImportFrom):
            aliases = [one for one in node.names if (one.asname or one.name).partition(".")[0] == name]
            if not aliases or getattr(node, "level", 0):
                raise NotSelfContainedError
            is_from = isinstance(node, ast.ImportFrom)
            only = ast.ImportFrom(node.module, aliases, 0) if is_from else ast.Import(aliases)
            self.imports.append(ast.unparse(only))
        elif _target(node):
            self.need(_free_names([node]) - {name}, path, None)
            self.bindings.append(node)
        else:
            raise NotSelfContainedError


def _assign(name: str, value: ast.expr) -> ast.Assign:
    return ast.Assign([ast.Name(name, ast.Store())], value, lineno=0)


def _parametrized(decorators: Sequence[ast.expr], name: str, index: int | None) -> ast.expr | None:
    """The value of a parametrized argument, from the decorator's list."""
    if index is None:
        return None
    for call in decorators:
        if not isinstance(call, ast.Call) or not ast.unparse(call.func).endswith("parametrize"):
            continue
        if len(call.args) < 2 or not isinstance(call.args[1], ast.List | ast.Tuple):
            continue
        words, rows = call.args[0], call.args[1].elts
        if isinstance(words, ast.Constant):
            names = [word.strip() for word in str(words.value).split(",")]
        else:
            names = [str(getattr(one, "value", "")) for one in getattr(words, "elts", ())]
        if name not in names or index >= len(rows):
            continue
        row = _without_marks(rows[index])
        if len(row) == 1 < len(names):
            row = list(getattr(row[0], "elts", ()))
        return row[names.index(name)] if len(row) == len(names) else None
    return None


def _fixture_value(decorators: Sequence[ast.expr], index: int | None) -> ast.expr | None:
    """The value of `request.param` in a fixture."""
    if index is None:
        return None
    for call in decorators:
        for one in call.keywords if isinstance(call, ast.Call) else ():
            rows = getattr(one.value, "elts", ())
            if one.arg == "params" and index < len(rows):
                return _without_marks(rows[index])[0]
    return None


def _without_marks(value: ast.expr) -> list[ast.expr]:
    """The values of a row, which may be wrapped in `pytest.param`."""
    is_param = isinstance(value, ast.Call) and ast.unparse(value.func) in ("pytest.param", "param")
    return list(value.args) if is_param and isinstance(value, ast.Call) else [value]


_LEAVING = (ast.Return, ast.Yield, ast.YieldFrom)


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _free_names(nodes: Sequence[ast.AST]) -> set[str]:
    """Names that a sequence of statements uses before it binds them."""
    free, bound = set[str](), set[str]()
    for node in nodes:
        within = bound_names(node)
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign) and node.value is not None:
            within = bound_names(node.value)
        free |= loaded_names(node) - within - bound
        bound |= bound_names(node)
    return free
