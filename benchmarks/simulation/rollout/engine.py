"""A simulated engine: continuous batching over a number of slots, each sampling at a fixed rate.

A request occupies a free slot, or the next one to become free, for the duration of its message, and none
during tool calls. Prefill takes no time. When weights are exchanged in the middle of a message, the new ones
sample the rest of it.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import AsyncIterator, Callable

import numpy as np
from numpy.typing import NDArray

from etude.errors import SamplerError
from etude.protocols import KvPolicy
from etude.records import PolicyVersion, SampleChunk, SampleRequest, Scores, WeightManifest

Message = Callable[[str, int], NDArray[np.int32]]
"""(session id, number of its request, from 0) -> the message's tokens, its end token included."""


class SimulatedEngine:
    """Implements Sampler and WeightSink. Times are those of the event loop's clock."""

    def __init__(self, message: Message, num_slots: int, tokens_per_s: float, stage_s: float = 0.0) -> None:
        """`tokens_per_s`: of all slots together. `stage_s`: transfer time of new weights, during which
        sampling continues."""
        self.busy_slot_s = 0.0
        """Number of slots in use, integrated over time."""
        self._message = message
        self._slots = asyncio.Semaphore(num_slots)
        self._slot_rate = tokens_per_s / num_slots
        self._stage_s = stage_s
        self._staged: PolicyVersion | None = None
        self._exchanged_s: list[float] = []
        """Activation time of each version, parallel to the list of versions."""
        self._versions: list[PolicyVersion] = []
        self._sessions: dict[str, int] = {}
        """Open session -> number of requests so far."""

    # ---- Sampler --------------------------------------------------------------------------------

    def open(self, session_id: str, sibling: str | None = None) -> None:
        """See Sampler.open."""
        self._sessions[session_id] = 0

    def close(self, session_id: str) -> None:
        """See Sampler.close."""
        self._sessions.pop(session_id, None)

    async def stream(self, request: SampleRequest) -> AsyncIterator[SampleChunk]:
        """See Sampler.stream: yields one chunk per policy version, all when the message is complete."""
        number = self._sessions.get(request.session_id)
        if number is None:
            raise SamplerError("session is not open", field="session_id", received=request.session_id)
        self._sessions[request.session_id] = number + 1
        tokens = self._message(request.session_id, number)
        finish = "stop"
        if len(tokens) > request.params.max_tokens:
            tokens, finish = tokens[: request.params.max_tokens], "length"
        loop = asyncio.get_running_loop()
        async with self._slots:
            began_s = loop.time()
            try:
                await asyncio.sleep(len(tokens) / self._slot_rate)
            finally:
                self.busy_slot_s += loop.time() - began_s
        parts = self._split(tokens, began_s)
        for place, (version, part) in enumerate(parts, 1):
            last = place == len(parts)
            yield SampleChunk(
                tokens=part,
                logprobs=np.zeros(len(part), dtype=np.float32),
                version=version,
                kv_oldest=version,
                finish=finish if last else None,
                prefix_digest=request.id if last else "",
            )

    async def score(self, tokens: NDArray[np.int32], version: PolicyVersion) -> Scores:
        """Raises SamplerError: nothing is computed here."""
        raise SamplerError("a simulated engine scores nothing", field="tokens", received=len(tokens))

    def abort(self, request_id: str) -> None:
        """See Sampler.abort: nothing to do, since cancelling the stream frees the slot."""

    # ---- WeightSink -----------------------------------------------------------------------------

    async def stage(self, manifest: WeightManifest) -> None:
        """See WeightSink.stage."""
        await asyncio.sleep(self._stage_s)
        self._staged = manifest.version

    async def activate(self, version: PolicyVersion, kv: KvPolicy = "keep") -> None:
        """See WeightSink.activate."""
        if version != self._staged:
            raise SamplerError("version is not staged", field="version", received=str(version))
        self._versions.append(version)
        self._exchanged_s.append(asyncio.get_running_loop().time())

    def current(self) -> PolicyVersion | None:
        """See WeightSink.current."""
        return self._versions[-1] if self._versions else None

    def _split(
        self, tokens: NDArray[np.int32], began_s: float
    ) -> list[tuple[PolicyVersion, NDArray[np.int32]]]:
        """The message's tokens grouped by the policy version that sampled them; never empty."""
        first = bisect_left(self._exchanged_s, began_s + 1e-9) - 1
        if first < 0:
            raise SamplerError(
                "no weights yet", field="version", received=None, fix="stage and activate some"
            )
        parts: list[tuple[PolicyVersion, NDArray[np.int32]]] = []
        start = 0
        for place in range(first, len(self._versions)):
            ends = place + 1 == len(self._versions)
            until_s = 0.0 if ends else self._exchanged_s[place + 1] - began_s
            end = len(tokens) if ends else min(len(tokens), int(until_s * self._slot_rate))
            if end > start or (ends and not parts):
                parts.append((self._versions[place], tokens[start:end]))
            start = max(start, end)
        return parts
