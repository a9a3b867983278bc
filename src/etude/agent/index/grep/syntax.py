"""Reads a regular expression in ripgrep's syntax (Rust's `regex`) as far as the index needs it.

The tree keeps what text a match must hold and forgets the rest: what a class, an escape or a flag means in
detail is ripgrep's affair. `parse` raises `Unsure` at anything that it does not know for certain; the caller
then asks ripgrep.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Alternation", "AnyText", "Char", "Concat", "Empty", "Node", "OneOf", "Repeat", "Unsure", "parse"]

_LARGEST_CLASS = 8
_DEEPEST = 100
_CONTROLS = {"t": "\t", "r": "\r", "f": "\f", "v": "\v", "a": "\a"}
_PUNCTUATION = frozenset("\\.+*?()|[]{}^$#&-~/ !\"%',:;=@_`")
"""What may be escaped without a meaning of its own. The underscore is harmless: Rust refuses it."""


class Unsure(Exception):
    """This pattern holds something that the index leaves to ripgrep."""


@dataclass(frozen=True, slots=True)
class Empty:
    """Matches between characters: `^`, `\\b`, an empty group."""


@dataclass(frozen=True, slots=True)
class AnyText:
    """Some text about which nothing is known, perhaps none."""


@dataclass(frozen=True, slots=True)
class Char:
    """One character; with `fold`, any character that is the same but for its case."""

    char: str
    fold: bool


@dataclass(frozen=True, slots=True)
class OneOf:
    """One of a few characters."""

    chars: tuple[Char, ...]


@dataclass(frozen=True, slots=True)
class Concat:
    """One after the other."""

    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Alternation:
    """Any of these."""

    branches: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """`part` at least `least` times, and exactly so often if `exact`."""

    part: Node
    least: int
    exact: bool


Node = Empty | AnyText | Char | OneOf | Concat | Alternation | Repeat


def parse(pattern: str, *, ignore_case: bool = False) -> Node:
    """The tree of `pattern`. Raises Unsure."""
    parser = _Parser(pattern, ignore_case)
    tree = parser.alternation(0)
    if parser.at < len(pattern):
        raise Unsure("unopened group")
    return tree


class _Parser:
    """Recursive descent over one pattern."""

    def __init__(self, pattern: str, fold: bool) -> None:
        self.pattern, self.at, self.fold = pattern, 0, fold

    def peek(self) -> str:
        return self.pattern[self.at : self.at + 1]

    def take(self) -> str:
        if self.at >= len(self.pattern):
            raise Unsure("the pattern ends too early")
        self.at += 1
        return self.pattern[self.at - 1]

    def until(self, end: str) -> str:
        """The text up to `end`, which is read too."""
        stop = self.pattern.find(end, self.at)
        if stop < 0:
            raise Unsure(f"no {end}")
        text, self.at = self.pattern[self.at : stop], stop + len(end)
        return text

    def alternation(self, depth: int) -> Node:
        """Branches up to a closing parenthesis. Flags that are set inside end with the group."""
        if depth > _DEEPEST:
            raise Unsure("too deep")
        fold = self.fold
        branches = [self.concat(depth)]
        while self.peek() == "|":
            self.take()
            branches.append(self.concat(depth))
        self.fold = fold
        return branches[0] if len(branches) == 1 else Alternation(tuple(branches))

    def concat(self, depth: int) -> Node:
        parts: list[Node] = []
        while (char := self.peek()) and char not in "|)":
            parts.append(self.repeated(self.atom(depth)))
        return parts[0] if len(parts) == 1 else Concat(tuple(parts))

    def repeated(self, part: Node) -> Node:
        while (char := self.peek()) and char in "*+?{":
            self.take()
            counts = _counts(self.until("}")) if char == "{" else (int(char == "+"), False)
            if self.peek() == "?":
                self.take()  # lazy: the same text in the end
            part = Alternation((part, Empty())) if char == "?" else Repeat(part, *counts)
        return part

    def atom(self, depth: int) -> Node:
        char = self.take()
        match char:
            case "(":
                return self.group(depth)
            case "[":
                return self.character_class()
            case "\\":
                return self.escape()
            case ".":
                return AnyText()
            case "^" | "$":
                return Empty()
            case "*" | "+" | "?" | "{" | "\n" | "\0":
                raise Unsure(f"a bare {char!r}")
        return Char(char, self.fold)

    def group(self, depth: int) -> Node:
        fold = self.fold
        if self.peek() == "?":
            self.take()
            if self.peek() in ("P", "<"):
                if self.take() == "P" and self.take() != "<":
                    raise Unsure("group syntax")
                if not self.until(">").replace("_", "a").isalnum():
                    raise Unsure("group name")
            elif self.flags():
                return Empty()  # (?i): from here to the end of the enclosing group
        node = self.alternation(depth + 1)
        if self.take() != ")":
            raise Unsure("unclosed group")
        self.fold = fold
        return node

    def flags(self) -> bool:
        """Reads flags and `:` or `)`; true if they stand alone."""
        value = True
        while (char := self.take()) not in ":)":
            if char == "-":
                value = False
            elif char == "i":
                self.fold = value
            elif char not in "msU":
                raise Unsure(f"flag {char}")  # x changes what is text, u what is a character
        return char == ")"

    def escape(self) -> Node:
        char = self.take()
        if char in "dDwWsS":
            return AnyText()
        if char in "pP":
            if self.take() == "{":
                self.until("}")
            return AnyText()
        if char in "AzbB<>":
            if char == "b" and self.peek() == "{":
                self.until("}")
            return Empty()
        return Char(self.escaped_char(char), self.fold)

    def escaped_char(self, char: str) -> str:
        if char in _CONTROLS:
            return _CONTROLS[char]
        if char in _PUNCTUATION:
            return char
        if char not in "xuU":
            raise Unsure(f"escape {char}")
        if self.peek() == "{":
            self.take()
            digits = self.until("}")
        else:
            digits = "".join(self.take() for _ in range({"x": 2, "u": 4, "U": 8}[char]))
        try:
            found = chr(int(digits, 16))
            found.encode()
        except (ValueError, OverflowError) as error:
            raise Unsure("no such character") from error
        if found in "\n\0":
            raise Unsure("line feed or NUL")
        return found

    def character_class(self) -> Node:
        """A class of few plain characters keeps them; any other one is some text."""
        chars: list[str] | None = []
        if self.peek() == "^":
            self.take()
            chars = None
        first = True
        while (char := self.take()) != "]" or first:
            first = first and char == "-"  # leading hyphens are plain, and a bracket after them too
            chars = self.class_item(char, chars)
        if not chars or len(set(chars)) > _LARGEST_CLASS:
            return AnyText()
        return OneOf(tuple(Char(char, self.fold) for char in sorted(set(chars))))

    def class_item(self, char: str, chars: list[str] | None) -> list[str] | None:
        if char == "[" or (char in "&-~" and self.peek() == char):
            raise Unsure("nested class or set operation")
        if char == "\\":
            char = self.take()
            if char in "dDwWsS":
                return None
            if char in "pP":
                if self.take() == "{":
                    self.until("}")
                return None
            char = self.escaped_char(char)
        last = char
        if self.peek() == "-" and self.pattern[self.at + 1 : self.at + 2] not in ("]", "-", ""):
            self.take()
            last = self.take()
            if last == "[":
                raise Unsure("nested class")
            if last == "\\":
                last = self.escaped_char(self.take())
        if chars is None or ord(last) - ord(char) >= _LARGEST_CLASS:
            return None
        return chars + [chr(code) for code in range(ord(char), ord(last) + 1)]


def _counts(text: str) -> tuple[int, bool]:
    """Least number and whether it is exact, of `3`, `3,` or `3,5`."""
    least, comma, most = (piece.strip() for piece in text.partition(","))
    if not all(piece.isascii() and (piece.isdigit() or not piece) for piece in (least, most)):
        raise Unsure("repetition count")
    if not least and not comma:
        raise Unsure("repetition count")
    return int(least or 0), not comma or least == most
