"""The scheduler: chooses the positions that each step computes, and allocates their pages.

    request ──start()──> waiting ──pages──> running ──finish()──> idle ──close()──> closed
                            ^                  |                    |
                            └──── preempt ─────┘      start() <─────┘

A request waits until its whole prompt has pages: cached prefixes are shared, the other pages are allocated.
While another session computes the same prompt, it waits for that. Running requests allocate one page every
16 tokens; where none is free, the youngest request is preempted: it frees its pages and waits again. It keeps
its tokens, and since noise is a function of (key, position), what it will sample stays the same.

All decisions follow from the order of calls: no clock and no randomness.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from etude.inference.cache import PAGE_TOKENS, StepRows
from etude.inference.draft_gauge import DraftGauge
from etude.inference.pages import SessionPages
from etude.inference.sequences import NO_ADAPTER, Answer, Sequences
from etude.inference.speculation import Drafter
from etude.inference.times import EngineCounters
from etude.records import PolicyVersion, SampleRequest


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """The work of one step: S members, decoding ones first."""

    rows: StepRows
    members: NDArray[np.int64]
    """[S] rows of `Sequences`."""
    num_decode: int
    """Number of decoding members: they compute their last token, and drafts behind it."""
    starts_run: bool = False
    """Whether native code may run several steps of the members, which all decode and are not reported token
    by token, and draft by itself."""


class Scheduler:
    """Owns the sessions, and plans what each step computes of them."""

    def __init__(
        self,
        sequences: Sequences,
        prefill_tokens: int,
        drafter: Drafter | None,
        gauge: DraftGauge,
        counters: EngineCounters,
        *,
        has_runs: bool,
    ) -> None:
        """`gauge`: chooses the number of drafts. `has_runs`: see `StepPlan.starts_run`."""
        self.sequences = sequences
        self.pages = SessionPages(sequences, counters)
        self.gauge, self.counters = gauge, counters
        self._drafter = drafter
        self._prefill_tokens = prefill_tokens
        self._has_runs = has_runs

    # ---- sessions -------------------------------------------------------------------------------

    def start(self, row: int, request: SampleRequest, adapter: int = NO_ADAPTER) -> None:
        """Begins a request of the session in `row`, which has none in flight, with adapter slot `adapter`."""
        if request.prefix_digest is None or self.sequences.adapter[row] != adapter:
            self.pages.free_pages_of(row)
        self.sequences.adapter[row] = adapter
        self.sequences.begin_request(row, request)
        if self.sequences.num_pages[row]:
            self.sequences.running[row] = True
            self.sequences.states[row].cached = int(self.sequences.computed[row])
        else:
            self.sequences.enqueue(row)

    def finish(self, row: int, reason: str) -> Answer:
        """Ends the request in `row`. The session keeps its pages until others need them."""
        self.pages.cache_with_tail(row)
        return self.sequences.finish(row, reason)

    def close(self, row: int) -> None:
        """Removes a session. Its shareable pages stay in the prefix cache."""
        if self.sequences.states[row].request is not None:
            self.pages.cache_with_tail(row)
        self.pages.free_pages_of(row)
        self.sequences.remove(row)

    def change_version(
        self, version: PolicyVersion, *, recompute: bool, adapter: int = NO_ADAPTER, all_sessions: bool = True
    ) -> None:
        """From now on adapter slot `adapter` computes with `version`: `all_sessions`, or those of the slot,
        continue with it. Cached prefixes of the old version are dropped; with `recompute`, so are the keys
        and values of these sessions."""
        self.gauge.reset()
        sequences = self.sequences
        rows = [row for row in sequences.states if all_sessions or sequences.adapter[row] == adapter]
        if all_sessions:
            self.pages.tree.clear()
        else:
            self.pages.tree.remove_adapter(adapter)
        sequences.change_version(version, adapter, rows)
        for row in rows:
            state = sequences.states[row]
            state.path, state.tail, state.pending, state.waits_for = None, None, [], None
            if recompute:
                self.pages.free_pages_of(row)
                if sequences.running[row]:
                    sequences.enqueue(row)
            else:
                uncomputed = -(-int(sequences.computed[row]) // PAGE_TOKENS)
                pages = sequences.tables[row, uncomputed : int(sequences.num_pages[row])]
                sequences.page_epoch[pages] = len(sequences.epochs) - 1

    # ---- one step -------------------------------------------------------------------------------

    def plan(self) -> StepPlan | None:
        """Plans the next step; None if nothing can be computed."""
        self.pages.clock += 1
        self._admit_waiting()
        sequences = self.sequences
        pending = sequences.length - sequences.computed
        decode = self._by_adapter(np.flatnonzero(sequences.running & (pending == 1)))
        prefill, counts = self._choose_prefill(np.flatnonzero(sequences.running & (pending > 1)), pending)
        members = np.concatenate((decode, prefill))
        if not len(members):
            return None
        starts_run = self._has_runs and not len(prefill) and not sequences.watched(decode)
        drafted = np.ones_like(decode) if starts_run else self._draft(decode)
        counts = np.concatenate((drafted, counts))
        if self._reserve(members, counts):
            still = sequences.running[members]
            num_decode = int(still[: len(decode)].sum())
            members, counts = members[still], counts[still]
        else:
            num_decode = len(decode)
        return StepPlan(self._plan_rows(members, counts), members, num_decode, starts_run)

    def _plan_rows(self, members: NDArray[np.int64], counts: NDArray[np.int64]) -> StepRows:
        sequences = self.sequences
        starts = sequences.computed[members]
        most = -(-int((starts + counts).max()) // PAGE_TOKENS)
        tables = sequences.tables[members, :most]
        rows = StepRows.plan(np.empty(0, dtype=np.int64), tables, counts, starts)
        tokens = sequences.tokens[members[rows.sequence], rows.positions].astype(np.int64)
        adapters = sequences.adapters_of(members)
        return StepRows(tokens, rows.positions, rows.sequence, tables, counts, starts, adapters)

    def _by_adapter(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """`rows` grouped by adapter, so that one matrix product takes each group."""
        adapters = self.sequences.adapters_of(rows)
        return rows if adapters is None else rows[np.argsort(adapters, kind="stable")]

    def extend_plan(self, plan: StepPlan, most_steps: int, num_drafts: int) -> tuple[StepPlan, int]:
        """Extends the plan of a run with pages for up to `most_steps` consecutive steps; returns it and
        their number: at most until a request reaches its limit, and 1 where pages are short. `num_drafts`:
        positions beyond one per step that get pages too, within the request's limit."""
        sequences, members = self.sequences, plan.members
        remaining = sequences.limit[members] - sequences.length[members]
        steps = min(most_steps, int(remaining.min()))
        reach = np.minimum(steps + num_drafts, remaining)
        needed = -(-(sequences.computed[members] + reach) // PAGE_TOKENS) - sequences.num_pages[members]
        if steps <= 1 or sequences.waiting or not self.pages.make_room(int(needed.clip(min=0).sum())):
            return plan, 1
        for index in np.flatnonzero(needed > 0).tolist():
            self.pages.append_pages(int(members[index]), int(needed[index]))
        most = -(-int((plan.rows.starts + steps).max()) // PAGE_TOKENS)
        return replace(plan, rows=replace(plan.rows, tables=sequences.tables[members, :most])), steps

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
        """Writes drafts behind the tokens of the decoding rows; returns how many positions each computes."""
        counts = np.ones(len(decode), dtype=np.int64)
        if self._drafter is None or not len(decode):
            return counts
        sequences = self.sequences
        wanted = self.gauge.choose_num_drafts(decode, sequences.arrival[decode])
        rooms = np.minimum(wanted, sequences.draft_room(decode))
        for number, (row, room) in enumerate(zip(decode.tolist(), rooms.tolist(), strict=True)):
            length = int(sequences.length[row])
            drafts = self._drafter.draft(row, sequences.tokens[row, :length], room)
            sequences.tokens[row, length : length + len(drafts)] = drafts
            counts[number] += len(drafts)
        return counts

    # ---- pages ----------------------------------------------------------------------------------

    def _admit_waiting(self) -> None:
        """Allocates pages to waiting requests, oldest first, until too few are free."""
        sequences = self.sequences
        for row in tuple(sequences.waiting):
            state = sequences.states[row]
            if state.waits_for is not None and state.waits_for.alive and not state.waits_for.ready:
                continue
            match = self.pages.match(row)
            state.waits_for = match.pending
            if match.pending is not None:
                continue
            if not self.pages.allocate_prompt(row, match):
                return
            sequences.waiting.remove(row)
            sequences.running[row] = True

    def _reserve(self, members: NDArray[np.int64], counts: NDArray[np.int64]) -> bool:
        """Allocates the pages that members are about to write, oldest first; whether any was preempted."""
        sequences = self.sequences
        needed = -(-(sequences.computed[members] + counts) // PAGE_TOKENS) - sequences.num_pages[members]
        short = np.flatnonzero(needed > 0)
        before = self.counters.preemptions
        for index in short[np.argsort(sequences.arrival[members[short]])].tolist():
            row = int(members[index])
            if sequences.running[row] and self._make_room_by_preempting(row, int(needed[index])):
                self.pages.append_pages(row, int(needed[index]))
        return self.counters.preemptions > before

    def _make_room_by_preempting(self, row: int, count: int) -> bool:
        """Frees `count` pages; False if `row` itself was preempted, because it is the youngest."""
        sequences = self.sequences
        while not self.pages.make_room(count):
            running = np.flatnonzero(sequences.running)
            youngest = int(running[np.argmax(sequences.arrival[running])])
            self._preempt(youngest)
            if youngest == row:
                return False
        return True

    def _preempt(self, row: int) -> None:
        self.sequences.record_oldest_kv(row)
        self.pages.free_pages_of(row)
        self.sequences.enqueue(row)
        self.counters.preemptions += 1
