"""Load target for a Sampler: exact tokens, no server in between."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from benchmarks.load.runner import Clock, TurnRecord
from benchmarks.load.workload import LoadSession
from numpy.typing import NDArray

from etude.errors import PrefixMissError
from etude.protocols import Sampler
from etude.records import SampleRequest, SamplingParams


@dataclass(slots=True)
class _Conversation:
    """The client's state of a session."""

    tokens: list[int] = field(default_factory=list)
    digest: str | None = None
    sent: int = 0
    """Number of tokens covered by the digest."""


class SamplerTarget:
    """Plays sessions of random or recorded tokens. No answer ends early, since there are no stop tokens."""

    def __init__(self, sampler: Sampler, vocab_size: int, seed: int = 0, temperature: float = 1.0) -> None:
        self._sampler = sampler
        self._vocab_size = vocab_size
        self._seed = seed
        self._temperature = temperature
        self._conversations: dict[str, _Conversation] = {}

    async def turn(self, session: LoadSession, record: TurnRecord, clock: Clock) -> None:
        """See LoadTarget.turn."""
        conversation = self._conversations.get(session.id)
        if conversation is None:
            conversation = self._conversations[session.id] = _Conversation()
            self._sampler.open(session.id)
        conversation.tokens += self._input(session, record.turn).tolist()
        record.prompt_tokens = len(conversation.tokens)
        try:
            record.cached_tokens = conversation.sent
            await self._stream(session, conversation, record, clock)
        except PrefixMissError:
            conversation.digest, record.cached_tokens = None, 0
            await self._stream(session, conversation, record, clock)

    async def end(self, session: LoadSession) -> None:
        """See LoadTarget.end."""
        if self._conversations.pop(session.id, None) is not None:
            self._sampler.close(session.id)

    def _input(self, session: LoadSession, number: int) -> NDArray[np.int32]:
        if session.inputs is not None:
            return session.inputs[number] % self._vocab_size
        generator = np.random.default_rng((self._seed, *session.id.encode(), number))
        return generator.integers(0, self._vocab_size, session.turns[number].input_tokens, dtype=np.int32)

    async def _stream(
        self, session: LoadSession, conversation: _Conversation, record: TurnRecord, clock: Clock
    ) -> None:
        start = conversation.sent if conversation.digest is not None else 0
        request = SampleRequest(
            id=f"{session.id}:{record.turn}:{'whole' if conversation.digest is None else 'suffix'}",
            session_id=session.id,
            suffix=np.array(conversation.tokens[start:], dtype=np.int32),
            params=SamplingParams(
                temperature=self._temperature, max_tokens=session.turns[record.turn].output_tokens
            ),
            stop_tokens=frozenset(),
            rng_key=(self._seed, *session.id.encode()),
            prefix_digest=conversation.digest,
            streaming=True,
        )
        sampled: list[int] = []
        async for chunk in self._sampler.stream(request):
            record.add_piece(clock(), len(chunk.tokens))
            sampled += chunk.tokens.tolist()
            if chunk.finish is not None:
                conversation.digest = chunk.prefix_digest
        conversation.tokens += sampled
        conversation.sent = len(conversation.tokens)
        record.output_tokens = len(sampled)
