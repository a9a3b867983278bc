"""Sessions between two of their requests, and what waits for the engine's answers."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from etude.errors import EtudeError
from etude.inference.sequences import Answer
from etude.records import SampleRequest


@dataclass(slots=True, eq=False)
class Reply:
    """What a stream waits for: answers, of which the last ends it, or an error."""

    items: asyncio.Queue[Answer | EtudeError] = field(default_factory=asyncio.Queue[Answer | EtudeError])
    is_closed: bool = False
    """Whether nothing more will come, or nobody listens any more."""

    def put(self, item: Answer | EtudeError) -> None:
        """Hands one item over; what comes after the last is dropped."""
        if self.is_closed:
            return
        self.is_closed = not isinstance(item, Answer) or item.is_last
        self.items.put_nowait(item)


@dataclass(slots=True, eq=False)
class Ticket:
    """A session that is away, and what it comes back with."""

    session_id: str
    due_step: int
    beside: str | None = None
    """The session that this one left, while it has not had a request of its own."""
    request: SampleRequest | None = None
    reply: Reply | None = None
    returned: asyncio.Event = field(default_factory=asyncio.Event)
