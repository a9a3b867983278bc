"""Words of a Dockerfile instruction: quotes, escapes and variables, as the Dockerfile reference has them.

`$X`, `${X}`, `${X:-y}`, `${X-y}`, `${X:+y}`, `${X+y}`; single quotes keep all as it is. One pass over the
text, linear in it and in what it expands to, which is bounded.
"""

from __future__ import annotations

from collections.abc import Mapping

from etude.sandbox.errors import TemplateError

MAX_VALUE_CHARS = 128 << 10
"""What the variables of one instruction expand to at most: as much as the kernel takes as one argument."""
_MAX_NESTING = 16
_NAME_START = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_")
_NAME = _NAME_START | frozenset("0123456789")
_SPACE = frozenset(" \t\r\n")


def split_words(text: str, variables: Mapping[str, str], escape: str = "\\") -> list[str]:
    """Words of `text`, quotes removed, variables expanded.

    Raises TemplateError without a line; whoever knows it adds it.
    """
    lexer = _Lexer(text, variables, escape)
    words: list[str] = []
    while True:
        lexer.skip_space()
        if lexer.at_end:
            return words
        words.append(lexer.word(_SPACE, 0))


def expand(text: str, variables: Mapping[str, str], escape: str = "\\") -> str:
    """`text` as one word: spaces are kept. Raises TemplateError."""
    return _Lexer(text, variables, escape).word(frozenset(), 0)


class _Lexer:
    def __init__(self, text: str, variables: Mapping[str, str], escape: str) -> None:
        self._text = text
        self._variables = variables
        self._escape = escape
        self._at = 0
        self._expanded_chars = 0

    @property
    def at_end(self) -> bool:
        return self._at >= len(self._text)

    def skip_space(self) -> None:
        while not self.at_end and self._text[self._at] in _SPACE:
            self._at += 1

    def word(self, stops: frozenset[str], depth: int) -> str:
        """Up to the next character of `stops`, which stays."""
        parts: list[str] = []
        while not self.at_end and self._text[self._at] not in stops:
            parts.append(self._piece(depth))
        return "".join(parts)

    def _piece(self, depth: int) -> str:
        char = self._text[self._at]
        if char == "'":
            return self._single_quoted()
        if char == '"':
            return self._double_quoted(depth)
        if char == self._escape:
            return self._escaped(None)
        if char == "$":
            return self._variable(depth)
        self._at += 1
        return char

    def _escaped(self, only: str | None) -> str:
        """An escape; where `only` some characters can be escaped, it stands for itself before others."""
        following = self._text[self._at + 1 : self._at + 2]
        if not following or (only is not None and following not in only):
            self._at += 1
            return self._escape
        self._at += 2
        return following

    def _single_quoted(self) -> str:
        end = self._text.find("'", self._at + 1)
        if end < 0:
            raise TemplateError("a single quote is never closed", received=self._text[self._at :][:80])
        text = self._text[self._at + 1 : end]
        self._at = end + 1
        return text

    def _double_quoted(self, depth: int) -> str:
        start = self._at
        self._at += 1
        parts: list[str] = []
        while not self.at_end:
            char = self._text[self._at]
            if char == '"':
                self._at += 1
                return "".join(parts)
            if char == self._escape:
                parts.append(self._escaped(f'"${self._escape}'))
            elif char == "$":
                parts.append(self._variable(depth))
            else:
                self._at += 1
                parts.append(char)
        raise TemplateError("a double quote is never closed", received=self._text[start:][:80])

    def _variable(self, depth: int) -> str:
        self._at += 1
        braced = self._text[self._at : self._at + 1] == "{"
        self._at += braced
        name = self._name()
        if not braced:
            return self._counted(self._variables.get(name, "")) if name else "$"
        if not name:
            raise self._bad_variable()
        value = self._variables.get(name)
        operator = self._operator()
        if not operator:
            self._expect_brace()
            return self._counted(value or "")
        if depth >= _MAX_NESTING:
            raise TemplateError("variables are nested too deep", received=self._text[:80])
        other = self.word(frozenset("}"), depth + 1)
        self._expect_brace()
        present = bool(value) if operator[0] == ":" else value is not None
        if operator[-1] == "+":
            return other if present else ""
        return self._counted(value or "") if present else other

    def _counted(self, value: str) -> str:
        """Doubling a variable line by line would fill the memory."""
        self._expanded_chars += len(value)
        if self._expanded_chars > MAX_VALUE_CHARS:
            raise TemplateError("expands to too much text", received=self._text[:80])
        return value

    def _name(self) -> str:
        start = self._at
        if not self.at_end and self._text[start] in _NAME_START:
            while not self.at_end and self._text[self._at] in _NAME:
                self._at += 1
        return self._text[start : self._at]

    def _operator(self) -> str:
        for operator in (":-", ":+", "-", "+"):
            if self._text.startswith(operator, self._at):
                self._at += len(operator)
                return operator
        return ""

    def _expect_brace(self) -> None:
        if self._text[self._at : self._at + 1] != "}":
            raise self._bad_variable()
        self._at += 1

    def _bad_variable(self) -> TemplateError:
        return TemplateError(
            "this way to write a variable is not supported",
            received=self._text[max(0, self._at - 20) :][:60],
            fix="use $X, ${X}, ${X:-default}, ${X-default}, ${X:+text} or ${X+text}",
        )  # fmt: skip
