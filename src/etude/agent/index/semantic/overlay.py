"""A session's edits on top of an index that many sessions share."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from etude.agent.index.semantic.lexical import TermCounts
from etude.agent.index.semantic.records import FileRecord, make_record
from etude.agent.index.semantic.state import CutFile, TreeState
from etude.agent.index.semantic.tree import MAX_FILE_BYTES

if TYPE_CHECKING:
    from etude.agent.index.semantic.index import SearchResult, SemanticIndex

__all__ = ["EditedFile", "Edits", "Overlay"]


class EditedFile:
    """A file as it is after an edit; cut when it is first searched."""

    def __init__(self, path: str, content: bytes) -> None:
        self.path = path
        self._content = content
        self._record: FileRecord | None = None

    def record(self) -> FileRecord:
        """Chunks of the content. Two threads may both make it: they make the same."""
        if self._record is None:
            content = self._content if len(self._content) <= MAX_FILE_BYTES else b""
            self._record = make_record(self.path, content)
        return self._record


@dataclass(frozen=True, slots=True)
class Edits:
    """What an overlay holds at one time."""

    files: tuple[EditedFile, ...] = ()
    """The one written last comes last."""
    removed: frozenset[str] = frozenset()

    def terms(self) -> TermCounts:
        """Words of all chunks, file by file."""
        return TermCounts.joined([CutFile.of(file.path, file.record()).terms for file in self.files])

    def masked(self, state: TreeState) -> NDArray[np.int32]:
        """Chunks of a state that these edits replaced or removed."""
        files = {index for file in self.files if (index := state.index_of.get(file.path)) is not None}
        for path in self.removed:
            if path in state.index_of:
                files.add(state.index_of[path])
            first = bisect_left(state.paths, path + "/")
            files.update(range(first, bisect_left(state.paths, path + "0", first)))  # "0" follows "/"
        chunks = [np.arange(state.starts[i], state.starts[i + 1], dtype=np.int32) for i in sorted(files)]
        return np.concatenate([*chunks, np.zeros(0, np.int32)])


class Overlay:
    """Edits of one session: searched together with the base, whose chunks of edited paths are hidden.

    Nothing is cut or embedded before somebody searches, and then only the chunks that are nowhere known. An
    overlay belongs to one event loop; it holds no file and needs no closing.
    """

    def __init__(self, index: SemanticIndex, edits: Edits | None = None) -> None:
        self._index = index
        self._files = {file.path: file for file in edits.files} if edits else {}
        self._removed = set(edits.removed) if edits else set[str]()

    def write(self, path: str, content: bytes) -> None:
        """The file has this content now. `path` is relative to the tree's root."""
        path = _clean(path)
        self._files.pop(path, None)
        self._files[path] = EditedFile(path, content)

    def remove(self, path: str) -> None:
        """The file, or the directory with all below it, is gone. A rename is a `remove` and `write`s."""
        path = _clean(path)
        for name in [name for name in self._files if name == path or name.startswith(path + "/")]:
            del self._files[name]
        self._removed.add(path)

    def edits(self) -> Edits:
        """What was written and removed so far; does not change afterwards."""
        return Edits(tuple(self._files.values()), frozenset(self._removed))

    def fork(self) -> Overlay:
        """A second overlay with the same edits, which both go on from."""
        return Overlay(self._index, self.edits())

    async def search(self, question: str, k: int = 10, paths: Sequence[str] | None = None) -> SearchResult:
        """Like `SemanticIndex.search`, over the edited tree."""
        return await self._index.search(question, k, paths, edits=self.edits())


def _clean(path: str) -> str:
    return "/".join(part for part in path.split("/") if part not in ("", "."))
