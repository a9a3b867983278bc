"""The history of an environment session, so that it can be shown, resent and replayed; and a numbered log of
its events for watchers.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from typing import Any

from etude.environment.grading import Verdict
from etude.errors import UserError
from etude.kit.tasks import Changes
from etude.records import ToolCall, ToolResult

OVERHEAD_BYTES = 256
"""Bytes counted for each call in addition to its texts."""
KEPT_EVENTS = 4096
KEPT_BYTES = 4 << 20

Event = dict[str, Any]
"""Plain JSON: `n` (its number, from 1), `event` (its kind), and its data."""


@dataclass(frozen=True, slots=True)
class SessionTurn:
    """The calls of one turn and their results."""

    calls: tuple[ToolCall, ...]
    results: tuple[ToolResult, ...]
    key: str | None = None
    """The idempotency key of its request."""

    @property
    def size_bytes(self) -> int:
        """Approximate memory use."""
        outputs = sum(len(result.output) for result in self.results)
        return OVERHEAD_BYTES * len(self.calls) + len(repr(self.calls)) + outputs


@dataclass(frozen=True, slots=True)
class Archived:
    """A full context that was written to a file of the workspace after `turn` turns."""

    turn: int
    path: str
    text: str


@dataclass(frozen=True, slots=True)
class StepEnded:
    """A step of the task that was verified after `turn` turns."""

    turn: int
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Difference:
    """A call whose result in a replay differs from the recorded one."""

    turn: int
    """From 0."""
    position: int
    call: ToolCall
    expected: ToolResult
    received: ToolResult


@dataclass(slots=True)
class History:
    """Everything that was done to a workspace, in order. Append-only."""

    turns: list[SessionTurn] = field(default_factory=list[SessionTurn])
    archives: list[Archived] = field(default_factory=list[Archived])
    steps: list[StepEnded] = field(default_factory=list[StepEnded])
    size_bytes: int = 0

    def add(self, turn: SessionTurn) -> None:
        """Appends a turn that has ended."""
        self.turns.append(turn)
        self.size_bytes += turn.size_bytes

    def archive(self, path: str, text: str) -> None:
        """Appends an archived context. Archiving the same one twice in a row counts once."""
        entry = Archived(len(self.turns), path, text)
        if not self.archives or self.archives[-1] != entry:
            self.archives.append(entry)
            self.size_bytes += len(text)

    def until(self, turn: int) -> History:
        """The history as it was after `turn` turns."""
        cut = History(steps=[ended for ended in self.steps if ended.turn <= turn])
        for done in self.turns[:turn]:
            cut.add(done)
        for entry in self.archives:
            if entry.turn < turn or (entry.turn == turn and turn == len(self.turns)):
                cut.archives.append(entry)
                cut.size_bytes += len(entry.text)
        return cut

    def find(self, number: int | None, key: str | None, calls: Sequence[ToolCall]) -> SessionTurn | None:
        """The existing turn that a request repeats; None for a new one.

        Raises UserError for the number or key of a turn with other calls, and for a number that skips turns.
        """
        place = number
        if place is None and key is not None:
            place = next((n for n, turn in enumerate(self.turns) if turn.key == key), None)
        if place is None or place == len(self.turns):
            return None
        if not 0 <= place < len(self.turns):
            raise UserError("skips turns", field="turn", received=place, fix=f"send turn {len(self.turns)}")
        kept = self.turns[place]
        if kept.calls != tuple(calls):
            raise TurnConflictError(
                "this turn was run with other calls", field="turn", received=place, fix="number turns upwards"
            )
        return kept


class EventLog:
    """The last events of one session, for one event loop.

    Watchers read at their own pace; one that falls behind the retained events gets a `dropped` event and
    ends. Watching never slows a session down.
    """

    def __init__(self, kept_events: int = KEPT_EVENTS) -> None:
        self.last = 0
        """The number of the last event."""
        self._kept: deque[tuple[Event, int]] = deque()
        self._kept_bytes = 0
        self._most_events = kept_events
        self._closed = False
        self._news = Changes()

    def put(self, event: str, **what: Any) -> None:
        """Appends an event. `what`: plain JSON values."""
        if self._closed:
            return
        self.last += 1
        entry: Event = {"n": self.last, "event": event, **what}
        size = len(json.dumps(entry))
        self._kept.append((entry, size))
        self._kept_bytes += size
        while self._kept and (len(self._kept) > self._most_events or self._kept_bytes > KEPT_BYTES):
            self._kept_bytes -= self._kept.popleft()[1]
        self._news.notify()

    def close(self) -> None:
        """Ends the log: watchers get the remaining events and end."""
        self._closed = True
        self._news.notify()

    async def watch(self, after: int = 0) -> AsyncGenerator[Event, None]:
        """Yields events with numbers above `after`, and new ones, until the session is closed.

        Events that are no longer retained are replaced by one `gap`. A watcher that is too slow gets
        `dropped` as its last event; it may resume after the last number that it saw.
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
        """Number of events, from the first, that are no longer retained."""
        return self.last - len(self._kept)


class TurnConflictError(UserError):
    """A turn's number or key was sent with two different sets of calls."""


def differences(number: int, turn: SessionTurn, results: Sequence[ToolResult]) -> list[Difference]:
    """Calls of a replayed turn whose results differ. Durations of calls are not compared."""
    return [
        Difference(number, position, call, expected, received)
        for position, (call, expected, received) in enumerate(
            zip(turn.calls, turn.results, results, strict=True)
        )
        if (expected.output, expected.error, expected.finished)
        != (received.output, received.error, received.finished)
    ]


DURATIONS = "durations"
_LONGEST = 1 << 20
"""Longer outputs are not searched for causes."""
_VOLATILE: dict[str, re.Pattern[str]] = {
    "addresses": re.compile(r"\b0x[0-9a-fA-F]{6,16}\b"),
    "dates and times": re.compile(
        r"\b\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d(?:\.\d{1,9})?)?)?(?:Z| ?[+-]\d\d:?\d\d\b)?"
        r"|\b\d\d:\d\d:\d\d(?:\.\d{1,9})?\b"
    ),
    "temporary names": re.compile(r"/tmp/[\w.+-]{1,255}"),
    DURATIONS: re.compile(r"\b\d{1,12}(?:\.\d{1,12})? ?(?:ns|us|µs|ms|s|sec|seconds)\b"),
}


def causes_of(difference: Difference) -> tuple[str, ...]:
    """The kinds of text that explain a difference: addresses, dates and times, temporary names, durations.

    Empty if there are other differences, or if the outputs are too long to search.
    """
    before, now = difference.expected, difference.received
    if (before.error, before.finished) != (now.error, now.finished):
        return ()
    texts = [before.output, now.output]
    if max(map(len, texts)) > _LONGEST:
        return ()
    causes: list[str] = []
    for name, pattern in _VOLATILE.items():
        if pattern.findall(texts[0]) != pattern.findall(texts[1]):
            causes.append(name)
        texts = [pattern.sub(f"<{name}>", text) for text in texts]
    return tuple(causes) if texts[0] == texts[1] else ()
