"""Page allocation for an engine's sessions: their own pages, shared cached prefixes, scratch pages."""

from __future__ import annotations

from etude.errors import SamplerError
from etude.inference.cache import PAGE_TOKENS
from etude.inference.radix import MIN_COPIED, Match, Node, PageTree
from etude.inference.sequences import Sequences
from etude.inference.times import EngineCounters


class SessionPages:
    """Allocates, shares and frees the pages of sessions. What they compute is the scheduler's choice."""

    def __init__(self, sequences: Sequences, counters: EngineCounters) -> None:
        self.tree = PageTree(sequences.cache.num_pages)
        self.clock = 0
        """Steps so far: the clock of the tree's LRU eviction."""
        self._counters = counters
        self._sequences = sequences
        self._scratch: list[list[int]] = []

    def match(self, row: int) -> Match:
        """The cached prefix of a row's tokens, without the last, which is always computed."""
        length = int(self._sequences.length[row])
        tokens = self._sequences.tokens[row, :length]
        return self.tree.match(tokens, length - 1, self.clock, self._root(row))

    def _root(self, row: int) -> Node:
        """Root of the prefixes of a row's adapter."""
        return self.tree.root_of(int(self._sequences.adapter[row]))

    def cache_computed(self, row: int) -> None:
        """Inserts the whole pages that `row` has computed into the prefix cache."""
        sequences, state = self._sequences, self._sequences.states[row]
        computed = int(sequences.computed[row])
        while state.pending and state.pending[0][0] <= computed:
            state.pending.pop(0)[1].ready = True
        if state.path is None:
            return
        while len(state.path) < computed // PAGE_TOKENS:
            parent = state.path[-1] if state.path else self._root(row)
            if state.tail is not None:
                self.tree.remove(state.tail)
                state.tail = None
            if not parent.alive:
                state.path = None
                return
            number = len(state.path)
            key = sequences.tokens[row, number * PAGE_TOKENS : (number + 1) * PAGE_TOKENS].tobytes()
            page = int(sequences.tables[row, number])
            state.path.append(self.tree.insert(parent, page, key, ready=True, clock=self.clock))

    def allocate_scratch(self, count: int) -> list[int] | None:
        """Pages for work that belongs to no session, until `free_scratch`; None if that many cannot be freed
        without preempting a request."""
        if not self.make_room(count):
            return None
        self._scratch.append(self.tree.allocate(count))
        return self._scratch[-1]

    def free_scratch(self, pages: list[int]) -> None:
        """Frees pages of `allocate_scratch`."""
        self._scratch.remove(pages)
        self.tree.release(pages, self.clock)

    def reset_prefix_cache(self) -> None:
        """Frees all cached pages. Raises SamplerError while a session or a scoring uses some."""
        used = int((self.tree.uses > 0).sum())
        if used:
            raise SamplerError(
                "pages are in use",
                field="pages",
                received=used,
                fix="close the sessions, and wait until scoring has ended",
            )
        self.tree.clear()

    def make_room(self, count: int) -> bool:
        """Makes `count` pages free: evicts cached pages first, then takes the pages of idle sessions, longest
        idle first. False, without evicting anything, if that could not be enough."""
        if self.tree.num_free >= count:
            return True
        sequences = self._sequences
        idle = [row for row in sequences.idle if sequences.num_pages[row]]
        kept = self.tree.num_pages - self.tree.num_free
        if kept - self._num_busy(idle) < count - self.tree.num_free:
            return False
        while not self.tree.make_room(count):
            if not idle:
                return False
            self.free_pages_of(idle.pop(0))
        return True

    def _num_busy(self, idle: list[int]) -> int:
        """Pages in use by rows other than `idle`, or as scratch."""
        uses = self.tree.uses.copy()
        for row in idle:
            uses[self._sequences.pages(row)] -= 1
        return int((uses > 0).sum())

    def allocate_prompt(self, row: int, match: Match) -> bool:
        """Gives a row pages for its tokens, those of `match` and new ones. False if too few are free."""
        sequences, state = self._sequences, self._sequences.states[row]
        total = -(-int(sequences.length[row]) // PAGE_TOKENS)
        shared = [node.page for node in match.nodes]
        self.tree.retain(shared)
        copied = match.tail.page if match.tail is not None else None
        if copied is not None:
            self.tree.retain((copied,))
        needed = total - len(shared)
        # A page more for each running request, so that none need be preempted at once.
        wanted = needed + int(sequences.running.sum())
        enough = self.make_room(wanted)
        if not enough and copied is not None:
            self.tree.release((copied,), self.clock)
            copied = None
            enough = self.make_room(wanted)
        if not enough:
            self.tree.release(shared, self.clock)
            return False
        sequences.tables[row, : len(shared)] = shared
        sequences.num_pages[row] = len(shared)
        pages = self.append_pages(row, needed)
        computed = len(shared) * PAGE_TOKENS
        if copied is not None:
            sequences.cache.copy_page(copied, pages[0])
            self.tree.release((copied,), self.clock)
            computed += match.tail_tokens
        sequences.computed[row] = computed
        self._counters.cached_tokens += computed
        if state.cached is None:  # hits after a preemption are of pages computed for this request
            state.cached = computed
        state.path = list(match.nodes)
        self._insert_pending(row)
        return True

    def _insert_pending(self, row: int) -> None:
        """Inserts the pages of a prompt into the tree as pending, before they are computed."""
        sequences, state = self._sequences, self._sequences.states[row]
        assert state.path is not None
        length, pages = int(sequences.length[row]), sequences.pages(row)
        for number in range(len(state.path), len(pages)):
            start, end = number * PAGE_TOKENS, min((number + 1) * PAGE_TOKENS, length)
            parent = state.path[-1] if state.path else self._root(row)
            key = sequences.tokens[row, start:end].tobytes()
            node = self.tree.insert(parent, pages[number], key, ready=False, clock=self.clock)
            if node.page == pages[number]:
                state.pending.append((end, node))
            if end - start == PAGE_TOKENS:
                state.path.append(node)
            elif node.page == pages[number]:
                state.tail = node

    def append_pages(self, row: int, count: int) -> list[int]:
        """Appends `count` new pages to a row's page table, and returns them."""
        sequences = self._sequences
        pages, first = self.tree.allocate(count), int(sequences.num_pages[row])
        sequences.tables[row, first : first + count] = pages
        sequences.num_pages[row] = first + count
        sequences.page_epoch[pages] = sequences.epoch_of(row)
        return pages

    def free_pages_of(self, row: int) -> None:
        """Frees all pages of a row: its keys will be computed again, and its routes reported again."""
        sequences, state = self._sequences, self._sequences.states[row]
        self._remove_pending(row)
        self.tree.release(sequences.pages(row), self.clock)
        sequences.num_pages[row] = sequences.computed[row] = 0
        state.reported_routes = 0
        state.path = state.tail = None

    def _remove_pending(self, row: int) -> None:
        """Removes pending pages that will not be computed from the tree."""
        state = self._sequences.states[row]
        for _, node in reversed(state.pending):
            self.tree.remove(node)
            if node is state.tail:
                state.tail = None
        state.pending = []
        if state.path is not None:
            del state.path[int(self._sequences.computed[row]) // PAGE_TOKENS :]

    def cache_with_tail(self, row: int) -> None:
        """Inserts all that a row has computed into the prefix cache, with its partly filled last page."""
        sequences, state = self._sequences, self._sequences.states[row]
        self.cache_computed(row)
        self._remove_pending(row)
        computed = int(sequences.computed[row])
        start = computed // PAGE_TOKENS * PAGE_TOKENS
        if state.path is None or computed - start < MIN_COPIED:
            return
        parent = state.path[-1] if state.path else self._root(row)
        if not parent.alive:
            return
        if state.tail is not None:
            self.tree.remove(state.tail)
        page = int(sequences.tables[row, start // PAGE_TOKENS])
        key = sequences.tokens[row, start:computed].tobytes()
        node = self.tree.insert(parent, page, key, ready=True, clock=self.clock)
        state.tail = node if node.page == page else None
