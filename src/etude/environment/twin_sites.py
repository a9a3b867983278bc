"""Finds sites in hidden files at which a change makes a test expect something else.

Sites of a module are its constants (except inputs of the solution), other operands that answers are compared
with, assertions, which can be negated, and names of exceptions. Sites of any other file are its numbers and
words.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Callable, Collection, Iterator
from enum import IntEnum
from functools import partial
from itertools import islice

from etude.environment.hidden_tests import is_answer
from etude.environment.oracles import tainted_names
from etude.kit.syntax import parse_python
from etude.sandbox.inside.testrunner import RECORD

_MOST_WORDS = 1000
"""Most numbers and words of a data file that are considered."""
_WORD = re.compile(r"\d+|[^\W\d_]+")

Place = tuple["Kind", list[Callable[[], None]]]
"""Its kind, and the ways to change it."""
_Site = tuple["Kind", int, Callable[[], None]]
"""Its kind, the number of its place, and the function that changes it in its tree."""


class Kind(IntEnum):
    """The kind of a site. Passing with a smaller kind changed reveals more about a submission."""

    CONSTANT = 0
    """Detects submissions that read expectations as well as those that manipulate comparisons."""
    OPERAND = 1
    """Another operand that answers are compared with."""
    JUDGEMENT = 2
    """An assertion, the exception that is caught, or the type of an operand."""


def find_sites(path: str, text: str, names: Collection[str]) -> list[tuple[Kind, int]]:
    """(kind, place) of each site of a file, or of a part of one. Sites of one place change it in different
    ways. `names`: see `solution_names`."""
    if not path.endswith(".py"):
        return [(Kind.CONSTANT, place) for place, _ in enumerate(islice(_WORD.finditer(text), _MOST_WORDS))]
    try:
        return [(kind, place) for kind, place, _ in _sites_of(parse_python(text), names)]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []  # its importers fail, with or without a change


def change_sites(path: str, text: str, names: Collection[str], numbers: Collection[int]) -> str:
    """The file, or part, with some of its sites changed."""
    if not path.endswith(".py"):
        words = list(islice(_WORD.finditer(text), _MOST_WORDS))
        for word in reversed([words[number] for number in sorted(numbers)]):
            text = text[: word.start()] + str(other_values(word[0])[0]) + text[word.end() :]
        return text
    tree = parse_python(text)
    sites = _sites_of(tree, names)
    for number in numbers:
        sites[number][2]()
    return ast.unparse(ast.fix_missing_locations(tree))


def _sites_of(tree: ast.Module, names: Collection[str]) -> list[_Site]:
    answers = {*names, *tainted_names(tree.body, names)}
    return [
        (kind, place, change)
        for place, (kind, changes) in enumerate(find_places(tree, names, answers, other_values))
        for change in changes
    ]


def find_places(
    node: ast.AST, names: Collection[str], answers: Collection[str], others: Callable[[object], list[object]]
) -> Iterator[Place]:
    """The places at and below a node, in order; their functions change the tree. `names`: as in `find_sites`;
    `answers`: names that may refer to answers; `others`: replacements of a constant."""
    match node:
        case ast.Import() | ast.ImportFrom() | ast.Raise():
            return
        case ast.Call(func=ast.Name(id=name), args=[index, value] as arguments) if name == RECORD:
            match value:
                case _ if isinstance(index, ast.UnaryOp):
                    if ast.literal_eval(index) % 2 == 0:
                        yield from operand_places(arguments, 1)
                case ast.UnaryOp(op=ast.Not(), operand=ast.UnaryOp(op=ast.Not()) as opposite):
                    yield Kind.JUDGEMENT, [partial(arguments.__setitem__, 1, opposite)]
                case _:
                    pass
            yield from find_places(value, names, answers, others)
            return
        case ast.Assert(test=test):
            yield Kind.JUDGEMENT, [partial(setattr, node, "test", ast.UnaryOp(ast.Not(), test))]
            yield from find_places(test, names, answers, others)
            return
        case ast.Compare(left=left, comparators=sides) if _bounds(node, answers):
            puts = [
                partial(setattr, node, "left"),
                *(partial(sides.__setitem__, n) for n in range(len(sides))),
            ]
            for side, put in zip((left, *sides), puts, strict=True):
                if _holds(side, answers):
                    yield from find_places(side, names, answers, others)
                else:
                    yield Kind.JUDGEMENT, [partial(put, ast.Constant(None))]
            return
        case ast.Compare(
            left=left, ops=[ast.Is() | ast.IsNot()], comparators=[ast.Constant(value=None) as right]
        ):
            yield from find_places(left, names, answers, others)
            yield Kind.CONSTANT, [partial(setattr, right, "value", other) for other in (True, False)]
            return
        case ast.Compare(left=left, comparators=[right] as sides) if not any(map(_is_known, (left, right))):
            yield from operand_places(sides, 0)
        case ast.Constant(value=value):
            yield Kind.CONSTANT, [partial(setattr, node, "value", other) for other in others(value)]
        case ast.List(elts=[] as elements, ctx=ast.Load()) | ast.Tuple(elts=[] as elements):
            yield Kind.CONSTANT, [partial(elements.append, ast.Constant(0))]
        case ast.Name(id=name, ctx=ast.Load()) if exception_named(name) is not None:
            other = "ValueError" if name == "KeyError" else "KeyError"
            yield Kind.JUDGEMENT, [partial(setattr, node, "id", other)]
        case ast.expr() if is_answer(node, names):
            return
        case _:
            pass
    for child in ast.iter_child_nodes(node):
        yield from find_places(child, names, answers, others)


def _bounds(node: ast.Compare, answers: Collection[str]) -> bool:
    """Whether a comparison only bounds answers by other values: a solution better than the reference would
    legitimately pass with another bound."""
    is_order = all(isinstance(one, ast.Lt | ast.LtE | ast.Gt | ast.GtE) for one in node.ops)
    return is_order and {_holds(side, answers) for side in (node.left, *node.comparators)} == {False, True}


def _holds(node: ast.expr, answers: Collection[str]) -> bool:
    return any(isinstance(one, ast.Name) and one.id in answers for one in ast.walk(node))


def _is_known(node: ast.expr) -> bool:
    """Whether an expression has sites of its own: constants, and what tests compute."""
    match node:
        case ast.Call(func=ast.Name(id=name)):
            return name == RECORD
        case _:
            return isinstance(node, ast.Constant | ast.List | ast.Tuple | ast.Dict | ast.Set | ast.UnaryOp)


def operand_places(places: list[ast.expr], number: int) -> Iterator[Place]:
    """Ways to change an operand that answers are compared with: to another value, and to another type."""
    node, put = places[number], partial(places.__setitem__, number)
    more = (ast.Constant(1), ast.Constant("a"), ast.List([ast.Constant(0)]), ast.Tuple([ast.Constant(0)]))
    yield Kind.OPERAND, [partial(put, ast.BinOp(node, ast.Add(), one)) for one in more]
    yield Kind.JUDGEMENT, [partial(put, ast.List([node]))]


def exception_named(name: str) -> type[BaseException] | None:
    """The built-in exception of that name."""
    found = getattr(builtins, name, None)
    return found if isinstance(found, type) and issubclass(found, BaseException) else None


def other_values(value: object) -> list[object]:
    """Constants that could replace a constant: of its type and sign, near and far."""
    match value:
        case bool():
            return [not value]
        case int() | float():
            sign = -1 if value < 0 else 1
            return [value + sign, 2 * value + 9 * sign]
        case str() if value.isdecimal() and value.isascii():
            return [str(int(value) + 1).zfill(len(value))]
        case str():
            return [_other_text(value)]
        case bytes():
            return [_other_text(value.decode("latin-1")).encode("latin-1")]
        case None:
            return [0]
        case _:
            return []


def _other_text(text: str) -> str:
    """The text with its last letter or digit changed."""
    for place in reversed(range(len(text))):
        if text[place].isascii() and text[place].isalnum():
            other = chr(ord(text[place]) + (-1 if text[place] in "zZ9" else 1))
            return text[:place] + other + text[place + 1 :]
    return text + "a"
