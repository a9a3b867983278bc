"""Cuts a source file into chunks: functions, methods, heads of classes, and the lines between them.

Chunks are ranges of whole lines that do not overlap, and together hold every line that has a letter or digit.
So a chunk that is found is a range that can be read, edited and masked.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from etude.agent.index.semantic.grammar import Language, grammar_version, language_of, parser_for

CHUNKER_VERSION = 1
"""Incremented whenever the same bytes give other chunks."""
MAX_LINES = 60
"""Of one chunk: longer functions are cut into pieces of one symbol."""
MIN_LINES = 4
"""A remainder this short stays with the piece before it."""
_DEEPEST = 16
"""Containers within containers; what lies deeper is not cut further."""
_SNIFFED_BYTES = 8192


@dataclass(frozen=True, slots=True)
class Chunk:
    """A range of lines with a name."""

    first_line: int
    """From 1."""
    last_line: int
    """Inclusive."""
    symbol: str
    """`Class.method`; "" between definitions at the top of a file."""
    kind: str
    """`function`, `class`, `rest` (between definitions) or `lines` (no grammar)."""
    text: str


@dataclass(frozen=True, slots=True)
class _Span:
    """Rows from 0, both inclusive."""

    first: int
    last: int
    symbol: str
    kind: str


def is_text(content: bytes) -> bool:
    """Whether a file counts as text: no zero byte near its start, the rule of ripgrep and git."""
    return b"\0" not in content[:_SNIFFED_BYTES]


def chunker_key(path: str) -> str:
    """Identifies everything but the bytes that decides how a file is cut."""
    language = language_of(path)
    grammar = f"{language.name}/{grammar_version(language.module)}" if language else "lines"
    return f"{CHUNKER_VERSION}/{MAX_LINES}/{grammar}"


def chunk_file(path: str, content: bytes) -> list[Chunk]:
    """All chunks of a file in order of lines; none of a binary or empty one.

    Undecodable bytes become U+FFFD. A file with syntax errors is cut as far as the grammar makes sense of it.
    """
    if not is_text(content):
        return []
    lines = content.split(b"\n")
    language = language_of(path)
    if language is None:
        spans: Iterator[_Span] = iter([_Span(0, len(lines) - 1, "", "lines")])
    else:
        root = parser_for(language).parse(content).root_node
        spans = _walk(language, root, _Span(0, len(lines) - 1, "", "rest"), 0)
    texts = [line.removesuffix(b"\r").decode("utf-8", "replace") for line in lines]
    return [
        Chunk(
            piece.first + 1,
            piece.last + 1,
            piece.symbol,
            piece.kind,
            "\n".join(texts[piece.first : piece.last + 1]),
        )
        for span in spans
        for piece in _pieces(span, texts)
    ]


def _walk(language: Language, body: Any, within: _Span, depth: int) -> Iterator[_Span]:
    """Spans of the definitions in `body` and of the lines between them, which belong to `within`."""
    row, kind = within.first, within.kind
    for node, start in _with_comments(language, body):
        definition, name = _definition(language, node)
        last = min(_last_row(node), within.last)
        if definition is None or last < row:
            continue
        start = max(start, row)
        if row < start:
            yield _Span(row, start - 1, within.symbol, kind)
            kind = "rest"
        yield from _members(
            language, definition, _Span(start, last, _join(within.symbol, name), "function"), depth
        )
        row = last + 1
    if row <= within.last:
        yield _Span(row, within.last, within.symbol, kind)


def _with_comments(language: Language, body: Any) -> Iterator[tuple[Any, int]]:
    """Children of a node, each with its first row, comments directly above it included."""
    end, lead, lead_end = -1, -1, -1
    for node in body.named_children:
        first, last = node.start_point[0], _last_row(node)
        if node.type in language.leading:
            follows = lead >= 0 and first <= lead_end + 1
            if not follows:
                # A trailing comment belongs to its own line.
                lead = first if first > end else -1
            lead_end = last
            continue
        yield node, lead if lead >= 0 and first <= lead_end + 1 else first
        end, lead = last, -1


def _definition(language: Language, node: Any) -> tuple[Any, str]:
    """The function or container that a node is or wraps, with its name; (None, "") for anything else."""
    name = ""
    for _ in range(4):
        name = name or _name(node)
        if node.type in language.functions or node.type in language.containers:
            return (node, name) if name else (None, "")
        if node.type not in language.wrappers:
            break
        inner = [
            child
            for child in node.named_children
            if child.type not in ("decorator", "accessibility_modifier")
        ]
        kinds = language.functions | language.containers | language.wrappers
        node = next((child for child in inner if child.type in kinds), None)
        if node is None:
            break
    return None, ""


def _name(node: Any) -> str:
    """Name of a definition: in C within declarators, in Rust's `impl` and Go's types in other fields."""
    receiver = node.child_by_field_name("receiver")
    for _ in range(6):
        for field in ("name", "property", "declarator", "type"):
            inner = node.child_by_field_name(field)
            if inner is not None:
                break
        else:
            inner = next((child for child in node.named_children if child.type == "type_spec"), None)
        if inner is None:
            return ""
        if field in ("name", "property", "type") or inner.child_count == 0:
            text = inner.child_by_field_name("name") if inner.type == "type_spec" else inner
            name = text.text.decode("utf-8", "replace") if text is not None else ""
            return _join(_receiver_type(receiver), name[:200])
        node = inner
    return ""


def _receiver_type(receiver: Any) -> str:
    """`T` of Go's `func (t *T) name()`."""
    if receiver is None:
        return ""
    return receiver.text.decode("utf-8", "replace").strip("()").split(" ")[-1].lstrip("*")


def _members(language: Language, definition: Any, span: _Span, depth: int) -> Iterator[_Span]:
    """A function as one span; a container as the spans of its head and members."""
    body = definition.child_by_field_name("body")
    if definition.type in language.containers:
        span = replace(span, kind="class")
        if body is not None and depth < _DEEPEST:
            yield from _walk(language, body, span, depth + 1)
            return
    yield span


def _join(outer: str, name: str) -> str:
    return f"{outer}.{name}" if outer and name else outer or name


def _last_row(node: Any) -> int:
    """Last row of a node; one that ends at the start of a line does not include that line."""
    row, column = node.end_point
    return row - 1 if column == 0 and row > node.start_point[0] else row


def _pieces(span: _Span, texts: list[str]) -> Iterator[_Span]:
    """A span without blank and bracket-only lines at its ends, in pieces of at most `MAX_LINES`."""
    first, last = span.first, span.last
    while first <= last and not _has_text(texts[first]):
        first += 1
    while last >= first and not texts[last].strip():
        last -= 1
    while first <= last:
        end = last if last - first < MAX_LINES else _cut(texts, first)
        if last - end < MIN_LINES and last - first < MAX_LINES + MIN_LINES:
            end = last
        if any(_has_text(text) for text in texts[first : end + 1]):
            yield _Span(first, end, span.symbol, span.kind)
        first = end + 1


def _cut(texts: list[str], first: int) -> int:
    """Last row of a piece that begins at row `first`: before the least indented line of its last third."""
    rows = range(first + MAX_LINES * 2 // 3, first + MAX_LINES)
    return min(rows, key=lambda row: (_indent(texts[row]), row)) - 1


def _indent(text: str) -> int:
    stripped = text.lstrip()
    return len(text) - len(stripped) if stripped else 0


def _has_text(text: str) -> bool:
    return any(map(str.isalnum, text))
