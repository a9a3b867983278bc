"""Reads one JSON value (RFC 8259) as it comes, in pieces of any size, and checks it while it does.

Stricter than Python's own parser: no NaN or Infinity, no key twice in one object, no half of a surrogate
pair, a bounded depth, bounded numbers. What lies within `REPORTED_DEPTH` containers is told to a sink as it
comes; what lies deeper is part of the raw text of the value that holds it.
"""

from __future__ import annotations

import json
import math
import re

MAX_DEPTH = 64
MAX_SCALAR_CHARACTERS = 400
MAX_KEY_CHARACTERS = 256
REPORTED_DEPTH = 2

_BLANKS = re.compile(r"[ \t\n\r]*")
_STRING_RUN = re.compile('[^"\\\\\x00-\x1f\ud800-\udfff]+')
_SCALAR_RUN = re.compile(r"[-+.0-9A-Za-z_]+")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?\Z", re.ASCII)
_BEGUN_ESCAPE = re.compile(r"(?:\\u?|\\u[0-9a-fA-F]{1,4})?\Z")
_ESCAPES = {'"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_LITERALS = {"true": "boolean", "false": "boolean", "null": "null"}

_VALUE, _VALUE_OR_END, _KEY, _KEY_OR_END, _COLON, _COMMA_OR_END, _DONE = range(7)


class JsonSink:
    """Is told of values within `REPORTED_DEPTH`. `depth`: how many containers are open around the value."""

    def key(self, depth: int, key: str) -> None:
        """The next value is a member of an object, of this name."""

    def begin(self, depth: int, kind: str) -> None:
        """A value begins: string, integer, number, boolean, null, array or object."""

    def text(self, depth: int, text: str) -> None:
        """More of the value: of a string what it means, of anything else how it is written."""

    def end(self, depth: int) -> None:
        """The value is whole."""


class JsonReader:
    """Reads one value. `error` says in few words what is wrong; then the rest is ignored. Never raises."""

    def __init__(self, sink: JsonSink) -> None:
        self.error: str | None = None
        self.kind = ""
        """Of the value, once it has begun."""
        self._begun = False
        self._sink = sink
        self._state = _VALUE
        self._keys: list[set[str] | None] = []
        """Of each open container: the keys seen; None for an array."""
        self._held = ""
        self._in_string = False
        self._is_key = False
        self._key = ""
        self._raw = False
        """Whether consumed text is told as it is written: in a container at `REPORTED_DEPTH`."""
        self._raw_start = 0
        self._scalar = ""

    def fail(self, message: str) -> None:
        """Only the first thing wrong is kept."""
        self.error = self.error or message

    def feed(self, text: str) -> None:
        """Takes more text; what may be half an escape is held back."""
        if self.error is not None:
            return
        if self._held:
            text, self._held = self._held + text, ""
        position, size = 0, len(text)
        self._raw_start = 0
        while position < size and self.error is None:
            if self._in_string:
                after = self._read_string(text, position)
            elif self._scalar:
                after = self._read_scalar(text, position)
            else:
                after = self._read_between(text, position)
            if after < 0:
                self._held = text[position:]
                break
            position = after
        if self._raw:
            self._tell_raw(text, position)

    def end(self) -> None:
        """No more text comes."""
        if self._scalar and self.error is None:
            self._end_scalar()
        if self._state != _DONE:
            self.fail("the JSON is cut off" if self._begun else "no JSON")

    def _tell_raw(self, text: str, end: int) -> None:
        if end > self._raw_start:
            self._sink.text(REPORTED_DEPTH, text[self._raw_start : end])
        self._raw_start = end

    def _read_between(self, text: str, position: int) -> int:
        """Blanks, punctuation and where values begin."""
        blanks = _BLANKS.match(text, position)
        if blanks is not None and blanks.end() > position:
            return blanks.end()
        character, state = text[position], self._state
        if state in (_VALUE, _VALUE_OR_END) and character != "]":
            return self._begin_value(text, position)
        if state in (_KEY, _KEY_OR_END) and character == '"':
            self._in_string, self._is_key, self._key = True, True, ""
        elif state == _COLON and character == ":":
            self._state = _VALUE
        elif state == _COMMA_OR_END and character == ",":
            self._state = _VALUE if self._keys[-1] is None else _KEY
        elif character in "]}" and state in (_VALUE_OR_END, _KEY_OR_END, _COMMA_OR_END):
            self._close_container(text, position)
        else:
            self._unexpected(character)
            return position
        return position + 1

    def _unexpected(self, character: str) -> None:
        if self._state == _DONE:
            self.fail("text after the JSON")
        else:
            shown = character if character.isprintable() else f"U+{ord(character):04X}"
            self.fail(f"unexpected {shown} in the JSON")

    def _begin_value(self, text: str, position: int) -> int:
        self._begun = True
        character = text[position]
        if character == '"':
            self._report_begin("string")
            self._in_string, self._is_key = True, False
        elif character in "{[":
            self._open_container(character, position)
        elif _SCALAR_RUN.match(character):
            return self._read_scalar(text, position)
        else:
            self._unexpected(character)
            return position
        return position if self.error else position + 1

    def _report_begin(self, kind: str) -> None:
        self.kind = self.kind or kind
        if len(self._keys) <= REPORTED_DEPTH:
            self._sink.begin(len(self._keys), kind)

    def _open_container(self, character: str, position: int) -> None:
        depth = len(self._keys)
        if depth >= MAX_DEPTH:
            self.fail(f"nested deeper than {MAX_DEPTH}")
            return
        self._report_begin("object" if character == "{" else "array")
        if depth == REPORTED_DEPTH and self.error is None:
            self._raw, self._raw_start = True, position
        self._keys.append(set() if character == "{" else None)
        self._state = _KEY_OR_END if character == "{" else _VALUE_OR_END

    def _close_container(self, text: str, position: int) -> None:
        if (self._keys[-1] is None) is not (text[position] == "]"):
            self._unexpected(text[position])
            return
        self._keys.pop()
        if self._raw and len(self._keys) == REPORTED_DEPTH:
            self._tell_raw(text, position + 1)
            self._raw = False
        self._end_value()

    def _end_value(self) -> None:
        depth = len(self._keys)
        self._state = _COMMA_OR_END if depth else _DONE
        if depth <= REPORTED_DEPTH:
            self._sink.end(depth)

    def _read_scalar(self, text: str, position: int) -> int:
        """A number or a literal: buffered until a character ends it."""
        run = _SCALAR_RUN.match(text, position)
        end = position if run is None else run.end()
        self._scalar += text[position : min(end, position + MAX_SCALAR_CHARACTERS + 1)]
        if len(self._scalar) > MAX_SCALAR_CHARACTERS:
            self.fail("number too long")
        elif end < len(text):
            self._end_scalar()
        return end

    def _end_scalar(self) -> None:
        scalar, self._scalar = self._scalar, ""
        number = _NUMBER.match(scalar)
        if number:
            kind = "number" if number[1] or number[2] else "integer"
        else:
            kind = _LITERALS.get(scalar)
        if kind is None:
            self.fail(f"{scalar[:20]} is not JSON")
            return
        if kind == "number" and math.isinf(float(scalar)):
            self.fail("number too large")
            return
        depth = len(self._keys)
        self._report_begin(kind)
        if depth <= REPORTED_DEPTH and self.error is None:
            self._sink.text(depth, scalar)
        self._end_value()

    def _read_string(self, text: str, position: int) -> int:
        """A string's next run of plain characters, its next escape, or its end."""
        run = _STRING_RUN.match(text, position)
        if run is not None:
            self._add_to_string(run.group())
            return run.end()
        character = text[position]
        if character == '"':
            self._end_string()
            return position + 1
        if character == "\\":
            return self._read_escape(text, position)
        self.fail("control character in a string" if character < " " else "half a surrogate pair")
        return position

    def _add_to_string(self, text: str) -> None:
        if self._is_key:
            self._key += text
            if len(self._key) > MAX_KEY_CHARACTERS:
                self.fail("key too long")
        elif len(self._keys) <= REPORTED_DEPTH:
            self._sink.text(len(self._keys), text)

    def _end_string(self) -> None:
        self._in_string = False
        if not self._is_key:
            self._end_value()
            return
        key, keys = self._key, self._keys[-1]
        assert keys is not None
        if key in keys:
            self.fail(f"repeated {printable(key)}")
            return
        keys.add(key)
        self._state = _COLON
        if len(self._keys) <= REPORTED_DEPTH:
            self._sink.key(len(self._keys), key)

    def _read_escape(self, text: str, position: int) -> int:
        """One escape, or -1 while it may be unfinished: pairs of surrogates count as one."""
        left = len(text) - position
        if left < 2:
            return -1
        plain = _ESCAPES.get(text[position + 1])
        if plain is not None:
            self._add_to_string(plain)
            return position + 2
        if text[position + 1] != "u":
            self.fail("unknown escape in a string")
            return position
        return self._read_code_unit(text, position, left)

    def _read_code_unit(self, text: str, position: int, left: int) -> int:
        """The same for an escape by number. What decides is the first character that cannot be part of it."""
        if not _is_begun(text, position):
            self.fail("unknown escape in a string")
            return position
        if left < 6:
            return -1
        unit = int(text[position + 2 : position + 6], 16)
        if not 0xD800 <= unit < 0xE000:
            self._add_to_string(chr(unit))
            return position + 6
        if unit < 0xDC00 and _is_begun(text, position + 6):
            if left < 12:
                return -1
            low = int(text[position + 8 : position + 12], 16)
            if 0xDC00 <= low < 0xE000:
                self._add_to_string(chr(0x10000 + ((unit - 0xD800) << 10) + low - 0xDC00))
                return position + 12
        self.fail("half a surrogate pair")
        return position


def _is_begun(text: str, position: int) -> bool:
    """Whether what stands at `position` is an escape by number, as far as it is there."""
    return _BEGUN_ESCAPE.match(text[position : position + 6]) is not None


def printable(name: str) -> str:
    """A name from the agent as it may stand in a short error."""
    return "".join(character if character.isprintable() else "?" for character in name[:40])


def check_json(text: str) -> tuple[str, str | None]:
    """Kind of the JSON value that `text` is, and what is wrong with it (None if it is well)."""
    reader = JsonReader(JsonSink())
    reader.feed(text)
    reader.end()
    return reader.kind, reader.error


def load_json(text: str) -> tuple[object, str | None]:
    """The value that `text` holds, and what is wrong with it (None if it is well)."""
    _, error = check_json(text)
    return (None, error) if error else (json.loads(text), None)
