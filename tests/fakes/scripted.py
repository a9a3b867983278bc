"""A sampler that plays given messages, for tests and for making training data from scripted sessions."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from etude.errors import PrefixMissError, SamplerError
from etude.records import PolicyVersion, SampleChunk, SampleRequest, Scores

Tokens = NDArray[np.int32]
Script = Callable[[str, Tokens], Tokens]
"""(session id, its tokens so far) -> the next message, its end token included."""

SCRIPTED_VERSION = PolicyVersion("scripted", 0)


@dataclass(slots=True)
class _Prefix:
    tokens: Tokens
    computed: int = 0
    """Positions whose keys a real sampler would have cached: all but the last sampled token."""


class ScriptedSampler:
    """Implements `Sampler` with a deterministic policy: every log-probability is 0.

    It keeps the contract on which sessions rely: prefixes are named by digest and missed once dropped, and
    routes cover every computed position. Messages longer than the request allows are cut.
    """

    def __init__(
        self,
        script: Script,
        version: PolicyVersion = SCRIPTED_VERSION,
        route_shape: tuple[int, int] | None = None,
        chunk_tokens: int = 0,
    ) -> None:
        """`route_shape` (layers, top_k) adds generated routes; `chunk_tokens` 0 sends messages whole."""
        self._script = script
        self._version = version
        self._route_shape = route_shape
        self._chunk_tokens = chunk_tokens
        self._sessions: dict[str, _Prefix] = {}
        self._aborted: set[str] = set()
        self.open_sessions: set[str] = set()
        self.requests: list[SampleRequest] = []
        """Every request, for tests."""

    def open(self, session_id: str, sibling: str | None = None) -> None:
        self.open_sessions.add(session_id)

    def close(self, session_id: str) -> None:
        self.open_sessions.discard(session_id)
        self._sessions.pop(session_id, None)

    def drop_prefix(self, session_id: str) -> None:
        """Drops a session's cached prefix, as a restarted replica does."""
        self._sessions.pop(session_id, None)

    def abort(self, request_id: str) -> None:
        self._aborted.add(request_id)

    async def score(self, tokens: Tokens, version: PolicyVersion) -> Scores:
        """Raises SamplerError for any version but the scripted one."""
        if version != self._version:
            raise SamplerError("not the version in service", field="version", received=str(version))
        routes = None if self._route_shape is None else self._routes(tokens, 0, len(tokens))
        return Scores(np.zeros(len(tokens), dtype=np.float32), version, routes)

    async def stream(self, request: SampleRequest) -> AsyncIterator[SampleChunk]:
        """Plays the next message. Raises PrefixMissError."""
        self.requests.append(request)
        prefix = self._extend_prefix(request)
        message = self._script(request.session_id, prefix.tokens)
        finish = "stop"
        if len(message) > request.params.max_tokens:
            message, finish = message[: request.params.max_tokens], "length"
        for start, end in self._chunks(len(message)):
            if request.id in self._aborted:
                finish = "abort"
                break
            yield self._chunk(prefix, message[start:end])
        yield self._last_chunk(prefix, finish)

    def _extend_prefix(self, request: SampleRequest) -> _Prefix:
        prefix = self._sessions.get(request.session_id)
        if request.prefix_digest is None:
            prefix = self._sessions[request.session_id] = _Prefix(np.array(request.suffix, dtype=np.int32))
        elif prefix is None or prefix_digest(prefix.tokens) != request.prefix_digest:
            raise PrefixMissError(
                "the prefix is not held", field="prefix_digest", received=request.prefix_digest[:12]
            )
        else:
            prefix.tokens = np.concatenate([prefix.tokens, request.suffix])
        return prefix

    def _chunks(self, length: int) -> Iterator[tuple[int, int]]:
        step = self._chunk_tokens or max(length, 1)
        return ((start, min(start + step, length)) for start in range(0, length, step))

    def _chunk(self, prefix: _Prefix, tokens: Tokens) -> SampleChunk:
        prefix.tokens = np.concatenate([prefix.tokens, tokens])
        routes, first = None, prefix.computed
        if self._route_shape is not None:
            computed = len(prefix.tokens) - 1
            routes = self._routes(prefix.tokens, prefix.computed, computed)
            prefix.computed = computed
        return SampleChunk(
            tokens=tokens,
            logprobs=np.zeros(len(tokens), dtype=np.float32),
            version=self._version,
            kv_oldest=self._version,
            routes=routes,
            routes_start=first,
        )

    def _last_chunk(self, prefix: _Prefix, finish: str) -> SampleChunk:
        return SampleChunk(
            tokens=np.zeros(0, dtype=np.int32),
            logprobs=np.zeros(0, dtype=np.float32),
            version=self._version,
            kv_oldest=self._version,
            finish=finish,
            prefix_digest=prefix_digest(prefix.tokens),
        )

    def _routes(self, tokens: Tokens, start: int, end: int) -> NDArray[np.uint8]:
        """Routes [end - start, layers, top_k]: a function of token and position, like a router's."""
        assert self._route_shape is not None
        layers, top_k = self._route_shape
        base = tokens[start:end].astype(np.int64) + np.arange(start, end)
        offsets = np.arange(layers * top_k).reshape(layers, top_k)
        return ((base[:, None, None] + offsets) % 8).astype(np.uint8)


def play(messages: Iterable[Tokens]) -> Script:
    """A script of one session: the messages in order. It raises SamplerError when there are no more."""
    remaining = iter(messages)

    def script(session_id: str, context: Tokens) -> Tokens:
        message = next(remaining, None)
        if message is None:
            raise SamplerError("the script has no more messages", field="session_id", received=session_id)
        return message

    return script


def prefix_digest(tokens: Tokens) -> str:
    """BLAKE3 hex digest of token ids."""
    return blake3(np.ascontiguousarray(tokens, dtype=np.int32).tobytes()).hexdigest()
