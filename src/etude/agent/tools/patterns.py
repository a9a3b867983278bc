r"""The regular expressions of `grep`: the language common to ripgrep (Rust's `regex`) and Python's `re`.

Two engines serve the tool, and an agent must see the same matches from both. So a pattern is parsed here and
rewritten in a form that both read alike; syntax that only one of them knows is refused with the reason.

    refused      look-around, back-references, atomic groups, possessive quantifiers, conditions, comments,
                 verbose mode, `\A \z \Z \G \N \p`, `\<`, line breaks
    rewritten    `{` and `}` that count nothing, `(?<name>`, `\x{41}`, `\/`, `[[:alpha:]]`, `[a&&b]`, `[--x]`

Unchanged: `\d \w \s \b` are Unicode's classes in both engines, which follow slightly different versions of
the tables. Matching is line by line.
"""

from __future__ import annotations

import re

from etude.errors import ToolArgumentError

MAX_CHARACTERS = 1000
_MAX_DEPTH = 50
_MAX_REPEAT = 1000
_META = frozenset(r".^$*+?()[]{}|\-&~#")
_CLASSES = frozenset("dDwWsS")
_CONTROLS = {"t": "\t", "r": "\r", "f": "\f", "v": "\v", "a": "\a"}
_COUNT = re.compile(r"\{([0-9]{1,6})(,([0-9]{0,6}))?\}")
_HEX = {"x": 2, "u": 4, "U": 8}
_GROUP_NAME = re.compile(r"\(\?P?<([A-Za-z_][A-Za-z0-9_]*)>")
_GROUP_FLAGS = re.compile(r"\(\?([ims]*)(?:-([ims]+))?([:)])")
_POSIX = {
    "alpha": "a-zA-Z", "digit": "0-9", "alnum": "a-zA-Z0-9", "upper": "A-Z", "lower": "a-z",
    "space": r"\t\v\f\r ", "blank": r"\t ", "word": "a-zA-Z0-9_", "xdigit": "0-9a-fA-F",
}  # fmt: skip
_REFUSED_GROUPS = {
    "(?=": "look-ahead", "(?!": "look-ahead", "(?<=": "look-behind", "(?<!": "look-behind",
    "(?>": "an atomic group", "(?#": "a comment", "(?P=": "a back-reference", "(?(": "a condition",
}  # fmt: skip
_POSIX_NAME = re.compile(r"\[:([a-z]+):\]")


def common_pattern(pattern: str) -> str:
    """The pattern in a form that both engines read alike. Raises ToolArgumentError if there is none."""
    if not pattern:
        raise _refused("pattern is empty")
    if len(pattern) > MAX_CHARACTERS:
        raise _refused("pattern too long: use a shorter one")
    if "\n" in pattern:
        raise _refused("a pattern matches within one line: no line breaks")
    if "\0" in pattern or any("\ud800" <= character <= "\udfff" for character in pattern):
        raise _refused("the pattern holds characters that are no text")
    written = _Reader(pattern).read()
    try:
        re.compile(written)
    except (re.error, OverflowError, RecursionError) as error:
        # Positions refer to our rewritten pattern, not to the agent's.
        reason = error.msg if isinstance(error, re.error) else str(error)
        raise _refused(f"bad regular expression: {_unquoted(reason, pattern)[:80]}") from error
    return written


class _Reader:
    """Reads one pattern from left to right, writing the common form."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._at = 0
        self._written: list[str] = []
        self._depth = 0
        self._repeatable = False
        """Whether a quantifier may follow."""

    def read(self) -> str:
        while self._at < len(self._pattern):
            character = self._pattern[self._at]
            if character == "\\":
                self._put(self._escape(in_class=False))
            elif character == "[":
                self._put(self._class())
            elif character == "(":
                self._open()
            elif character in "*+?" or (character == "{" and _COUNT.match(self._pattern, self._at)):
                self._quantifier()
            elif character in "{}":
                self._put("\\" + self._consume())
            elif character in "^$|":
                self._put(self._consume(), repeatable=False)
            elif character == ")":
                self._depth -= 1
                self._put(self._consume())
            else:
                self._put(self._consume())
        return "".join(self._written)

    def _put(self, written: str, repeatable: bool = True) -> None:
        self._written.append(written)
        self._repeatable = repeatable and written not in (r"\b", r"\B")

    def _consume(self, count: int = 1) -> str:
        taken = self._pattern[self._at : self._at + count]
        self._at += count
        return taken

    def _rest(self) -> str:
        return self._pattern[self._at : self._at + 20]

    def _quantifier(self) -> None:
        if not self._repeatable:
            raise _refused(f"nothing to repeat before {self._rest()[:8]}")
        count = _COUNT.match(self._pattern, self._at)
        if count is None:
            written = self._consume()
        else:
            low, high = int(count[1]), int(count[3] or 0)
            if max(low, high) > _MAX_REPEAT:
                raise _refused(f"more than {_MAX_REPEAT} repetitions")
            written = self._consume(count.end() - count.start())
        if self._rest().startswith("+"):
            raise _refused("possessive quantifiers are not supported")
        if self._rest().startswith("?"):
            written += self._consume()
        self._put(written, repeatable=False)

    def _open(self) -> None:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise _refused("groups are nested too deeply")
        if not self._pattern.startswith("(?", self._at):
            self._put(self._consume(), repeatable=False)
            return
        if name := _GROUP_NAME.match(self._pattern, self._at):
            self._at = name.end()
            self._put(f"(?P<{name[1]}>", repeatable=False)
            return
        flags = _GROUP_FLAGS.match(self._pattern, self._at)
        if flags is None:
            raise _refused(f"{_construct(self._rest())} is not supported")
        if flags[3] == ")":
            if self._at != 0 or flags[2] or not flags[1]:
                raise _refused("flags stand at the start of the pattern, or as (?i:...)")
            self._depth -= 1
        self._put(self._consume(flags.end() - flags.start()), repeatable=False)

    def _escape(self, in_class: bool) -> str:
        self._at += 1
        character = self._consume()
        if not character:
            raise _refused("the pattern ends with a backslash")
        if character in _CLASSES:
            return "\\" + character
        if character in "bB" and not in_class:
            if self._rest().startswith("{"):
                raise _refused(r"\b{...} is not supported")
            return "\\" + character
        if character in _CONTROLS:
            return _literal(_CONTROLS[character])
        if character in _HEX:
            return _literal(self._code(character))
        if character == "n":
            raise _refused("a pattern matches within one line: no line breaks")
        if character.isdigit():
            raise _refused("back-references are not supported")
        if character in "<>" or (character.isascii() and character.isalpha()):
            raise _refused(f"\\{character} is not supported")
        return _literal(character)

    def _code(self, kind: str) -> str:
        """The character that `x41`, `x{41}` or `u0041` names."""
        braces = re.compile(r"\{([0-9a-fA-F]{1,8})\}").match(self._pattern, self._at)
        digits = braces[1] if braces else self._pattern[self._at : self._at + _HEX[kind]]
        complete = braces is not None or len(digits) == _HEX[kind]
        if not complete or not re.fullmatch("[0-9a-fA-F]+", digits):
            raise _refused(f"\\{kind} needs {_HEX[kind]} hexadecimal digits")
        self._at += len(braces[0]) if braces else len(digits)
        code = int(digits, 16)
        if code in (0, 10) or 0xD800 <= code <= 0xDFFF or code > 0x10FFFF:
            raise _refused(f"\\{kind} names no character of a line")
        return chr(code)

    def _class(self) -> str:
        """`[...]`, with everything escaped that one of the engines could take for an operator."""
        written = [self._consume()]
        if self._rest().startswith("^"):
            written.append(self._consume())
        first, open_range, last_single = True, False, False
        while True:
            character = self._pattern[self._at : self._at + 1]
            if not character:
                raise _refused("unclosed [")
            if character == "]" and not first:
                return "".join(written) + ("\\-" if open_range else "") + self._consume()
            first = False
            if character == "-" and last_single and not open_range:
                self._at += 1
                open_range = True
                continue
            item, single = self._class_item()
            if open_range and not single:
                raise _refused("a range in [...] ends with a class")
            written.append(("-" if open_range else "") + item)
            last_single, open_range = single and not open_range, False

    def _class_item(self) -> tuple[str, bool]:
        """(what is written, whether it is a single character) of the next item of a class."""
        if name := _POSIX_NAME.match(self._pattern, self._at):
            if name[1] not in _POSIX:
                raise _refused(f"{name[0]} is not supported")
            self._at = name.end()
            return _POSIX[name[1]], False
        if self._rest().startswith("\\"):
            written = self._escape(in_class=True)
            return written, written[1:] not in _CLASSES or len(written) != 2
        return _literal(self._consume()), True


def _literal(character: str) -> str:
    return "\\" + character if character in _META else character


def _construct(rest: str) -> str:
    """A name for the group that the agent will recognise."""
    for start, name in _REFUSED_GROUPS.items():
        if rest.startswith(start):
            return name
    return rest[:4]


def _unquoted(reason: str, pattern: str) -> str:
    """Python's error text, without a quoted range that we rewrote, which the agent would not recognise."""
    words, found, quoted = reason.partition("character range ")
    return reason if not found or quoted in pattern else f"{words}character range"


def _refused(message: str) -> ToolArgumentError:
    return ToolArgumentError(message, field="pattern")
