"""Records one segment as it grows: tokens exactly as given and sampled, with the origin of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from etude.errors import SamplerError
from etude.records import (
    BlobRef,
    PolicyVersion,
    Relation,
    SampleChunk,
    SamplingParams,
    Segment,
    ToolCall,
    ToolResult,
    Turn,
    TurnSpan,
    VersionSpan,
)
from etude.tokens.renderer import Renderer
from etude.tokens.stream import malformed_spans

Spans = list[tuple[int, int, PolicyVersion]]
Routes = NDArray[Any]
"""[positions, layers, top_k] uint8, or uint16 where there are more than 255 experts."""
KeepRoutes = Callable[[Routes], BlobRef]
"""Stores the expert routes of a segment and returns their reference."""


class Recording:
    """Append-only tokens [T] with logprobs, sampled mask, version spans, expert routes and turn spans.

    Arrays double when full. A view of the tokens stays valid: its range is never overwritten.
    """

    def __init__(self, capacity: int = 1024) -> None:
        self.length = 0
        self.turn_spans: list[TurnSpan] = []
        self._tokens = np.zeros(capacity, dtype=np.int32)
        self._logprobs = np.zeros(capacity, dtype=np.float32)
        self._sampled = np.zeros(capacity, dtype=np.bool_)
        self._versions: Spans = []
        self._kv_oldest: Spans = []
        self._routes: Routes | None = None
        self._routed = 0

    @property
    def tokens(self) -> NDArray[np.int32]:
        """[T], read-only."""
        return _view(self._tokens, self.length)

    @property
    def logprobs(self) -> NDArray[np.float32]:
        """[T], 0 where not sampled; read-only."""
        return _view(self._logprobs, self.length)

    @property
    def sampled(self) -> NDArray[np.bool_]:
        """[T], read-only."""
        return _view(self._sampled, self.length)

    @property
    def version_spans(self) -> tuple[VersionSpan, ...]:
        """Policy version of each sampled token, neighbours merged."""
        return tuple(VersionSpan(*span) for span in self._versions)

    @property
    def kv_oldest_spans(self) -> tuple[VersionSpan, ...]:
        """Oldest version that each sampled token attended to, neighbours merged."""
        return tuple(VersionSpan(*span) for span in self._kv_oldest)

    def routes(self) -> Routes | None:
        """[T, layers, top_k] as sampled; the type's largest value where nothing was computed. None for dense
        models.

        The very last sampled token has no routes: nothing was sampled after it.
        """
        if self._routes is None:
            return None
        missing, dtype = np.iinfo(self._routes.dtype).max, self._routes.dtype
        routes = np.full((self.length, *self._routes.shape[1:]), missing, dtype=dtype)
        routes[: self._routed] = self._routes[: self._routed]
        return routes

    def segment(
        self,
        segment_id: str,
        trajectory_id: str,
        params: SamplingParams,
        renderer: Renderer,
        keep_routes: KeepRoutes | None,
        **more: Any,
    ) -> Segment:
        """The segment as a record, with `more` fields set; without `keep_routes` routes are left out."""
        routes = self.routes() if keep_routes is not None else None
        return Segment(
            segment_id,
            trajectory_id,
            self.tokens,
            self.sampled,
            self.logprobs,
            self.version_spans,
            self.kv_oldest_spans,
            tuple(self.turn_spans),
            params,
            renderer.tokenizer.digest,
            renderer.template_digest,
            keep_routes(routes) if keep_routes is not None and routes is not None else None,
            **more,
        )

    def turn(
        self,
        segment_id: str,
        start: int,
        end: int,
        renderer: Renderer,
        calls: tuple[ToolCall, ...],
        results: tuple[ToolResult, ...] = (),
    ) -> Turn:
        """The agent's message in tokens [start, end) as a record."""
        message = self.tokens[start:end]
        spans = malformed_spans(message, calls, renderer)
        malformed = tuple((start + first, start + last) for first, last in spans)
        text = renderer.tokenizer.decode(message)
        return Turn(segment_id, start, end, text, calls, results, malformed)

    def append_given(self, tokens: NDArray[np.int32], role: str) -> None:
        """Appends a whole message that was not sampled."""
        start = self.length
        self._reserve(start + len(tokens))
        self.length += len(tokens)
        self._tokens[start : self.length] = tokens
        self.turn_spans.append(TurnSpan(start, self.length, role))

    def append_sampled(self, chunk: SampleChunk) -> None:
        """Appends sampled tokens with their chunk's logprobs, versions and routes. Raises SamplerError; then
        nothing has changed."""
        count = len(chunk.tokens)
        if len(chunk.logprobs) != count:
            raise SamplerError(
                f"{count} tokens need {count} logprobs", field="chunk.logprobs", received=len(chunk.logprobs)
            )
        if chunk.routes is not None and len(chunk.routes):
            self._check_routes(chunk.routes, chunk.routes_start, self.length + count)
        if count:
            start = self.length
            self._reserve(start + count)
            self.length += count
            self._tokens[start : self.length] = chunk.tokens
            self._logprobs[start : self.length] = chunk.logprobs
            self._sampled[start : self.length] = True
            _extend(self._versions, start, self.length, chunk.version)
            _extend(self._kv_oldest, start, self.length, chunk.kv_oldest)
        if chunk.routes is not None and len(chunk.routes):
            self._record_routes(chunk.routes, chunk.routes_start)

    def end_message(self, start: int) -> None:
        """Marks tokens from `start` on as one message of the agent."""
        self.turn_spans.append(TurnSpan(start, self.length, "assistant"))

    def truncate(self, length: int) -> None:
        """Discards sampled tokens from `length` on; only for a message that has not been ended."""
        self._sampled[length : self.length] = False
        self._logprobs[length : self.length] = 0.0
        self.length = length
        self._routed = min(self._routed, length)
        for spans in (self._versions, self._kv_oldest):
            spans[:] = [(start, min(end, length), version) for start, end, version in spans if start < length]

    def invalidate_routes(self) -> None:
        """Marks all routes as outdated: all positions will be recomputed with new routes."""
        self._routed = 0

    def _check_routes(self, routes: Routes, start: int, length: int) -> None:
        """Raises SamplerError if they cannot be recorded for `length` tokens."""
        known = ("uint8", "uint16") if self._routes is None else (self._routes.dtype.name,)
        if routes.dtype.name not in known:  # a cast would name other experts
            raise SamplerError(
                "routes are of another type",
                field="chunk.routes",
                received=routes.dtype.name,
                fix=f"send {' or '.join(known)}",
            )
        end = start + len(routes)
        if end > length:
            raise SamplerError(
                f"more positions than the session's {length} tokens", field="chunk.routes", received=end
            )
        if start > self._routed:
            raise SamplerError(
                f"routes are missing from position {self._routed} on",
                field="chunk.routes_start",
                received=start,
            )

    def _record_routes(self, routes: Routes, start: int) -> None:
        """Records routes of positions from `start` on; recomputed ones replace earlier ones."""
        if self._routes is None:
            self._routes = np.zeros((len(self._tokens), *routes.shape[1:]), dtype=routes.dtype)
        end = start + len(routes)
        self._routes[start:end] = routes
        self._routed = end

    def _reserve(self, length: int) -> None:
        capacity = len(self._tokens)
        if length <= capacity:
            return
        capacity = max(length, 2 * capacity)
        self._tokens = _grown(self._tokens, capacity)
        self._logprobs = _grown(self._logprobs, capacity)
        self._sampled = _grown(self._sampled, capacity)
        if self._routes is not None:
            self._routes = _grown(self._routes, capacity)


@dataclass(slots=True, eq=False)
class Context:
    """What the policy sees at once: a growing segment and its relation to its parent."""

    id: str
    opening: str
    """The user text with which it began."""
    recording: Recording = field(default_factory=Recording)
    relation: Relation = Relation.ROOT
    parent: tuple[str, int] | None = None


def _extend(spans: Spans, start: int, end: int, version: PolicyVersion) -> None:
    if spans and spans[-1][1] == start and spans[-1][2] == version:
        start = spans.pop()[0]
    spans.append((start, end, version))


def _view(array: NDArray[Any], length: int) -> NDArray[Any]:
    view = array[:length]
    view.flags.writeable = False
    return view


def _grown(array: NDArray[Any], capacity: int) -> NDArray[Any]:
    grown = np.zeros((capacity, *array.shape[1:]), dtype=array.dtype)
    grown[: len(array)] = array
    return grown
