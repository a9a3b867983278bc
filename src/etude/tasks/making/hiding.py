"""Test files without the tests that a change makes fail: who reports a bug has no failing test."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence

from etude.tasks.making.changes import TestFailure
from etude.tasks.making.source import Edit, Function, Source, apply_edits


def hide_tests(tests: Mapping[str, str], failures: Sequence[TestFailure]) -> dict[str, str] | None:
    """Path -> text of the test files that lose a failing test; imports and all else stay.

    A test is removed where it is written, with all its parameters, so also for every class that inherits it;
    tests of the same name in other classes stay.
    None where one is not found, or no file would be left whole.
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
        edits = _remove(source, list(found))
        if edits is None:
            return None
        hidden[path] = apply_edits(source.text, edits)
    return hidden


def _remove(source: Source, functions: Sequence[ast.AST]) -> list[Edit] | None:
    edits: list[Edit] = []
    for parent in dict.fromkeys(source.parents[one] for one in functions):
        body: list[ast.stmt] = getattr(parent, "body", [])
        mine = [one for one in body if one in functions]
        rest = [one for one in body if one not in functions]
        for at, one in enumerate(mine):
            edit = source.remove(one, [one] if not rest and at == 0 else body)
            if edit is None:
                return None
            edits.append(edit)
    return edits
