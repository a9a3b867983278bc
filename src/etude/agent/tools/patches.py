r"""Parses unified diffs: git's, plain ones, and those that models write, with wrong counts and numbers.

    [diff --git a/old b/new]        then `rename from`, `rename to`, `new file mode`, `deleted file mode`
    --- a/old                       or /dev/null for a new file
    +++ b/new                       or /dev/null for a deleted one
    @@ -12,3 +12,4 @@ any text      numbers may be wrong or missing
     kept
    -removed
    +added
    \ No newline at end of file     of the line before

`a/` and `b/` are removed if a file has both. The counts of a hunk's header are trusted if its lines fit them;
if not, the hunk extends to the next header.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from etude.errors import ToolArgumentError

_HUNK = re.compile(r"@@ -(\d{1,9})(?:,(\d{1,9}))? \+(\d{1,9})(?:,(\d{1,9}))? @@")
_NUMBERLESS = re.compile(r"@@(?:\s|@@|$)")
_ESCAPE = re.compile(r'\\([0-7]{3}|[abfnrtv"\\])')
_ESCAPES = {"a": 7, "b": 8, "f": 12, "n": 10, "r": 13, "t": 9, "v": 11, '"': 34, "\\": 92}
_IGNORED = ("index ", "similarity index ", "dissimilarity index ", "old mode ", "new mode ")
_NO_NEWLINE = "\\"
MAX_FILES = 200


@dataclass(frozen=True, slots=True)
class Hunk:
    """One change. Lines carry their newline; only a last one may lack it."""

    number: int
    """From 1, within its file."""
    start: int | None
    """First line of the old file, from 1; without old lines, the line after which to add. None: not given."""
    lines: tuple[tuple[str, str], ...]
    """(`" "`, `"-"` or `"+"`, text)."""

    @property
    def old(self) -> list[str]:
        """The lines that the file must hold."""
        return [text for mark, text in self.lines if mark != "+"]


@dataclass(frozen=True, slots=True)
class FilePatch:
    """The changes of one file."""

    old_path: str | None
    """None: the file is new."""
    new_path: str | None
    """None: the file is deleted."""
    hunks: tuple[Hunk, ...]


@dataclass(slots=True)
class _Header:
    """The header lines above a file's first hunk."""

    old: str | None = None
    new: str | None = None
    created: bool = False
    deleted: bool = False
    renamed: bool = False


@dataclass(slots=True)
class _Lines:
    """The patch's lines, and the current position."""

    texts: list[str]
    at: int = 0

    def peek(self, ahead: int = 0) -> str | None:
        place = self.at + ahead
        return self.texts[place] if place < len(self.texts) else None


def parse_patch(text: str) -> list[FilePatch]:
    """The patches of all files, in order. Raises ToolArgumentError with the line that is invalid."""
    texts = text.split("\n")
    if texts and texts[-1] == "":
        texts.pop()
    if texts and all(line.endswith("\r") for line in texts):
        texts = [line[:-1] for line in texts]
    lines, files = _Lines(texts), list[FilePatch]()
    while (line := lines.peek()) is not None:
        if line.startswith("diff --git ") or _is_file_header(lines):
            files.append(_file(lines))
            if len(files) > MAX_FILES:
                raise _refused(f"the patch has more than {MAX_FILES} files")
        elif line.startswith("@@"):
            raise _refused(f"line {lines.at + 1}: a hunk before any --- and +++ line")
        elif line.startswith(("GIT binary patch", "Binary files ")):
            raise _refused("binary patches are not supported")
        else:
            # Text around a patch, as in a mail or a model's answer, is skipped.
            lines.at += 1
    if not files:
        raise _refused("no file header (--- and +++ lines) in the patch")
    return files


def _is_file_header(lines: _Lines) -> bool:
    first, second = lines.peek(), lines.peek(1)
    return first is not None and first.startswith("--- ") and (second or "").startswith("+++ ")


def _file(lines: _Lines) -> FilePatch:
    header = _Header()
    begin = lines.at
    if (line := lines.peek()) is not None and line.startswith("diff --git "):
        header.old, header.new = _git_paths(line.removeprefix("diff --git ").rstrip("\r"))
        lines.at += 1
        _extended_headers(lines, header)
    if _is_file_header(lines):
        old, new = (_path(text[4:]) for text in lines.texts[lines.at : lines.at + 2])
        old, new = _stripped(old, new)
        lines.at += 2
    else:
        old, new = None if header.created else header.old, None if header.deleted else header.new
    hunks = _hunks(lines)
    if old is None and new is None:
        raise _refused(f"line {begin + 1}: a patch from /dev/null to /dev/null")
    if not hunks and not (header.renamed or header.created or header.deleted):
        raise _refused(f"line {begin + 1}: no hunk for {new or old}")
    return FilePatch(old, new, tuple(hunks))


def _extended_headers(lines: _Lines, header: _Header) -> None:
    while (line := lines.peek()) is not None and not line.startswith(("--- ", "@@", "diff --git ")):
        line = line.rstrip("\r")
        if line.startswith(("rename from ", "rename to ")):
            header.renamed = True
            path = _unquoted(line.split(" ", 2)[2])
            if line.startswith("rename from "):
                header.old = path
            else:
                header.new = path
        elif line.startswith("copy "):
            raise _refused("copies are not supported: write the file anew")
        elif line.startswith("new file mode"):
            header.created = True
        elif line.startswith("deleted file mode"):
            header.deleted = True
        elif line.startswith(("GIT binary patch", "Binary files ")):
            raise _refused("binary patches are not supported")
        elif not line.startswith(_IGNORED):
            return
        lines.at += 1


def _git_paths(text: str) -> tuple[str | None, str | None]:
    """The paths of a `diff --git` line, if they can be separated; other lines mostly repeat them."""
    if text.startswith('"'):
        match = re.match(r'("(?:[^"\\]|\\.)*") (.*)$', text)
        return _stripped(_unquoted(match[1]), _unquoted(match[2])) if match else (None, None)
    # Unquoted paths may hold blanks. They are equal except for a rename, whose lines repeat them.
    half = len(text) // 2
    if text[half : half + 1] == " " and text[2:half] == text[half + 3 :]:
        return _stripped(text[:half], text[half + 1 :])
    first, _, second = text.partition(" ")
    return _stripped(first, _unquoted(second)) if second else (None, None)


def _path(text: str) -> str | None:
    path = _unquoted(text.rstrip("\r").split("\t", 1)[0].strip())
    if not path:
        raise _refused("a file header without a path")
    return None if path == "/dev/null" else path


def _stripped(old: str | None, new: str | None) -> tuple[str | None, str | None]:
    """The paths without git's `a/` and `b/`."""
    if (old is None or old.startswith("a/")) and (new is None or new.startswith("b/")):
        return old and old[2:], new and new[2:]
    return old, new


def _unquoted(path: str) -> str:
    r"""The path that git wrote as `"a/\303\244"`."""
    if not (len(path) >= 2 and path.startswith('"') and path.endswith('"')):
        return path

    def byte(match: re.Match[str]) -> bytes:
        name = match[1]
        return bytes([int(name, 8) & 255 if name.isdigit() else _ESCAPES[name]])

    parts: list[bytes] = []
    inner, end = path[1:-1], 0
    for match in _ESCAPE.finditer(inner):
        parts += [inner[end : match.start()].encode("utf-8", "surrogateescape"), byte(match)]
        end = match.end()
    parts.append(inner[end:].encode("utf-8", "surrogateescape"))
    return b"".join(parts).decode("utf-8", "surrogateescape")


def _hunks(lines: _Lines) -> list[Hunk]:
    hunks: list[Hunk] = []
    while (line := lines.peek()) is not None and line.startswith("@@"):
        header = _HUNK.match(line)
        if header is None and not _NUMBERLESS.match(line):
            raise _refused(f"line {lines.at + 1}: not a hunk header: {line[:60]}")
        lines.at += 1
        start = lines.at
        body = _counted_body(lines, header) if header else None
        if body is None:
            lines.at = start
            body = _open_body(lines)
        if not any(mark != " " for mark, _ in body):
            raise _refused(f"line {start}: hunk {len(hunks) + 1} changes nothing")
        hunks.append(Hunk(len(hunks) + 1, int(header[1]) if header else None, tuple(body)))
    return hunks


def _counted_body(lines: _Lines, header: re.Match[str]) -> list[tuple[str, str]] | None:
    """The lines that the header counts; None if they do not fit the counts."""
    old_left, new_left = (1 if header[n] is None else int(header[n]) for n in (2, 4))
    body: list[tuple[str, str]] = []
    while old_left or new_left:
        line = lines.peek()
        if line is None or (line[:1] or " ") not in " -+\\":
            return None
        lines.at += 1
        if line.startswith(_NO_NEWLINE):
            _drop_newline(body)
            continue
        mark, text = (line[0], line[1:]) if line else (" ", "")
        old_left -= mark != "+"
        new_left -= mark != "-"
        if old_left < 0 or new_left < 0:
            return None
        body.append((mark, text + "\n"))
    if (line := lines.peek()) is not None and line.startswith(_NO_NEWLINE):
        _drop_newline(body)
        lines.at += 1
    # More lines of a hunk follow: the counts are wrong.
    line = lines.peek()
    if line is None or line[:1] not in (" ", "+", "-") or _is_file_header(lines):
        return body
    # Except for the line before a signature, which ends a patch in a mail.
    return body if line.rstrip() == "--" else None


def _open_body(lines: _Lines) -> list[tuple[str, str]]:
    """The lines up to the next header."""
    body: list[tuple[str, str]] = []
    while (line := lines.peek()) is not None:
        if line.startswith(("@@", "diff --git ")) or _is_file_header(lines):
            break
        if line.startswith(_NO_NEWLINE):
            _drop_newline(body)
        elif line[:1] in (" ", "+", "-"):
            body.append((line[0], line[1:] + "\n"))
        elif line.strip() == "":
            body.append((" ", line + "\n"))
        else:
            # Text after the patch.
            break
        lines.at += 1
    while body and body[-1][0] == " " and not body[-1][1].strip():
        body.pop()
    return body


def _drop_newline(body: list[tuple[str, str]]) -> None:
    if body:
        mark, text = body[-1]
        body[-1] = (mark, text.removesuffix("\n"))


def _refused(message: str) -> ToolArgumentError:
    return ToolArgumentError(message, field="patch")
