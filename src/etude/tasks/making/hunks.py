"""Dropped hunks: a release that lacks one place of what changed since the release before it."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from random import Random

from etude.tasks.making.changes import Change, Place
from etude.tasks.making.source import Source, is_test_path, read_tree
from etude.tasks.making.tokens import changed_lines, code_tokens


def plan_dropped_hunks(before: Mapping[str, str], after: Mapping[str, str], seed: int) -> Iterator[Change]:
    """The later release with one hunk of its changes taken back: bugs as people leave them.

    Hunks of comments alone, of tests, and those without which the file is no Python are passed over.
    """
    planned = list[Change]()
    for path in sorted(before.keys() & after.keys()):
        source = None if is_test_path(path) else Source.parse(path, after[path])
        if source is not None and before[path] != after[path] and "\r" not in before[path]:
            planned += _dropped(source, before[path])
    Random(f"hunks/{seed}").shuffle(planned)
    yield from planned


def _dropped(source: Source, before: str) -> Iterator[Change]:
    old, tree = before.split("\n"), ast.dump(source.tree)
    for one, two in changed_lines(before, source.text):
        was, now = old[slice(*one)], source.lines[slice(*two)]
        if code_tokens("\n".join(was)) == code_tokens("\n".join(now)):
            continue
        text = "\n".join([*source.lines[: two[0]], *was, *source.lines[two[1] :]])
        changed = read_tree(text)
        if changed is None or ast.dump(changed) == tree:
            continue
        what = "dropped addition" if not was else "dropped removal" if not now else "dropped rewrite"
        first = min(two[0] + 1, len(source.lines))
        last = max(first, two[1])
        place = Place(source.path, source.scope_name(first, last), first, last)
        yield Change("dropped_hunk", what, {source.path: text}, (place,))
