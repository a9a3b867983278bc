"""Which positions a step computes, and in which pages they lie.

    request ──start()──> waiting ──pages──> running ──finish()──> idle ──close()──> gone
                            ^                  |                    |
                            └──── preempt ─────┘      start() <─────┘

A request waits until its whole prompt has pages: those that the tree of prefixes holds are shared, the others
are taken. While somebody else is computing the same prompt, it waits for that. Running requests take one page
every 16 tokens; where none can be had, the youngest request gives its pages back and waits again. It keeps
its tokens, and since noise is a function of (key, position), what it will sample stays the same.

Everything is decided by the order of calls: no clock, no chance.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from etude.errors import SamplerError
from etude.inference.cache import PAGE_TOKENS, PagedCache, StepRows
from etude.inference.radix import MIN_COPIED, Match, PageTree
from etude.inference.sequences import Answer, Sequences
from etude.inference.speculation import Drafter
from etude.records import PolicyVersion, SampleRequest


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """One step's work: S members, decoding ones first."""

    rows: StepRows
    members: NDArray[np.int64]
    """[S] rows of `Sequences`."""
    num_decode: int
    """Members that compute their last token, and drafts behind it."""


class Scheduler:
    """Owns the sessions and their pages."""

    def __init__(
        self,
        cache: PagedCache,
        num_sessions: int,
        max_tokens: int,
        prefill_tokens: int,
        drafter: Drafter | None = None,
    ) -> None:
        self.sequences = Sequences(cache, num_sessions, max_tokens)
        self.tree = PageTree(cache.num_pages)
        self.num_preemptions = 0
        self.cached_tokens = 0
        """Positions that a request found computed by another, or by itself before it was preempted."""
        self._cache = cache
        self._prefill_tokens = prefill_tokens
        self._drafter = drafter
        self._clock = 0
        self._lent: list[list[int]] = []

    # ---- sessions -------------------------------------------------------------------------------

    def start(self, row: int, request: SampleRequest) -> None:
        """Begins a request of the session in `row`, which has none."""
        if request.prefix_digest is None:
            self._drop_pages(row)
        self.sequences.begin(row, request)
        if self.sequences.num_pages[row]:
            self.sequences.running[row] = True
            self.sequences.states[row].cached = int(self.sequences.computed[row])
        else:
            self.sequences.wait(row)

    def finish(self, row: int, reason: str) -> Answer:
        """Ends the request in `row`. The session keeps its pages until somebody needs them more."""
        self._keep_tail(row)
        return self.sequences.finish(row, reason)

    def close(self, row: int) -> None:
        """Forgets a session. What others may share of its pages stays in the tree."""
        if self.sequences.states[row].request is not None:
            self._keep_tail(row)
        self._drop_pages(row)
        self.sequences.remove(row)

    def change_version(self, version: PolicyVersion, *, recompute: bool) -> None:
        """What is computed from now on is `version`'s. Prefixes of the old are shared with nobody; with
        `recompute`, sessions lose theirs too."""
        sequences = self.sequences
        sequences.change_version(version)
        self.tree.clear()
        for row, state in sequences.states.items():
            state.path, state.tail, state.coming, state.waits_for = None, None, [], None
            if recompute:
                self._drop_pages(row)
                if sequences.running[row]:
                    sequences.wait(row)
            else:
                uncomputed = -(-int(sequences.computed[row]) // PAGE_TOKENS)
                pages = sequences.tables[row, uncomputed : int(sequences.num_pages[row])]
                sequences.page_epoch[pages] = len(sequences.epochs) - 1

    # ---- one step -------------------------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        """What the next step computes; None if nothing can be computed."""
        self._clock += 1
        self._place_waiting()
        sequences = self.sequences
        pending = sequences.length - sequences.computed
        decode = np.flatnonzero(sequences.running & (pending == 1))
        prefill, counts = self._choose_prefill(np.flatnonzero(sequences.running & (pending > 1)), pending)
        members = np.concatenate((decode, prefill))
        if not len(members):
            return None
        counts = np.concatenate((self._draft(decode), counts))
        if self._reserve(members, counts):
            still = sequences.running[members]
            num_decode = int(still[: len(decode)].sum())
            members, counts = members[still], counts[still]
        else:
            num_decode = len(decode)
        return self._plan(members, counts, num_decode)

    def _plan(self, members: NDArray[np.int64], counts: NDArray[np.int64], num_decode: int) -> StepPlan:
        sequences = self.sequences
        starts = sequences.computed[members]
        most = -(-int((starts + counts).max()) // PAGE_TOKENS)
        tables = sequences.tables[members, :most]
        rows = StepRows.plan(np.empty(0, dtype=np.int64), tables, counts, starts)
        tokens = sequences.tokens[members[rows.sequence], rows.positions].astype(np.int64)
        rows = StepRows(tokens, rows.positions, rows.sequence, tables, counts, starts)
        return StepPlan(rows, members, num_decode)

    def ahead(self, plan: StepPlan, most_steps: int) -> tuple[StepPlan, int]:
        """The same plan with pages for up to `most_steps` steps in a row, and how many: until a request
        reaches its limit. One where pages are short, where anything but decoding is to be done, or where
        somebody waits for each token."""
        sequences, members = self.sequences, plan.members
        if plan.num_decode < len(members) or self._drafter is not None or sequences.watched(members):
            return plan, 1
        steps = min(most_steps, int((sequences.limit[members] - sequences.length[members]).min()))
        needed = -(-(sequences.computed[members] + steps) // PAGE_TOKENS) - sequences.num_pages[members]
        if steps <= 1 or sequences.waiting or not self._make_room(int(needed.clip(min=0).sum())):
            return plan, 1
        for index in np.flatnonzero(needed > 0).tolist():
            row = int(members[index])
            self._take(row, int(sequences.num_pages[row]), [], int(needed[index]))
        most = -(-int((plan.rows.starts + steps).max()) // PAGE_TOKENS)
        rows = replace(plan.rows, tables=sequences.tables[members, :most])
        return StepPlan(rows, members, plan.num_decode), steps

    def publish(self, row: int) -> None:
        """Lets others share what `row` has computed by now."""
        sequences, state = self.sequences, self.sequences.states[row]
        computed = int(sequences.computed[row])
        while state.coming and state.coming[0][0] <= computed:
            state.coming.pop(0)[1].ready = True
        if state.path is None:
            return
        while len(state.path) < computed // PAGE_TOKENS:
            parent = state.path[-1] if state.path else self.tree.root
            if state.tail is not None:
                self.tree.remove(state.tail)
                state.tail = None
            if not parent.alive:
                state.path = None
                return
            number = len(state.path)
            key = sequences.tokens[row, number * PAGE_TOKENS : (number + 1) * PAGE_TOKENS].tobytes()
            page = int(sequences.tables[row, number])
            state.path.append(self.tree.insert(parent, page, key, ready=True, clock=self._clock))

    def borrow(self, count: int) -> list[int] | None:
        """Pages for work that belongs to no session, until they are given back; None if so many are not to
        be had without preempting anybody."""
        if not self._make_room(count):
            return None
        self._lent.append(self.tree.take(count))
        return self._lent[-1]

    def give_back(self, pages: list[int]) -> None:
        """Ends a loan."""
        self._lent.remove(pages)
        self.tree.release(pages, self._clock)

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

    def check(self) -> None:
        """Asserts that no page is lost and none has two owners who write to it."""
        sequences = self.sequences
        self.tree.check([*(sequences.pages(row) for row in sequences.states), *self._lent])
        for row, state in sequences.states.items():
            assert (state.request is None) == (row in sequences.idle)
            assert not (row in sequences.waiting and sequences.running[row])
            assert sequences.computed[row] <= sequences.num_pages[row] * PAGE_TOKENS
            if state.request is not None:
                assert sequences.running[row] or row in sequences.waiting
            if sequences.num_pages[row] * PAGE_TOKENS > sequences.computed[row]:
                written = sequences.pages(row)[int(sequences.computed[row]) // PAGE_TOKENS :]
                assert all(self.tree.uses[page] == 1 for page in written), "shared pages are not written"

    # ---- choosing -------------------------------------------------------------------------------

    def _choose_prefill(
        self, candidates: NDArray[np.int64], pending: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Rows to prefill, oldest first, and how many tokens of each, within the step's budget."""
        candidates = candidates[np.argsort(self.sequences.arrival[candidates])]
        before = np.cumsum(pending[candidates]) - pending[candidates]
        fits = before < self._prefill_tokens
        chosen = candidates[fits]
        return chosen, np.minimum(pending[chosen], self._prefill_tokens - before[fits])

    def _draft(self, decode: NDArray[np.int64]) -> NDArray[np.int64]:
        """Positions that each decoding row computes: its last token and drafts, which are put behind it."""
        counts = np.ones(len(decode), dtype=np.int64)
        if self._drafter is None:
            return counts
        sequences = self.sequences
        rooms = sequences.draft_room(decode).tolist()
        for number, (row, room) in enumerate(zip(decode.tolist(), rooms, strict=True)):
            length = int(sequences.length[row])
            drafts = self._drafter.draft(sequences, row, room)
            sequences.tokens[row, length : length + len(drafts)] = drafts
            counts[number] += len(drafts)
        return counts

    # ---- pages ----------------------------------------------------------------------------------

    def _place_waiting(self) -> None:
        """Gives pages to waiting requests, oldest first, until there are no more."""
        sequences = self.sequences
        for row in tuple(sequences.waiting):
            state = sequences.states[row]
            if state.waits_for is not None and state.waits_for.alive and not state.waits_for.ready:
                continue
            length = int(sequences.length[row])
            match = self.tree.match(sequences.tokens[row, :length], length - 1, self._clock)
            state.waits_for = match.coming
            if match.coming is not None:
                continue
            if not self._place(row, match):
                return
            sequences.waiting.remove(row)
            sequences.running[row] = True

    def _place(self, row: int, match: Match) -> bool:
        """Gives a row the pages of its tokens: those of `match`, and new ones. False if there are too few."""
        sequences, state = self.sequences, self.sequences.states[row]
        total = -(-int(sequences.length[row]) // PAGE_TOKENS)
        shared = [node.page for node in match.nodes]
        self.tree.retain(shared)
        copied = match.tail.page if match.tail is not None else None
        if copied is not None:
            self.tree.retain((copied,))
        needed = total - len(shared)
        wanted = needed + int(sequences.running.sum())  # so that those who run need not be preempted at once
        enough = self._make_room(wanted)
        if not enough and copied is not None:
            self.tree.release((copied,), self._clock)
            copied = None
            enough = self._make_room(wanted)
        if not enough:
            self.tree.release(shared, self._clock)
            return False
        pages = self._take(row, 0, shared, needed)
        computed = len(shared) * PAGE_TOKENS
        if copied is not None:
            self._cache.copy_page(copied, pages[0])
            self.tree.release((copied,), self._clock)
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
        sequences, state = self.sequences, self.sequences.states[row]
        assert state.path is not None
        length, pages = int(sequences.length[row]), sequences.pages(row)
        for number in range(len(state.path), len(pages)):
            start, end = number * PAGE_TOKENS, min((number + 1) * PAGE_TOKENS, length)
            parent = state.path[-1] if state.path else self.tree.root
            key = sequences.tokens[row, start:end].tobytes()
            node = self.tree.insert(parent, pages[number], key, ready=False, clock=self._clock)
            if node.page == pages[number]:
                state.coming.append((end, node))
            if end - start == PAGE_TOKENS:
                state.path.append(node)
            elif node.page == pages[number]:
                state.tail = node

    def _take(self, row: int, first: int, shared: list[int], count: int) -> list[int]:
        """Appends `shared` and then `count` new pages to a row's table, of which `first` are kept."""
        sequences = self.sequences
        pages = self.tree.take(count)
        sequences.tables[row, first : first + len(shared) + count] = [*shared, *pages]
        sequences.num_pages[row] = first + len(shared) + count
        sequences.page_epoch[pages] = len(sequences.epochs) - 1
        return pages

    def _reserve(self, members: NDArray[np.int64], counts: NDArray[np.int64]) -> bool:
        """Gives members the pages that they are about to write, oldest first; whether any was preempted."""
        sequences = self.sequences
        needed = -(-(sequences.computed[members] + counts) // PAGE_TOKENS) - sequences.num_pages[members]
        short = np.flatnonzero(needed > 0)
        before = self.num_preemptions
        for index in short[np.argsort(sequences.arrival[members[short]])].tolist():
            row = int(members[index])
            if sequences.running[row] and self._make_room_by_preempting(row, int(needed[index])):
                self._take(row, int(sequences.num_pages[row]), [], int(needed[index]))
        return self.num_preemptions > before

    def _make_room_by_preempting(self, row: int, count: int) -> bool:
        """Frees `count` pages; False if `row` itself had to go, because it is the youngest."""
        sequences = self.sequences
        while not self._make_room(count):
            running = np.flatnonzero(sequences.running)
            youngest = int(running[np.argmax(sequences.arrival[running])])
            self._preempt(youngest)
            if youngest == row:
                return False
        return True

    def _preempt(self, row: int) -> None:
        self.sequences.note_oldest(row)
        self._drop_pages(row)
        self.sequences.wait(row)
        self.num_preemptions += 1

    def _make_room(self, count: int) -> bool:
        """Frees `count` pages: first what only the tree keeps, then the pages of idle sessions.

        Where that cannot be enough, nothing is given up for it.
        """
        if self.tree.num_free >= count:
            return True
        sequences = self.sequences
        idle = [row for row in sequences.idle if sequences.num_pages[row]]
        kept = self.tree.num_pages - self.tree.num_free
        if kept - self._num_busy(idle) < count - self.tree.num_free:
            return False
        while not self.tree.make_room(count):
            if not idle:
                return False
            self._drop_pages(idle.pop(0))
        return True

    def _num_busy(self, idle: list[int]) -> int:
        """Pages that anybody but the `idle` rows uses."""
        uses = self.tree.uses.copy()
        for row in idle:
            uses[self.sequences.pages(row)] -= 1
        return int((uses > 0).sum())

    def _drop_pages(self, row: int) -> None:
        """A row uses no pages any more: its keys will be computed again, and its routes reported again."""
        sequences, state = self.sequences, self.sequences.states[row]
        self._retract(row)
        self.tree.release(sequences.pages(row), self._clock)
        sequences.num_pages[row] = sequences.computed[row] = 0
        state.reported_routes = 0
        state.path = state.tail = None

    def _retract(self, row: int) -> None:
        """Takes pages out of the tree that were announced and will not be computed."""
        state = self.sequences.states[row]
        for _, node in reversed(state.coming):
            self.tree.remove(node)
            if node is state.tail:
                state.tail = None
        state.coming = []
        if state.path is not None:
            del state.path[int(self.sequences.computed[row]) // PAGE_TOKENS :]

    def _keep_tail(self, row: int) -> None:
        """Lets others share all that a row has computed, its partly filled last page included."""
        sequences, state = self.sequences, self.sequences.states[row]
        self.publish(row)
        self._retract(row)
        computed = int(sequences.computed[row])
        start = computed // PAGE_TOKENS * PAGE_TOKENS
        if state.path is None or computed - start < MIN_COPIED:
            return
        parent = state.path[-1] if state.path else self.tree.root
        if not parent.alive:
            return
        if state.tail is not None:
            self.tree.remove(state.tail)
        page = int(sequences.tables[row, start // PAGE_TOKENS])
        key = sequences.tokens[row, start:computed].tobytes()
        node = self.tree.insert(parent, page, key, ready=True, clock=self._clock)
        state.tail = node if node.page == page else None
