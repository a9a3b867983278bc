"""The engine's sessions: what each holds, how far it is computed, and the answers to its requests."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from xxhash import xxh3_64_hexdigest

from etude.config import ModelConfig
from etude.inference.cache import KvCache
from etude.inference.sampling import hash_key
from etude.records import PolicyVersion, SampleChunk, SampleRequest


@dataclass(slots=True)
class _Span:
    """Sampled tokens from `start` on carry `version`, until the next span begins."""

    start: int
    version: PolicyVersion
    kv_oldest: PolicyVersion | None = None
    """Oldest version among the keys that these tokens attended to; set when the span ends."""


@dataclass(slots=True)
class Occupant:
    """The session in one slot."""

    session_id: str
    request: SampleRequest | None = None
    key: int = 0
    """64-bit noise key of the request."""
    first_sampled: int = 0
    """Position of the request's first sampled token."""
    reported_routes: int = 0
    """Positions below this have had their routes reported."""
    kv_oldest: PolicyVersion | None = None
    """Oldest version that computed any key in this slot."""
    spans: list[_Span] = field(default_factory=list[_Span])
    """Of the request's sampled tokens."""
    idle_since: int = 0
    """Step at which the last request ended."""


@dataclass(frozen=True, slots=True, eq=False)
class FinishedRequest:
    """A request's answer: one chunk per policy version that sampled part of it."""

    request: SampleRequest
    chunks: tuple[SampleChunk, ...]


class Slots:
    """Live sessions occupy slots 0..n-1; when one closes, the last moves into its place."""

    def __init__(self, config: ModelConfig, num_slots: int, max_tokens: int) -> None:
        self.cache = KvCache(config, num_slots, max_tokens)
        self.num_slots = num_slots
        self.max_tokens = max_tokens
        self.tokens = torch.zeros((num_slots, max_tokens), dtype=torch.int64)
        self.logprobs = torch.zeros((num_slots, max_tokens))
        route_shape = (num_slots, max_tokens, config.num_layers, config.experts_per_token)
        self.routes = torch.zeros(route_shape, dtype=torch.uint8)
        self.length = np.zeros(num_slots, dtype=np.int64)
        """Tokens that each slot holds."""
        self.computed = np.zeros(num_slots, dtype=np.int64)
        """Tokens whose keys and values are there."""
        self.sampling = np.zeros(num_slots, dtype=np.bool_)
        """Whether a request is in flight."""
        self.occupants: list[Occupant] = []
        self._slot_of: dict[str, int] = {}

    def __len__(self) -> int:
        """How many sessions are live."""
        return len(self.occupants)

    @property
    def is_full(self) -> bool:
        return len(self.occupants) == self.num_slots

    @property
    def any_sampling(self) -> bool:
        """Whether any session has a request in flight."""
        return bool(self.sampling[: len(self.occupants)].any())

    def find(self, session_id: str) -> int | None:
        """The session's slot."""
        return self._slot_of.get(session_id)

    def add(self, session_id: str) -> int:
        """A slot for a new session; there must be one."""
        slot = len(self.occupants)
        self.occupants.append(Occupant(session_id))
        self._slot_of[session_id] = slot
        self.length[slot] = self.computed[slot] = 0
        return slot

    def remove(self, session_id: str) -> None:
        """Frees a session's slot; unknown sessions are ignored."""
        slot = self._slot_of.pop(session_id, None)
        if slot is None:
            return
        last = len(self.occupants) - 1
        if slot != last:
            self._move(last, slot)
        self.occupants.pop()
        self.sampling[last] = False

    def begin(self, slot: int, request: SampleRequest, version: PolicyVersion) -> None:
        """Appends a request's suffix (or starts anew without a prefix) and lets the slot sample."""
        occupant = self.occupants[slot]
        if request.prefix_digest is None:
            self.length[slot] = self.computed[slot] = 0
            occupant.reported_routes = 0
            occupant.kv_oldest = None
        known = int(self.length[slot])
        end = known + len(request.suffix)
        self.tokens[slot, known:end] = torch.from_numpy(request.suffix.astype(np.int64))
        self.length[slot] = end
        self.computed[slot] = min(int(self.computed[slot]), end - 1)
        self.sampling[slot] = True
        occupant.request = request
        occupant.key = hash_key(request.rng_key)
        occupant.first_sampled = end
        occupant.spans = [_Span(end, version)]

    def change_version(self, version: PolicyVersion, recompute: bool) -> None:
        """What is sampled from now on is `version`'s; with `recompute`, so will all keys and routes be."""
        for slot, occupant in enumerate(self.occupants):
            if occupant.request is not None:
                occupant.spans[-1].kv_oldest = occupant.kv_oldest
                occupant.spans.append(_Span(int(self.length[slot]), version))
            if recompute:
                self.computed[slot] = 0
                occupant.reported_routes = 0
                occupant.kv_oldest = None

    def append(self, slots: NDArray[np.int64], tokens: Tensor, logprobs: Tensor) -> None:
        """One sampled token each for `slots` [N]."""
        index = (torch.from_numpy(slots), torch.from_numpy(self.length[slots]))
        self.tokens[index] = tokens
        self.logprobs[index] = logprobs
        self.length[slots] += 1

    def finish_reason(self, slot: int, token: int) -> str | None:
        """Why the request in `slot` ends with `token`, which was just appended; None if it goes on."""
        occupant = self.occupants[slot]
        assert occupant.request is not None
        if token in occupant.request.stop_tokens:
            return "stop"
        length = int(self.length[slot])
        full = length - occupant.first_sampled >= occupant.request.params.max_tokens
        return "length" if full or length >= self.max_tokens else None

    def finish(self, slot: int, reason: str, step: int) -> FinishedRequest:
        """Ends the request in `slot` at engine step `step`; the session keeps its slot."""
        occupant = self.occupants[slot]
        request = occupant.request
        assert request is not None
        occupant.spans[-1].kv_oldest = occupant.kv_oldest
        chunks = [
            self._chunk(slot, span, following.start, None)
            for span, following in itertools.pairwise(occupant.spans)
            if following.start > span.start
        ]
        chunks.append(self._chunk(slot, occupant.spans[-1], int(self.length[slot]), reason))
        occupant.request = None
        occupant.idle_since = step
        self.sampling[slot] = False
        return FinishedRequest(request, tuple(chunks))

    def digest(self, slot: int) -> str:
        """Of all tokens that the slot holds."""
        return xxh3_64_hexdigest(self.tokens[slot, : int(self.length[slot])].numpy().tobytes())

    def _chunk(self, slot: int, span: _Span, end: int, reason: str | None) -> SampleChunk:
        """Sampled tokens of a span, up to `end`; the last chunk carries all unreported routes."""
        occupant = self.occupants[slot]
        first = occupant.reported_routes
        routes = None
        if reason is not None:
            routes = self.routes[slot, first : int(self.computed[slot])].numpy().copy()
            occupant.reported_routes = int(self.computed[slot])
        return SampleChunk(
            tokens=self.tokens[slot, span.start : end].numpy().astype(np.int32),
            logprobs=self.logprobs[slot, span.start : end].numpy().copy(),
            version=span.version,
            kv_oldest=span.kv_oldest or span.version,
            routes=routes,
            routes_start=first,
            finish=reason,
            prefix_digest=self.digest(slot) if reason is not None else "",
        )

    def _move(self, source: int, target: int) -> None:
        length = int(self.length[source])
        self.cache.move(source, target, int(self.computed[source]))
        for store in (self.tokens, self.logprobs, self.routes):
            store[target, :length] = store[source, :length]
        for counts in (self.length, self.computed, self.sampling):
            counts[target] = counts[source]
        self.occupants[target] = self.occupants[source]
        self._slot_of[self.occupants[target].session_id] = target
