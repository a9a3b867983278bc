"""Incremental parser of one JSON value (RFC 8259), fed in pieces of any size, which validates as it reads.

Stricter than Python's own parser: no NaN or Infinity, no key twice in one object, no half of a surrogate
pair, a bounded depth, bounded numbers. Values within `REPORTED_DEPTH` containers are passed to a sink
incrementally; deeper ones are part of the raw text of their container.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Generator
from functools import partial

MAX_DEPTH = 64
MAX_SCALAR_CHARACTERS = 400
MAX_KEY_CHARACTERS = 256
REPORTED_DEPTH = 2

_BLANKS = " \t\n\r"
_NO_BLANK = re.compile(f"[^{_BLANKS}]")
_HEX, _HIGH, _LOW = "[0-9a-fA-F]", "[dD][89abAB][0-9a-fA-F]{2}", "[dD][c-fC-F][0-9a-fA-F]{2}"
_PLAIN = re.compile('[^"\\\\\x00-\x1f\ud800-\udfff]+')
_STRING_PART = re.compile(
    rf'(?:{_PLAIN.pattern}|\\(?:["\\/bfnrt]|u(?![dD][89a-fA-F]){_HEX}{{4}}|u{_HIGH}\\u{_LOW}))++'
)
"""Whole characters and escapes; pairs of surrogates count as one escape."""
_BEGUN_ESCAPE = re.compile(
    rf"(?:\\(?:u(?:{_HEX}{{0,3}}|{_HIGH}(?:\\(?:u(?:[dD](?:[c-fC-F]{_HEX}?)?)?)?)?))?)?\Z"
)
_STRING_FAULTS = (
    (re.compile("[\x00-\x1f]"), "control character in a string"),
    (re.compile(rf"[\ud800-\udfff]|\\u(?:{_HIGH}|{_LOW})"), "half a surrogate pair"),
)
_SCALAR_RUN = re.compile(r"[-+.0-9A-Za-z_]+")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?\Z", re.ASCII)
_LITERALS = {"true": "boolean", "false": "boolean", "null": "null"}
_CLOSINGS = {"{": "}", "[": "]"}


class JsonFault(Exception):
    """A syntax error, with a short message."""


class JsonSink:
    """Receives values within `REPORTED_DEPTH`. `depth`: how many containers are open around the value.

    May raise JsonFault to reject a value.
    """

    def key(self, depth: int, key: str) -> None:
        """The next value is the member `key` of an object."""

    def begin(self, depth: int, kind: str) -> None:
        """A value begins: string, integer, number, boolean, null, array or object."""

    def text(self, depth: int, text: str) -> None:
        """More of the value: decoded for a string, raw for anything else."""

    def end(self, depth: int) -> None:
        """The value is complete."""


_NULL_SINK = JsonSink()


class JsonReader:
    """Parses one value.

    A recursive-descent parser whose methods are generators: at the end of the text they yield until the next
    piece arrives, and continue from there.
    """

    def __init__(self, sink: JsonSink) -> None:
        self.kind = ""
        """Kind of the value; empty until it has begun."""
        self._sink = sink
        self._text, self._at = "", 0
        """The last piece after the unread rest of earlier ones, and the current position in it."""
        self._ended = False
        self._raw_start: int | None = None
        """In a container at `REPORTED_DEPTH`: start of the text that was read and not yet passed on."""
        self._open_string: Callable[[str], object] | None = None
        """Receives parts of the open string directly, if nothing else needs them."""
        self._steps = self._document()

    def feed(self, text: str) -> None:
        """Parses more text. Raises JsonFault for an error; then no more may be fed."""
        if self._open_string and self._at == len(self._text) and _PLAIN.fullmatch(text):
            self._open_string(text)  # fast path: most pieces are plain parts of a string
            return
        self._text, self._at = self._text[self._at :] + text, 0
        if self._raw_start is not None:
            self._raw_start = 0
        try:
            next(self._steps)
        finally:
            self._flush_raw()

    def end(self) -> None:
        """Ends the input. Raises JsonFault if the value is incomplete."""
        self._ended = True
        self.feed("")

    def _expect_more(self) -> None:
        if self._ended:
            raise JsonFault("the JSON is cut off" if self.kind else "no JSON")

    def _next(self) -> Generator[None, None, str]:
        """The next character that is no blank, without consuming it."""
        while (found := _NO_BLANK.search(self._text, self._at)) is None:
            self._at = len(self._text)
            self._expect_more()
            yield
        self._at = found.start()
        return found[0]

    def _unexpected(self) -> JsonFault:
        character = self._text[self._at]
        shown = character if character.isprintable() else f"U+{ord(character):04X}"
        return JsonFault(f"unexpected {shown} in the JSON")

    def _flush_raw(self) -> None:
        start = self._raw_start
        if start is not None and self._at > start:
            self._sink.text(REPORTED_DEPTH, self._text[start : self._at])

    def _document(self) -> Generator[None]:
        yield from self._value(0)
        while not self._text[self._at :].lstrip(_BLANKS):
            self._at = len(self._text)
            yield
        raise JsonFault("text after the JSON")

    def _value(self, depth: int) -> Generator[None]:
        opening = yield from self._next()
        sink = self._sink if depth <= REPORTED_DEPTH else _NULL_SINK
        if opening == '"':
            self._begin(sink, depth, "string")
            yield from self._string(partial(sink.text, depth))
        elif opening not in _CLOSINGS:
            yield from self._scalar(sink, depth)
        elif depth >= MAX_DEPTH:
            raise JsonFault(f"nested deeper than {MAX_DEPTH}")
        else:
            self._begin(sink, depth, "object" if opening == "{" else "array")
            if depth == REPORTED_DEPTH:
                self._raw_start = self._at
            yield from self._container(depth, _CLOSINGS[opening])
            if depth == REPORTED_DEPTH:
                self._flush_raw()
                self._raw_start = None
        sink.end(depth)

    def _begin(self, sink: JsonSink, depth: int, kind: str) -> None:
        self.kind = self.kind or kind
        sink.begin(depth, kind)

    def _container(self, depth: int, closing: str) -> Generator[None]:
        keys: set[str] = set()
        self._at += 1
        has_more = (yield from self._next()) != closing
        while has_more:
            if closing == "}":
                yield from self._key(depth + 1, keys)
            yield from self._value(depth + 1)
            after = yield from self._next()
            has_more = after == ","
            if has_more:
                self._at += 1
            elif after != closing:
                raise self._unexpected()
        self._at += 1

    def _key(self, depth: int, keys: set[str]) -> Generator[None]:
        """Parses a member's name and the colon. `keys`: names already in the object."""
        if (yield from self._next()) != '"':
            raise self._unexpected()
        parts: list[str] = []
        yield from self._string(parts.append)
        key = "".join(parts)
        if len(key) > MAX_KEY_CHARACTERS:
            raise JsonFault("key too long")
        if key in keys:
            raise JsonFault(f"repeated {printable(key)}")
        keys.add(key)
        if depth <= REPORTED_DEPTH:
            self._sink.key(depth, key)
        if (yield from self._next()) != ":":
            raise self._unexpected()
        self._at += 1

    def _scalar(self, sink: JsonSink, depth: int) -> Generator[None]:
        """Parses a number or a literal, which ends only at the next character."""
        scalar = ""
        while True:
            most = self._at + MAX_SCALAR_CHARACTERS + 1 - len(scalar)
            if run := _SCALAR_RUN.match(self._text, self._at, most):
                scalar, self._at = scalar + run[0], run.end()
            if len(scalar) > MAX_SCALAR_CHARACTERS:
                raise JsonFault("number too long")
            if self._at < len(self._text) or self._ended:
                break
            yield
        if not scalar:
            raise self._unexpected()
        number = _NUMBER.match(scalar)
        kind = _LITERALS.get(scalar) if number is None else "number" if number[1] or number[2] else "integer"
        if kind is None:
            raise JsonFault(f"{scalar[:20]} is not JSON")
        if kind == "number" and math.isinf(float(scalar)):
            raise JsonFault("number too large")
        self._begin(sink, depth, kind)
        sink.text(depth, scalar)

    def _string(self, on_part: Callable[[str], object]) -> Generator[None]:
        """Parses a string; calls `on_part` with each decoded part. Waits for the rest of a cut escape."""
        self._at += 1
        while True:
            if part := _STRING_PART.match(self._text, self._at):
                self._at = part.end()
                on_part(json.loads(f'"{part[0]}"') if "\\" in part[0] else part[0])
            if self._text.startswith('"', self._at):
                self._at += 1
                return
            if self._at < len(self._text) and not _BEGUN_ESCAPE.match(self._text, self._at):
                found = (fault for wrong, fault in _STRING_FAULTS if wrong.match(self._text, self._at))
                raise JsonFault(next(found, "unknown escape in a string"))
            self._expect_more()
            self._open_string = on_part if self._raw_start is None else None
            yield
            self._open_string = None


def printable(name: str) -> str:
    """A name from the agent, made fit for a short error."""
    return "".join(character if character.isprintable() else "?" for character in name[:40])


def check_json(text: str) -> tuple[str, str | None]:
    """Kind of the JSON value in `text`, and its syntax error (None if it is valid)."""
    reader = JsonReader(_NULL_SINK)
    try:
        reader.feed(text)
        reader.end()
    except JsonFault as fault:
        return reader.kind, str(fault)
    return reader.kind, None
