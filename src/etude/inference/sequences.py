"""The engine's sessions: what each holds, how far it is computed, and the answers to its requests."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_hexdigest

from etude.inference.cache import PAGE_TOKENS, PagedCache
from etude.inference.radix import Node
from etude.inference.sampling import Alternatives, hash_key
from etude.records import PolicyVersion, SampleChunk, SampleRequest

NO_ADAPTER = -1
"""In place of an adapter's: the weights as they are."""


@dataclass(slots=True)
class Span:
    """Sampled tokens from `start` on carry `version`, until the next span begins."""

    start: int
    version: PolicyVersion
    kv_oldest: PolicyVersion | None = None
    """Oldest version among the keys that these tokens attended to, as far as it is known."""


@dataclass(slots=True, eq=False)
class SessionState:
    """What the arrays of `Sequences` do not hold of the session in one row."""

    session_id: str
    request: SampleRequest | None = None
    first_sampled: int = 0
    """Position of the request's first sampled token."""
    delivered: int = 0
    """Tokens below this have been handed out."""
    cached: int | None = None
    """Tokens of the request's input that were computed when it got its pages; None before that."""
    reported_routes: int = 0
    """Positions below this have had their routes reported."""
    spans: list[Span] = field(default_factory=list[Span])
    """Of the request's sampled tokens."""
    alternatives: list[Alternatives] = field(default_factory=list[Alternatives])
    """Of the tokens that are not delivered yet, where they were asked for."""
    path: list[Node] | None = None
    """Nodes of the leading whole pages; None where the session's pages may not be shared."""
    pending: list[tuple[int, Node]] = field(default_factory=list[tuple[int, Node]])
    """Nodes of this session's prompt that are not computed yet, each with the position behind it."""
    tail: Node | None = None
    """Node of this session's last, partly filled page."""
    waits_for: Node | None = None
    """A page that another session computes."""


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """To one request: one chunk per policy version that sampled part of it.

    A streaming request has many answers, of which the last has `finish` set.
    """

    request: SampleRequest
    chunks: tuple[SampleChunk, ...]

    @property
    def is_last(self) -> bool:
        """Whether the request is done."""
        return self.chunks[-1].finish is not None


class Sequences:
    """Sessions by row. Arrays have one entry, or one line, per row."""

    def __init__(self, cache: PagedCache, num_rows: int, max_tokens: int) -> None:
        self.cache = cache
        self.num_rows = num_rows
        self.max_tokens = max_tokens
        self.tokens = np.zeros((num_rows, max_tokens), dtype=np.int32)
        self.logprobs = np.zeros((num_rows, max_tokens), dtype=np.float32)
        self.tables = np.zeros((num_rows, -(-max_tokens // PAGE_TOKENS)), dtype=np.int32)
        """Page of each 16 positions."""
        self.num_pages = np.zeros(num_rows, dtype=np.int64)
        """Pages that each row uses."""
        self.length = np.zeros(num_rows, dtype=np.int64)
        """Tokens that each row holds."""
        self.computed = np.zeros(num_rows, dtype=np.int64)
        """Tokens whose keys and values are there."""
        self.limit = np.zeros(num_rows, dtype=np.int64)
        """Length at which the request in the row ends."""
        self.key = np.zeros(num_rows, dtype=np.uint64)
        """Noise key of the request in the row."""
        self.arrival = np.zeros(num_rows, dtype=np.int64)
        """Requests are numbered as they begin: of two, the one with the larger number is younger."""
        self.running = np.zeros(num_rows, dtype=np.bool_)
        """Whether a request is in flight that has its pages."""
        self.waiting: list[int] = []
        """Rows whose request has yet to get its pages, oldest first."""
        self.idle: dict[int, None] = {}
        """Rows without a request, longest idle first."""
        self.adapter = np.full(num_rows, NO_ADAPTER, dtype=np.int64)
        """Place of the adapter that each row uses among those in service."""
        self.any_adapters = False
        """Whether any adapter is in service."""
        self.states: dict[int, SessionState] = {}
        self.epochs: list[PolicyVersion] = []
        """Versions in the order of their activation."""
        self._epoch_of: dict[int, int] = {}
        """Which of them is in service, by the place of its adapter."""
        self.page_epoch = np.zeros(cache.num_pages, dtype=np.int64)
        """Index in `epochs` of the oldest version that computed part of each page."""
        self._row_of: dict[str, int] = {}
        self._stops: list[frozenset[int]] = [frozenset()] * num_rows
        self._watched = np.zeros(num_rows, dtype=np.bool_)
        """Whether the row's request wants more than its tokens at the end."""
        self._unused = list(range(num_rows - 1, -1, -1))
        self._arrivals = 0

    def __len__(self) -> int:
        """How many sessions are held."""
        return len(self._row_of)

    @property
    def is_full(self) -> bool:
        return not self._unused

    @property
    def any_request(self) -> bool:
        """Whether any session has a request in flight."""
        return len(self.idle) < len(self._row_of)

    def find(self, session_id: str) -> int | None:
        """The session's row."""
        return self._row_of.get(session_id)

    def pages(self, row: int) -> list[int]:
        """The pages that a row uses, in order."""
        return self.tables[row, : int(self.num_pages[row])].tolist()

    def add(self, session_id: str) -> int:
        """A row for a new session; there must be one."""
        row = self._unused.pop()
        self._row_of[session_id] = row
        self.adapter[row] = NO_ADAPTER
        self.states[row] = SessionState(session_id)
        self.length[row] = self.computed[row] = self.num_pages[row] = 0
        self.idle[row] = None
        return row

    def remove(self, row: int) -> None:
        """Forgets a session, which has no pages any more."""
        assert not self.num_pages[row]
        del self._row_of[self.states.pop(row).session_id]
        self.idle.pop(row, None)
        if row in self.waiting:
            self.waiting.remove(row)
        self.running[row] = False
        self._unused.append(row)

    def begin(self, row: int, request: SampleRequest) -> None:
        """Appends a request's suffix, or starts anew where it names no prefix. Pages are the caller's."""
        state = self.states[row]
        start = int(self.length[row]) if request.prefix_digest is not None else 0
        end = start + len(request.suffix)
        self.tokens[row, start:end] = request.suffix
        self.length[row] = end
        self.limit[row] = min(end + request.params.max_tokens, self.max_tokens)
        self.key[row] = hash_key(request.rng_key)
        self._arrivals += 1
        self.arrival[row] = self._arrivals
        state.request = request
        state.first_sampled = state.delivered = end
        state.spans = [Span(end, self.epochs[self.epoch_of(row)])]
        state.alternatives = []
        state.cached = None
        self._stops[row] = request.stop_tokens
        params = request.params
        self._watched[row] = request.streaming or params.raw_logprobs or params.top_logprobs > 0
        self.idle.pop(row)

    def wait(self, row: int) -> None:
        """Puts a row with a request among those that wait for pages, by age."""
        self.running[row] = False
        bisect.insort(self.waiting, row, key=lambda waiting: int(self.arrival[waiting]))

    # ---- versions -------------------------------------------------------------------------------

    def epoch_of(self, row: int) -> int:
        """Index in `epochs` of the version that a row's adapter has now."""
        return self._epoch_of[int(self.adapter[row])]

    def adapters_of(self, rows: NDArray[np.int64]) -> NDArray[np.int64] | None:
        """The adapter of each of `rows`; None while there is none in service."""
        return self.adapter[rows] if self.any_adapters else None

    def change_version(self, version: PolicyVersion, adapter: int, rows: Sequence[int]) -> None:
        """What is sampled from now on with the adapter at this place is `version`'s; `rows` go on with it.
        Comes before any keys are dropped for it."""
        for row in rows:
            state = self.states[row]
            if state.request is not None and state.spans:
                self.note_oldest(row)
                state.spans.append(Span(int(self.length[row]), version))
            self.adapter[row] = adapter
        self.any_adapters = adapter != NO_ADAPTER
        self._epoch_of[adapter] = len(self.epochs)
        self.epochs.append(version)

    def note_oldest(self, row: int) -> None:
        """Remembers the oldest keys that the row's current span attended to: before they are dropped, and
        when it ends."""
        state = self.states[row]
        if not state.spans or not self.num_pages[row] or self.length[row] == state.spans[-1].start:
            return
        span = state.spans[-1]
        epochs = self.page_epoch[self.tables[row, : int(self.num_pages[row])]]
        if epochs[0] == epochs[-1]:
            oldest = self.epochs[int(epochs[0])]
        else:
            # Not np.unique: its first call imports numpy.ma, in the middle of an exchange of weights.
            oldest = min((self.epochs[epoch] for epoch in set(epochs.tolist())), key=lambda v: v.step)
        if span.kv_oldest is None or oldest.step < span.kv_oldest.step:
            span.kv_oldest = oldest

    # ---- answers --------------------------------------------------------------------------------

    def keep(
        self,
        rows: NDArray[np.int64],
        places: NDArray[np.int64],
        tokens: NDArray[np.int64],
        logprobs: NDArray[np.float32],
    ) -> None:
        """Writes tokens and log-probabilities [N] behind what rows [N] hold; their lengths stay."""
        self.tokens[rows, places] = tokens
        self.logprobs[rows, places] = logprobs

    def needs_care(self, rows: NDArray[np.int64], tokens: NDArray[np.int64]) -> NDArray[np.bool_]:
        """[N] whether anything but being kept may happen to the next token of each of `rows` [N]."""
        stops = self._stops
        pairs = zip(rows.tolist(), tokens.tolist(), strict=True)
        stopped = np.array([token in stops[row] for row, token in pairs], dtype=np.bool_)
        return stopped | self._watched[rows] | (self.length[rows] + 1 >= self.limit[rows])

    def watched(self, rows: NDArray[np.int64]) -> bool:
        """Whether any request in `rows` wants more than its tokens at the end."""
        return bool(self._watched[rows].any())

    def stops(self, rows: NDArray[np.int64]) -> list[frozenset[int]]:
        """The tokens that end the request in each of `rows`."""
        return [self._stops[row] for row in rows.tolist()]

    def finish_reason(self, row: int, token: int, length: int) -> str | None:
        """Why the request in `row` ends with `token`, its `length`-th; None if it goes on."""
        if token in self._stops[row]:
            return "stop"
        return "length" if length >= self.limit[row] else None

    def deliver(self, row: int) -> Answer:
        """What a streaming request has sampled since the last answer."""
        state = self.states[row]
        assert state.request is not None
        return Answer(state.request, tuple(self._undelivered(row, None)))

    def finish(self, row: int, reason: str) -> Answer:
        """Ends the request in `row`; the session keeps its tokens, and its pages for now."""
        state = self.states[row]
        assert state.request is not None
        answer = Answer(state.request, tuple(self._undelivered(row, reason)))
        state.request, state.spans, state.waits_for = None, [], None
        if row in self.waiting:
            self.waiting.remove(row)
        self.running[row] = False
        self.idle[row] = None
        return answer

    def draft_room(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """[N] most drafts behind what each of `rows` [N] holds: they take no page that its last token does
        not take anyway, and reach no further than its request may."""
        length = self.length[rows]
        return np.minimum(self.limit[rows] - length - 1, -length % PAGE_TOKENS)

    def digest(self, row: int) -> str:
        """Of all tokens that the row holds."""
        return xxh3_64_hexdigest(self.tokens[row, : int(self.length[row])].tobytes())

    def _undelivered(self, row: int, reason: str | None) -> list[SampleChunk]:
        """One chunk per version; the last has the finish, and with it all unreported routes."""
        self.note_oldest(row)
        state, length = self.states[row], int(self.length[row])
        ends = [*(span.start for span in state.spans[1:]), length]
        is_first = state.delivered == state.first_sampled
        chunks: list[SampleChunk] = []
        for number, (span, end) in enumerate(zip(state.spans, ends, strict=True)):
            start = max(span.start, state.delivered)
            is_last = number == len(state.spans) - 1
            if end > start or is_last:
                chunk = self._chunk(row, span, (start, max(start, end)), reason if is_last else None)
                cached = state.cached if is_first and not chunks else None
                chunks.append(chunk if cached is None else replace(chunk, cached_tokens=cached))
        state.delivered = length
        state.alternatives = []
        return chunks

    def _chunk(self, row: int, span: Span, part: tuple[int, int], reason: str | None) -> SampleChunk:
        state, (start, end) = self.states[row], part
        first = state.reported_routes
        routes = self._take_routes(row) if reason is not None else None
        assert state.request is not None
        given = state.alternatives[start - state.delivered : end - state.delivered]
        return SampleChunk(
            tokens=self.tokens[row, start:end].copy(),
            logprobs=self.logprobs[row, start:end].copy(),
            version=span.version,
            kv_oldest=span.kv_oldest or span.version,
            routes=routes,
            routes_start=first,
            finish=reason,
            prefix_digest=self.digest(row) if reason is not None else "",
            **Alternatives.columns(given, state.request.params),
        )

    def _take_routes(self, row: int) -> NDArray[Any] | None:
        """Routes of computed positions that are not reported yet; None for a dense model."""
        if not self.cache.routes.shape[2]:
            return None
        state, end = self.states[row], int(self.computed[row])
        first, state.reported_routes = state.reported_routes, end
        first_page = first // PAGE_TOKENS
        pages = self.tables[row, first_page : -(-end // PAGE_TOKENS)]
        routes = self.cache.routes[pages].reshape(-1, *self.cache.routes.shape[2:])
        skipped = first_page * PAGE_TOKENS
        return routes[first - skipped : end - skipped].copy()
