"""HTML as plain text: what a reader would see, in order, without marks that only a browser needs.

A scanner of our own: `html.parser` raises AssertionError for some broken declarations (`<![<![`) and holds
the rest of a page back after a tag without an end. Here every character is looked at once.
"""

from __future__ import annotations

import html
import re
from dataclasses import dataclass, field

MAX_CHARACTERS = 2 << 20
"""Of HTML; what comes after it is not read."""
_TAG = re.compile(r"""<(/?)([a-zA-Z][a-zA-Z0-9:_-]*)((?:[^"'>]|"[^"]*"|'[^']*')*+)>""")
_TAG_CHARACTERS = 4096
"""Of a tag with quotation marks that are taken for such; a longer one ends at its first `>`."""
_RAW = ("script", "style", "textarea", "title")
"""Elements whose content is no markup."""
_RAW_ENDS = {name: re.compile(f"</{name}", re.IGNORECASE) for name in _RAW}
_SKIPPED = frozenset({"noscript", "template", "svg", "iframe", "object", "select"})
_BLOCK_NAMES = """
address article aside blockquote body br caption dd details div dl dt fieldset figcaption figure footer form
header hr html legend main nav ol p pre section summary table tbody tfoot thead tr ul
"""
_BLOCKS = frozenset(_BLOCK_NAMES.split())
_HEADINGS = {f"h{level}": "#" * level + " " for level in range(1, 7)}
_KEPT = "\0"
"""Marks a line of `pre`, whose blanks stay."""
_BLANKS = re.compile(r"\s+")
_EMPTY_LINES = re.compile(r"\n{3,}")


def html_to_text(page: str) -> tuple[str, str]:
    """Title and text of a page. Never raises, whatever the page is; linear in time.

    Headings get `#`, list items `- `, cells of a row stand apart by tabs, `pre` keeps its lines.
    """
    page = page[:MAX_CHARACTERS]
    text = _Text()
    position = 0
    while (start := page.find("<", position)) >= 0:
        text.add(page[position:start])
        position = _read_markup(page, start, text)
        if position < 0:
            return text.result()
    text.add(page[position:])
    return text.result()


@dataclass(slots=True)
class _Text:
    """The text so far."""

    parts: list[str] = field(default_factory=list[str])
    title: str = ""
    skipping: str | None = None
    """The outermost element whose content is not shown."""
    depth: int = 0
    """How many elements of that name are open."""
    num_pre: int = 0

    def add(self, data: str) -> None:
        if data and self.skipping is None:
            data = _unescaped(data).replace(_KEPT, "")
            kept = _KEPT + data.expandtabs(4).replace("\n", "\n" + _KEPT)
            self.parts.append(kept if self.num_pre else _BLANKS.sub(" ", data))

    def open(self, tag: str) -> None:
        if self.skipping is not None:
            self.depth += tag == self.skipping
        elif tag in _SKIPPED:
            self.skipping, self.depth = tag, 1
        elif tag in _HEADINGS:
            self.parts.append("\n\n" + _HEADINGS[tag])
        elif tag == "li":
            self.parts.append("\n- ")
        elif tag in ("td", "th"):
            self.parts.append("\t")
        elif tag in _BLOCKS:
            self.num_pre += tag == "pre"
            self.parts.append("\n")

    def close(self, tag: str) -> None:
        if self.skipping is not None:
            self.depth -= tag == self.skipping
            if self.depth == 0:
                self.skipping = None
        elif tag in _BLOCKS or tag in _HEADINGS:
            self.num_pre -= tag == "pre" and self.num_pre > 0
            self.parts.append("\n")

    def result(self) -> tuple[str, str]:
        text = "\n".join(map(_finished, "".join(self.parts).split("\n")))
        return self.title, _EMPTY_LINES.sub("\n\n", text).strip("\n")


def _finished(line: str) -> str:
    """A line without blanks at its ends, and at those of its cells, unless it keeps them."""
    if _KEPT in line:
        return line.replace(_KEPT, "").rstrip()
    return "\t".join(cell.strip() for cell in line.strip().split("\t"))


def _read_markup(page: str, start: int, text: _Text) -> int:
    """Reads what begins with the `<` at `start`; where to go on, or -1 where the rest is no text."""
    if page.startswith("<!--", start):
        end = page.find("-->", start + 4)
        return end if end < 0 else end + 3
    if page.startswith(("<!", "<?"), start):
        end = page.find(">", start)
        return end if end < 0 else end + 1
    begins = page[start + 1 : start + 3].lstrip("/")[:1]
    if not (begins.isascii() and begins.isalpha()):
        text.add("<")
        return start + 1
    match = _TAG.match(page, start, start + _TAG_CHARACTERS)
    if match is None:
        end = page.find(">", start)
        return end if end < 0 else end + 1
    tag = match[2].lower()
    if match[1]:
        text.close(tag)
    elif tag in _RAW:
        return _read_raw(page, tag, match.end(), text)
    else:
        text.open(tag)
        if match[3].endswith("/") and tag in _SKIPPED:
            text.close(tag)
    return match.end()


def _read_raw(page: str, tag: str, start: int, text: _Text) -> int:
    """Reads an element without markup; returns as `_read_markup`."""
    end = _RAW_ENDS[tag].search(page, start)
    if end is None:
        return -1
    if tag == "title" and not text.title and text.skipping is None:
        text.title = _BLANKS.sub(" ", _unescaped(page[start : end.start()])).strip()
    close = page.find(">", end.end())
    return close if close < 0 else close + 1


def _unescaped(data: str) -> str:
    try:
        return html.unescape(data)
    except ValueError:
        # A character reference of thousands of digits.
        return data
