"""Sessions between two of their requests, in the order in which they are taken back, and what waits for the
engine's answers."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
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


class TicketLine:
    """Tickets of the sessions that are open and that the engine does not answer, in their order."""

    def __init__(self, delay_steps: int | None) -> None:
        """`delay_steps`: until a session is waited for; None takes sessions as they come back."""
        self.clock = 0
        """Steps that were taken, those included that were skipped because nobody was due."""
        self._delay_steps = delay_steps
        self._line: deque[Ticket] = deque()
        self._away: dict[str, Ticket] = {}
        """By session: tickets of those that have not come back."""

    def __len__(self) -> int:
        return len(self._line)

    def __iter__(self) -> Iterator[Ticket]:
        return iter(self._line)

    def __contains__(self, session_id: str) -> bool:
        """Whether the session is away."""
        return session_id in self._away

    @property
    def any_away(self) -> bool:
        """Whether a session has not come back."""
        return bool(self._away)

    @property
    def due(self) -> Ticket | None:
        """The first ticket, if its step has come."""
        return self._line[0] if self._line and self._line[0].due_step <= self.clock else None

    @property
    def steps_until_due(self) -> int | None:
        """Steps until the next session is waited for; None where nobody is."""
        if not self._line or self._delay_steps is None:
            return None
        return max(1, self._line[0].due_step - self.clock)

    def skip_to_due(self) -> None:
        """Moves the clock to where the first ticket is due."""
        self.clock = max(self.clock, self._line[0].due_step)

    def leave(self, session_id: str) -> Ticket:
        """The session goes away."""
        ticket = self._away[session_id] = Ticket(session_id, self._due_step())
        self._line.append(ticket)
        return ticket

    def leave_beside(self, session_id: str, other: str) -> bool:
        """The session goes away together with `other`, behind all that did so before; False, and nothing is
        done, where that one is not away."""
        beside = self._away.get(other)
        if beside is None:
            return False
        ticket = self._away[session_id] = Ticket(session_id, beside.due_step, other)
        place = self._line.index(beside) + 1
        while place < len(self._line) and self._line[place].beside == other:
            place += 1
        self._line.insert(place, ticket)
        return True

    def come_back(
        self, session_id: str, request: SampleRequest | None = None, reply: Reply | None = None
    ) -> bool:
        """The session is back, with a request or for good; False where it is not away."""
        ticket = self._away.pop(session_id, None)
        if ticket is None:
            return False
        ticket.request, ticket.reply = request, reply
        ticket.returned.set()
        return True

    def send_away(self, ticket: Ticket) -> Reply | None:
        """The session is away again as before, without its request; who waited for the answer."""
        reply, ticket.request, ticket.reply = ticket.reply, None, None
        ticket.returned.clear()
        self._away[ticket.session_id] = ticket
        return reply

    def find(self, request_id: str) -> Ticket | None:
        """The ticket that came back with this request."""
        for ticket in self._line:
            if ticket.request is not None and ticket.request.id == request_id:
                return ticket
        return None

    def take_due(self) -> Ticket:
        """Takes out the first ticket."""
        return self._line.popleft()

    def take_returned(self) -> list[Ticket]:
        """Takes out all tickets whose sessions are back."""
        returned = [ticket for ticket in self._line if ticket.returned.is_set()]
        self._line = deque(ticket for ticket in self._line if not ticket.returned.is_set())
        return returned

    def _due_step(self) -> int:
        """The next multiple of the delay that is at least the delay away: sessions come back in batches,
        so that fewer steps have something to prefill."""
        delay = self._delay_steps or 0
        return -(-(self.clock + delay) // delay) * delay if delay else self.clock
