"""The changes of one turn of the agent: saved on disk before they are written to the repository."""

from __future__ import annotations

import base64
import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from etude.agent.inputs import result_document, result_of
from etude.records import ToolResult

_NUM_DIFF_LINES = 20_000


@dataclass(frozen=True, slots=True)
class FileChange:
    """A file's contents before and after; None: it does not exist."""

    path: str
    before: bytes | None
    after: bytes | None

    def diff(self) -> str:
        """The change as a unified diff; one line for files that are not text."""
        old, new = text_of(self.before), text_of(self.after)
        if old is None or new is None or old == new:
            # Bytes that are not text, or an empty file that was added or deleted.
            kind = "Binary" if old is None or new is None else "Empty"
            return f"{kind} file {self.path} {_verb(self)}\n"
        a = "/dev/null" if self.before is None else f"a/{self.path}"
        b = "/dev/null" if self.after is None else f"b/{self.path}"
        lines = difflib.unified_diff(
            _lines(old)[:_NUM_DIFF_LINES],
            _lines(new)[:_NUM_DIFF_LINES],
            a,
            b,
        )
        return "".join(
            line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines
        )

    @property
    def counts(self) -> tuple[int, int]:
        """Lines added, lines removed."""
        lines = self.diff().split("\n")[2:]
        return sum(line[:1] == "+" for line in lines), sum(line[:1] == "-" for line in lines)


@dataclass(frozen=True, slots=True)
class TurnChange:
    """The changes of one turn."""

    number: int
    """Number of the change in its session: 1, 2, ..."""
    turn: int
    """Number of the agent's message, from 1."""
    prompt: int
    """Number of the user's instruction, from 1."""
    files: tuple[FileChange, ...]
    results: tuple[ToolResult, ...] | None = None
    """Results of the turn's calls; None where the turn was interrupted."""
    written: bool = True
    """Whether it was to be written to the repository."""
    undone: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "number": self.number,
            "turn": self.turn,
            "prompt": self.prompt,
            "written": self.written,
            "undone": self.undone,
            "results": None if self.results is None else list(map(result_document, self.results)),
            "files": [
                {"path": file.path, "before": _packed(file.before), "after": _packed(file.after)}
                for file in self.files
            ],
        }

    @staticmethod
    def from_dict(document: Mapping[str, Any]) -> TurnChange:
        """Reads what `to_dict` wrote. Raises KeyError, TypeError, ValueError for anything else."""
        results = document["results"]
        return TurnChange(
            number=int(document["number"]),
            turn=int(document["turn"]),
            prompt=int(document["prompt"]),
            files=tuple(
                FileChange(str(file["path"]), _unpacked(file["before"]), _unpacked(file["after"]))
                for file in document["files"]
            ),
            results=None if results is None else tuple(map(result_of, results)),
            written=bool(document["written"]),
            undone=bool(document["undone"]),
        )


def combined(changes: Iterable[TurnChange]) -> tuple[FileChange, ...]:
    """Combines all changes that were not undone: each file's first and last contents."""
    files: dict[str, FileChange] = {}
    for change in changes:
        for file in () if change.undone else change.files:
            first = files.get(file.path)
            files[file.path] = FileChange(file.path, first.before if first else file.before, file.after)
    return tuple(files[path] for path in sorted(files) if files[path].before != files[path].after)


def diff_text(files: Sequence[FileChange]) -> str:
    """Unified diffs of several files."""
    return "".join(file.diff() for file in files)


def _verb(file: FileChange) -> str:
    if file.before is None:
        return "added"
    return "deleted" if file.after is None else "changed"


def text_of(data: bytes | None) -> str | None:
    """The text of a file; "" where it does not exist; None for bytes that are not text."""
    if data is None:
        return ""
    try:
        return None if b"\0" in data else data.decode("utf-8")
    except UnicodeDecodeError:
        return None


def _lines(text: str) -> list[str]:
    """The lines with their newlines; as in patches, no other character ends a line."""
    lines = [line + "\n" for line in text.split("\n")]
    return [*lines[:-1], *([last] if (last := lines[-1][:-1]) else [])]


def _packed(data: bytes | None) -> str | None:
    return None if data is None else base64.b64encode(data).decode("ascii")


def _unpacked(text: str | None) -> bytes | None:
    return None if text is None else base64.b64decode(text, validate=True)
