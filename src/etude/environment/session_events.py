"""What happens in an environment session, numbered, for whoever watches: now, or from some event on.

Bounded on both sides: the log keeps the last events only, and a watcher that does not take them in time is
let go with a word. Watching never slows a session down.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncGenerator
from typing import Any

KEPT_EVENTS = 4096
KEPT_BYTES = 4 << 20
WAITING_EVENTS = 512
"""Events that may wait for one watcher."""

Event = dict[str, Any]
"""Plain JSON: `n` (its number, from 1), `event` (what happened), and what belongs to it."""


class EventLog:
    """The events of one session, for one event loop."""

    def __init__(
        self,
        kept_events: int = KEPT_EVENTS,
        kept_bytes: int = KEPT_BYTES,
        waiting_events: int = WAITING_EVENTS,
    ) -> None:
        self.last = 0
        """The number of the last event."""
        self._kept: deque[tuple[Event, int]] = deque()
        self._kept_bytes = 0
        self._limits = (kept_events, kept_bytes)
        self._waiting_events = waiting_events
        self._watchers: set[_Watcher] = set()
        self._closed = False

    def put(self, event: str, **what: Any) -> None:
        """Something happened. `what`: plain JSON values."""
        if self._closed:
            return
        self.last += 1
        entry: Event = {"n": self.last, "event": event, **what}
        size = len(json.dumps(entry))
        self._kept.append((entry, size))
        self._kept_bytes += size
        most, most_bytes = self._limits
        while self._kept and (len(self._kept) > most or self._kept_bytes > most_bytes):
            self._kept_bytes -= self._kept.popleft()[1]
        for watcher in list(self._watchers):
            if not watcher.put(entry):
                self._watchers.discard(watcher)

    def close(self) -> None:
        """Nothing more happens: watchers see the rest and end."""
        self._closed = True
        for watcher in self._watchers:
            watcher.end()
        self._watchers.clear()

    async def watch(self, after: int = 0) -> AsyncGenerator[Event, None]:
        """The events with numbers above `after`, and those to come, until the session is closed.

        Events that are not kept any longer are told as one `gap`. A watcher that is too slow gets `dropped`
        as its last event; it may begin again after the last number that it saw.
        """
        watcher = _Watcher(self._waiting_events)
        kept = [entry for entry, _ in self._kept if entry["n"] > after]
        first = kept[0]["n"] if kept else self.last + 1
        if not self._closed:
            self._watchers.add(watcher)
        try:
            if first > after + 1:
                yield {"event": "gap", "first_missing": after + 1, "last_missing": first - 1}
            for entry in kept:
                yield entry
            if self._closed:
                # It may have been closed just now, with events in the queue.
                watcher.end()
            while (entry := await watcher.take()) is not None:
                yield entry
        finally:
            self._watchers.discard(watcher)


class _Watcher:
    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._queue: deque[Event | None] = deque()
        self._something = asyncio.Event()

    def put(self, entry: Event) -> bool:
        """False if the watcher is too slow and gets no more."""
        if len(self._queue) >= self._limit:
            self._queue.append({"event": "dropped", "reason": "too slow", "first_missing": entry["n"]})
            self.end()
            return False
        self._queue.append(entry)
        self._something.set()
        return True

    def end(self) -> None:
        self._queue.append(None)
        self._something.set()

    async def take(self) -> Event | None:
        while not self._queue:
            self._something.clear()
            await self._something.wait()
        return self._queue.popleft()
