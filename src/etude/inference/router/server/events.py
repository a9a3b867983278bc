"""Server-sent events on their way through: whole ones only, counted, and an end that says whether it is one.

A replica that dies leaves half an event behind. What is handed on ends with a whole event each time, so
that an error event can follow it and the client's parser is not in the middle of something.
"""

from __future__ import annotations

import json
import re
from typing import Any

from etude.serving.errors import openai_document

_BOUNDARY = re.compile(rb"\r?\n\r?\n")
_DONE = re.compile(rb"^data:\s*\[DONE\]", re.MULTILINE)
_ERROR = re.compile(rb'^data:\s*\{\s*"error"', re.MULTILINE)
_USAGE = re.compile(rb'"usage"\s*:\s*\{')


class EventGuard:
    """Reads one answer's stream."""

    def __init__(self) -> None:
        self.num_events = 0
        """Data events but the last: about the number of sampled tokens."""
        self.ended = False
        """The replica has said that the answer is over, well or not."""
        self.usage: dict[str, Any] | None = None
        self._held = b""

    def feed(self, data: bytes) -> bytes:
        """What may be handed on: everything up to the last whole event."""
        data = self._held + data
        end = 0
        for match in _BOUNDARY.finditer(data):
            self._note(data[end : match.start()])
            end = match.end()
        self._held = data[end:]
        return data[:end]

    def _note(self, event: bytes) -> None:
        if _DONE.search(event) or _ERROR.search(event):
            self.ended = True
        elif b"data:" in event:
            self.num_events += 1
            if _USAGE.search(event):
                self.usage = _usage_of(event) or self.usage


def _usage_of(event: bytes) -> dict[str, Any] | None:
    lines = [line[5:].strip() for line in event.splitlines() if line.startswith(b"data:")]
    return usage_in(b"\n".join(lines))


def usage_in(document: bytes) -> dict[str, Any] | None:
    """The `usage` of an answer in OpenAI's form; None where there is none or it is no such answer."""
    try:
        found = json.loads(document)
    except ValueError:
        return None
    usage = found.get("usage") if isinstance(found, dict) else None
    return usage if isinstance(usage, dict) else None


def error_event(message: str, code: str) -> bytes:
    """The event that tells a client that its answer was cut; OpenAI's clients raise it as an APIError."""
    return b"data: " + json.dumps(openai_document(message, code=code)).encode() + b"\n\n"
