"""Invariants of an engine's sessions and pages between two steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from etude.inference import Engine
from etude.inference.cache import PAGE_TOKENS
from etude.inference.radix import PageTree


def check_engine(engine: Engine) -> None:
    """Asserts that no page is lost and none has two owners who write to it."""
    sequences, pages = engine._sequences, engine._scheduler.pages
    check_tree(pages.tree, [*(sequences.pages(row) for row in sequences.states), *pages._scratch])
    for row, state in sequences.states.items():
        assert (state.request is None) == (row in sequences.idle)
        assert not (row in sequences.waiting and sequences.running[row])
        assert sequences.computed[row] <= sequences.num_pages[row] * PAGE_TOKENS
        if state.request is not None:
            assert sequences.running[row] or row in sequences.waiting
        if sequences.num_pages[row] * PAGE_TOKENS > sequences.computed[row]:
            written = sequences.pages(row)[int(sequences.computed[row]) // PAGE_TOKENS :]
            assert all(pages.tree.uses[page] == 1 for page in written), "shared pages are not written"


def num_kept(tree: PageTree) -> int:
    """Pages that only the tree keeps."""
    return sum(node is not None and not tree.uses[page] for page, node in enumerate(tree._node_of))


def check_tree(tree: PageTree, tables: Iterable[Sequence[int]]) -> None:
    """Asserts that every page is free or accounted for, given the pages that each session uses."""
    counted = [0] * tree.num_pages
    for table in tables:
        for page in table:
            counted[page] += 1
    assert counted == tree.uses.tolist(), "a page's uses are the sessions that have it"
    kept = {page for page, node in enumerate(tree._node_of) if node is not None}
    assert len(set(tree._free)) == len(tree._free), "a page is free once"
    used = set(np.flatnonzero(tree.uses).tolist())
    assert not (used | kept) & set(tree._free), "a page is free only if nobody uses or keeps it"
    assert len(used | kept) + len(tree._free) == tree.num_pages, "no page is lost"
    reachable, below = 0, [*tree._roots.values()]
    while below:
        node = below.pop()
        assert node.alive
        reachable += 1
        below.extend(node.children.values())
    assert reachable == len(kept) + len(tree._roots), "every page that is kept can be found"
    candidates = {id(node) for _, _, node in tree._leaves}
    for node in tree._node_of:
        if node is not None and tree._is_idle_leaf(node):
            assert id(node) in candidates, "every idle leaf can be given up"
