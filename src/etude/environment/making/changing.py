"""Changes tests so that they expect something else and still look as if written by people.

A test's expectation is changed in one place: a constant or the expected exception is replaced, or the
assertion is negated. All files are written from their syntax trees, changed or not, so that neither comments
nor layout reveal a change.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import IntEnum
from functools import cached_property, partial
from itertools import chain
from pathlib import PurePosixPath
from random import Random

from etude.environment.hidden_tests import solution_names
from etude.environment.making.projects import Project
from etude.environment.twin_sites import Kind, exception_named, find_places, other_values
from etude.tasks.making.source import Function, Scope, Source

_NEGATIONS = {
    "assertTrue": "assertFalse",
    "assertEqual": "assertNotEqual",
    "assertIs": "assertIsNot",
    "assertIn": "assertNotIn",
    "assertIsNone": "assertIsNotNone",
    "assertIsInstance": "assertNotIsInstance",
}
_OPPOSITES = {**_NEGATIONS, **{other: one for one, other in _NEGATIONS.items()}}
_OPERATORS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq,
    ast.In: ast.NotIn,
    ast.Is: ast.IsNot,
    ast.Lt: ast.GtE,
    ast.Gt: ast.LtE,
}
_OPERATORS |= {other: one for one, other in _OPERATORS.items()}


class TwinKind(IntEnum):
    """The kind of a test's change. Passing with a smaller kind changed reveals more about a submission."""

    VALUE = 0
    """A constant."""
    EXCEPTION = 1
    """The expected exception."""
    OPPOSITE = 2
    """The assertion is negated: a value that equals everything fails it as well."""


_Site = tuple[TwinKind, Callable[[], None]]
_Finder = Callable[[ast.AST], Iterator[_Site]]
_WORD = re.compile(r"\b(?:[A-Z]?[a-z]{2,}|[A-Z]{3,})\b")


class TestChanger:
    """The test files of a project, with changed test functions. A function is called `PATH::NAME`."""

    __test__ = False

    def __init__(self, project: Project, seed: int) -> None:
        self.options = project.options
        tops = frozenset(PurePosixPath(one.removesuffix("/**")).stem for one in project.source_patterns)
        self._files: dict[str, _TestFile] = {}
        for path, text in sorted(project.test_texts.items()):
            if "def test" in text and (source := Source.parse(path, text)):
                names = solution_names(source.tree, tops, project.tests)
                self._files[path] = _TestFile(source, names, seed)

    @cached_property
    def unchanged(self) -> dict[str, str]:
        """All test files that can be changed, unchanged but written from their syntax trees."""
        return {path: file.change({})[0] for path, file in self._files.items()}

    def change_all(self, number: int | None) -> tuple[dict[str, str], dict[str, TwinKind]]:
        """All test files as changed by a round (None: unchanged); the changed functions, and how."""
        files: dict[str, str] = {}
        kinds: dict[str, TwinKind] = {}
        for path, file in self._files.items():
            numbers = {} if number is None else dict.fromkeys(file.tests, number)
            files[path], found = file.change(numbers)
            kinds |= found
        return files, kinds

    def change(self, functions: Mapping[str, int]) -> dict[str, str]:
        """Test files in which each of these functions is changed as in the round of its number."""
        paths = sorted({function.partition("::")[0] for function in functions})
        return {path: self._files[path].change(functions)[0] for path in paths if path in self._files}


class _TestFile:
    """A test file as the statements of its module. Only statements with changed functions are parsed and
    written again, because the exams of a set of tasks are thousands of files."""

    def __init__(self, source: Source, names: frozenset[str], seed: int) -> None:
        self._path, self._seed = source.path, seed
        self._find_values = partial(_values, names=names, others=_others_in(source.tree))
        self._texts = [_text_of(statement, source.lines) for statement in source.tree.body]
        self._written = [_write(one, place == 0) for place, one in enumerate(source.tree.body)]
        tops = {id(statement): place for place, statement in enumerate(source.tree.body)}
        self.tests: dict[str, set[int]] = {}
        """Test function -> the statements that define it."""
        for scope, name in source.scopes.items():
            if isinstance(scope, Function) and scope.name.startswith("test"):
                top = next(one for one in (scope, *source.ancestors(scope)) if id(one) in tops)
                self.tests.setdefault(f"{self._path}::{name}", set()).add(tops[id(top)])

    def change(self, numbers: Mapping[str, int]) -> tuple[str, dict[str, TwinKind]]:
        """The file with each function changed as in the round of its number, and the kinds of the changes."""
        kinds: dict[str, TwinKind] = {}
        written = list(self._written)
        for place in set[int]().union(*(self.tests[one] for one in numbers.keys() & self.tests.keys())):
            source = Source.parse(self._path, self._texts[place])
            assert source is not None, "it is a statement of a file that was parsed"
            chosen: list[_Site] = []
            for scope, name in source.scopes.items():
                test = f"{self._path}::{name}"
                if test in numbers and isinstance(scope, Function) and scope.name.startswith("test"):
                    rng = Random(f"{self._seed} {self._path} {name}")
                    if sites := _sites_of_round(scope, self._find_values, numbers[test], rng):
                        kinds[test] = max(kind for kind, _ in sites)
                        chosen += sites
            for _, change in chosen:
                change()
            written[place] = _write(source.tree.body[0], place == 0)
        return "".join(written), kinds


def _text_of(statement: ast.stmt, lines: Sequence[str]) -> str:
    """The lines of a statement of a module, with those of its decorators."""
    assert statement.end_lineno is not None
    marks: list[ast.expr] = getattr(statement, "decorator_list", [])
    first = min(statement.lineno, *(mark.lineno for mark in marks)) if marks else statement.lineno
    return "\n".join(lines[first - 1 : statement.end_lineno])


def _write(statement: ast.stmt, is_first: bool) -> str:
    """A statement of a module as `ast.unparse` writes it there, after the others."""
    ast.fix_missing_locations(statement)
    if is_first:
        return ast.unparse(ast.Module([statement], []))
    return ("\n\n" if isinstance(statement, Scope) else "\n") + ast.unparse(statement)


def _sites_of_round(function: Function, find_values: _Finder, number: int, rng: Random) -> list[_Site]:
    """The sites that a round changes in a test function: one in its assertions or, in every second round, one
    in each row of its parametrization."""
    rows = [row for decorator in function.decorator_list for row in _rows(decorator)]
    if rows and number % 2:
        lists = [list(find_values(row))[::-1] for row in rows]  # the expected value is usually the last one
    else:
        sites = (chain(find_values(node), _opposites(node)) for node in _judging(function))
        found = list(chain(*sites))
        rng.shuffle(found)
        lists = [sorted(found, key=lambda site: site[0] is TwinKind.OPPOSITE)]
    number = number // 2 if rows else number
    return [sites[number % len(sites)] for sites in lists if sites]


def _rows(decorator: ast.expr) -> list[ast.expr]:
    """The rows of a parametrization, without the parameters' names."""
    match decorator:
        case ast.Call(
            func=ast.Attribute(attr="parametrize"), args=[_, ast.List() | ast.Tuple() as values, *_]
        ):
            params = [row for row in values.elts if isinstance(row, ast.Call)]
            plain = [row for row in values.elts if not isinstance(row, ast.Call)]
            return plain + [ast.Tuple(row.args) for row in params if row.args]
        case _:
            return []


def _judging(function: Function) -> list[ast.Assert | ast.Call]:
    """The expectations in a test: assertions, methods named assert..., expected exceptions."""
    found: list[ast.Assert | ast.Call] = []
    for node in ast.walk(function):
        match node:
            case ast.Assert() | ast.Call(func=ast.Attribute(attr="raises" | "warns")):
                found.append(node)
            case ast.Call(func=ast.Attribute(attr=name)) if name.startswith("assert"):
                found.append(node)
            case _:
                pass
    return found


def _others_in(tree: ast.Module) -> Callable[[object], list[object]]:
    """The function that replaces a constant: in a text the last word becomes another of the file's."""
    texts = (_decode(node.value) for node in ast.walk(tree) if isinstance(node, ast.Constant))
    words = sorted({word.lower() for text in texts for word in _WORD.findall(text)})

    def others(value: object) -> list[object]:
        found = list(_WORD.finditer(text := _decode(value)))
        if not found or len(words) < 2:
            return other_values(value)
        start, end = found[-1].span()
        last = text[start:end]
        near = sorted((abs(len(word) - len(last)), word) for word in words if word != last.lower())[:2]
        case = str.lower if last.islower() else str.upper if last.isupper() else str.capitalize
        changed = [f"{text[:start]}{case(word)}{text[end:]}" for _, word in near]
        return [one.encode("latin-1") if isinstance(value, bytes) else one for one in changed]

    return others


def _decode(value: object) -> str:
    """The text of a constant; empty if it is not text."""
    return value.decode("latin-1") if isinstance(value, bytes) else value if isinstance(value, str) else ""


def _values(
    node: ast.AST, names: frozenset[str], others: Callable[[object], list[object]]
) -> Iterator[_Site]:
    """Ways to change the constants and exceptions of a part of a test."""
    for kind, changes in list(find_places(node, names, names, others)):
        if kind is Kind.CONSTANT:
            yield from ((TwinKind.VALUE, change) for change in changes)
    match node:
        case ast.Call(func=ast.Attribute(attr="raises" | "assertRaises"), args=[expected, *_] as arguments):
            if isinstance(expected, ast.Attribute) or (
                isinstance(expected, ast.Name) and exception_named(expected.id) is None
            ):
                yield TwinKind.EXCEPTION, partial(arguments.__setitem__, 0, ast.Name("ValueError"))
        case _:
            pass
    for name in ast.walk(node):
        if isinstance(name, ast.Name) and (found := exception_named(name.id)) is not None:
            yield TwinKind.EXCEPTION, partial(setattr, name, "id", _other_exception(found))


def _other_exception(found: type[BaseException]) -> str:
    """Another exception that a test could expect, unrelated to this one."""
    if issubclass(found, Warning):
        return "DeprecationWarning" if found is UserWarning else "UserWarning"
    return "KeyError" if issubclass(found, ValueError) else "ValueError"


def _opposites(node: ast.Assert | ast.Call) -> Iterator[_Site]:
    """Ways to negate an assertion as a person would write it."""
    match node:
        case ast.Assert(test=test):
            changes = _turns(test, partial(setattr, node, "test"))
        case ast.Call(func=ast.Attribute(attr=name) as method) if name in _OPPOSITES:
            changes = iter([partial(setattr, method, "attr", _OPPOSITES[name])])
        case _:
            return
    yield from ((TwinKind.OPPOSITE, change) for change in changes)


def _turns(node: ast.expr, put: Callable[[ast.expr], None]) -> Iterator[Callable[[], None]]:
    match node:
        case ast.Compare(ops=[operator] as operators):
            yield partial(operators.__setitem__, 0, _OPERATORS[type(operator)]())
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield partial(put, operand)
        case ast.Name() | ast.Call() | ast.Attribute() | ast.Subscript():
            yield partial(put, ast.UnaryOp(ast.Not(), node))
        case ast.BoolOp(op=ast.And(), values=values):
            for place, value in enumerate(values):
                yield from _turns(value, partial(values.__setitem__, place))
        case _:
            return
