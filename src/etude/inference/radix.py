"""The prefix cache: a radix tree over whole pages, and the pool that the pages come from.

A path from the root spells the tokens of a prefix, one page per node; its last node may be a partly filled
page (the tail). Only pages that were computed under the version in service are in the tree: it is emptied
when weights change, so no new request ever attends to another version's keys. Each adapter has its own root.

A page is free, or in use by sessions, or cached by the tree for later sessions (or both). A page that only
the tree holds can be evicted: least recently used first, leaves before their parents.

A node is inserted before its page is computed (`ready` False), so that sessions with the same prompt see that
it is pending, and wait for it.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from etude.inference.cache import PAGE_TOKENS

MIN_COPIED = 4
"""Fewest common tokens for which a page is copied; below that it is computed."""
_TOKEN_BYTES = 4
_PAGE_BYTES = PAGE_TOKENS * _TOKEN_BYTES


@dataclass(slots=True, eq=False)
class Node:
    """One page of the tree."""

    page: int
    key: bytes
    """Its tokens as int32 bytes; a tail has fewer than a page."""
    parent: Node | None
    ready: bool
    """Whether keys and values of all its tokens are computed."""
    last_used: int = 0
    alive: bool = True
    """Whether it is still in the tree."""
    children: dict[bytes, Node] = field(default_factory=dict[bytes, "Node"])


@dataclass(frozen=True, slots=True)
class Match:
    """The longest cached prefix of a prompt."""

    nodes: tuple[Node, ...] = ()
    """Whole pages, from the first on."""
    tail: Node | None = None
    """A page of which only the first `tail_tokens` tokens match: it must be copied before it is continued."""
    tail_tokens: int = 0
    pending: Node | None = None
    """The next matching page, which another session is computing: the caller should wait for it."""


class PageTree:
    """The page pool and the prefix tree over it. Clocks are engine steps: any non-decreasing number."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._roots: dict[int, Node] = {}
        self.uses = np.zeros(num_pages, dtype=np.int32)
        """[pages] reference counts: the sessions that use each page."""
        self._node_of: list[Node | None] = [None] * num_pages
        self._free = list(range(num_pages - 1, -1, -1))
        self._leaves: list[tuple[int, int, Node]] = []
        """Eviction heap of (last used, tie-breaker, node); entries may be out of date."""
        self._pushed = 0

    @property
    def root(self) -> Node:
        """Root of the prefixes that were computed without an adapter."""
        return self.root_of(-1)

    def root_of(self, adapter: int) -> Node:
        """Root of the prefixes of the adapter in slot `adapter`, created on first use."""
        if adapter not in self._roots:
            self._roots[adapter] = Node(-1, b"", None, ready=True)
        return self._roots[adapter]

    # ---- pages ----------------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        """Pages that neither a session nor the tree holds."""
        return len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Takes `count` free pages for one session. There must be that many: see `make_room`."""
        pages = [self._free.pop() for _ in range(count)]
        self.uses[pages] = 1
        return pages

    def make_room(self, count: int) -> bool:
        """Evicts unused cached pages until `count` pages are free; False if that is not enough."""
        while len(self._free) < count:
            if not self._evict_leaf():
                return False
        return True

    def retain(self, pages: Sequence[int]) -> None:
        """Adds one reference to each of these pages."""
        self.uses[[*pages]] += 1

    def release(self, pages: Sequence[int], clock: int) -> None:
        """Drops one reference from each of these pages; those that the tree does not cache become free."""
        self.uses[[*pages]] -= 1
        counts = self.uses[[*pages]].tolist()
        assert min(counts, default=0) >= 0, "a page is released once by each session that uses it"
        for page, uses in zip(reversed(pages), reversed(counts), strict=True):
            if uses:
                continue
            node = self._node_of[page]
            if node is None:
                self._free.append(page)
            else:
                node.last_used = clock
                self._push_leaf(node)

    # ---- prefixes -------------------------------------------------------------------------------

    def match(self, tokens: NDArray[np.int32], limit: int, clock: int, root: Node | None = None) -> Match:
        """The longest prefix of `tokens[:limit]` below `root`. Updates `last_used`, takes no references."""
        data = tokens[:limit].tobytes()
        nodes: list[Node] = []
        node = self.root if root is None else root
        while (len(nodes) + 1) * _PAGE_BYTES <= len(data):
            at = len(nodes) * _PAGE_BYTES
            child = node.children.get(data[at : at + _PAGE_BYTES])
            if child is None:
                break
            if not child.ready:
                return Match(tuple(nodes), pending=child)
            child.last_used = clock
            nodes.append(child)
            node = child
        rest = data[len(nodes) * _PAGE_BYTES :]
        tail, common = _closest(node, rest)
        if tail is None:
            return Match(tuple(nodes))
        if not tail.ready:
            whole = common * _TOKEN_BYTES == len(rest)
            return Match(tuple(nodes), pending=tail if whole else None)
        tail.last_used = clock
        return Match(tuple(nodes), tail, common)

    def insert(self, parent: Node, page: int, key: bytes, *, ready: bool, clock: int) -> Node:
        """The child of `parent` with `key`: a new node for `page`, or the existing one."""
        assert parent.alive
        node = parent.children.get(key)
        if node is not None:
            return node
        assert self._node_of[page] is None, "a page is in the tree once"
        node = Node(page, key, parent, ready, clock)
        parent.children[key] = node
        self._node_of[page] = node
        return node

    def remove(self, node: Node) -> None:
        """Removes a node and its subtree; nodes that are no longer in the tree are ignored."""
        if not node.alive or node.parent is None:
            return
        parent = node.parent
        del parent.children[node.key]
        stack = [node]
        while stack:
            removed = stack.pop()
            removed.alive = False
            stack.extend(removed.children.values())
            self._node_of[removed.page] = None
            if not self.uses[removed.page]:
                self._free.append(removed.page)
        self._push_leaf(parent)

    def remove_adapter(self, adapter: int) -> None:
        """Removes all prefixes of one adapter. The caller must hold no node of them."""
        if not any(root.children for slot, root in self._roots.items() if slot != adapter):
            self.clear()
            return
        for node in tuple(self.root_of(adapter).children.values()):
            self.remove(node)

    def clear(self) -> None:
        """Removes all prefixes; pages in use by sessions stay theirs. Nodes are not visited, since no step
        runs meanwhile: the caller must hold none."""
        self._roots = {}
        self._node_of = [None] * self.num_pages
        self._free = np.flatnonzero(self.uses == 0)[::-1].tolist()
        self._leaves.clear()

    # ---- eviction -------------------------------------------------------------------------------

    def _push_leaf(self, node: Node) -> None:
        if node.parent is None or node.children or self.uses[node.page]:
            return
        self._pushed += 1
        heapq.heappush(self._leaves, (node.last_used, self._pushed, node))
        if len(self._leaves) > 4 * self.num_pages + 64:
            current = {node: (node.last_used, order, node) for _, order, node in sorted(self._leaves)}
            self._leaves = [entry for entry in current.values() if self._is_idle_leaf(entry[2])]
            heapq.heapify(self._leaves)

    def _is_idle_leaf(self, node: Node) -> bool:
        return node.alive and not node.children and not self.uses[node.page]

    def _evict_leaf(self) -> bool:
        """Evicts the least recently used leaf; False if there is none."""
        while self._leaves:
            last_used, _, node = heapq.heappop(self._leaves)
            if not self._is_idle_leaf(node):
                continue
            if node.last_used != last_used:
                self._push_leaf(node)
                continue
            self.remove(node)
            return True
        return False


def _closest(parent: Node, rest: bytes) -> tuple[Node | None, int]:
    """The child with the longest common prefix with `rest`, and its length; None below `MIN_COPIED`."""
    best: Node | None = None
    longest = MIN_COPIED - 1
    start = rest[: MIN_COPIED * _TOKEN_BYTES]
    if len(start) < MIN_COPIED * _TOKEN_BYTES:
        return None, 0
    for child in parent.children.values():
        if not child.key.startswith(start):
            continue
        common = _common_tokens(child.key, rest)
        if common > longest or (common == longest and best is not None and child.ready and not best.ready):
            best, longest = child, common
    return best, longest if best is not None else 0


def _common_tokens(a: bytes, b: bytes) -> int:
    """Length of the common prefix in tokens, from the lowest differing bit of two long integers."""
    size = min(len(a), len(b))
    differing = int.from_bytes(a[:size], "little") ^ int.from_bytes(b[:size], "little")
    if not differing:
        return size // _TOKEN_BYTES
    return ((differing & -differing).bit_length() - 1) // (8 * _TOKEN_BYTES)
