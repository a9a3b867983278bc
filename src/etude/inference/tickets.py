"""The queue of sessions between two requests (tickets), and the streams that wait for answers (replies)."""

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
    """The queue behind one stream: answers to its request, up to the last one, or an error."""

    request: SampleRequest
    items: asyncio.Queue[Answer | EtudeError] = field(default_factory=asyncio.Queue[Answer | EtudeError])
    is_closed: bool = False
    """Whether the last item was put, or the reader has stopped."""

    def put(self, item: Answer | EtudeError) -> None:
        """Adds an item; items after the last one are dropped."""
        if self.is_closed:
            return
        self.is_closed = not isinstance(item, Answer) or item.is_last
        self.items.put_nowait(item)


@dataclass(slots=True, eq=False)
class Ticket:
    """A session without a request in the engine, and the stream that it returns with."""

    session_id: str
    due_step: int
    parent: str | None = None
    """The session that this one was forked from, until it has a request of its own."""
    reply: Reply | None = None
    """None: it has not returned, or is to be closed."""
    returned: asyncio.Event = field(default_factory=asyncio.Event)


class TicketQueue:
    """Tickets of the open sessions without a request in the engine, in the order in which they are due."""

    def __init__(self, delay_steps: int | None) -> None:
        """`delay_steps`: steps until a ticket is due; None admits sessions whenever they return."""
        self.clock = 0
        """Engine steps so far, including those skipped by `skip_to_due`."""
        self._delay_steps = delay_steps
        self._queue: deque[Ticket] = deque()
        self._outstanding: dict[str, Ticket] = {}
        """Tickets of the sessions that have not returned, by session."""

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Ticket]:
        return iter(self._queue)

    def __contains__(self, session_id: str) -> bool:
        """Whether the session has not returned."""
        return session_id in self._outstanding

    @property
    def any_outstanding(self) -> bool:
        """Whether any session has not returned."""
        return bool(self._outstanding)

    @property
    def due(self) -> Ticket | None:
        """The first ticket, if it is due."""
        return self._queue[0] if self._queue and self._queue[0].due_step <= self.clock else None

    @property
    def steps_until_due(self) -> int | None:
        """Steps until the next ticket is due; None without tickets or delay."""
        if not self._queue or self._delay_steps is None:
            return None
        return max(1, self._queue[0].due_step - self.clock)

    def skip_to_due(self) -> None:
        """Advances the clock to the step at which the first ticket is due."""
        self.clock = max(self.clock, self._queue[0].due_step)

    def issue(self, session_id: str) -> None:
        """Issues a ticket to a session that is opened, or whose request has ended."""
        ticket = self._outstanding[session_id] = Ticket(session_id, self._due_step())
        self._queue.append(ticket)

    def issue_after(self, session_id: str, other: str) -> bool:
        """Issues a ticket that is due together with that of `other`, after earlier ones of this kind; returns
        False, without doing anything, if `other` has no ticket or has returned."""
        parent = self._outstanding.get(other)
        if parent is None:
            return False
        ticket = self._outstanding[session_id] = Ticket(session_id, parent.due_step, other)
        place = self._queue.index(parent) + 1
        while place < len(self._queue) and self._queue[place].parent == other:
            place += 1
        self._queue.insert(place, ticket)
        return True

    def mark_returned(self, session_id: str, reply: Reply | None = None) -> bool:
        """The session has returned: with a stream, or None to be closed. False if it has no open ticket."""
        ticket = self._outstanding.pop(session_id, None)
        if ticket is None:
            return False
        ticket.reply = reply
        ticket.returned.set()
        return True

    def withdraw(self, request_id: str) -> Reply | None:
        """Takes a request back, so that its session has not returned; its stream, if a ticket has it."""
        for ticket in self._queue:
            reply = ticket.reply
            if reply is not None and reply.request.id == request_id:
                ticket.reply = None
                ticket.returned.clear()
                self._outstanding[ticket.session_id] = ticket
                return reply
        return None

    def pop_due(self) -> Ticket:
        """Removes and returns the first ticket."""
        return self._queue.popleft()

    def pop_returned(self) -> list[Ticket]:
        """Removes and returns the tickets of all sessions that have returned."""
        returned = [ticket for ticket in self._queue if ticket.returned.is_set()]
        self._queue = deque(ticket for ticket in self._queue if not ticket.returned.is_set())
        return returned

    def _due_step(self) -> int:
        """The next multiple of the delay that is at least the delay away: sessions return in batches, so that
        fewer steps prefill."""
        delay = self._delay_steps or 0
        return -(-(self.clock + delay) // delay) * delay if delay else self.clock
