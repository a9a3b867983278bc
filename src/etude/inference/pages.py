"""Which pages the sessions of an engine have: of their own, shared with others, lent."""

from __future__ import annotations

from etude.errors import SamplerError
from etude.inference.cache import PAGE_TOKENS, PagedCache
from etude.inference.radix import MIN_COPIED, Match, Node, PageTree
from etude.inference.sequences import Sequences


class SessionPages:
    """Takes, shares and gives back the pages of sessions. What is computed in them is said elsewhere."""

    def __init__(self, cache: PagedCache, sequences: Sequences) -> None:
        self.tree = PageTree(cache.num_pages)
        self.clock = 0
        """Steps so far, by which the tree knows what was used last."""
        self.cached_tokens = 0
        """Positions that a request found computed by another, or by itself before it was preempted."""
        self._cache = cache
        self._sequences = sequences
        self._lent: list[list[int]] = []

    def match(self, row: int) -> Match:
        """What the tree has of a row's tokens, but for the last."""
        length = int(self._sequences.length[row])
        tokens = self._sequences.tokens[row, :length]
        return self.tree.match(tokens, length - 1, self.clock, self._root(row))

    def _root(self, row: int) -> Node:
        """Where the prefixes of a row's adapter begin."""
        return self.tree.root_of(int(self._sequences.adapter[row]))

    def publish(self, row: int) -> None:
        """Lets others share what `row` has computed by now."""
        sequences, state = self._sequences, self._sequences.states[row]
        computed = int(sequences.computed[row])
        while state.coming and state.coming[0][0] <= computed:
            state.coming.pop(0)[1].ready = True
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

    def borrow(self, count: int) -> list[int] | None:
        """Pages for work that belongs to no session, until they are given back; None if so many are not to
        be had without preempting anybody."""
        if not self.make_room(count):
            return None
        self._lent.append(self.tree.take(count))
        return self._lent[-1]

    def give_back(self, pages: list[int]) -> None:
        """Ends a loan."""
        self._lent.remove(pages)
        self.tree.release(pages, self.clock)

    def forget_prefixes(self) -> None:
        """Frees all pages. Raises SamplerError while a session or a scoring uses some."""
        used = int((self.tree.uses > 0).sum())
        if used:
            raise SamplerError(
                "pages are in use",
                field="pages",
                received=used,
                fix="close the sessions, and wait for what is being scored",
            )
        self.tree.clear()

    def make_room(self, count: int) -> bool:
        """Frees `count` pages: first what only the tree keeps, then the pages of idle sessions.

        Where that cannot be enough, nothing is given up for it.
        """
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
            self.drop(idle.pop(0))
        return True

    def _num_busy(self, idle: list[int]) -> int:
        """Pages that anybody but the `idle` rows uses."""
        uses = self.tree.uses.copy()
        for row in idle:
            uses[self._sequences.pages(row)] -= 1
        return int((uses > 0).sum())

    def place(self, row: int, match: Match) -> bool:
        """Gives a row the pages of its tokens: those of `match`, and new ones. False if there are too few."""
        sequences, state = self._sequences, self._sequences.states[row]
        total = -(-int(sequences.length[row]) // PAGE_TOKENS)
        shared = [node.page for node in match.nodes]
        self.tree.retain(shared)
        copied = match.tail.page if match.tail is not None else None
        if copied is not None:
            self.tree.retain((copied,))
        needed = total - len(shared)
        wanted = needed + int(sequences.running.sum())  # so that those who run need not be preempted at once
        enough = self.make_room(wanted)
        if not enough and copied is not None:
            self.tree.release((copied,), self.clock)
            copied = None
            enough = self.make_room(wanted)
        if not enough:
            self.tree.release(shared, self.clock)
            return False
        pages = self.take(row, 0, shared, needed)
        computed = len(shared) * PAGE_TOKENS
        if copied is not None:
            self._cache.copy_page(copied, pages[0])
            self.tree.release((copied,), self.clock)
            computed += match.tail_tokens
        sequences.computed[row] = computed
        self.cached_tokens += computed
        if state.cached is None:  # what is found again after a preemption was computed for this request
            state.cached = computed
        state.path = list(match.nodes)
        self._announce(row)
        return True

    def _announce(self, row: int) -> None:
        """Puts the pages of a prompt into the tree before they are computed."""
        sequences, state = self._sequences, self._sequences.states[row]
        assert state.path is not None
        length, pages = int(sequences.length[row]), sequences.pages(row)
        for number in range(len(state.path), len(pages)):
            start, end = number * PAGE_TOKENS, min((number + 1) * PAGE_TOKENS, length)
            parent = state.path[-1] if state.path else self._root(row)
            key = sequences.tokens[row, start:end].tobytes()
            node = self.tree.insert(parent, pages[number], key, ready=False, clock=self.clock)
            if node.page == pages[number]:
                state.coming.append((end, node))
            if end - start == PAGE_TOKENS:
                state.path.append(node)
            elif node.page == pages[number]:
                state.tail = node

    def take(self, row: int, first: int, shared: list[int], count: int) -> list[int]:
        """Appends `shared` and then `count` new pages to a row's table, of which `first` are kept."""
        sequences = self._sequences
        pages = self.tree.take(count)
        sequences.tables[row, first : first + len(shared) + count] = [*shared, *pages]
        sequences.num_pages[row] = first + len(shared) + count
        sequences.page_epoch[pages] = sequences.epoch_of(row)
        return pages

    def drop(self, row: int) -> None:
        """A row uses no pages any more: its keys will be computed again, and its routes reported again."""
        sequences, state = self._sequences, self._sequences.states[row]
        self._retract(row)
        self.tree.release(sequences.pages(row), self.clock)
        sequences.num_pages[row] = sequences.computed[row] = 0
        state.reported_routes = 0
        state.path = state.tail = None

    def _retract(self, row: int) -> None:
        """Takes pages out of the tree that were announced and will not be computed."""
        state = self._sequences.states[row]
        for _, node in reversed(state.coming):
            self.tree.remove(node)
            if node is state.tail:
                state.tail = None
        state.coming = []
        if state.path is not None:
            del state.path[int(self._sequences.computed[row]) // PAGE_TOKENS :]

    def keep_tail(self, row: int) -> None:
        """Lets others share all that a row has computed, its partly filled last page included."""
        sequences, state = self._sequences, self._sequences.states[row]
        self.publish(row)
        self._retract(row)
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
