"""The side channel: token ids, log-probabilities, versions and routes of answers, as a binary message.

A request with `x-etude-extensions: tokens` gets, in its answer's `x-etude-side-channel` header, a path; once
the answer is complete, `GET` on it returns the tokens of all its choices. They are kept for a while, for the
same API key. So the answer itself stays what OpenAI's clients expect, streamed or not, and routes (about
1 KB a token on the largest models) never become JSON.

The last sampled token has no routes, since it is not computed.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from etude.inference import wire
from etude.inference.headers import EXTENSIONS_HEADER
from etude.inference.server.errors import NoSuchAnswerError
from etude.records import PolicyVersion, SampleChunk

SIDE_CHANNEL_PATH = "/v1/side_channel"
WANT_TOKENS = {EXTENSIONS_HEADER: "tokens"}
"""Request headers that ask for the tokens: `extra_headers` of OpenAI's client."""


@dataclass(frozen=True, slots=True)
class Span:
    """Policy versions of the sampled tokens `start` to `end` (exclusive)."""

    start: int
    end: int
    version: PolicyVersion
    kv_oldest: PolicyVersion
    """Oldest version among the keys that they attended to."""


@dataclass(slots=True, eq=False)
class ChoiceTokens:
    """Tokens of one answer: p of the prompt and n sampled ones."""

    prompt: NDArray[np.int32]
    tokens: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, dtype=np.int32))
    logprobs: NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, dtype=np.float32))
    raw_logprobs: NDArray[np.float32] | None = None
    spans: tuple[Span, ...] = ()
    routes: NDArray[np.uint8] | NDArray[np.uint16] | None = None
    """[r, layers, top_k] of the positions from `routes_start` on; None for a dense model."""
    routes_start: int = 0


def choice_tokens(prompt: NDArray[np.int32], chunks: Sequence[SampleChunk]) -> ChoiceTokens:
    """Merges one answer's chunks. Later routes of a position replace earlier ones."""
    raw = [chunk.raw_logprobs for chunk in chunks if chunk.raw_logprobs is not None]
    routes, start = _merged_routes(chunks)
    return ChoiceTokens(
        prompt=prompt,
        tokens=np.concatenate([np.zeros(0, dtype=np.int32), *(chunk.tokens for chunk in chunks)]),
        logprobs=np.concatenate([np.zeros(0, dtype=np.float32), *(chunk.logprobs for chunk in chunks)]),
        raw_logprobs=np.concatenate(raw) if raw else None,
        spans=_spans(chunks),
        routes=routes,
        routes_start=start,
    )


def _merged_routes(chunks: Sequence[SampleChunk]) -> tuple[Any, int]:
    rows = [(chunk.routes_start, chunk.routes) for chunk in chunks if chunk.routes is not None]
    rows = [(start, routes) for start, routes in rows if len(routes)]
    if not rows:
        return None, 0
    first = min(start for start, _ in rows)
    end = max(start + len(routes) for start, routes in rows)
    dtype = rows[0][1].dtype
    merged = np.full((end - first, *rows[0][1].shape[1:]), np.iinfo(dtype).max, dtype=dtype)
    for start, routes in rows:
        merged[start - first : start - first + len(routes)] = routes
    return merged, first


def _spans(chunks: Sequence[SampleChunk]) -> tuple[Span, ...]:
    spans: list[Span] = []
    place = 0
    for chunk in chunks:
        start, place = place, place + len(chunk.tokens)
        if start == place:
            continue
        if spans and (spans[-1].version, spans[-1].kv_oldest) == (chunk.version, chunk.kv_oldest):
            start = spans.pop().start
        spans.append(Span(start, place, chunk.version, chunk.kv_oldest))
    return tuple(spans)


def encode(choices: Sequence[ChoiceTokens]) -> bytes:
    """Encodes the choices of an answer in the format of `etude.inference.wire`."""
    return wire.pack(list(choices))


def decode(body: bytes) -> list[ChoiceTokens]:
    """The reverse of `encode`. Raises DamagedMessageError for a body that is cut or of another format."""
    return wire.unpack(body, (ChoiceTokens, Span, PolicyVersion))


@dataclass(frozen=True, slots=True)
class _Kept:
    body: bytes
    key_name: str
    until_s: float


class SideChannel:
    """Keeps the encoded tokens of answers for a while; bounded in bytes, the oldest are dropped first."""

    def __init__(
        self,
        keep_s: float = 300.0,
        max_bytes: int = 256 << 20,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._keep_s = keep_s
        self._max_bytes = max_bytes
        self._clock = clock
        self._num_bytes = 0
        self._kept: OrderedDict[str, _Kept] = OrderedDict()

    def put(self, answer_id: str, key_name: str, body: bytes) -> None:
        """Stores an encoded answer."""
        self._kept[answer_id] = _Kept(body, key_name, self._clock() + self._keep_s)
        self._num_bytes += len(body)
        now_s = self._clock()
        while self._kept:
            oldest = next(iter(self._kept))
            if self._num_bytes <= self._max_bytes and self._kept[oldest].until_s >= now_s:
                return
            self._num_bytes -= len(self._kept.pop(oldest).body)

    def get(self, answer_id: str, key_name: str) -> bytes:
        """A stored answer. Raises NoSuchAnswerError if it is incomplete, another key's, or dropped."""
        kept = self._kept.get(answer_id)
        if kept is None or kept.key_name != key_name or kept.until_s < self._clock():
            raise NoSuchAnswerError(
                "no tokens of this answer are held",
                field="id",
                received=answer_id,
                fix=f"fetch them within {self._keep_s:g} s after the answer's end, with the key that asked",
            )
        return kept.body
