"""What happens in an environment session, numbered, for watchers: now, or from some event on.

The log keeps the last events only. A watcher reads it at a pace of its own; one that falls behind what is
kept is let go with a word. Watching never slows a session down.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncGenerator
from typing import Any

KEPT_EVENTS = 4096
KEPT_BYTES = 4 << 20

Event = dict[str, Any]
"""Plain JSON: `n` (its number, from 1), `event` (what happened), and what belongs to it."""


class EventLog:
    """The events of one session, for one event loop."""

    def __init__(self, kept_events: int = KEPT_EVENTS) -> None:
        self.last = 0
        """The number of the last event."""
        self._kept: deque[tuple[Event, int]] = deque()
        self._kept_bytes = 0
        self._most_events = kept_events
        self._closed = False
        self._news = asyncio.Event()

    def put(self, event: str, **what: Any) -> None:
        """Something happened. `what`: plain JSON values."""
        if self._closed:
            return
        self.last += 1
        entry: Event = {"n": self.last, "event": event, **what}
        size = len(json.dumps(entry))
        self._kept.append((entry, size))
        self._kept_bytes += size
        while self._kept and (len(self._kept) > self._most_events or self._kept_bytes > KEPT_BYTES):
            self._kept_bytes -= self._kept.popleft()[1]
        self._wake()

    def close(self) -> None:
        """Nothing more happens: watchers see the rest and end."""
        self._closed = True
        self._wake()

    async def watch(self, after: int = 0) -> AsyncGenerator[Event, None]:
        """The events with numbers above `after`, and those to come, until the session is closed.

        Events that are not kept any longer come as one `gap`. A watcher that is too slow gets `dropped`
        as its last event; it may begin again after the last number that it saw.
        """
        seen = min(after, self.last)
        if self._num_gone > seen:
            yield {"event": "gap", "first_missing": seen + 1, "last_missing": self._num_gone}
            seen = self._num_gone
        while True:
            while seen < self.last:
                if self._num_gone > seen:
                    yield {"event": "dropped", "reason": "too slow", "first_missing": seen + 1}
                    return
                entry, _ = self._kept[seen - self._num_gone]
                seen += 1
                yield entry
            if self._closed:
                return
            await self._news.wait()

    @property
    def _num_gone(self) -> int:
        """Events that are kept no longer: the first ones."""
        return self.last - len(self._kept)

    def _wake(self) -> None:
        self._news.set()
        self._news = asyncio.Event()
