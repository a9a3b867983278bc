"""The table of the engine's sessions: tokens, progress, pages and versions; and how answers are built."""

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
from etude.records import PolicyVersion, SampleChunk, SampleRequest, SamplingParams

NO_ADAPTER = -1
"""Adapter slot of sessions that use the base weights."""


@dataclass(slots=True)
class Span:
    """Sampled tokens from position `start` on are of `version`, until the next span begins."""

    start: int
    version: PolicyVersion
    kv_oldest: PolicyVersion | None = None
    """Oldest version among the keys that these tokens attended to, as recorded so far."""


@dataclass(slots=True, eq=False)
class SessionState:
    """State of the session in one row beyond the arrays of `Sequences`."""

    session_id: str
    request: SampleRequest | None = None
    first_sampled: int = 0
    """Position of the request's first sampled token."""
    delivered: int = 0
    """Positions below this have been delivered in answers."""
    cached: int | None = None
    """Cached input tokens of the request when it got its pages; None before that."""
    reported_routes: int = 0
    """Positions below this have had their routes reported."""
    spans: list[Span] = field(default_factory=list[Span])
    """Policy versions of the request's sampled tokens."""
    alternatives: list[Alternatives] = field(default_factory=list[Alternatives])
    """Alternatives to the undelivered tokens, if requested."""
    path: list[Node] | None = None
    """Prefix cache nodes of the leading whole pages; None where the pages may not be shared."""
    pending: list[tuple[int, Node]] = field(default_factory=list[tuple[int, Node]])
    """Nodes of this session's prompt that are not computed yet, each with its end position."""
    tail: Node | None = None
    """Node of this session's last page, if that is partly filled."""
    waits_for: Node | None = None
    """Node of a pending page of the prompt, which another session computes."""


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """Output for one request: one chunk per policy version that sampled part of it.

    A streaming request gets many answers; the last has `finish` set.
    """

    request: SampleRequest
    chunks: tuple[SampleChunk, ...]

    @property
    def is_last(self) -> bool:
        """Whether the request is done."""
        return self.chunks[-1].finish is not None


class Sequences:
    """The table of sessions. All arrays are indexed by row."""

    def __init__(self, cache: PagedCache, num_rows: int, max_tokens: int) -> None:
        self.cache = cache
        self.num_rows = num_rows
        self.max_tokens = max_tokens
        self.tokens = np.zeros((num_rows, max_tokens), dtype=np.int32)
        self.logprobs = np.zeros((num_rows, max_tokens), dtype=np.float32)
        self.tables = np.zeros((num_rows, -(-max_tokens // PAGE_TOKENS)), dtype=np.int32)
        """Page tables: the page of each 16 positions."""
        self.num_pages = np.zeros(num_rows, dtype=np.int64)
        """Valid entries of each page table."""
        self.length = np.zeros(num_rows, dtype=np.int64)
        """Tokens of each row."""
        self.computed = np.zeros(num_rows, dtype=np.int64)
        """Leading tokens of each row whose keys and values are computed."""
        self.limit = np.zeros(num_rows, dtype=np.int64)
        """Length at which the request in the row ends."""
        self.key = np.zeros(num_rows, dtype=np.uint64)
        """Sampling noise key of the row's request."""
        self.arrival = np.zeros(num_rows, dtype=np.int64)
        """Sequence number of the row's request, by which the scheduler compares ages."""
        self.running = np.zeros(num_rows, dtype=np.bool_)
        """Whether the row's request has its pages."""
        self.waiting: list[int] = []
        """Rows whose request waits for pages, oldest first."""
        self.idle: dict[int, None] = {}
        """Rows without a request, longest idle first."""
        self.adapter = np.full(num_rows, NO_ADAPTER, dtype=np.int64)
        """Adapter slot of each row."""
        self.any_adapters = False
        """Whether any adapter is in service."""
        self.states: dict[int, SessionState] = {}
        self.epochs: list[PolicyVersion] = []
        """Versions in the order of their activation."""
        self._epoch_of: dict[int, int] = {}
        """Index of the version in service, by adapter slot."""
        self.page_epoch = np.zeros(cache.num_pages, dtype=np.int64)
        """Index in `epochs` of the oldest version that computed part of each page."""
        self._row_of: dict[str, int] = {}
        self._stops: list[frozenset[int]] = [frozenset()] * num_rows
        self._watched = np.zeros(num_rows, dtype=np.bool_)
        """Whether the row's request streams, or wants alternatives per token."""
        self._unused = list(range(num_rows - 1, -1, -1))
        self._arrivals = 0

    def __len__(self) -> int:
        """Number of sessions in the table."""
        return len(self._row_of)

    @property
    def is_full(self) -> bool:
        return not self._unused

    @property
    def any_request(self) -> bool:
        """Whether any session has a request in flight."""
        return len(self.idle) < len(self._row_of)

    def find(self, session_id: str) -> int | None:
        """The session's row, if it has one."""
        return self._row_of.get(session_id)

    def pages(self, row: int) -> list[int]:
        """The pages that a row uses, in order."""
        return self.tables[row, : int(self.num_pages[row])].tolist()

    def add(self, session_id: str) -> int:
        """Assigns a row to a new session; one must be unused."""
        row = self._unused.pop()
        self._row_of[session_id] = row
        self.adapter[row] = NO_ADAPTER
        self.states[row] = SessionState(session_id)
        self.length[row] = self.computed[row] = self.num_pages[row] = 0
        self.idle[row] = None
        return row

    def remove(self, row: int) -> None:
        """Removes a session, whose pages must be freed already."""
        assert not self.num_pages[row]
        del self._row_of[self.states.pop(row).session_id]
        self.idle.pop(row, None)
        if row in self.waiting:
            self.waiting.remove(row)
        self.running[row] = False
        self._unused.append(row)

    def begin_request(self, row: int, request: SampleRequest) -> None:
        """Appends a request's suffix, or replaces all tokens without a prefix. Leaves pages to the caller."""
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

    def enqueue(self, row: int) -> None:
        """Inserts a row with a request into the queue for pages, by age."""
        self.running[row] = False
        bisect.insort(self.waiting, row, key=lambda waiting: int(self.arrival[waiting]))

    # ---- versions -------------------------------------------------------------------------------

    def epoch_of(self, row: int) -> int:
        """Index in `epochs` of the version that a row samples with now."""
        return self._epoch_of[int(self.adapter[row])]

    def adapters_of(self, rows: NDArray[np.int64]) -> NDArray[np.int64] | None:
        """Adapter slot of each of `rows`; None while no adapter is in service."""
        return self.adapter[rows] if self.any_adapters else None

    def change_version(self, version: PolicyVersion, adapter: int, rows: Sequence[int]) -> None:
        """From now on adapter slot `adapter` samples with `version`, and `rows` continue with it. To be
        called before keys are dropped for it."""
        for row in rows:
            state = self.states[row]
            if state.request is not None and state.spans:
                self.record_oldest_kv(row)
                state.spans.append(Span(int(self.length[row]), version))
            self.adapter[row] = adapter
        self.any_adapters = adapter != NO_ADAPTER
        self._epoch_of[adapter] = len(self.epochs)
        self.epochs.append(version)

    def record_oldest_kv(self, row: int) -> None:
        """Updates `kv_oldest` of the row's current span: to be called before its keys are dropped, and when
        the span ends."""
        state = self.states[row]
        if not state.spans or not self.num_pages[row] or self.length[row] == state.spans[-1].start:
            return
        span = state.spans[-1]
        epochs = self.page_epoch[self.tables[row, : int(self.num_pages[row])]]
        if epochs[0] == epochs[-1]:
            oldest = self.epochs[int(epochs[0])]
        else:
            # Not np.unique: its first call imports numpy.ma, in the middle of a weight swap.
            oldest = min((self.epochs[epoch] for epoch in set(epochs.tolist())), key=lambda v: v.step)
        if span.kv_oldest is None or oldest.step < span.kv_oldest.step:
            span.kv_oldest = oldest

    # ---- answers --------------------------------------------------------------------------------

    def needs_handling(self, rows: NDArray[np.int64], tokens: NDArray[np.int64]) -> NDArray[np.bool_]:
        """[N] whether the next token of each of `rows` may end its request, or must be reported by itself."""
        stops = self._stops
        pairs = zip(rows.tolist(), tokens.tolist(), strict=True)
        stopped = np.array([token in stops[row] for row, token in pairs], dtype=np.bool_)
        return stopped | self._watched[rows] | (self.length[rows] + 1 >= self.limit[rows])

    def watched(self, rows: NDArray[np.int64]) -> bool:
        """Whether any request in `rows` streams, or wants alternatives per token."""
        return bool(self._watched[rows].any())

    def stops(self, rows: NDArray[np.int64]) -> list[frozenset[int]]:
        """Stop tokens of the request in each of `rows`."""
        return [self._stops[row] for row in rows.tolist()]

    def params(self, rows: NDArray[np.int64]) -> list[SamplingParams]:
        """Sampling parameters of the requests in `rows`, which all have one."""
        requests = [self.states[row].request for row in rows.tolist()]
        params = [request.params for request in requests if request is not None]
        assert len(params) == len(requests), "only rows with a request sample"
        return params

    def finish_reason(self, row: int, token: int, length: int) -> str | None:
        """Why the request in `row` ends with `token`, its `length`-th; None if it continues."""
        if token in self._stops[row]:
            return "stop"
        return "length" if length >= self.limit[row] else None

    def deliver(self, row: int) -> Answer:
        """An answer with what a streaming request has sampled since the last one."""
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
        """[N] most drafts for each of `rows` [N]: they must fit into the page of its last token, and stay
        below its length limit."""
        length = self.length[rows]
        return np.minimum(self.limit[rows] - length - 1, -length % PAGE_TOKENS)

    def digest(self, row: int) -> str:
        """Digest of all tokens of the row: a prefix digest."""
        return xxh3_64_hexdigest(self.tokens[row, : int(self.length[row])].tobytes())

    def _undelivered(self, row: int, reason: str | None) -> list[SampleChunk]:
        """One chunk per version; the last one has the finish reason, and then all unreported routes."""
        self.record_oldest_kv(row)
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
        """Unreported routes of computed positions, which are reported now; None for a dense model."""
        if not self.cache.routes.shape[2]:
            return None
        state, end = self.states[row], int(self.computed[row])
        first, state.reported_routes = state.reported_routes, end
        first_page = first // PAGE_TOKENS
        pages = self.tables[row, first_page : -(-end // PAGE_TOKENS)]
        routes = self.cache.routes[pages].reshape(-1, *self.cache.routes.shape[2:])
        skipped = first_page * PAGE_TOKENS
        return routes[first - skipped : end - skipped].copy()
