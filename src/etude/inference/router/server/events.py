"""Server-sent events in transit: forwarded whole, counted, and checked for a proper end of the stream.

A replica that dies leaves half an event behind. Forwarded data always ends with a whole event, so that an
error event can follow it without confusing the client's parser.
"""

from __future__ import annotations

import json
import re
from typing import Any

from etude.errors import UserError
from etude.serving.errors import openai_document
from etude.serving.json_bodies import parse_json

_BOUNDARY = re.compile(rb"\r?\n\r?\n")
_DONE = re.compile(rb"^data:\s*\[DONE\]", re.MULTILINE)
_ERROR = re.compile(rb'^data:\s*\{\s*"error"', re.MULTILINE)
_USAGE = re.compile(rb'"usage"\s*:\s*\{')


class EventGuard:
    """Incremental reader of one answer's event stream."""

    def __init__(self) -> None:
        self.num_events = 0
        """Data events without the last: about the number of sampled tokens."""
        self.ended = False
        """Whether the final event has come: `[DONE]`, or an error."""
        self.usage: dict[str, Any] | None = None
        self._held = b""

    def feed(self, data: bytes) -> bytes:
        """Adds data; returns all whole events that have not been returned yet."""
        data = self._held + data
        end = 0
        for match in _BOUNDARY.finditer(data):
            self._inspect(data[end : match.start()])
            end = match.end()
        self._held = data[end:]
        return data[:end]

    def _inspect(self, event: bytes) -> None:
        if _DONE.search(event) or _ERROR.search(event):
            self.ended = True
        elif b"data:" in event:
            self.num_events += 1
            if _USAGE.search(event):
                lines = [line[5:].strip() for line in event.splitlines() if line.startswith(b"data:")]
                self.usage = usage_in(b"\n".join(lines)) or self.usage


def usage_in(document: bytes) -> dict[str, Any] | None:
    """The `usage` of an answer in OpenAI's format; None if missing or not of that format."""
    usage = object_in(document).get("usage")
    return usage if isinstance(usage, dict) else None


def object_in(data: bytes) -> dict[str, Any]:
    """The JSON object in `data`; empty if there is none, or it exceeds the limits of `parse_json`."""
    try:
        found = parse_json(data)
    except UserError:
        return {}
    return found if isinstance(found, dict) else {}


def error_event(message: str, code: str) -> bytes:
    """The event for an answer that was cut off; OpenAI's clients raise it as an APIError."""
    return b"data: " + json.dumps(openai_document(message, code=code)).encode() + b"\n\n"
