"""The tree of prefixes gives back what was put in, and loses no page."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from etude.inference.cache import PAGE_TOKENS
from etude.inference.radix import MIN_COPIED, Node, PageTree
from tests.inference.invariants import check_tree, num_kept


def _tokens(*parts: tuple[int, int]) -> NDArray[np.int32]:
    """Runs of (token, length)."""
    return np.concatenate([np.full(length, token, dtype=np.int32) for token, length in parts])


def _put(tree: PageTree, tokens: NDArray[np.int32], clock: int = 0, *, ready: bool = True) -> list[int]:
    """A session's pages of `tokens`, put into the tree, the partly filled last page too."""
    pages = tree.allocate(-(-len(tokens) // PAGE_TOKENS))
    parent = tree.root
    for number, page in enumerate(pages):
        key = tokens[number * PAGE_TOKENS : (number + 1) * PAGE_TOKENS].tobytes()
        parent = tree.insert(parent, page, key, ready=ready, clock=clock)
    return pages


def test_a_prompt_finds_whole_pages_and_the_page_that_agrees_in_part() -> None:
    tree = PageTree(8)
    first = _tokens((1, 32), (2, 10))
    pages = _put(tree, first)
    match = tree.match(_tokens((1, 32), (2, 7), (3, 9)), 47, 0)
    assert [node.page for node in match.nodes] == pages[:2]
    assert match.tail is not None
    assert (match.tail.page, match.tail_tokens, match.pending) == (pages[2], 7, None)
    within = tree.match(first, 20, 0)
    assert [node.page for node in within.nodes] == pages[:1]
    assert (within.tail and within.tail.page, within.tail_tokens) == (pages[1], MIN_COPIED)
    check_tree(tree, [pages])


def test_a_few_tokens_in_common_are_not_worth_a_copy() -> None:
    tree = PageTree(4)
    _put(tree, _tokens((1, 16)))
    match = tree.match(_tokens((1, MIN_COPIED - 1), (2, 20)), 22, 0)
    assert (match.nodes, match.tail, match.pending) == ((), None, None)


def test_pages_that_are_being_computed_are_waited_for_where_they_would_be_shared() -> None:
    tree = PageTree(8)
    _put(tree, _tokens((1, 16), (2, 8)), ready=False)
    same = tree.match(_tokens((1, 16), (2, 8)), 23, 0)
    assert same.pending is not None
    assert same.pending.page == tree.root.children[_tokens((1, 16)).tobytes()].page
    same.pending.ready = True
    tail = tree.match(_tokens((1, 16), (2, 8)), 23, 0)
    assert (len(tail.nodes), tail.pending is not None) == (1, True)
    other = tree.match(_tokens((1, 16), (2, 6), (9, 9)), 30, 0)
    assert (len(other.nodes), other.tail, other.pending) == (1, None, None)


def test_what_nobody_uses_is_kept_until_room_is_needed_and_the_oldest_leaf_goes_first() -> None:
    tree = PageTree(4)
    old, new = _tokens((1, 32)), _tokens((2, 32))
    for clock, tokens in ((1, old), (2, new)):
        tree.release(_put(tree, tokens, clock), clock)
    assert (tree.num_free, num_kept(tree)) == (0, 4)
    tree.match(old, 16, 3)
    assert tree.make_room(1)
    assert len(tree.match(old, 32, 3).nodes) == 1, "the end of the older prefix went"
    assert len(tree.match(new, 32, 3).nodes) == 2
    assert tree.make_room(4)
    assert tree.match(new, 32, 4).nodes == ()
    check_tree(tree, [])


def test_used_pages_are_not_given_up_and_what_hangs_on_them_goes_first() -> None:
    tree = PageTree(3)
    pages = _put(tree, _tokens((1, 48)))
    tree.release(pages[1:], 1)
    assert not tree.make_room(3)
    assert tree.num_free == 2
    assert [node.page for node in tree.match(_tokens((1, 48)), 48, 2).nodes] == pages[:1]
    check_tree(tree, [pages[:1]])


def test_clearing_forgets_prefixes_and_leaves_sessions_their_pages() -> None:
    tree = PageTree(4)
    used, idle = _put(tree, _tokens((1, 32))), _put(tree, _tokens((2, 32)))
    tree.release(idle, 1)
    tree.clear()
    assert tree.match(_tokens((1, 32)), 32, 2).nodes == ()
    assert tree.num_free == 2
    check_tree(tree, [used])
    tree.release(used, 3)
    check_tree(tree, [])


@given(st.data())
def test_any_use_keeps_the_books_and_matches_only_what_was_put_in(data: st.DataObject) -> None:
    tree = PageTree(12)
    held: dict[Node, bytes] = {}
    sessions: list[list[int]] = []
    for clock in range(data.draw(st.integers(1, 40))):
        action = data.draw(st.sampled_from(["add", "add", "release", "room", "clear"]))
        if action == "add":
            runs = st.tuples(st.integers(0, 2), st.sampled_from([3, 16, 21, 32]))
            tokens = _tokens(*data.draw(st.lists(runs, min_size=1, max_size=2)))
            sessions += _add(tree, tokens, clock, held)
        elif action == "release" and sessions:
            tree.release(sessions.pop(data.draw(st.integers(0, len(sessions) - 1))), clock)
        elif action == "room":
            tree.make_room(data.draw(st.integers(0, 12)))
        elif action == "clear" and data.draw(st.integers(0, 4)) == 0:
            tree.clear()
        check_tree(tree, sessions)


def _add(tree: PageTree, tokens: NDArray[np.int32], clock: int, held: dict[Node, bytes]) -> list[list[int]]:
    """What a session does that comes with these tokens: shares what there is, and adds the rest."""
    match = tree.match(tokens, len(tokens) - 1, clock)
    for number, node in enumerate(match.nodes):
        assert node.key == tokens[number * PAGE_TOKENS : (number + 1) * PAGE_TOKENS].tobytes() == held[node]
    shared = [node.page for node in match.nodes]
    tree.retain(shared)
    count = -(-len(tokens) // PAGE_TOKENS) - len(shared)
    if not tree.make_room(count):
        tree.release(shared, clock)
        return []
    pages = [*shared, *tree.allocate(count)]
    parent = match.nodes[-1] if match.nodes else tree.root
    for number in range(len(shared), len(pages)):
        key = tokens[number * PAGE_TOKENS : (number + 1) * PAGE_TOKENS].tobytes()
        parent = tree.insert(parent, pages[number], key, ready=True, clock=clock)
        held[parent] = key
    return [pages]
