"""The engine: continuous batching over many sessions, step by step, in the caller's thread.

Each step computes one token for every session that is sampling and a run of tokens for sessions whose
prompt or observations are not computed yet, all in one forward pass: the trainer's own module, or native code
that computes the same. Nothing here waits, does I/O or reads a clock, so equal calls give equal bits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from etude.config import ModelConfig
from etude.errors import ConfigError, PrefixMissError, SamplerError
from etude.inference.cache import PAGE_TOKENS, PagedCache
from etude.inference.drawing import Draws
from etude.inference.forward import EagerForward, ForwardPass
from etude.inference.gpu import GpuForward
from etude.inference.mtp import MtpDrafter, MtpDrafts
from etude.inference.native import NativeForward
from etude.inference.requests import check_length, check_tokens
from etude.inference.sampling import Alternatives, uniforms
from etude.inference.scheduler import Scheduler, StepPlan
from etude.inference.scoring import score_tokens
from etude.inference.sequences import Answer, TokenBytes
from etude.inference.speculation import NgramLookup
from etude.inference.versions import serves
from etude.inference.weights import DoubleWeights
from etude.model import LanguageModel
from etude.model.kernels.native.matrices import WeightType
from etude.protocols import KvPolicy
from etude.records import PolicyVersion, SampleChunk, SampleRequest, SamplingParams, Scores

Kernels = Literal["eager", "native", "gpu"]
CacheType = Literal["auto", "float32", "bfloat16"]


@dataclass(slots=True)
class EngineCounters:
    """What the engine has done since it was made. Units: tokens, steps."""

    decode_tokens: int = 0
    prefill_tokens: int = 0
    steps: int = 0
    weight_updates: int = 0
    cached_tokens: int = 0
    """Prompt tokens that needed no computing: their pages were there."""
    preemptions: int = 0
    """Times that a request lost its pages to an older one."""
    drafted_tokens: int = 0
    """Computed on the guess that they would be sampled."""
    accepted_tokens: int = 0
    """Of those, the ones that were."""


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
        token_bytes: TokenBytes | None = None,
        drafts: NgramLookup | MtpDrafts | None = None,
        native_weights: WeightType = "float32",
        device: str = "cpu",
        cache_dtype: CacheType = "auto",
    ) -> None:
        """`num_sessions`: those whose tokens are held; `max_tokens`: longest of them; `prefill_tokens`: most
        prompt tokens computed in one step; `kernels`: the trainer's module operator by operator, native code
        on up to `native_threads` cores, or the module on `device` with Triton's attention (ResourceError
        where that cannot be); `num_pages`: pages of 16 tokens for keys and values, by default enough for all
        sessions at their longest; `token_bytes`: what stop texts are looked for in; `drafts`: speculative
        decoding from the session's own tokens or by layers for it; `native_weights`: number format of native
        code's copy of the matrices, or of all that lies on the GPU; `cache_dtype`: of keys and values, by
        default as the model computes.

        Raises ConfigError if there are too few pages for one session, or for a cache that kernels cannot
        read."""
        pages_of_one = -(-max_tokens // PAGE_TOKENS)
        num_pages = num_sessions * pages_of_one if num_pages is None else num_pages
        if num_pages < pages_of_one:
            raise ConfigError(
                "too few pages for one session",
                field="num_pages",
                received=num_pages,
                fix=f"give at least {pages_of_one}, or lower the longest session of {max_tokens} tokens",
            )
        self.counters = EngineCounters()
        place, number = torch.device(device), torch.float32
        if kernels == "gpu" and native_weights == "bfloat16":
            number = torch.bfloat16
        held = _cache_type(cache_dtype, kernels, number)
        self._cache = PagedCache(config, num_pages, place, held)
        layers, self._mtp = None, None
        if isinstance(drafts, MtpDrafts):
            layers = drafts.layers
            self._cache.drafts = PagedCache(layers.config, num_pages, place, held)
            self._mtp = MtpDrafter(self._cache.drafts, num_sessions, drafts.num_drafts)
        drafter = drafts if isinstance(drafts, NgramLookup) else self._mtp
        self._scheduler = Scheduler(self._cache, num_sessions, max_tokens, prefill_tokens, drafter)
        self._sequences = self._scheduler.sequences
        self._token_bytes = token_bytes
        self._step_tokens = prefill_tokens

        def make_forward(model: LanguageModel) -> ForwardPass:
            if kernels == "native":
                return NativeForward(model, self._cache, native_threads, native_weights)
            return (GpuForward if kernels == "gpu" else EagerForward)(model, self._cache)

        self._weights = DoubleWeights(config, vocab_size, make_forward, place, number, layers)
        self._queue: deque[SampleRequest] = deque()

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
    def outstanding_tokens(self) -> int:
        """Tokens that the requests in flight have yet to compute, if all sample as many as they may."""
        sequences = self._sequences
        rows = [row for row in sequences.states if row not in sequences.idle]
        queued = sum(len(request.suffix) + request.params.max_tokens for request in self._queue)
        return queued + int((sequences.limit[rows] - sequences.computed[rows]).sum())

    @property
    def num_pages(self) -> int:
        """Pages of the cache."""
        return self._cache.num_pages

    @property
    def num_free_pages(self) -> int:
        """Pages of the cache that hold nothing."""
        return self._scheduler.tree.num_free

    def submit(self, request: SampleRequest) -> None:
        """Queues a request. Raises SamplerError or PrefixMissError, and then changes nothing."""
        self._check(request)
        self._queue.append(request)

    def abort(self, request_id: str) -> Answer | None:
        """Stops a request and returns what it has sampled; None if it is not known."""
        for request in self._queue:
            if request.id == request_id:
                self._queue.remove(request)
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
        version, vocab_size = self.current(), self.model.vocab_size
        check_tokens(tokens, vocab_size, "tokens")
        longest = self._sequences.max_tokens
        if not 0 < len(tokens) <= longest:
            raise SamplerError(f"must be 1 to {longest} tokens", field="tokens", received=len(tokens))
        pages = self._scheduler.borrow(-(-len(tokens) // PAGE_TOKENS))
        if pages is None:
            raise SamplerError(
                "too few pages are free for scoring",
                field="tokens",
                received=f"{len(tokens)} tokens; {self.num_free_pages} pages of {PAGE_TOKENS}",
                fix="score between rollouts, or raise engine.cache_tokens",
            )
        try:
            compute = self._weights.active.compute
            scored = score_tokens(compute, self._cache, pages, tokens, self._step_tokens, vocab_size)
        finally:
            self._scheduler.give_back(pages)
        return Scores(scored[0], version, scored[1])

    def check(self) -> None:
        """Asserts the invariants of sessions and pages."""
        self._scheduler.check()

    def _check(self, request: SampleRequest) -> None:
        version = self.current()
        if request.version is not None and not serves(version, request.version, request.version_is_minimum):
            raise SamplerError(
                "version is not served", field="version", received=f"{request.version}; serving {version}"
            )
        row = self._sequences.find(request.session_id)
        if (row is not None and self._sequences.states[row].request is not None) or any(
            queued.session_id == request.session_id for queued in self._queue
        ):
            raise SamplerError(
                "session has a request in flight", field="session_id", received=request.session_id
            )
        if request.stop_texts and self._token_bytes is None:
            raise SamplerError(
                "this engine does not know its tokens' bytes",
                field="stop_texts",
                received=request.stop_texts,
                fix="make the engine with token_bytes=tokenizer.decode_bytes, or use stop_tokens",
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

    def stage(self, version: PolicyVersion, tensors: Mapping[str, Tensor]) -> None:
        """Takes the next weights beside the current ones. Raises WeightUpdateError if they do not fit.

        May run in another thread than the rest of the engine, one call at a time.
        """
        self._weights.stage(version, tensors)

    def activate(self, version: PolicyVersion, kv: KvPolicy = "keep") -> None:
        """Serves the staged version from the next step on; running requests go on with it."""
        self._weights.activate(version)
        self.counters.weight_updates += 1
        self._scheduler.change_version(version, recompute=kv == "recompute")

    # ---- one step -------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self) -> list[Answer]:
        """Computes one batch; returns answers to the requests that it finished, and to those that stream."""
        self._admit()
        plan = self._scheduler.plan()
        self.counters.cached_tokens = self._scheduler.cached_tokens
        self.counters.preemptions = self._scheduler.num_preemptions
        if plan is None:
            return []
        hidden, routes = self._weights.active.compute(plan.rows)
        if routes.shape[1]:
            self._cache.routes[plan.rows.pages, plan.rows.offsets] = routes.numpy()
        self._count(plan)
        answers = self._sample(plan, hidden)
        if self._mtp is not None:
            self._mtp.follow(plan, hidden, self._weights.active, self._sequences)
        return answers

    def _count(self, plan: StepPlan) -> None:
        counters, num_decode = self.counters, plan.num_decode
        counters.steps += 1
        counters.decode_tokens += num_decode
        counters.prefill_tokens += int(plan.rows.counts[num_decode:].sum())
        counters.drafted_tokens += int(plan.rows.counts[:num_decode].sum()) - num_decode

    def _admit(self) -> None:
        """Starts queued requests in order. Those whose session is held never wait for a place."""
        waiting: deque[SampleRequest] = deque()
        while self._queue:
            request = self._queue.popleft()
            row = self._sequences.find(request.session_id)
            if row is None and not waiting:
                row = self._take_row(request.session_id)
            if row is None:
                waiting.append(request)
            else:
                self._scheduler.start(row, request)
        self._queue = waiting

    def _take_row(self, session_id: str) -> int | None:
        """A place for a new session; None if all are taken and somebody in them can go on."""
        sequences = self._sequences
        if sequences.is_full:
            queued = {request.session_id for request in self._queue}
            forgettable = (row for row in sequences.idle if sequences.states[row].session_id not in queued)
            row = next(forgettable, None)
            if sequences.any_request or row is None:
                return None
            self._scheduler.close(row)
        return sequences.add(session_id)

    def _sample(self, plan: StepPlan, hidden: Tensor) -> list[Answer]:
        """Draws what can be drawn from the step's hidden states [T, width]; returns the answers."""
        sequences = self._sequences
        ends = plan.rows.starts + plan.rows.counts
        sequences.computed[plan.members] = ends
        draws = Draws.of(plan, sequences)
        answers = self._draw(draws, hidden) if len(draws.sessions) else []
        crossed = ends // PAGE_TOKENS > plan.rows.starts // PAGE_TOKENS
        crossed[plan.num_decode :] = True
        for row in plan.members[crossed].tolist():
            self._scheduler.publish(row)
        return answers

    def _draw(self, draws: Draws, hidden: Tensor) -> list[Answer]:
        """Draws tokens from the step's hidden states [T, width], and keeps those that stand."""
        sequences, compute = self._sequences, self._weights.active.compute
        requests = [sequences.states[row].request for row in draws.owners.tolist()]
        params = [request.params for request in requests if request is not None]
        assert len(params) == len(requests), "only rows with a request sample"
        if len(draws.hidden_rows) < len(hidden):
            hidden = hidden[torch.from_numpy(draws.hidden_rows)]
        noise = uniforms(sequences.key[draws.owners], draws.places)
        drawn, logprobs = compute.sample(hidden, params, noise)
        alternatives = self._alternatives(hidden, params, drawn)
        tokens = drawn.numpy()
        standing = draws.standing(tokens, sequences)
        sequences.keep(draws.owners, draws.places, tokens, logprobs.numpy())
        self.counters.accepted_tokens += int(standing.sum()) - len(standing)
        self.counters.decode_tokens += int(standing.sum()) - len(standing)
        firsts = np.cumsum(draws.counts) - draws.counts
        special = (standing > 1) | sequences.needs_care(draws.sessions, tokens[firsts])
        plain = draws.sessions[~special]
        sequences.computed[plain] = sequences.length[plain]
        sequences.length[plain] += 1
        taken = zip(*(x[special].tolist() for x in (draws.sessions, firsts, standing)), strict=True)
        answers = (
            self._take_up(row, tokens[at : at + num].tolist(), alternatives[at : at + num])
            for row, at, num in taken
        )
        return [answer for answer in answers if answer is not None]

    def _alternatives(
        self, hidden: Tensor, params: Sequence[SamplingParams], tokens: Tensor
    ) -> list[Alternatives | None]:
        """Of each draw [N] whose request asked for them. An empty list if none did."""
        asked = [n for n, param in enumerate(params) if param.raw_logprobs or param.top_logprobs]
        if not asked:
            return []
        logits = self._weights.active.compute.logits(hidden[asked])
        given = Alternatives.of(logits, [params[n] for n in asked], tokens[asked])
        by_draw = dict(zip(asked, given, strict=True))
        return [by_draw.get(n) for n in range(len(params))]

    def _take_up(self, row: int, tokens: list[int], alternatives: list[Alternatives | None]) -> Answer | None:
        """Lengthens the session in `row` by its next tokens, up to one that ends the request; the answer, if
        there is one to give now."""
        sequences, state = self._sequences, self._sequences.states[row]
        assert state.request is not None
        state.alternatives.extend(given for given in alternatives[: len(tokens)] if given is not None)
        length, reason = int(sequences.length[row]), None
        for taken, token in enumerate(tokens, 1):
            reason = sequences.finish_reason(row, token, length + taken, self._token_bytes)
            if reason is not None:
                length += taken
                break
        else:
            length += len(tokens)
        sequences.length[row], sequences.computed[row] = length, length - 1
        if reason is not None:
            return self._scheduler.finish(row, reason)
        return sequences.deliver(row) if state.request.streaming else None


def _cache_type(wanted: CacheType, kernels: Kernels, computed: torch.dtype) -> torch.dtype:
    """Type of keys and values. Raises ConfigError."""
    held = computed if wanted == "auto" else getattr(torch, wanted)
    if kernels == "native" and held != torch.float32:
        raise ConfigError(
            "native kernels hold keys and values in float32",
            field="engine.cache_dtype",
            received=wanted,
            fix="leave it at auto, or set engine.kernels=eager",
        )
    return held
