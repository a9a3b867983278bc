"""Query and result types of the grep index. Semantics are ripgrep's, flag by flag."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from etude.agent.globs import compile_globs
from etude.errors import ConfigError
from etude.sandbox.types import GrepMatch


@dataclass(frozen=True, slots=True)
class GrepQuery:
    """One search. Equal to `rg --no-ignore` with the flags named below, run in the root of the tree."""

    pattern: str
    """A regular expression in ripgrep's (Rust's) syntax, or a fixed string."""
    ignore_case: bool = False
    """`--ignore-case`"""
    fixed: bool = False
    """`--fixed-strings`"""
    word: bool = False
    """`--word-regexp`"""
    globs: tuple[str, ...] = ()
    """Files to search, as `compile_globs` reads them: `*.py`, `!vendor/`."""
    path: str = ""
    """A file or directory below the root, relative to it; empty for the whole tree."""
    limit: int | None = None
    """At most so many matches, the first in order. None: all (up to `max_bytes`)."""
    max_bytes: int = 256 << 20
    """Bound on what ripgrep may print for one search; beyond it the result says `truncated`."""
    deadline_s: float = 60.0
    """For each run of ripgrep, of which a search needs one or a few."""

    def __post_init__(self) -> None:
        """Raises ConfigError for invalid fields."""
        if self.limit is not None and self.limit < 1:
            raise ConfigError(
                "must be at least 1", field="limit", received=self.limit, fix="leave it out for all"
            )
        if self.path.startswith("/") or ".." in self.path.split("/"):
            raise ConfigError(
                "must lie below the root",
                field="path",
                received=self.path,
                fix="give a path relative to the root",
            )
        if "\0" in self.pattern or "\0" in self.path or any("\0" in glob for glob in self.globs):
            raise ConfigError("holds a NUL", field="pattern", received=self.pattern, fix=r"write \x00 for it")

    def pattern_flags(self) -> list[str]:
        """The flags that decide which lines match, for ripgrep's command line."""
        flags = ["--ignore-case" if self.ignore_case else "--case-sensitive"]
        flags += ["--fixed-strings"] if self.fixed else []
        flags += ["--word-regexp"] if self.word else []
        return [*flags, "--regexp", self.pattern]

    def includes(self, path: bytes) -> bool:
        """Whether the globs include a file; the file that the query's `path` names always is. Raises
        ToolArgumentError for an invalid glob."""
        name = os.fsdecode(path)
        return name == self.path or compile_globs(self.globs)(name)


@dataclass(frozen=True, slots=True)
class FileMatches:
    """The matching lines of one file as ripgrep printed them, `12:text` each; parsed on demand."""

    path: bytes
    printed: bytes
    """What ripgrep printed, of this file and perhaps of others."""
    start: int
    end: int
    """`printed[start:end]` are this file's lines."""

    @property
    def text(self) -> bytes:
        """This file's part of `printed`."""
        return self.printed[self.start : self.end]

    def matches(self) -> Iterator[GrepMatch]:
        """The lines in order."""
        path = self.path.decode("utf-8", "surrogateescape")
        for line in self.text.split(b"\n"):
            number, colon, content = line.partition(b":")
            if colon and number.isdigit():  # anything else is a notice about binary content
                yield GrepMatch(path, int(number), content.decode("utf-8", "surrogateescape"))

    def __len__(self) -> int:
        """Number of matching lines."""
        if self.start == self.end:
            return 0
        where = (self.start, self.end)
        if self.printed.find(b": WARNING: ", *where) < 0 and self.printed.find(b": binary file ", *where) < 0:
            return self.printed.count(b"\n", *where) + (not self.printed.endswith(b"\n", *where))
        return sum(1 for _ in self.matches())

    def first(self, count: int) -> FileMatches:
        """Only the first `count` lines."""
        lines = [line for line in self.text.split(b"\n") if line.partition(b":")[0].isdigit()]
        kept = b"\n".join(lines[:count])
        return FileMatches(self.path, kept, 0, len(kept))


@dataclass(frozen=True, slots=True)
class GrepResult:
    """The answer to one query."""

    files: Sequence[FileMatches]
    """The matches by path and line, as ripgrep printed them: a broad search may hold millions."""
    truncated: bool
    """More matched than `limit` or `max_bytes` let through."""
    candidates: int
    """Number of files that ripgrep searched after the index excluded others; all without the index."""
    used_index: bool
    """False: the index could not exclude enough, and ripgrep searched the whole tree."""

    @property
    def matches(self) -> list[GrepMatch]:
        """All matches, parsed on each access. Bytes that are no UTF-8 become surrogate escapes; a `\\r` at a
        line's end stays, as ripgrep prints it."""
        return [match for file in self.files for match in file.matches()]
