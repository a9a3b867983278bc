"""Deleted features: functions, classes and modules whose bodies are gone, or that are not there at all."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from random import Random

from etude.tasks.making.changes import Change
from etude.tasks.making.source import (
    Edit,
    Function,
    Source,
    apply_edits,
    has_docstring,
    read_sources,
    read_tree,
)

_LEAST_LINES = 3
_MOST_FUNCTIONS = 12
_NOTHING = "raise NotImplementedError"


def plan_deletions(sources: Mapping[str, str], seed: int) -> Iterator[Change]:
    """Every deletion of a project, in an order that the seed decides.

    A function is emptied where its docstring stays to say what it does; removed where nothing else in
    the project names it, so that all else still imports. A class or module loses all its bodies.
    """
    files = read_sources(sources)
    names = Counter(re.findall(r"\w+", "\n".join(source.text for source in files)))
    planned = [found for source in files for found in _deletions(source, names)]
    Random(f"deletions/{seed}").shuffle(planned)
    seen = set[str]()
    for operator, source, edits in planned:
        text = apply_edits(source.text, edits)
        change = Change("deleted_feature", operator, {source.path: text}, (source.place(edits),))
        if read_tree(text) is not None and change.id not in seen:
            seen.add(change.id)
            yield change


def _deletions(source: Source, names: Counter[str]) -> Iterator[tuple[str, Source, list[Edit]]]:
    whole = [edit for scope in source.scopes for edit in _empty(source, scope)]
    if 2 <= len(whole) <= _MOST_FUNCTIONS:
        yield "emptied module", source, whole
    for scope in source.scopes:
        if isinstance(scope, Function):
            edits = _empty(source, scope)
            if edits:
                yield "emptied function", source, edits
            block = next(
                (body for body in [getattr(source.parents[scope], "body", [])] if scope in body),
                [],
            )
            dunder = scope.name.startswith("__")
            if edits and len(block) > 1 and not dunder and names[scope.name] == 1:
                removed = source.remove(scope, block)
                if removed is not None:
                    yield "removed function", source, [removed]
        elif not scope.name.startswith("_"):
            edits = [edit for entry in scope.body for edit in _empty(source, entry)]
            if 2 <= len(edits) <= _MOST_FUNCTIONS:
                yield "emptied class", source, edits


def _empty(source: Source, node: ast.AST) -> list[Edit]:
    """The edit that leaves a function its docstring alone; none for stubs, small ones and inner ones."""
    if not isinstance(node, Function) or isinstance(source.parents[node], Function):
        return []
    body = node.body[has_docstring(node) :]
    if not body or any(isinstance(entry, ast.Global) for entry in body):
        return []
    span = source.own_lines(body[0], body[-1])
    num_lines = (body[-1].end_lineno or 0) - body[0].lineno + 1
    if span is None or num_lines < _LEAST_LINES or source.segment(body[0]).startswith(_NOTHING):
        return []
    return [Edit(span[0], span[1], f"{' ' * body[0].col_offset}{_NOTHING}\n")]
