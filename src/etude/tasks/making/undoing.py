"""Undoes past changes in the project's current text, which gives realistic bugs and missing features.

before ──┐ one commit or release           the current text
after  ──┴──> hunks ──> those whose lines are unchanged since, in their earlier state
                 ├── all of a change: `undone change`
                 └── one of them:     `dropped hunk`
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from etude.tasks.making.changes import Change, Place, split_of, unique_changes
from etude.tasks.making.source import Function, Source, is_test_path, read_tree
from etude.tasks.making.tokens import changed_lines

_GAP = 2
"""Most unchanged lines between two differences of one hunk."""
_MOST_HUNKS = 8
"""Most hunks of a change that is undone as a whole: an instruction cannot describe more."""


@dataclass(frozen=True, slots=True)
class PastChange:
    """Modules before and after a commit or release that also changed tests: path -> text."""

    before: Mapping[str, str]
    """Without modules that were added."""
    after: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class _Hunk:
    source: Source
    first: int
    """Lines [first, last) of the current text, counted from 0."""
    last: int
    before: tuple[str, ...]

    @property
    def place(self) -> Place:
        first = max(1, self.first + (self.last > self.first))
        last = max(first, self.last)
        return Place(self.source.path, self.source.scope_name(first, last), first, last)


def plan_undone(sources: Mapping[str, str], past: Iterable[PastChange]) -> Iterator[Change]:
    """Every past change that can be undone, in order, each followed by its single hunks, without duplicates.

    A change over modules of several splits is undone for each split separately, a large one by module, or
    only by hunk. Skips hunks whose lines or adjacent lines were changed again since.
    """
    return unique_changes(change for one in past for change in _plan(one, sources))


def _plan(past: PastChange, sources: Mapping[str, str]) -> list[Change | None]:
    hunks = [hunk for path in sorted(past.after) for hunk in _find_hunks(path, past, sources)]
    planned = [_undo("undone change", group) for group in _groups(hunks)]
    return planned + [_undo("dropped hunk", [hunk]) for hunk in hunks]


def _find_hunks(path: str, past: PastChange, sources: Mapping[str, str]) -> Iterator[_Hunk]:
    source = Source.parse(path, sources.get(path, ""))
    if source is None or not source.text or is_test_path(path):
        return
    before, after = past.before.get(path, ""), past.after[path]
    since = list(changed_lines(after, source.text))
    rows: list[tuple[int, int, int, int]] = []
    for (first, last), (old_first, old_last) in changed_lines(after, before):
        if rows and first - rows[-1][1] <= _GAP:
            first, _, old_first, _ = rows.pop()
        rows.append((first, last, old_first, old_last))
    lines = before.split("\n")
    for first, last, old_first, old_last in rows:
        moved = 0
        for (one, two), (new_one, new_two) in since:
            if two < first:
                moved += (new_two - new_one) - (two - one)
            elif one <= last:
                break
        else:
            yield _Hunk(source, first + moved, last + moved, tuple(lines[old_first:old_last]))


def _groups(hunks: Sequence[_Hunk]) -> list[list[_Hunk]]:
    """Groups of hunks that are undone together."""
    splits: dict[str, list[_Hunk]] = {}
    modules: dict[str, list[_Hunk]] = {}
    for hunk in hunks:
        splits.setdefault(split_of(hunk.source.path), []).append(hunk)
        modules.setdefault(hunk.source.path, []).append(hunk)
    groups = [*splits.values(), *modules.values()]
    return [group for group in groups if 1 < len(group) <= _MOST_HUNKS]


def _undo(operator: str, hunks: Sequence[_Hunk]) -> Change | None:
    """The change; None if the executed code does not differ, or the result is invalid Python."""
    files: dict[str, str] = {}
    for source in dict.fromkeys(hunk.source for hunk in hunks):
        lines = source.text.split("\n")
        for hunk in reversed([hunk for hunk in hunks if hunk.source is source]):
            lines[hunk.first : hunk.last] = hunk.before
        text = "\n".join(lines)
        executed = _dump_executed(text)
        if executed is None:
            return None
        if executed != _dump_executed(source.text):
            files[source.path] = text
    places = tuple(hunk.place for hunk in hunks if hunk.source.path in files)
    return Change("past_change", operator, files, places) if files else None


@lru_cache(maxsize=8)
def _dump_executed(text: str) -> str | None:
    tree = read_tree(text)
    return None if tree is None else ast.dump(_ExecutedOnly().visit(tree))


class _ExecutedOnly(ast.NodeTransformer):
    """Removes docstrings, annotations and imports of a module."""

    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        return None if isinstance(node.value, ast.Constant) else node

    def visit_Import(self, node: ast.Import | ast.ImportFrom) -> None:
        return None

    visit_ImportFrom = visit_Import

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.Assign | None:
        return ast.Assign([node.target], node.value) if node.value is not None else None

    def visit_arg(self, node: ast.arg) -> ast.arg:
        return ast.arg(node.arg)

    def visit_FunctionDef(self, node: Function) -> ast.AST:
        node.returns = None
        return self.generic_visit(node)

    visit_AsyncFunctionDef = visit_FunctionDef
