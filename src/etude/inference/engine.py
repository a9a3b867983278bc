"""The engine: continuous batching over many sessions, step by step, in the caller's thread.

Each step computes one token for every session that is sampling and a run of tokens for sessions whose
prompt or observations are not computed yet, all in one forward pass: the trainer's own module, or native code
that computes the same. Nothing here waits, does I/O or reads a clock, so equal calls give equal bits.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from etude.config import ModelConfig
from etude.errors import PrefixMissError, SamplerError
from etude.inference.cache import PAGE_TOKENS, PagedCache, cache_type, count_pages
from etude.inference.draft_gauge import DraftGauge, step_cost
from etude.inference.forward import EagerForward, ForwardPass
from etude.inference.gpu import GpuForward
from etude.inference.mtp import MtpDrafter, MtpDrafts
from etude.inference.native import NativeForward
from etude.inference.requests import check_length, check_tokens, not_served, serves
from etude.inference.scheduler import Scheduler
from etude.inference.scoring import Scoring
from etude.inference.sequences import Answer, Sequences
from etude.inference.speculation import NgramLookup
from etude.inference.stepping import Stepper
from etude.inference.times import EngineCounters
from etude.inference.weights import DoubleWeights, make_runner
from etude.model import DraftLayers, LanguageModel
from etude.model.kernels.native.matrices import WeightType
from etude.protocols import KvPolicy
from etude.records import PolicyVersion, SampleChunk, SampleRequest, Scores

Kernels = Literal["eager", "native", "gpu"]
CacheType = Literal["auto", "float32", "bfloat16"]


class Engine:
    """Serves one model. Not thread-safe: one owner calls it (except for `stage`: see there)."""

    def __init__(
        self,
        config: ModelConfig,
        vocab_size: int,
        num_sessions: int,
        max_tokens: int,
        prefill_tokens: int = 2048,
        kernels: Kernels = "eager",
        native_threads: int = 1,
        *,
        num_pages: int | None = None,
        drafts: NgramLookup | MtpDrafts | None = None,
        native_weights: WeightType = "float32",
        device: str = "cpu",
        cache_dtype: CacheType = "auto",
        keep_spare: bool = True,
    ) -> None:
        """`num_sessions`: most sessions whose tokens are kept; `max_tokens`: the longest session;
        `prefill_tokens`: most prompt tokens computed in one step (chunked prefill); `kernels`: the trainer's
        module operator by operator, native code on up to `native_threads` cores, or the module on `device`
        with Triton's attention (ResourceError where that is unavailable); `num_pages`: pages of 16 tokens for
        keys and values, by default enough for all sessions at their longest; `drafts`: speculative decoding
        by n-gram lookup or by MTP layers; `native_weights`: number format of native code's copy of the
        matrices, or of all weights on the GPU; `cache_dtype`: of keys and values, by default the one that the
        model computes in; `keep_spare`: whether a second set of weights is allocated all the time, or only
        from `stage` to `activate`.

        Raises ConfigError if there are too few pages for one session, for sessions beyond the model's
        positions, or for a cache that kernels cannot read."""
        num_pages = count_pages(config, num_sessions, max_tokens, num_pages)
        computed = native_weights if kernels == "gpu" else "float32"
        target, dtype = torch.device(device), getattr(torch, computed)
        kv_dtype: torch.dtype = getattr(torch, cache_type(cache_dtype, kernels, computed))
        self.counters = EngineCounters()
        self._cache = PagedCache(config, num_pages, target, kv_dtype)
        self._sequences = Sequences(self._cache, num_sessions, max_tokens)
        layers, drafter = _open_drafts(drafts, self._sequences, target, kv_dtype)

        def make_forward(model: LanguageModel, drafts: DraftLayers | None) -> ForwardPass:
            if kernels == "native":
                return NativeForward(model, self._cache, native_threads, native_weights, drafts)
            return (GpuForward if kernels == "gpu" else EagerForward)(model, self._cache, drafts=drafts)

        make = functools.partial(make_runner, config, vocab_size, make_forward, target, dtype, layers)
        self._weights = DoubleWeights(make, keep_spare)
        adaptive = drafts is not None and drafts.adaptive
        cost = step_cost(kernels, self.model, layers) if adaptive else None
        gauge = DraftGauge(num_sessions, 0 if drafts is None else drafts.num_drafts, cost)
        self._scheduler = Scheduler(
            self._sequences, prefill_tokens, drafter, gauge, self.counters, has_runs=kernels == "native"
        )
        self._step_tokens = prefill_tokens
        self._stepper = Stepper(self._scheduler, self._weights, drafter)
        self._queue: dict[str, SampleRequest] = {}
        """Submitted requests without a row, by session, in order of arrival."""

    @property
    def model(self) -> LanguageModel:
        """The model in service; another object after each weight update."""
        return self._weights.active.model

    # ---- requests -------------------------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._queue) or self._sequences.any_request

    @property
    def num_live_sessions(self) -> int:
        return len(self._sequences)

    @property
    def num_running(self) -> int:
        """Requests that have their pages and are being computed."""
        return int(self._sequences.running.sum())

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a row, for pages, or for another session that computes their prompt."""
        return len(self._queue) + len(self._sequences.waiting)

    @property
    def num_pages(self) -> int:
        """Pages of the cache."""
        return self._cache.num_pages

    @property
    def num_free_pages(self) -> int:
        """Pages of the cache that are neither in use nor cached."""
        return self._scheduler.pages.tree.num_free

    def submit(self, request: SampleRequest) -> None:
        """Queues a request. Raises SamplerError or PrefixMissError without changing anything."""
        self._check(request)
        self._queue[request.session_id] = request

    def abort(self, request_id: str) -> Answer | None:
        """Aborts a request and returns what it has sampled; None for an unknown id."""
        for request in self._queue.values():
            if request.id == request_id:
                del self._queue[request.session_id]
                return self.abort_unstarted(request)
        for row, state in self._sequences.states.items():
            if state.request is not None and state.request.id == request_id:
                return self._scheduler.finish(row, "abort")
        return None

    def abort_unstarted(self, request: SampleRequest) -> Answer:
        """The answer to a request that is aborted before it began. Raises SamplerError without weights."""
        version = self.current()
        empty = np.zeros(0, dtype=np.int32)
        chunk = SampleChunk(empty, empty.astype(np.float32), version, version, finish="abort")
        return Answer(request, (chunk,))

    def close(self, session_id: str) -> None:
        """Removes a session; unknown sessions are ignored. Its pages stay in the prefix cache for now."""
        row = self._sequences.find(session_id)
        if row is not None:
            self._scheduler.close(row)

    def score(self, tokens: NDArray[np.int32]) -> Scores:
        """Log-probabilities at temperature 1 of `tokens` [T] under the version in service, and their routes:
        computed like a prompt, by the kernels that sample, in scratch pages. To be called between two steps.
        Raises SamplerError without changing anything."""
        scoring = self.begin_score(tokens)
        try:
            while not scoring.is_done:
                scoring.advance()
        finally:
            self.end_score(scoring)
        return scoring.scores()

    def begin_score(self, tokens: NDArray[np.int32]) -> Scoring:
        """Begins a `score` that is computed in parts: steps may run between two parts, but no weights may be
        activated. The caller must call `end_score`, also after an error."""
        version, vocab_size = self.current(), self.model.vocab_size
        check_tokens(tokens, vocab_size, "tokens")
        longest = self._sequences.max_tokens
        if not 0 < len(tokens) <= longest:
            raise SamplerError(f"must be 1 to {longest} tokens", field="tokens", received=len(tokens))
        self._allocate_cache()
        pages = self._scheduler.pages.allocate_scratch(-(-len(tokens) // PAGE_TOKENS))
        if pages is None:
            raise SamplerError(
                "too few pages are free for scoring",
                field="tokens",
                received=f"{len(tokens)} tokens; {self.num_free_pages} pages of {PAGE_TOKENS}",
                fix="score between rollouts, or raise engine.cache_tokens",
            )
        slot = None if version.adapter is None else self._weights.slot_of(version.adapter)
        compute = self._weights.active.compute
        return Scoring(compute, tokens, pages, self._step_tokens, vocab_size, version, slot)

    def end_score(self, scoring: Scoring) -> None:
        """Frees the pages of a scoring, done or not. To be called between two steps."""
        self._scheduler.pages.free_scratch(scoring.pages)

    # ---- memory ---------------------------------------------------------------------------------

    def release_memory(self) -> None:
        """Frees the memory of all keys and values, between two steps; the next step, or scoring, allocates it
        again. Cached prefixes are dropped. Raises SamplerError, without changing anything, while there are
        sessions, whose keys would be lost."""
        if self.has_work or self.num_live_sessions:
            raise SamplerError(
                "sessions are open",
                field="sessions",
                received=self.num_live_sessions + len(self._queue),
                fix="close them first",
            )
        self._scheduler.pages.reset_prefix_cache()
        self._cache.release()
        self._weights.load_cache()
        if self._cache.keys.is_cuda:
            torch.cuda.empty_cache()  # blocks that are cut up would not do for the trainer's large tensors

    def _allocate_cache(self) -> None:
        if not self._cache.is_allocated:
            self._cache.allocate()
            self._weights.load_cache()

    def _check(self, request: SampleRequest) -> None:
        version, wanted = self.current(), request.version
        found = version if wanted is None else self._weights.served.get(wanted.adapter)
        if wanted is not None and not serves(found, wanted, request.version_is_minimum):
            raise not_served(wanted, found or version)
        row = self._sequences.find(request.session_id)
        in_flight = row is not None and self._sequences.states[row].request is not None
        if in_flight or request.session_id in self._queue:
            raise SamplerError(
                "session has a request in flight", field="session_id", received=request.session_id
            )
        check_tokens(request.suffix, self.model.vocab_size)
        known = 0
        if request.prefix_digest is not None:
            if row is None or self._sequences.digest(row) != request.prefix_digest:
                raise PrefixMissError(
                    "prefix is not in the cache", field="prefix_digest", received=request.prefix_digest
                )
            known = int(self._sequences.length[row])
        check_length(known + len(request.suffix), self._sequences.max_tokens)

    # ---- weights --------------------------------------------------------------------------------

    def current(self) -> PolicyVersion:
        """The version in service. Raises SamplerError before the first activation."""
        version = self._weights.version
        if version is None:
            raise SamplerError(
                "no weights yet", field="version", received=None, fix="stage and activate a version"
            )
        return version

    @property
    def version(self) -> PolicyVersion | None:
        return self._weights.version

    def stage(
        self, version: PolicyVersion, tensors: Mapping[str, Tensor], base_digest: str | None = None
    ) -> None:
        """Copies the next weights into the spare set. Raises WeightUpdateError if they do not fit.
        `base_digest`: of all tensors but the factors of adapters; a base in service is not copied again.

        May run in another thread than the rest of the engine, one call at a time.
        """
        self._weights.stage(version, tensors, base_digest)

    def activate(self, version: PolicyVersion, kv: KvPolicy = "keep") -> None:
        """Serves the staged version from the next step on. Running requests continue with it: all of them, or
        for an adapter on the base in service, those that use the adapter."""
        all_sessions = self._weights.activate(version)
        self.counters.weight_updates += 1
        self._scheduler.change_version(
            version,
            recompute=kv == "recompute",
            adapter=self._weights.slot_of(version.adapter),
            all_sessions=all_sessions,
        )

    def _adapter_of(self, request: SampleRequest) -> int:
        """Slot of the adapter that a request asks for, or of the one activated last."""
        wanted = self.current() if request.version is None else request.version
        name = wanted.adapter if wanted.adapter in self._weights.served else self.current().adapter
        return self._weights.slot_of(name)

    # ---- one step -------------------------------------------------------------------------------

    def step(self, most_steps: int = 1) -> list[Answer]:
        """Computes one batch; returns answers to the requests that it finished, and to streaming ones.

        With native code, and if all requests are decoding, it computes up to `most_steps` steps, until a
        request ends: the results are those of single steps.
        """
        self._allocate_cache()
        self._admit()
        plan = self._scheduler.plan()
        return self._stepper.step(plan, most_steps) if plan is not None else []

    def _admit(self) -> None:
        """Starts queued requests in order. Those whose session has a row never wait for one."""
        full = False
        for session_id, request in tuple(self._queue.items()):
            row = self._sequences.find(session_id)
            if row is None and not full:
                row = self._assign_row(session_id)
                full = row is None
            if row is not None:
                del self._queue[session_id]
                self._scheduler.start(row, request, self._adapter_of(request))

    def _assign_row(self, session_id: str) -> int | None:
        """A row for a new session: unused, or that of an idle session if no request is in flight; or None."""
        sequences = self._sequences
        if sequences.is_full:
            queued = self._queue
            evictable = (row for row in sequences.idle if sequences.states[row].session_id not in queued)
            row = next(evictable, None)
            if sequences.any_request or row is None:
                return None
            self._scheduler.close(row)
        return sequences.add(session_id)


def _open_drafts(
    drafts: NgramLookup | MtpDrafts | None, sequences: Sequences, device: torch.device, dtype: torch.dtype
) -> tuple[DraftLayers | None, NgramLookup | MtpDrafter | None]:
    """Draft layers, if any, which get a cache of their own (`PagedCache.drafts`), and the drafter."""
    if not isinstance(drafts, MtpDrafts):
        return None, drafts
    cache = sequences.cache
    cache.drafts = PagedCache(drafts.layers.config, cache.num_pages, device, dtype)
    return drafts.layers, MtpDrafter(sequences, len(drafts.layers.layers), drafts.num_drafts)
