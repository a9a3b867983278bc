"""The engine: continuous batching over many sessions, step by step, in the caller's thread.

Each step computes one token for every session that is sampling and a run of tokens for sessions whose
prompt or observations are not computed yet, all in one forward pass of the trainer's own module. Nothing
here waits, does I/O or reads a clock, so equal calls give equal bits.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from xxhash import xxh3_64_hexdigest

from etude.config import ModelConfig
from etude.errors import PrefixMissError, SamplerError, WeightUpdateError
from etude.inference.cache import KvCache
from etude.inference.forward import EagerForward, ForwardPass, StepRows
from etude.inference.native import NativeForward
from etude.inference.sampling import hash_key, sample, uniforms
from etude.model import Qwen3Moe
from etude.protocols import KvPolicy
from etude.records import PolicyVersion, SampleChunk, SampleRequest

Kernels = Literal["eager", "native"]


@dataclass(slots=True)
class EngineCounters:
    """What the engine has done since it was made. Units: tokens, steps, seconds where named so."""

    decode_tokens: int = 0
    prefill_tokens: int = 0
    steps: int = 0
    weight_updates: int = 0


@dataclass(slots=True)
class _Span:
    """Sampled tokens from `start` on carry `version`, until the next span begins."""

    start: int
    version: PolicyVersion
    kv_oldest: PolicyVersion | None = None
    """Oldest version among the keys that these tokens attended to; set when the span ends."""


@dataclass(slots=True)
class _Occupant:
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


class Engine:
    """Serves one model. Not thread-safe: one owner calls it.

    Live sessions occupy slots 0..n-1; when one closes, the last moves into its place.
    """

    def __init__(
        self,
        config: ModelConfig,
        vocab_size: int,
        num_slots: int,
        max_tokens: int,
        prefill_tokens: int = 2048,
        kernels: Kernels = "eager",
    ) -> None:
        """`max_tokens`: longest session; `prefill_tokens`: most prompt tokens computed in one step;
        `kernels`: the trainer's module operator by operator, or one native call (ResourceError where that
        cannot be)."""
        self.model = Qwen3Moe(config, vocab_size).requires_grad_(requires_grad=False)
        self.counters = EngineCounters()
        self._max_tokens = max_tokens
        self._prefill_tokens = prefill_tokens
        self._num_slots = num_slots
        self._cache = KvCache(config, num_slots, max_tokens)
        self._tokens = torch.zeros((num_slots, max_tokens), dtype=torch.int64)
        self._logprobs = torch.zeros((num_slots, max_tokens))
        route_shape = (num_slots, max_tokens, config.num_layers, config.experts_per_token)
        self._routes = torch.zeros(route_shape, dtype=torch.uint8)
        forward = NativeForward if kernels == "native" else EagerForward
        self._compute: ForwardPass = forward(self.model, self._cache)
        self._length = np.zeros(num_slots, dtype=np.int64)
        self._computed = np.zeros(num_slots, dtype=np.int64)
        self._sampling = np.zeros(num_slots, dtype=np.bool_)
        self._occupants: list[_Occupant] = []
        self._slot_of: dict[str, int] = {}
        self._queue: deque[SampleRequest] = deque()
        self._version: PolicyVersion | None = None
        self._staged: tuple[PolicyVersion, Mapping[str, Tensor]] | None = None

    # ---- requests -------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._queue) or bool(self._sampling[: len(self._occupants)].any())

    @property
    def num_live_sessions(self) -> int:
        return len(self._occupants)

    def submit(self, request: SampleRequest) -> None:
        """Queues a request. Raises SamplerError or PrefixMissError, and then changes nothing."""
        self._check(request)
        self._queue.append(request)

    def abort(self, request_id: str) -> FinishedRequest | None:
        """Stops a request and returns what it has sampled; None if it is not known."""
        for request in self._queue:
            if request.id == request_id:
                self._queue.remove(request)
                return self.give_up(request)
        for slot, occupant in enumerate(self._occupants):
            if occupant.request is not None and occupant.request.id == request_id:
                return self._finish(slot, "abort")
        return None

    def give_up(self, request: SampleRequest) -> FinishedRequest:
        """The answer to a request that is aborted before it began. Raises SamplerError without weights."""
        version = self.current()
        nothing = np.zeros(0, dtype=np.int32)
        chunk = SampleChunk(nothing, nothing.astype(np.float32), version, version, finish="abort")
        return FinishedRequest(request, (chunk,))

    def close(self, session_id: str) -> None:
        """Frees a session's slot; unknown sessions are ignored."""
        slot = self._slot_of.pop(session_id, None)
        if slot is None:
            return
        last = len(self._occupants) - 1
        if slot != last:
            self._move(last, slot)
        self._occupants.pop()
        self._sampling[last] = False

    def _check(self, request: SampleRequest) -> None:
        version = self.current()
        if request.version is not None and not _serves(version, request.version, request.version_is_minimum):
            raise SamplerError(
                "version is not served", field="version", received=f"{request.version}; serving {version}"
            )
        slot = self._slot_of.get(request.session_id)
        if (slot is not None and self._sampling[slot]) or any(
            queued.session_id == request.session_id for queued in self._queue
        ):
            raise SamplerError(
                "session has a request in flight", field="session_id", received=request.session_id
            )
        outside = request.suffix[(request.suffix < 0) | (request.suffix >= self.model.vocab_size)]
        if len(outside):
            raise SamplerError(
                f"tokens must be in 0..{self.model.vocab_size - 1}", field="suffix", received=int(outside[0])
            )
        known = 0
        if request.prefix_digest is not None:
            if slot is None or self._digest(slot) != request.prefix_digest:
                raise PrefixMissError(
                    "prefix is not held", field="prefix_digest", received=request.prefix_digest
                )
            known = int(self._length[slot])
        total = known + len(request.suffix)
        if not len(request.suffix) and not known:
            raise SamplerError(
                "nothing to continue", field="suffix", received=0, fix="send at least one token"
            )
        if total >= self._max_tokens:
            raise SamplerError(
                "session is too long",
                field="suffix",
                received=total,
                fix=f"stay under {self._max_tokens} tokens, or raise the engine's limit",
            )

    # ---- weights --------------------------------------------------------------------------------

    def current(self) -> PolicyVersion:
        """The version in service. Raises SamplerError before the first activation."""
        if self._version is None:
            raise SamplerError(
                "no weights yet", field="version", received=None, fix="stage and activate some"
            )
        return self._version

    @property
    def version(self) -> PolicyVersion | None:
        return self._version

    def stage(self, version: PolicyVersion, tensors: Mapping[str, Tensor]) -> None:
        """Takes the next weights beside the current ones. Raises WeightUpdateError if they do not fit."""
        own = dict(self.model.named_parameters())
        if own.keys() != tensors.keys():
            differing = sorted(own.keys() ^ tensors.keys())
            raise WeightUpdateError("other tensors than the model's", field="tensors", received=differing)
        for name, tensor in tensors.items():
            if tensor.shape != own[name].shape:
                raise WeightUpdateError(
                    f"shape differs from the model's {tuple(own[name].shape)}",
                    field=name,
                    received=tuple(tensor.shape),
                )
        self._staged = (version, tensors)

    @torch.no_grad()
    def activate(self, version: PolicyVersion, kv: KvPolicy = "keep") -> None:
        """Serves the staged version from the next step on; running requests go on with it."""
        if self._staged is None or self._staged[0] != version:
            held = self._staged[0] if self._staged else None
            raise WeightUpdateError(
                "version is not staged", field="version", received=f"{version}; staged {held}"
            )
        for name, parameter in self.model.named_parameters():
            parameter.copy_(self._staged[1][name])
        self._compute.load_weights()
        self._staged = None
        self._version = version
        self.counters.weight_updates += 1
        for slot, occupant in enumerate(self._occupants):
            if occupant.request is not None:
                occupant.spans[-1].kv_oldest = occupant.kv_oldest
                occupant.spans.append(_Span(int(self._length[slot]), version))
            if kv == "recompute":
                self._computed[slot] = 0
                occupant.reported_routes = 0
                occupant.kv_oldest = None

    # ---- one step -------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self) -> list[FinishedRequest]:
        """Computes one batch; returns the requests that it finished, in slot order."""
        self._admit()
        live = len(self._occupants)
        pending = (self._length - self._computed)[:live]
        active = self._sampling[:live]
        decode = np.flatnonzero(active & (pending == 1))
        prefill, counts = self._choose_prefill(np.flatnonzero(active & (pending > 1)), pending)
        if not len(decode) and not len(prefill):
            return []
        starts = self._computed[np.concatenate((decode, prefill))]
        ones = np.ones(len(decode), dtype=np.int64)
        hidden = self._forward(StepRows(decode, prefill, starts, np.concatenate((ones, counts)), live))
        done = self._computed[prefill] + counts == self._length[prefill]
        last_rows = len(decode) + np.cumsum(counts) - 1
        sampled_rows = np.concatenate((np.arange(len(decode)), last_rows[done]))
        sampled_slots = np.concatenate((decode, prefill[done]))
        self._computed[decode] += 1
        self._computed[prefill] += counts
        self.counters.steps += 1
        self.counters.decode_tokens += len(decode)
        self.counters.prefill_tokens += int(counts.sum())
        if not len(sampled_slots):
            return []
        return self._sample(hidden[torch.from_numpy(sampled_rows)], sampled_slots)

    def _admit(self) -> None:
        """Starts queued requests in order. Those whose session holds a slot never wait for one."""
        waiting: deque[SampleRequest] = deque()
        while self._queue:
            request = self._queue.popleft()
            slot = self._slot_of.get(request.session_id)
            if slot is None and not waiting:
                slot = self._take_slot(request.session_id)
            if slot is None:
                waiting.append(request)
            else:
                self._start(slot, request)
        self._queue = waiting

    def _take_slot(self, session_id: str) -> int | None:
        """A slot for a new session; None if all are taken and somebody in them can go on."""
        if len(self._occupants) == self._num_slots and not self._evict_idle():
            return None
        slot = len(self._occupants)
        self._occupants.append(_Occupant(session_id))
        self._slot_of[session_id] = slot
        self._length[slot] = self._computed[slot] = 0
        return slot

    def _start(self, slot: int, request: SampleRequest) -> None:
        occupant = self._occupants[slot]
        if request.prefix_digest is None:
            self._length[slot] = self._computed[slot] = 0
            occupant.reported_routes = 0
            occupant.kv_oldest = None
        known = int(self._length[slot])
        end = known + len(request.suffix)
        self._tokens[slot, known:end] = torch.from_numpy(request.suffix.astype(np.int64))
        self._length[slot] = end
        self._computed[slot] = min(int(self._computed[slot]), end - 1)
        self._sampling[slot] = True
        occupant.request = request
        occupant.key = hash_key(request.rng_key)
        occupant.first_sampled = end
        occupant.spans = [_Span(end, self.current())]

    def _evict_idle(self) -> bool:
        """Frees the slot that has been idle longest, but only where nothing else can make progress."""
        if self._sampling[: len(self._occupants)].any():
            return False
        queued = {request.session_id for request in self._queue}
        idle = [occupant for occupant in self._occupants if occupant.session_id not in queued]
        if not idle:
            return False
        self.close(min(idle, key=lambda occupant: occupant.idle_since).session_id)
        return True

    def _choose_prefill(
        self, candidates: NDArray[np.int64], pending: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Slots to prefill and how many tokens of each, within the step's budget."""
        before = np.cumsum(pending[candidates]) - pending[candidates]
        fits = before < self._prefill_tokens
        chosen = candidates[fits]
        counts = np.minimum(pending[chosen], self._prefill_tokens - before[fits])
        return chosen, counts

    def _forward(self, rows: StepRows) -> Tensor:
        """Final hidden states [T, width] of the batch; stores keys, values and routes."""
        slots, positions = torch.from_numpy(rows.slots), torch.from_numpy(rows.positions)
        version = self.current()
        for slot in {*rows.decode.tolist(), *rows.prefill.tolist()}:
            occupant = self._occupants[slot]
            occupant.kv_oldest = occupant.kv_oldest or version
        tokens = self._tokens[slots, positions]
        hidden, self._routes[slots, positions] = self._compute(tokens, slots, positions, rows)
        return hidden

    def _sample(self, hidden: Tensor, slots: NDArray[np.int64]) -> list[FinishedRequest]:
        """Draws a token for each of `slots` from hidden [N, width]; returns what finished."""
        requests = [self._occupants[slot].request for slot in slots]
        params = [request.params for request in requests if request is not None]
        assert len(params) == len(slots), "only slots with a request sample"
        positions = self._length[slots]
        keys = np.array([self._occupants[slot].key for slot in slots], dtype=np.uint64)
        tokens, logprobs = sample(self.model.logits(hidden), params, uniforms(keys, positions))
        index = (torch.from_numpy(slots), torch.from_numpy(positions))
        self._tokens[index] = tokens
        self._logprobs[index] = logprobs
        self._length[slots] += 1
        finished: list[FinishedRequest] = []
        for slot, token in zip(slots.tolist(), tokens.tolist(), strict=True):
            reason = self._finish_reason(slot, token)
            if reason is not None:
                finished.append(self._finish(slot, reason))
        return finished

    def _finish_reason(self, slot: int, token: int) -> str | None:
        occupant = self._occupants[slot]
        assert occupant.request is not None
        if token in occupant.request.stop_tokens:
            return "stop"
        length = int(self._length[slot])
        if (
            length - occupant.first_sampled >= occupant.request.params.max_tokens
            or length >= self._max_tokens
        ):
            return "length"
        return None

    # ---- answers --------------------------------------------------------------------------------

    def _finish(self, slot: int, reason: str) -> FinishedRequest:
        occupant = self._occupants[slot]
        request = occupant.request
        assert request is not None
        occupant.spans[-1].kv_oldest = occupant.kv_oldest
        chunks = [
            self._chunk(slot, span, following.start, None)
            for span, following in itertools.pairwise(occupant.spans)
            if following.start > span.start
        ]
        chunks.append(self._chunk(slot, occupant.spans[-1], int(self._length[slot]), reason))
        occupant.request = None
        occupant.idle_since = self.counters.steps
        self._sampling[slot] = False
        return FinishedRequest(request, tuple(chunks))

    def _chunk(self, slot: int, span: _Span, end: int, reason: str | None) -> SampleChunk:
        """Sampled tokens of a span, up to `end`; the last chunk carries all unreported routes."""
        occupant = self._occupants[slot]
        first = occupant.reported_routes
        routes = None
        if reason is not None:
            routes = self._routes[slot, first : int(self._computed[slot])].numpy().copy()
            occupant.reported_routes = int(self._computed[slot])
        return SampleChunk(
            tokens=self._tokens[slot, span.start : end].numpy().astype(np.int32),
            logprobs=self._logprobs[slot, span.start : end].numpy().copy(),
            version=span.version,
            kv_oldest=span.kv_oldest or span.version,
            routes=routes,
            routes_start=first,
            finish=reason,
            prefix_digest=self._digest(slot) if reason is not None else "",
        )

    def _digest(self, slot: int) -> str:
        return xxh3_64_hexdigest(self._tokens[slot, : int(self._length[slot])].numpy().tobytes())

    def _move(self, source: int, target: int) -> None:
        length = int(self._length[source])
        self._cache.move(source, target, int(self._computed[source]))
        for store in (self._tokens, self._logprobs, self._routes):
            store[target, :length] = store[source, :length]
        for counts in (self._length, self._computed, self._sampling):
            counts[target] = counts[source]
        self._occupants[target] = self._occupants[source]
        self._slot_of[self._occupants[target].session_id] = target


def _serves(current: PolicyVersion, wanted: PolicyVersion, wanted_is_minimum: bool) -> bool:
    if current.lineage != wanted.lineage:
        return False
    if current.step == wanted.step:
        return wanted.digest in ("", current.digest)
    return wanted_is_minimum and current.step > wanted.step
