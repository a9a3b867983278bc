"""A session's edits on top of an index that many sessions share."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from etude.agent.index.semantic.building import MAX_FILE_BYTES
from etude.agent.index.semantic.store import CutChunk, cut_file
from etude.agent.tools.ports import CodeHits

SYMBOL_WEIGHT = 4.0
"""Weight of a word in a chunk's name, relative to one in its lines."""
_K1, _B = 1.2, 0.75
"""FTS5's constants of BM25."""
_LEAST_WEIGHT = 1e-6
"""What FTS5 gives to a word that more than half of all chunks hold."""


class EditedFile:
    """A file as it is after an edit; cut when it is first searched."""

    def __init__(self, path: str, content: bytes) -> None:
        self.path = path
        self._content = content if len(content) <= MAX_FILE_BYTES else b""

    @cached_property
    def chunks(self) -> list[CutChunk]:
        """Its chunks. Two threads may both compute them: the results are equal."""
        return cut_file(self.path, self._content)


@dataclass(frozen=True, slots=True)
class Edits:
    """Snapshot of an overlay's edits."""

    files: tuple[EditedFile, ...] = ()
    """Ordered by time of writing, latest last."""
    removed: frozenset[str] = frozenset()
    vectors: dict[bytes, NDArray[np.float32]] = field(default_factory=dict[bytes, NDArray[np.float32]])
    """Vectors of edited chunks that were needed so far, by name; grows as searches embed."""

    @property
    def chunks(self) -> list[tuple[str, CutChunk]]:
        """All chunks with their paths, file by file."""
        return [(file.path, chunk) for file in self.files for chunk in file.chunks]

    def hidden(self, paths: Sequence[str]) -> list[tuple[str, bool]]:
        """Each path of the index, and whether it was replaced or removed."""
        gone = self.removed | {file.path for file in self.files}
        below = tuple(f"{path}/" for path in self.removed)
        return [(path, path in gone or path.startswith(below)) for path in paths]

    def score(
        self, question: Sequence[str], base_chunks: int, base_words: int, base_holders: Mapping[str, int]
    ) -> NDArray[np.float32]:
        """[chunks]: BM25 of the edited chunks, by FTS5's formula, with the words' weights in the index: its
        numbers of chunks and words, and of the chunks that hold each word."""
        chunks = [cut for _, cut in self.chunks]
        counts = [_counts(cut, set(question)) for cut in chunks]
        total = base_chunks + len(chunks)
        num_words = base_words + sum(cut.num_words for cut in chunks)
        scores = np.zeros(len(chunks), np.float32)
        for word in question:
            holders = base_holders.get(word, 0) + sum(word in count for count in counts)
            weight = max(math.log((total - holders + 0.5) / (holders + 0.5)), _LEAST_WEIGHT)
            for number, (cut, count) in enumerate(zip(chunks, counts, strict=True)):
                often = count[word]
                length = cut.num_words * total / max(num_words, 1)
                scores[number] += weight * often * (_K1 + 1) / (often + _K1 * (1 - _B + _B * length))
        return scores


def _counts(cut: CutChunk, wanted: set[str]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for part, weight in ((cut.symbol_stems, int(SYMBOL_WEIGHT)), (cut.text_stems, 1), (cut.path_stems, 1)):
        for word in part:
            if word in wanted:
                counts[word] += weight
    return counts


class Overlay:
    """Edits of one session: searched together with the base, whose chunks of edited paths are hidden.

    Nothing is cut or embedded before a search, and then only chunks whose vectors are not stored yet. An
    overlay belongs to one event loop; it holds no file and needs no closing.
    """

    def __init__(self, search: Callable[[str, int, str, Edits], Awaitable[CodeHits]]) -> None:
        """Use `SemanticIndex.overlay`."""
        self._search = search
        self._files: dict[str, EditedFile] = {}
        self._removed: set[str] = set()
        self._vectors: dict[bytes, NDArray[np.float32]] = {}

    def write(self, path: str, content: bytes) -> None:
        """Records the file's new content; a hidden file is not indexed. `path` is relative to the root."""
        path = _clean(path)
        if path.startswith(".") or "/." in path:
            return
        self._files.pop(path, None)
        self._files[path] = EditedFile(path, content)

    def remove(self, path: str) -> None:
        """Records the removal of a file, or of a directory with all below it. A rename is a `remove` and
        `write`s."""
        path = _clean(path)
        for name in [name for name in self._files if name == path or name.startswith(path + "/")]:
            del self._files[name]
        self._removed.add(path)

    async def search(self, question: str, k: int = 10, path: str = "") -> CodeHits:
        """Like `SemanticIndex.search`, over the edited tree."""
        edits = Edits(tuple(self._files.values()), frozenset(self._removed), self._vectors)
        return await self._search(question, k, path, edits)


def _clean(path: str) -> str:
    return "/".join(part for part in path.split("/") if part not in ("", "."))
