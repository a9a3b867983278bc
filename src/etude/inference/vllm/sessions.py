"""What is remembered of each session beside vLLM's own cache: its tokens, and where their keys came from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest, xxh3_128_hexdigest

from etude.errors import PrefixMissError, SamplerError
from etude.inference.requests import check_length, check_tokens
from etude.records import SampleRequest

Tokens = NDArray[np.int32]


@dataclass(slots=True, eq=False)
class Session:
    """One session."""

    id: str
    tokens: Tokens = field(default_factory=lambda: np.zeros(0, dtype=np.int32))
    digest: str | None = None
    """Of `tokens`, while they are what the caller knows; None: they must be sent whole."""
    request_id: str | None = None
    """The request in flight."""
    epoch: int = 0
    """Counts the times that earlier keys must not be used again, because their routes are unknown."""
    routed: int = 0
    """Positions whose routes have been reported."""
    oldest: int | None = None
    """Place in the replica's history from which the oldest of its keys may come; None: it has none."""

    def append(self, tokens: Tokens) -> None:
        """Adds what was sent or sampled."""
        self.tokens = np.concatenate([self.tokens, tokens])

    def settle(self) -> str:
        """The request is answered: names all tokens for the next one."""
        self.request_id = None
        self.digest = xxh3_128_hexdigest(np.ascontiguousarray(self.tokens, dtype="<i4").tobytes())
        return self.digest

    def lose(self) -> None:
        """The request failed, or nobody read its answer: the caller must begin anew."""
        self.request_id, self.digest = None, None


class Sessions:
    """All open sessions."""

    def __init__(self) -> None:
        self._sessions: dict[str, Session] = {}

    def open(self, session_id: str) -> None:
        """Raises SamplerError if it is open."""
        if session_id in self._sessions:
            raise SamplerError("session is open already", field="session_id", received=session_id)
        self._sessions[session_id] = Session(session_id)

    def close(self, session_id: str) -> Session | None:
        """Forgets a session and returns it; unknown ids are ignored."""
        return self._sessions.pop(session_id, None)

    def begin(self, request: SampleRequest, vocab_size: int, max_tokens: int) -> Session:
        """Takes a request's tokens in. Raises SamplerError or PrefixMissError, and then changes nothing."""
        session = self._sessions.get(request.session_id)
        if session is None or session.request_id is not None:
            raise SamplerError(
                "session is not open or has a request in flight",
                field="session_id",
                received=request.session_id,
                fix="call open() first, and wait for the last answer",
            )
        if request.prefix_digest is not None and request.prefix_digest != session.digest:
            raise PrefixMissError(
                "prefix is not held", field="prefix_digest", received=request.prefix_digest[:16]
            )
        # vLLM's engine dies of a token outside the vocabulary, and takes all requests with it.
        check_tokens(request.suffix, vocab_size)
        known = len(session.tokens) if request.prefix_digest is not None else 0
        total = known + len(request.suffix)
        check_length(total, max_tokens, "--max-model-len")
        if request.prefix_digest is None:
            if len(session.tokens):
                session.epoch += 1
            session.tokens, session.routed, session.oldest = session.tokens[:0], 0, None
        session.append(request.suffix)
        session.request_id = request.id
        return session


def seed_of(rng_key: Sequence[int], position: int) -> int:
    """vLLM's seed of a request: a function of the key and of where the message begins."""
    return xxh3_64_intdigest(repr((tuple(rng_key), position)).encode()) >> 1
