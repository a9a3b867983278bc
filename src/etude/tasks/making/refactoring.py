"""Refactorings: code that works and is to be written otherwise. Its tests pass before and after.

planted smell    clean code, changed so that ruff finds something and nothing behaves otherwise
found smell      of the project itself, with ruff's own safe fix for a solution
planted name     a private name, changed into one that says nothing

A goal is a plain mapping: `code`, `path` and `scope` of a smell, or `old`, `new`, `path` and `scope` of a
name. `etude.tasks.making.structure_inside` says whether it is reached.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, zip_longest
from random import Random
from typing import Any

from etude.tasks.making.changes import Change, Place
from etude.tasks.making.source import Edit, Function, Source, apply_edits, blocks, read_sources
from etude.tasks.making.structure_inside import JUMPS, find_fault, survey

SMELLS = {
    "RET504": ("assignment before return", "a variable that is only there to be returned"),
    "RET505": ("else after a jump", "an `else` or `elif` after a `return`"),
    "RET506": ("else after a jump", "an `else` or `elif` after a `raise`"),
    "RET507": ("else after a jump", "an `else` or `elif` after a `continue`"),
    "RET508": ("else after a jump", "an `else` or `elif` after a `break`"),
    "SIM102": ("nested ifs", "an `if` with nothing but another `if` in it"),
    "SIM103": ("spelt out condition", "an `if` that returns nothing but `True` and `False`"),
    "SIM114": ("repeated branch", "two branches that do the same"),
    "PLR5501": ("if in an else", "an `else` with nothing but an `if` in it"),
}
"""Rule of ruff -> what was done, as operators of changes are called, and what a user sees."""
_ASKING = (
    "{code} in {path}, `{scope}`: {what}.",
    "`{scope}` in {path} has {what} ({code}).",
    "Our linter complains about `{scope}` ({path}): {what}, {code}.",
    "{path}: `{scope}` could be simpler, there is {what} ({code}).",
)
_TERMS = (
    " Please write it properly, with no noqa and nothing new from ruff's RET, SIM or PLR5501. It has to work"
    " as before.",
    " Clean that up; behaviour stays as it is, and ruff (RET, SIM, PLR5501) should find nothing new.",
    " Fix it without changing what it does. No noqa, and nothing new from RET, SIM and PLR5501.",
)
_RENAMING = (
    "`{old}` in {path} says nothing. Rename it to `{new}`, wherever it is used.",
    "Please rename `{old}` ({path}) to `{new}` everywhere; the old name should be gone.",
    "{path}: `{old}` should be called `{new}`. Change it in the whole project.",
)
_POOR_NAMES = ("thing", "stuff", "helper", "do_it", "process", "handle", "misc", "run_it", "data2", "tmp")
_MOST_LINES = 30
"""Of code that is indented."""
_Planted = Iterator[tuple[str, Edit]]
"""Code of the smell, and the edit that makes it."""


def write_request(change: Change, seed: int) -> str:
    """What a user would ask for, the same for the same seed."""
    rng = Random(f"refactoring/{seed}/{change.id}")
    if "old" in change.goal:
        return rng.choice(_RENAMING).format(**change.goal)
    words = {**change.goal, "what": SMELLS[change.goal["code"]][1]}
    return (rng.choice(_ASKING) + rng.choice(_TERMS)).format(**words)


def write_check(
    goal: Mapping[str, str], modules: Mapping[str, str | None], patterns: Sequence[str]
) -> dict[str, Any]:
    """What `structure_inside` reads: a goal, and the workspace's modules, which `patterns` find."""
    found = {path: survey(text) for path, text in modules.items()}
    kept = {
        path: sorted(name for name in one.defined if not re.search(r"(^|\.)_[^_]", name))
        for path, one in found.items()
    }
    kept[goal["path"]] += [goal["scope"]]
    limits = sum((one.counts() for one in found.values()), Counter[str]())
    check: dict[str, Any] = {"patterns": [*patterns], "kept": kept, "clean": [], "gone": [], "used": []}
    if "old" in goal:
        return {**check, "limits": limits, "gone": [goal["old"]], "used": [goal["new"]]}
    code, path, scope = goal["code"], goal["path"], goal["scope"]
    limits[code] -= found[path].smells[code, scope]
    return {**check, "limits": limits, "clean": [(code, path, scope)]}


def is_reached(change: Change, sources: Mapping[str, str]) -> bool:
    """Whether the solution of a refactoring reaches its goal, and the workspace does not."""
    check = write_check(change.goal, change.files, ())
    return find_fault(check, change.files) is not None and find_fault(check, change.solved(sources)) is None


def plan_smells(sources: Mapping[str, str], seed: int) -> Iterator[Change]:
    """Smells planted in clean code, one of each code in turn. What they leave behaves as before."""
    by_code: dict[str, list[tuple[str, Source, Edit]]] = {}
    for source in read_sources(sources):
        for function in source.scopes:
            for code, edit in _plant(source, function) if isinstance(function, Function) else ():
                by_code.setdefault(code, []).append((code, source, edit))
    rng = Random(f"smells/{seed}")
    for code in sorted(by_code):
        rng.shuffle(by_code[code])
    for code, source, edit in filter(None, chain(*zip_longest(*(by_code[code] for code in sorted(by_code))))):
        text, place = apply_edits(source.text, [edit]), source.place([edit])
        goal = {"code": code, "path": source.path, "scope": place.name}
        change = Change("planted_smell", SMELLS[code][0], {source.path: text}, (place,), goal=goal)
        if is_reached(change, sources):
            yield change


def _plant(source: Source, function: Function) -> _Planted:
    words = source.segment(function)
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
                    yield from _spell_out(source, statement, words)
        todo += [one for one in ast.iter_child_nodes(node) if not isinstance(one, Function | ast.ClassDef)]


def _split_condition(source: Source, statement: ast.If) -> _Planted:
    """`if a and b` becomes an if in an if, and `if a or b` two branches that do the same."""
    span, indent = source.own_lines(statement, statement), " " * statement.col_offset
    body = source.own_lines(statement.body[0], statement.body[-1])
    if not isinstance(statement.test, ast.BoolOp) or span is None or body is None:
        return
    first, *rest = statement.test.values
    if "#" in source.text[span[0] : body[0]]:
        return
    one, two = source.segment(first), source.text[source.start(rest[0]) : source.end(rest[-1])]
    text = source.text[slice(*body)]
    if isinstance(statement.test.op, ast.Or):
        new = f"{indent}if {one}:\n{text}{indent}elif {two}:\n{text}"
        yield "SIM114", Edit(span[0], body[1], new)
    elif not statement.orelse and (inner := _indent(text)) is not None:
        yield "SIM102", Edit(*span, f"{indent}if {one}:\n{indent}    if {two}:\n{inner}")


def _add_else(source: Source, statement: ast.If, following: Sequence[ast.stmt]) -> _Planted:
    """What follows a branch that jumps away is put into an else."""
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


def _spell_out(source: Source, statement: ast.Return, words: str) -> _Planted:
    """A result is given a name, a condition is spelt out."""
    span, value, indent = source.own_lines(statement, statement), statement.value, " " * statement.col_offset
    if span is None or value is None or "#" in source.text[slice(*span)]:
        return
    test = ast.unparse(value)
    match value:
        case ast.Compare(ops=[ast.Is() | ast.IsNot() | ast.In() | ast.NotIn()]) | ast.UnaryOp(op=ast.Not()):
            text = f"{indent}if {test}:\n{indent}    return True\n{indent}return False\n"
            yield "SIM103", Edit(*span, text)
        case _:
            pass
    name = next((one for one in ("result", "value", "found") if not re.search(rf"\b{one}\b", words)), "")
    if name and not isinstance(value, ast.Name | ast.Constant):
        lines = source.text[slice(*span)].rstrip("\n").replace("return", f"{name} =", 1)
        yield "RET504", Edit(*span, f"{lines}\n{indent}return {name}\n")


def _indent(text: str) -> str | None:
    """The lines one level deeper; None where that would change a text, and for many lines."""
    if re.search(r"\"\"\"|'''|\\\n|\t", text) or text.count("\n") > _MOST_LINES:
        return None
    return "".join(f"    {line}" if line.strip() else line for line in text.splitlines(keepends=True))


def plan_renames(sources: Mapping[str, str], others: Sequence[str], seed: int) -> Iterator[Change]:
    """Private functions, classes and constants under names that say nothing, wherever they are used.

    `others` are the project's other texts: what they name too is left as it is.
    """
    files, rng = read_sources(sources), Random(f"names/{seed}")
    foreign = set(re.findall(r"\w+", "\n".join(others)))
    words = Counter(re.findall(r"\w+", "\n".join(sources.values())))
    names = [(source, name) for source in files for name in sorted(survey(source.text).defined)]
    rng.shuffle(names)
    for source, name in names:
        own, pattern = name.rpartition(".")[2], re.compile(rf"\b{name.rpartition('.')[2]}\b")
        if not re.fullmatch(r"_[a-zA-Z]\w{3,}", own) or own in foreign or words[own] < 2:
            continue
        poor = f"_{rng.choice(_POOR_NAMES)}"
        poor = f"_{poor.title().replace('_', '')}" if own[1].isupper() else poor
        changed = [one for one in files if pattern.search(one.text)]
        lines = [(one, at) for one in changed for at, line in enumerate(one.lines, 1) if pattern.search(line)]
        places = [Place(one.path, one.scope_name(at, at), at, at) for one, at in lines]
        texts = {one.path: pattern.sub(poor, one.text) for one in changed}
        goal = {"old": poor, "new": own, "path": source.path, "scope": name}
        change = Change("planted_name", "poor name", texts, tuple(places), goal=goal)
        if poor not in foreign and poor not in words and is_reached(change, sources):
            yield change
