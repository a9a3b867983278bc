"""The sampler's sessions behind requests: one of its own for each, or one that lasts for a conversation.

A request that names a conversation (`x-session-id`) keeps its keys and values between turns: only what is new
is sent. One that names none, or whose conversation is busy with another request, gets a session that ends
with it; the engine then finds what it still holds by the tokens alone.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from etude.protocols import Sampler

Tokens = NDArray[np.int32]


@dataclass(slots=True, eq=False)
class Lease:
    """The right to send one request to one session of the sampler."""

    session_id: str
    conversation: str | None = None
    """The client's name for it; None: ends with the request."""
    tokens: Tokens = field(default_factory=lambda: np.zeros(0, dtype=np.int32))
    """What the sampler held after the last answer."""
    prefix_digest: str | None = None
    used_s: float = 0.0
    busy: bool = False

    def num_known(self, prompt: Tokens) -> int:
        """How many of the prompt's tokens need not be sent: those held, if it begins with all of them."""
        held = len(self.tokens)
        if not self.prefix_digest or not held or held >= len(prompt):
            return 0
        return held if np.array_equal(prompt[:held], self.tokens) else 0


class Leases:
    """All sessions of one server. For one event loop."""

    def __init__(
        self,
        sampler: Sampler,
        idle_s: float = 600.0,
        max_conversations: int = 1024,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`idle_s`: a conversation that nobody goes on with ends after it; over the limit, the least used."""
        self._sampler = sampler
        self._idle_s = idle_s
        self._max = max_conversations
        self._clock = clock
        self._prefix = secrets.token_hex(4)
        self._numbers = itertools.count()
        self._conversations: OrderedDict[str, Lease] = OrderedDict()

    def __len__(self) -> int:
        """Conversations that are held."""
        return len(self._conversations)

    def take(self, conversation: str | None) -> Lease:
        """A session for one request, open at the sampler. Raises SamplerError."""
        held = self._conversations.get(conversation) if conversation is not None else None
        if held is not None and not held.busy:
            held.busy, held.used_s = True, self._clock()
            self._conversations.move_to_end(held.conversation or "")
            return held
        lease = Lease(f"serve-{self._prefix}-{next(self._numbers)}", busy=True, used_s=self._clock())
        self._sampler.open(lease.session_id)
        if conversation is not None and held is None:
            lease.conversation = conversation
            self._conversations[conversation] = lease
            self._make_room()
        return lease

    def give_back(self, lease: Lease, tokens: Tokens | None, prefix_digest: str | None) -> None:
        """The request has ended. `tokens`: all that the session holds now; None where that is not certain,
        as after an abort: the session then ends."""
        lease.busy, lease.used_s = False, self._clock()
        if lease.conversation is None or tokens is None or not prefix_digest:
            self._end(lease)
            return
        lease.tokens, lease.prefix_digest = tokens, prefix_digest

    def expire(self) -> int:
        """Ends the conversations that nobody goes on with; how many."""
        end_s = self._clock() - self._idle_s
        idle = [one for one in self._conversations.values() if not one.busy and one.used_s < end_s]
        for lease in idle:
            self._end(lease)
        return len(idle)

    def close(self) -> None:
        """Ends all conversations."""
        for lease in list(self._conversations.values()):
            self._end(lease)

    def _make_room(self) -> None:
        idle = (one for one in list(self._conversations.values()) if not one.busy)
        while len(self._conversations) > self._max and (lease := next(idle, None)) is not None:
            self._end(lease)

    def _end(self, lease: Lease) -> None:
        if lease.conversation is not None and self._conversations.get(lease.conversation) is lease:
            del self._conversations[lease.conversation]
        self._sampler.close(lease.session_id)
