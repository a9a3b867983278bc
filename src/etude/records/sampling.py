"""Requests to a sampler and its answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from etude.records.policy import PolicyVersion

NATIVE_ROUTE = 255
"""Expert index for "not recorded, let the router choose" in uint8 routes. In uint16 routes it is 65,535:
always the largest value of the type."""

MAX_TOP_LOGPROBS = 128
"""Most alternatives that are reported with a token."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is drawn. `temperature` 0 is greedy."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """Keep the k likeliest tokens; 0 keeps all."""
    min_p: float = 0.0
    max_tokens: int = 256
    raw_logprobs: bool = False
    """Also report each token's log-probability under the model's own distribution: temperature 1, nothing
    cut."""
    top_logprobs: int = 0
    """Also report that many of the likeliest tokens of the processed distribution at each position."""

    def __post_init__(self) -> None:
        checks = (
            ("temperature", self.temperature >= 0.0, ">= 0"),
            ("top_p", 0.0 < self.top_p <= 1.0, "in (0, 1]"),
            ("top_k", self.top_k >= 0, ">= 0"),
            ("min_p", 0.0 <= self.min_p < 1.0, "in [0, 1)"),
            ("max_tokens", self.max_tokens >= 1, ">= 1"),
            ("top_logprobs", 0 <= self.top_logprobs <= MAX_TOP_LOGPROBS, f"in 0..{MAX_TOP_LOGPROBS}"),
        )
        for name, holds, bound in checks:
            if not holds:
                raise ValueError(f"SamplingParams.{name}: must be {bound}, received {getattr(self, name)}")

    @property
    def truncated(self) -> bool:
        """Whether some tokens have probability 0: training then needs the recorded support."""
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """The next message of one session.

    The whole input is prefix + `suffix`; the prefix is what the sampler still holds for `session_id`,
    named by its digest. A sampler that no longer holds it answers PrefixMissError, and the
    caller sends everything as suffix with `prefix_digest` None.
    """

    id: str
    session_id: str
    suffix: NDArray[np.int32]
    params: SamplingParams
    stop_tokens: frozenset[int]
    """Sampling ends with the first of these, which is part of the answer."""
    rng_key: tuple[int, ...]
    """(seed, trajectory, segment): the sampling noise is a function of this key and the position alone."""
    prefix_digest: str | None = None
    pool: str = "rollout"
    version: PolicyVersion | None = None
    """Serve exactly this version, or (with `version_is_minimum`) this or a later one."""
    version_is_minimum: bool = False
    deadline_s: float | None = None
    streaming: bool = False
    """Whether to send a chunk after every engine step that sampled for this request, or one at the end."""


@dataclass(frozen=True, slots=True, eq=False)
class SampleChunk:
    """Consecutive sampled tokens of one request. n tokens; p positions computed since the last chunk."""

    tokens: NDArray[np.int32]
    """[n]"""
    logprobs: NDArray[np.float32]
    """[n] under the processed distribution."""
    version: PolicyVersion
    kv_oldest: PolicyVersion
    routes: NDArray[Any] | None = None
    """[p, layers that route, top_k]: of every position whose keys were computed since the last chunk, the
    prefill included. uint8, or uint16 where there are more than 255 experts; None for a dense model. The last
    sampled token of a message is computed, and so routed, with the next request."""
    routes_start: int = 0
    """Position of the first row of `routes`. Where keys were computed again, later rows replace earlier."""
    finish: str | None = None
    """None while more may come; then `stop`, `length` or `abort`."""
    prefix_digest: str = ""
    """With `finish`: names all tokens of the session so far, for the next request."""
    raw_logprobs: NDArray[np.float32] | None = None
    """[n] under the model's own distribution, where SamplingParams.raw_logprobs asked for them."""
    top_tokens: NDArray[np.int32] | None = None
    """[n, k] the likeliest tokens, k = SamplingParams.top_logprobs, best first; -1 where fewer are
    possible."""
    top_logprobs: NDArray[np.float32] | None = None
    """[n, k] their log-probabilities under the processed distribution."""
    cached_tokens: int | None = None
    """In the first chunk of a request: tokens of its whole input, prefix and suffix, whose keys were cached.
    None in later chunks, and from samplers that do not report it."""


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """Log-probabilities of given tokens. `logprobs[t]` is that of token t given those before; [0] is 0."""

    logprobs: NDArray[np.float32]
    version: PolicyVersion
    routes: NDArray[Any] | None = field(default=None)
