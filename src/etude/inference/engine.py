"""The engine: continuous batching over many sessions, step by step, in the caller's thread.

Each step computes one token for every session that is sampling and a run of tokens for sessions whose
prompt or observations are not computed yet, all in one forward pass: the trainer's own module, or native code
that computes the same. Nothing here waits, does I/O or reads a clock, so equal calls give equal bits.
"""

from __future__ import annotations

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
from etude.inference.requests import check_length, check_tokens, serves
from etude.inference.scheduler import Scheduler
from etude.inference.scoring import Scoring
from etude.inference.sequences import Answer
from etude.inference.speculation import NgramLookup
from etude.inference.stepping import Stepper
from etude.inference.times import EngineCounters
from etude.inference.weights import DoubleWeights
from etude.model import DraftLayers, LanguageModel
from etude.model.kernels.native.matrices import WeightType
from etude.protocols import KvPolicy
from etude.records import PolicyVersion, SampleChunk, SampleRequest, Scores

Kernels = Literal["eager", "native", "gpu"]
CacheType = Literal["auto", "float32", "bfloat16"]


class Engine:
    """Serves one model. Not thread-safe: one owner calls it (`stage` excepted: see there)."""

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
        """`num_sessions`: those whose tokens are held; `max_tokens`: longest of them; `prefill_tokens`: most
        prompt tokens computed in one step; `kernels`: the trainer's module operator by operator, native code
        on up to `native_threads` cores, or the module on `device` with Triton's attention (ResourceError
        where that cannot be); `num_pages`: pages of 16 tokens for keys and values, by default enough for all
        sessions at their longest; `drafts`: speculative
        decoding from the session's own tokens or by layers for it; `native_weights`: number format of native
        code's copy of the matrices, or of all that lies on the GPU; `cache_dtype`: of keys and values, by
        default as the model computes; `keep_spare`: whether there are two sets of weights all the time, or
        the second only from `stage` to `activate`.

        Raises ConfigError if there are too few pages for one session, for sessions beyond the model's
        positions, or for a cache that kernels cannot read."""
        num_pages = count_pages(config, num_sessions, max_tokens, num_pages)
        place, number = torch.device(device), torch.float32
        if kernels == "gpu" and native_weights == "bfloat16":
            number = torch.bfloat16
        computed = "bfloat16" if number == torch.bfloat16 else "float32"
        held: torch.dtype = getattr(torch, cache_type(cache_dtype, kernels, computed))
        self.counters = EngineCounters()
        self._cache = PagedCache(config, num_pages, place, held)
        layers, drafter = _open_drafts(drafts, self._cache, num_sessions, place, held)

        def make_forward(model: LanguageModel, drafts: DraftLayers | None) -> ForwardPass:
            if kernels == "native":
                return NativeForward(model, self._cache, native_threads, native_weights, drafts)
            return (GpuForward if kernels == "gpu" else EagerForward)(model, self._cache, drafts=drafts)

        self._weights = DoubleWeights(config, vocab_size, make_forward, place, number, layers, keep_spare)
        num_drafts, cost = (0, None) if drafts is None else (drafts.num_drafts, None)
        if drafts is not None and drafts.adaptive:
            cost = step_cost(kernels, self.model, layers)
        gauge = self._gauge = DraftGauge(num_sessions, num_drafts, cost)
        self._scheduler = Scheduler(
            self._cache,
            num_sessions,
            max_tokens,
            prefill_tokens,
            drafter,
            gauge,
            drafts_in_runs=kernels == "native",
        )
        self._sequences = self._scheduler.sequences
        self._step_tokens = prefill_tokens
        self._stepper = Stepper(self._scheduler, self._cache, self._weights, self.counters, drafter, gauge)
        self._queue: dict[str, SampleRequest] = {}
        """By session, in the order of their coming."""

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
        """Requests that are being computed."""
        return int(self._sequences.running.sum())

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a place, for pages, or for somebody who computes their prompt."""
        return len(self._queue) + len(self._sequences.waiting)

    @property
    def num_pages(self) -> int:
        """Pages of the cache."""
        return self._cache.num_pages

    @property
    def num_free_pages(self) -> int:
        """Pages of the cache that hold nothing."""
        return self._scheduler.pages.tree.num_free

    def submit(self, request: SampleRequest) -> None:
        """Queues a request. Raises SamplerError or PrefixMissError, and then changes nothing."""
        self._check(request)
        self._queue[request.session_id] = request

    def abort(self, request_id: str) -> Answer | None:
        """Stops a request and returns what it has sampled; None if it is not known."""
        for request in self._queue.values():
            if request.id == request_id:
                del self._queue[request.session_id]
                return self.give_up(request)
        for row, state in self._sequences.states.items():
            if state.request is not None and state.request.id == request_id:
                return self._scheduler.finish(row, "abort")
        return None

    def give_up(self, request: SampleRequest) -> Answer:
        """The answer to a request that is aborted before it began. Raises SamplerError without weights."""
        version = self.current()
        nothing = np.zeros(0, dtype=np.int32)
        chunk = SampleChunk(nothing, nothing.astype(np.float32), version, version, finish="abort")
        return Answer(request, (chunk,))

    def close(self, session_id: str) -> None:
        """Forgets a session; unknown sessions are ignored. What others may share of it is kept for now."""
        row = self._sequences.find(session_id)
        if row is not None:
            self._scheduler.close(row)

    def score(self, tokens: NDArray[np.int32]) -> Scores:
        """Log-probabilities at temperature 1 of `tokens` [T] under the version in service, and their routes:
        computed as a prompt is, by the kernels that sample, through pages that are free again afterwards.
        Between two steps only. Raises SamplerError, and then nothing has changed."""
        scoring = self.begin_score(tokens)
        try:
            while not scoring.is_done:
                scoring.advance()
        finally:
            self.end_score(scoring)
        return scoring.scores()

    def begin_score(self, tokens: NDArray[np.int32]) -> Scoring:
        """As `score`, a part at a time: steps may be taken between two parts, but no weights activated. Who
        calls it also calls `end_score`, whatever happens."""
        version, vocab_size = self.current(), self.model.vocab_size
        check_tokens(tokens, vocab_size, "tokens")
        longest = self._sequences.max_tokens
        if not 0 < len(tokens) <= longest:
            raise SamplerError(f"must be 1 to {longest} tokens", field="tokens", received=len(tokens))
        self._hold_memory()
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
        """Frees the pages of a scoring, done or not. Between two steps only."""
        self._scheduler.pages.free_scratch(scoring.pages)

    # ---- memory ---------------------------------------------------------------------------------

    def release_memory(self) -> None:
        """Gives back the memory of all keys and values, between two steps; the next step, or scoring, takes
        it again by itself. Shared prefixes are forgotten. Raises SamplerError, and changes nothing, while a
        session is held: its keys would be lost."""
        if self.has_work or self.num_live_sessions:
            raise SamplerError(
                "sessions are held",
                field="sessions",
                received=self.num_live_sessions + len(self._queue),
                fix="close them first",
            )
        self._scheduler.pages.reset_prefix_cache()
        self._cache.release()
        self._weights.load_cache()
        if self._cache.keys.is_cuda:
            torch.cuda.empty_cache()  # blocks that are cut up would not do for the trainer's large tensors

    def _hold_memory(self) -> None:
        if not self._cache.is_held:
            self._cache.hold()
            self._weights.load_cache()

    def _check(self, request: SampleRequest) -> None:
        version, wanted = self.current(), request.version
        found = version if wanted is None else self._weights.served.get(wanted.adapter)
        if wanted is not None and not serves(found, wanted, request.version_is_minimum):
            raise SamplerError(
                "version is not served", field="version", received=f"{wanted}; serving {found or version}"
            )
        row = self._sequences.find(request.session_id)
        in_flight = row is not None and self._sequences.states[row].request is not None
        if in_flight or request.session_id in self._queue:
            raise SamplerError(
                "session has a request in flight", field="session_id", received=request.session_id
            )
        check_tokens(request.suffix, self.model.vocab_size)
        self._check_length(request, row)

    def _check_length(self, request: SampleRequest, row: int | None) -> None:
        known = 0
        if request.prefix_digest is not None:
            if row is None or self._sequences.digest(row) != request.prefix_digest:
                raise PrefixMissError(
                    "prefix is not held", field="prefix_digest", received=request.prefix_digest
                )
            known = int(self._sequences.length[row])
        check_length(known + len(request.suffix), self._sequences.max_tokens)

    # ---- weights --------------------------------------------------------------------------------

    def current(self) -> PolicyVersion:
        """The version in service. Raises SamplerError before the first activation."""
        version = self._weights.version
        if version is None:
            raise SamplerError(
                "no weights yet", field="version", received=None, fix="stage and activate some"
            )
        return version

    @property
    def version(self) -> PolicyVersion | None:
        return self._weights.version

    def stage(
        self, version: PolicyVersion, tensors: Mapping[str, Tensor], base_digest: str | None = None
    ) -> None:
        """Takes the next weights beside the current ones. Raises WeightUpdateError if they do not fit.
        `base_digest`: of all but the factors of adapters; those of the base in service are not read again.

        May run in another thread than the rest of the engine, one call at a time.
        """
        self._weights.stage(version, tensors, base_digest)

    def activate(self, version: PolicyVersion, kv: KvPolicy = "keep") -> None:
        """Serves the staged version from the next step on; running requests go on with it: all of them, or
        those of its adapter, where that lies on the base in service."""
        everybody = self._weights.activate(version)
        self.counters.weight_updates += 1
        self._gauge.forget()
        self._scheduler.change_version(
            version,
            recompute=kv == "recompute",
            adapter=self._weights.slot_of(version.adapter),
            everybody=everybody,
        )

    def _adapter_of(self, request: SampleRequest) -> int:
        """Place of the adapter that a request asks for, or of the one activated last."""
        wanted = self.current() if request.version is None else request.version
        name = wanted.adapter if wanted.adapter in self._weights.served else self.current().adapter
        return self._weights.slot_of(name)

    # ---- one step -------------------------------------------------------------------------------

    def step(self, most_steps: int = 1) -> list[Answer]:
        """Computes one batch; returns answers to the requests that it finished, and to those that stream.

        With native code, and where nothing but plain decoding is to be done, it goes on for up to
        `most_steps` steps until a request ends: nothing but the number of calls is different.
        """
        self._hold_memory()
        self._admit()
        plan = self._scheduler.plan()
        self.counters.cached_tokens = self._scheduler.pages.cached_tokens
        self.counters.preemptions = self._scheduler.num_preemptions
        return self._stepper.step(plan, most_steps) if plan is not None else []

    def _admit(self) -> None:
        """Starts queued requests in order. Those whose session is held never wait for a place."""
        full = False
        for session_id, request in tuple(self._queue.items()):
            row = self._sequences.find(session_id)
            if row is None and not full:
                row = self._take_row(session_id)
                full = row is None
            if row is not None:
                del self._queue[session_id]
                self._scheduler.start(row, request, self._adapter_of(request))

    def _take_row(self, session_id: str) -> int | None:
        """A place for a new session; None if all are taken and somebody in them can go on."""
        sequences = self._sequences
        if sequences.is_full:
            queued = self._queue
            forgettable = (row for row in sequences.idle if sequences.states[row].session_id not in queued)
            row = next(forgettable, None)
            if sequences.any_request or row is None:
                return None
            self._scheduler.close(row)
        return sequences.add(session_id)


def _open_drafts(
    drafts: NgramLookup | MtpDrafts | None,
    cache: PagedCache,
    num_sessions: int,
    device: torch.device,
    dtype: torch.dtype,
) -> tuple[DraftLayers | None, NgramLookup | MtpDrafter | None]:
    """The layers that draft, for which `cache` gets a second one beside it, and who asks for drafts."""
    if not isinstance(drafts, MtpDrafts):
        return None, drafts
    cache.drafts = PagedCache(drafts.layers.config, cache.num_pages, device, dtype)
    return drafts.layers, MtpDrafter(len(drafts.layers.layers), num_sessions, drafts.num_drafts)
