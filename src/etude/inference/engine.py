"""The engine: continuous batching over many sessions, step by step, in the caller's thread.

Each step computes one token for every session that is sampling and a run of tokens for sessions whose
prompt or observations are not computed yet, all in one forward pass: the trainer's own module, or native code
that computes the same. Nothing here waits, does I/O or reads a clock, so equal calls give equal bits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from etude.config import ModelConfig
from etude.errors import PrefixMissError, SamplerError, WeightUpdateError
from etude.inference.forward import EagerForward, ForwardPass, StepRows
from etude.inference.native import NativeForward
from etude.inference.sampling import uniforms
from etude.inference.slots import FinishedRequest, Slots
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


class Engine:
    """Serves one model. Not thread-safe: one owner calls it."""

    def __init__(
        self,
        config: ModelConfig,
        vocab_size: int,
        num_slots: int,
        max_tokens: int,
        prefill_tokens: int = 2048,
        kernels: Kernels = "eager",
        native_threads: int = 1,
    ) -> None:
        """`max_tokens`: longest session; `prefill_tokens`: most prompt tokens computed in one step;
        `kernels`: the trainer's module operator by operator, or native code on up to `native_threads` cores
        (ResourceError where that cannot be)."""
        self.model = Qwen3Moe(config, vocab_size).requires_grad_(requires_grad=False)
        self.counters = EngineCounters()
        self._slots = Slots(config, num_slots, max_tokens)
        self._prefill_tokens = prefill_tokens
        self._compute: ForwardPass = (
            NativeForward(self.model, self._slots.cache, native_threads)
            if kernels == "native"
            else EagerForward(self.model, self._slots.cache)
        )
        self._queue: deque[SampleRequest] = deque()
        self._version: PolicyVersion | None = None
        self._staged: tuple[PolicyVersion, Mapping[str, Tensor]] | None = None

    # ---- requests -------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._queue) or self._slots.any_sampling

    @property
    def num_live_sessions(self) -> int:
        return len(self._slots)

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
        for slot, occupant in enumerate(self._slots.occupants):
            if occupant.request is not None and occupant.request.id == request_id:
                return self._slots.finish(slot, "abort", self.counters.steps)
        return None

    def give_up(self, request: SampleRequest) -> FinishedRequest:
        """The answer to a request that is aborted before it began. Raises SamplerError without weights."""
        version = self.current()
        nothing = np.zeros(0, dtype=np.int32)
        chunk = SampleChunk(nothing, nothing.astype(np.float32), version, version, finish="abort")
        return FinishedRequest(request, (chunk,))

    def close(self, session_id: str) -> None:
        """Frees a session's slot; unknown sessions are ignored."""
        self._slots.remove(session_id)

    def _check(self, request: SampleRequest) -> None:
        version = self.current()
        if request.version is not None and not _serves(version, request.version, request.version_is_minimum):
            raise SamplerError(
                "version is not served", field="version", received=f"{request.version}; serving {version}"
            )
        slot = self._slots.find(request.session_id)
        if (slot is not None and self._slots.sampling[slot]) or any(
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
            if slot is None or self._slots.digest(slot) != request.prefix_digest:
                raise PrefixMissError(
                    "prefix is not held", field="prefix_digest", received=request.prefix_digest
                )
            known = int(self._slots.length[slot])
        total = known + len(request.suffix)
        if not len(request.suffix) and not known:
            raise SamplerError(
                "nothing to continue", field="suffix", received=0, fix="send at least one token"
            )
        if total >= self._slots.max_tokens:
            raise SamplerError(
                "session is too long",
                field="suffix",
                received=total,
                fix=f"stay under {self._slots.max_tokens} tokens, or raise the engine's limit",
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
        self._slots.change_version(version, recompute=kv == "recompute")

    # ---- one step -------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self) -> list[FinishedRequest]:
        """Computes one batch; returns the requests that it finished, in slot order."""
        self._admit()
        slots, live = self._slots, len(self._slots)
        pending = (slots.length - slots.computed)[:live]
        active = slots.sampling[:live]
        decode = np.flatnonzero(active & (pending == 1))
        prefill, counts = self._choose_prefill(np.flatnonzero(active & (pending > 1)), pending)
        if not len(decode) and not len(prefill):
            return []
        starts = slots.computed[np.concatenate((decode, prefill))]
        ones = np.ones(len(decode), dtype=np.int64)
        hidden = self._forward(StepRows(decode, prefill, starts, np.concatenate((ones, counts)), live))
        done = slots.computed[prefill] + counts == slots.length[prefill]
        last_rows = len(decode) + np.cumsum(counts) - 1
        sampled_rows = np.concatenate((np.arange(len(decode)), last_rows[done]))
        sampled_slots = np.concatenate((decode, prefill[done]))
        slots.computed[decode] += 1
        slots.computed[prefill] += counts
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
            slot = self._slots.find(request.session_id)
            if slot is None and not waiting:
                slot = self._take_slot(request.session_id)
            if slot is None:
                waiting.append(request)
            else:
                self._slots.begin(slot, request, self.current())
        self._queue = waiting

    def _take_slot(self, session_id: str) -> int | None:
        """A slot for a new session; None if all are taken and somebody in them can go on."""
        if self._slots.is_full and not self._evict_idle():
            return None
        return self._slots.add(session_id)

    def _evict_idle(self) -> bool:
        """Frees the slot that has been idle longest, but only where nothing else can make progress."""
        if self._slots.any_sampling:
            return False
        queued = {request.session_id for request in self._queue}
        idle = [occupant for occupant in self._slots.occupants if occupant.session_id not in queued]
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
            occupant = self._slots.occupants[slot]
            occupant.kv_oldest = occupant.kv_oldest or version
        tokens = self._slots.tokens[slots, positions]
        hidden, self._slots.routes[slots, positions] = self._compute(tokens, slots, positions, rows)
        return hidden

    def _sample(self, hidden: Tensor, slots: NDArray[np.int64]) -> list[FinishedRequest]:
        """Draws a token for each of `slots` from hidden [N, width]; returns what finished."""
        occupants = [self._slots.occupants[slot] for slot in slots]
        params = [occupant.request.params for occupant in occupants if occupant.request is not None]
        assert len(params) == len(slots), "only slots with a request sample"
        keys = np.array([occupant.key for occupant in occupants], dtype=np.uint64)
        draws = uniforms(keys, self._slots.length[slots])
        tokens, logprobs = self._compute.sample(hidden, params, draws)
        self._slots.append(slots, tokens, logprobs)
        finished: list[FinishedRequest] = []
        for slot, token in zip(slots.tolist(), tokens.tolist(), strict=True):
            reason = self._slots.finish_reason(slot, token)
            if reason is not None:
                finished.append(self._slots.finish(slot, reason, self.counters.steps))
        return finished


def _serves(current: PolicyVersion, wanted: PolicyVersion, wanted_is_minimum: bool) -> bool:
    if current.lineage != wanted.lineage:
        return False
    if current.step == wanted.step:
        return wanted.digest in ("", current.digest)
    return wanted_is_minimum and current.step > wanted.step
