"""Deleted features: functions, classes and modules with emptied bodies, or removed functions; and removal of
the failing tests from test files, as a user who reports a bug has no failing test."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from random import Random

from etude.tasks.making.changes import Change, TestFailure, unique_changes
from etude.tasks.making.source import (
    Edit,
    Function,
    Source,
    apply_edits,
    blocks,
    has_docstring,
    read_sources,
    read_tree,
)

_LEAST_LINES = 3
_MOST_FUNCTIONS = 12
_NOTHING = "raise NotImplementedError"


def plan_deletions(sources: Mapping[str, str], seed: int) -> Iterator[Change]:
    """Every deletion of a project, in random order by seed.

    A function is emptied, and keeps its docstring as a specification; or removed if nothing else in the
    project names it, so that everything still imports. In a class or module all bodies are emptied.
    """
    files = read_sources(sources)
    names = Counter(re.findall(r"\w+", "\n".join(source.text for source in files)))
    planned = [found for source in files for found in _deletions(source, names)]
    Random(f"deletions/{seed}").shuffle(planned)
    yield from unique_changes(_delete(*one) for one in planned)


def _delete(operator: str, source: Source, edits: list[Edit]) -> Change | None:
    """The change; None if it leaves invalid Python."""
    text = apply_edits(source.text, edits)
    change = Change("deleted_feature", operator, {source.path: text}, (source.place(edits),))
    return change if read_tree(text) is not None else None


def _deletions(source: Source, names: Counter[str]) -> Iterator[tuple[str, Source, list[Edit]]]:
    whole = [edit for scope in source.scopes for edit in _empty(source, scope)]
    if 2 <= len(whole) <= _MOST_FUNCTIONS:
        yield "emptied module", source, whole
    for scope in source.scopes:
        if isinstance(scope, Function):
            edits = _empty(source, scope)
            if edits:
                yield "emptied function", source, edits
            block: list[ast.stmt] = getattr(source.parents[scope], "body", [])
            is_unused = names[scope.name] == 1 and not scope.name.startswith("__")
            if edits and is_unused and scope in block and len(block) > 1:
                removed = source.remove(scope, block)
                if removed is not None:
                    yield "removed function", source, [removed]
        elif not scope.name.startswith("_"):
            edits = [edit for entry in scope.body for edit in _empty(source, entry)]
            if 2 <= len(edits) <= _MOST_FUNCTIONS:
                yield "emptied class", source, edits


def _empty(source: Source, node: ast.AST) -> list[Edit]:
    """The edit that leaves only a function's docstring; none for stubs, small and nested functions."""
    if not isinstance(node, Function) or any(isinstance(one, Function) for one in source.ancestors(node)):
        return []
    body = node.body[has_docstring(node) :]
    if not body or any(isinstance(entry, ast.Global) for entry in body):
        return []
    span = source.own_lines(body[0], body[-1])
    num_lines = (body[-1].end_lineno or 0) - body[0].lineno + 1
    if span is None or num_lines < _LEAST_LINES or source.segment(body[0]).startswith(_NOTHING):
        return []
    return [Edit(span[0], span[1], f"{' ' * body[0].col_offset}{_NOTHING}\n")]


def hide_tests(tests: Mapping[str, str], failures: Sequence[TestFailure]) -> dict[str, str] | None:
    """Path -> text of the test files after removal of the failing tests; everything else stays.

    A test is removed where it is defined, with all its parameters, and so for every class that inherits it;
    tests of the same name in other classes stay. None if one is not found or cannot be removed.
    """
    hidden: dict[str, str] = {}
    names: dict[str, set[str]] = {}
    for failure in failures:
        names.setdefault(failure.path, set()).add(failure.name)
    for path, wanted in names.items():
        source = Source.parse(path, tests.get(path, ""))
        if source is None:
            return None
        found = {
            scope: name
            for scope, name in source.scopes.items()
            if isinstance(scope, Function) and name in wanted
        }
        if set(found.values()) != wanted:
            return None
        planned = list(_remove_tests(source, list(found)))
        edits = [edit for edit in planned if edit is not None]
        if len(edits) < len(planned):
            return None
        hidden[path] = apply_edits(source.text, edits)
    return hidden


def _remove_tests(source: Source, functions: Sequence[ast.AST]) -> Iterator[Edit | None]:
    for parent in dict.fromkeys(source.parents[one] for one in functions):
        for block in blocks(parent):
            mine = [one for one in block if one in functions]
            for at, one in enumerate(mine):
                yield source.remove(one, [one] if len(mine) == len(block) and at == 0 else block)
