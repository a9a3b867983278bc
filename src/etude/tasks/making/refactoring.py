"""Refactoring tasks: working code with a smell that ruff reports. Its tests pass before and after.

planted smell    clean code, changed so that ruff reports a smell and the behaviour is the same
found smell      a smell of the project itself, with ruff's own safe fix as the solution

`etude.tasks.making.structure_inside` checks whether a smell was removed.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from random import Random
from typing import Any

from etude.tasks.making.changes import Change, round_robin
from etude.tasks.making.source import Edit, Function, Source, apply_edits, blocks, read_sources
from etude.tasks.making.structure_inside import JUMPS, count_smells, find_fault, survey

SMELLS = {
    "RET504": ("assignment before return", "a variable that is only there to be returned"),
    "RET505": ("else after a return", "an `else` or `elif` after a `return`"),
    "RET506": ("else after a raise", "an `else` or `elif` after a `raise`"),
    "RET507": ("else after a continue", "an `else` or `elif` after a `continue`"),
    "RET508": ("else after a break", "an `else` or `elif` after a `break`"),
    "SIM102": ("nested ifs", "an `if` with nothing but another `if` in it"),
    "PLR5501": ("if in an else", "an `else` with nothing but an `if` in it"),
}
"""Rule of ruff -> name of the operator, and description for the user."""
_ASKING = (
    "{code} in {path}, `{scope}`: {what}.",
    "`{scope}` in {path} has {what} ({code}).",
    "Our linter complains about `{scope}` ({path}): {what}, {code}.",
    "{path}: `{scope}` could be simpler, there is {what} ({code}).",
)
_TERMS = (
    " Please write it properly, with nothing new from ruff ({codes}). It has to work as before.",
    " Clean that up; behaviour stays as it is, and ruff ({codes}) should find nothing new.",
    " Fix it without changing what it does. No noqa, and nothing new of {codes}.",
)
_MOST_LINES = 30
"""Most lines of code that are indented."""
_Planted = Iterator[tuple[str, Edit]]
"""The rule's code, and the edit that plants the smell."""


def write_request(change: Change, seed: int) -> str:
    """The instruction as a user would write it, deterministic by seed."""
    rng, place = Random(f"refactoring/{seed}/{change.id}"), change.places[0]
    words = {"code": change.smell, "what": SMELLS[change.smell][1], "codes": ", ".join(sorted(SMELLS))}
    return (rng.choice(_ASKING) + rng.choice(_TERMS)).format(**words, path=place.path, scope=place.name)


def write_check(change: Change, modules: Mapping[str, bytes], patterns: Sequence[str]) -> dict[str, Any]:
    """The request for `structure_inside`, for the workspace's modules, which match `patterns`."""
    path, scope = change.places[0].path, change.places[0].name
    limits = count_smells(modules)
    limits[change.smell] -= survey(modules[path])[0][change.smell, scope]
    kept = {path: sorted(survey(data)[1]) for path, data in modules.items()}
    return {"patterns": [*patterns], "kept": kept, "clean": [change.smell, path, scope], "limits": limits}


def is_removed(change: Change, sources: Mapping[str, str]) -> bool:
    """Whether the workspace has the smell and the solution does not."""
    before = {path: text.encode() for path, text in change.files.items()}
    after = {path: text.encode() for path, text in change.solved(sources).items()}
    check = write_check(change, before, ())
    return find_fault(check, before) is not None and find_fault(check, after) is None


def plan_smells(sources: Mapping[str, str], seed: int) -> Iterator[Change]:
    """Plants smells in clean code without changing its behaviour, round-robin over the rules."""
    by_code: dict[str, list[tuple[str, Source, Edit]]] = {}
    for source in read_sources(sources):
        for function in source.scopes:
            for code, edit in _plant(source, function) if isinstance(function, Function) else ():
                by_code.setdefault(code, []).append((code, source, edit))
    rng = Random(f"smells/{seed}")
    for code in sorted(by_code):
        rng.shuffle(by_code[code])
    for code, source, edit in round_robin(by_code[code] for code in sorted(by_code)):
        text, place = apply_edits(source.text, [edit]), source.place([edit])
        change = Change("planted_smell", SMELLS[code][0], {source.path: text}, (place,), smell=code)
        if is_removed(change, sources):
            yield change


def _plant(source: Source, function: Function) -> _Planted:
    todo: list[ast.AST] = [function]
    while todo:
        node = todo.pop()
        for block in blocks(node):
            for at, statement in enumerate(block):
                if isinstance(statement, ast.If) and source.text.startswith("if", source.start(statement)):
                    yield from _split_condition(source, statement)
                    yield from _add_else(source, statement, block[at + 1 :])
                    yield from _split_elif(source, statement)
                elif isinstance(statement, ast.Return):
                    yield from _name_result(source, statement, function)
        todo += [one for one in ast.iter_child_nodes(node) if not isinstance(one, Function | ast.ClassDef)]


def _split_condition(source: Source, statement: ast.If) -> _Planted:
    """`if a and b` becomes an if in an if."""
    span, indent = source.own_lines(statement, statement), " " * statement.col_offset
    body, test = source.own_lines(statement.body[0], statement.body[-1]), statement.test
    if not isinstance(test, ast.BoolOp) or isinstance(test.op, ast.Or) or span is None or body is None:
        return
    inner, (first, *rest) = _indent(source.text[slice(*body)]), test.values
    if inner is not None and not statement.orelse and "#" not in source.text[span[0] : body[0]]:
        one, two = source.segment(first), source.text[source.start(rest[0]) : source.end(rest[-1])]
        yield "SIM102", Edit(*span, f"{indent}if {one}:\n{indent}    if {two}:\n{inner}")


def _add_else(source: Source, statement: ast.If, following: Sequence[ast.stmt]) -> _Planted:
    """Statements after a branch that always jumps are moved into an else."""
    code, whole = JUMPS.get(type(statement.body[-1])), source.own_lines(statement, statement)
    if code is None or statement.orelse or not following or whole is None:
        return
    end = source.own_lines(following[0], following[-1])
    inner = _indent(source.text[whole[1] : end[1]]) if end is not None else None
    if end is not None and inner is not None:
        yield code, Edit(whole[1], end[1], f"{' ' * statement.col_offset}else:\n{inner}")


def _split_elif(source: Source, statement: ast.If) -> _Planted:
    """An elif becomes an if in an else."""
    branch = statement
    while len(branch.orelse) == 1 and isinstance(inner := branch.orelse[0], ast.If):
        span = source.own_lines(inner, inner)
        if span is not None and source.text.startswith("elif", source.start(inner)):
            text = _indent(source.text[slice(*span)].replace("elif", "if", 1))
            if text is not None:
                yield "PLR5501", Edit(*span, f"{' ' * statement.col_offset}else:\n{text}")
        branch = inner


def _name_result(source: Source, statement: ast.Return, function: Function) -> _Planted:
    """A result is assigned to a name before it is returned."""
    span, words = source.own_lines(statement, statement), source.segment(function)
    name = next((one for one in ("result", "value", "found") if not re.search(rf"\b{one}\b", words)), "")
    is_plain = isinstance(statement.value, ast.Name | ast.Constant | None)
    if span is not None and name and not is_plain and "#" not in source.text[slice(*span)]:
        lines = source.text[slice(*span)].rstrip("\n").replace("return", f"{name} =", 1)
        yield "RET504", Edit(*span, f"{lines}\n{' ' * statement.col_offset}return {name}\n")


def _indent(text: str) -> str | None:
    """Indents lines one level; None if that would change a string, and for too many lines."""
    if re.search(r"\"\"\"|'''|\\\n|\t", text) or text.count("\n") > _MOST_LINES:
        return None
    return "".join(f"    {line}" if line.strip() else line for line in text.splitlines(keepends=True))
