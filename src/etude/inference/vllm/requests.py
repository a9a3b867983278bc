"""State of sessions and requests on our side of vLLM: request bodies, and answers converted to chunks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest, xxh3_128_hexdigest

from etude.errors import PrefixMissError, SamplerError
from etude.inference.requests import check_length, check_tokens, not_open
from etude.inference.vllm.activations import Activation, History, check_spans
from etude.inference.vllm.answers import Finish, Part, Routes, Tokens
from etude.inference.vllm.client import Abilities, VllmClient
from etude.kit.tasks import unless
from etude.records import SampleChunk, SampleRequest, SamplingParams


@dataclass(slots=True, eq=False)
class Session:
    """One session: its tokens, and its state with respect to vLLM's cache."""

    id: str
    tokens: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, dtype=np.int32))
    digest: str | None = None
    """Digest of `tokens` while the caller knows them all; None: the next request must send all tokens."""
    request_id: str | None = None
    """The request in flight."""
    epoch: int = 0
    """Incremented whenever earlier keys must not be reused, because their routes are unknown."""
    routed: int = 0
    """Leading positions whose routes have been reported."""
    oldest: int | None = None
    """Index in the replica's history of the oldest activation of its keys; None: it has no keys."""

    def append(self, tokens: NDArray[np.int32]) -> None:
        """Appends sent or sampled tokens."""
        self.tokens = np.concatenate([self.tokens, tokens])

    def complete(self) -> str:
        """Ends an answered request; returns the prefix digest for the next one."""
        self.request_id = None
        self.digest = xxh3_128_hexdigest(np.ascontiguousarray(self.tokens, dtype="<i4").tobytes())
        return self.digest

    def reset(self) -> None:
        """Ends a failed or unread request: the next one must send all tokens."""
        self.request_id, self.digest = None, None

    def begin_request(self, request: SampleRequest, vocab_size: int, max_tokens: int) -> None:
        """Adds a request's tokens. Raises SamplerError or PrefixMissError without changing anything."""
        if self.request_id is not None:
            raise not_open(request.session_id)
        if request.prefix_digest is not None and request.prefix_digest != self.digest:
            raise PrefixMissError(
                "prefix is not in the cache", field="prefix_digest", received=request.prefix_digest[:16]
            )
        # A token outside the vocabulary kills vLLM's engine, and with it all requests.
        check_tokens(request.suffix, vocab_size)
        known = len(self.tokens) if request.prefix_digest is not None else 0
        check_length(known + len(request.suffix), max_tokens, "--max-model-len")
        if request.prefix_digest is None:
            if len(self.tokens):
                self.epoch += 1
            self.tokens, self.routed, self.oldest = self.tokens[:0], 0, None
        self.append(request.suffix)
        self.request_id = request.id


def seed_of(rng_key: Sequence[int], position: int) -> int:
    """vLLM's seed of a request: a function of the key and of the message's start position."""
    return xxh3_64_intdigest(repr((tuple(rng_key), position)).encode()) >> 1


_ABORT_GRACE_S = 60.0
"""After an abort vLLM answers at its next step, or after a weight swap; beyond this it is considered dead."""
T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Running:
    """One request in flight."""

    request: SampleRequest
    session: Session
    client: VllmClient
    """Of the server that has it."""
    abilities: Abilities
    history: History
    began: int
    """Number of activations when it was sent."""
    num_prompt: int
    """Tokens of the prompt."""
    name: str = field(default_factory=lambda: f"etude-{uuid4().hex}")
    """Its request id in vLLM."""
    num_sampled: int = 0
    """Sampled tokens that have been delivered."""
    cached_tokens: int | None = None
    """Prompt tokens found in vLLM's prefix cache, once reported."""
    routes: Routes | None = None
    """Routes that came with the answer."""
    aborted: asyncio.Event = field(default_factory=asyncio.Event)

    def body(self) -> dict[str, Any]:
        """The body for `/inference/v1/generate`."""
        request, params = self.request, self.request.params
        sampling: dict[str, Any] = {
            "max_tokens": min(params.max_tokens, self.abilities.max_tokens - self.num_prompt),
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k,
            "min_p": params.min_p,
            "seed": seed_of(request.rng_key, self.num_prompt),
            "logprobs": params.top_logprobs,
            "stop_token_ids": sorted(request.stop_tokens),
            "ignore_eos": True,
            "detokenize": False,
        }
        return {
            "model": self.abilities.adapters,
            "request_id": self.name,
            "token_ids": self.session.tokens.tolist(),
            "sampling_params": sampling,
            "cache_salt": self._salt(),
        }

    async def chunks(self, part: Part) -> list[SampleChunk]:
        """Converts a part to chunks, one per version. Waits until each version is verified."""
        count = len(part.sampled.tokens)
        end = self.num_sampled + count
        spans = self.history.spans(self.name, self.num_prompt, self.began, end)
        if part.spans:
            check_spans(spans, part.spans)
        chunks: list[SampleChunk] = []
        for span in spans:
            start = max(span.start, self.num_sampled)
            if span.end > start:
                activation = await self.history.verified(span.label)
                tokens = part.sampled[start - self.num_sampled : span.end - self.num_sampled]
                chunks.append(self._chunk(tokens, activation))
        self.session.append(part.sampled.tokens)
        self.num_sampled = end
        return chunks

    def record(self, part: Part) -> bool:
        """Records a part's routes and cached tokens; returns whether it has tokens or a finish reason."""
        self.routes = part.routes or self.routes
        if part.cached_tokens is not None:
            self.cached_tokens = part.cached_tokens
        return bool(len(part.sampled.tokens)) or part.finish is not None

    def closing_chunks(
        self, pending: list[SampleChunk], finish: Finish, routes: Routes | None
    ) -> list[SampleChunk]:
        """The last chunks, of which the final one has the finish reason, the digest and the routes.

        vLLM reports cached tokens at the end of its answer, so the first chunk has `cached_tokens` only if
        the request is not streaming.
        """
        session = self.session
        if not pending:
            version = self.history.last.version
            empty = np.zeros(0, dtype=np.int32)
            pending = [SampleChunk(empty, empty.astype(np.float32), version, version)]
        if routes is not None:
            if routes.start > session.routed:
                raise SamplerError(
                    "routes of some positions are missing", received=(session.routed, routes.start)
                )
            session.routed = routes.start + len(routes.experts)
        experts, start = (None, 0) if routes is None else (routes.experts, routes.start)
        if not self.request.streaming:
            pending[0] = replace(pending[0], cached_tokens=self.cached_tokens)
        pending[-1] = replace(
            pending[-1],
            routes=experts,
            routes_start=start,
            finish=finish,
            prefix_digest=session.complete(),
        )
        return pending

    async def unless_stuck(self, work: Awaitable[T]) -> T:
        """The result of `work`; SamplerError if the request was aborted and vLLM does not answer in time."""
        error = SamplerError("vLLM did not answer an abort", received=self.request.id)
        return await unless(work, self._grace(), error)

    async def _grace(self) -> None:
        await self.aborted.wait()
        await asyncio.sleep(_ABORT_GRACE_S)

    def _salt(self) -> str:
        """The cache salt, which restricts prefix sharing to sessions that began under the same version, and
        where routes are captured to the session itself, because those of shared keys would be lost."""
        session = self.session
        if session.oldest is None:
            session.oldest = max(self.began - 1, 0)
        start = self.history.label_at(session.oldest)
        # Hashed, since vLLM limits a salt's length and characters.
        salt = f"{start}|{session.id}|{session.epoch}" if self.abilities.captures else start
        return xxh3_128_hexdigest(salt.encode())

    def _chunk(self, tokens: Tokens, activation: Activation) -> SampleChunk:
        params = self.request.params
        return SampleChunk(
            tokens=tokens.tokens,
            logprobs=tokens.logprobs,
            version=activation.version,
            kv_oldest=self.history.oldest(self.session.oldest or 0, activation),
            raw_logprobs=tokens.logprobs if params.raw_logprobs else None,
            top_tokens=tokens.top_tokens,
            top_logprobs=tokens.top_logprobs,
        )


def check_request(request: SampleRequest) -> None:
    """Raises SamplerError for requests that vLLM cannot serve."""
    params: SamplingParams = request.params
    is_raw = params.temperature in (0.0, 1.0) and not (params.truncated and params.temperature > 0)
    if params.raw_logprobs and not is_raw:
        raise SamplerError(
            "vLLM reports only processed log-probabilities with these sampling parameters",
            field="raw_logprobs",
            received=params,
            fix="ask for them at temperature 1 without truncation, or score the answer",
        )
