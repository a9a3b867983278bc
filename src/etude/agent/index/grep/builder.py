"""Builds index segments from files: read, cut into grams, sort, write.

Memory is bounded by the size of a segment, not by that of the tree: about 660 MB at the default of 64 MB of
text. A file that vanishes meanwhile is left out; one that cannot be read is always a candidate.
"""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from etude.agent.index.grep.grams import LONGEST_BYTES, PairRanks, rank_pairs, sorted_unique, text_keys
from etude.agent.index.grep.segment import MOST_DOCUMENTS, Document, Flags, write_segment

SEGMENT_BYTES = 64 << 20
LARGEST_BYTES = 64 << 20
"""A larger file is not cut into grams: ripgrep looks into it for every query."""
_BLOCK_BYTES = 256 << 10
_PIECE_BYTES = 1 << 20
_SAMPLE_FILES = 512
_SAMPLE_BYTES = 64 << 10
_MOST_BITS = 20
_FEWEST_BITS = 12
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_ODD_FOLDS = ("\N{KELVIN SIGN}".encode(), "\N{LATIN SMALL LETTER LONG S}".encode())
_UTF16 = {b"\xff\xfe": "utf-16-le", b"\xfe\xff": "utf-16-be"}


def read_file(root: Path, path: bytes) -> tuple[Document, bytes] | None:
    """A file's record and its searchable text; None if there is no regular file."""
    try:
        descriptor = os.open(os.fsencode(root) + b"/" + path, _READ)
    except PermissionError:
        return Document(path, Flags.ALWAYS), b""
    except OSError:
        return None
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            return None
        if status.st_size > LARGEST_BYTES:
            return Document(path, Flags.ALWAYS), b""
        try:
            content = file.read(LARGEST_BYTES)
        except OSError:
            return Document(path, Flags.ALWAYS), b""
    text, flags = searched_text(content)
    return Document(path, flags), text


def searched_text(content: bytes) -> tuple[bytes, int]:
    """All that ripgrep can possibly match in this content, as UTF-8; and the document's `Flags`.

    UTF-16 with a byte order mark is decoded, as ripgrep does; after a NUL it reports nothing.
    """
    encoding = _UTF16.get(content[:2])
    if encoding is not None:
        content = content[2:].decode(encoding, "replace").encode("utf-8", "replace")
    flags = 0
    nul = content.find(b"\0")
    if nul >= 0:
        flags, content = Flags.NUL, content[:nul]
    if any(odd in content for odd in _ODD_FOLDS):
        flags |= Flags.ODD_FOLD
    return content, flags


def sample_ranks(root: Path, paths: Sequence[bytes]) -> PairRanks:
    """Ranks byte pairs by rarity in a sample of files spread evenly over the tree."""
    step = max(1, len(paths) // _SAMPLE_FILES)
    found = (read_file(root, path) for path in paths[::step])
    return rank_pairs(text[:_SAMPLE_BYTES] for _, text in filter(None, found))


def write_segments(root: Path, files: Sequence[tuple[bytes, int]], into: Path, ranks: PairRanks) -> list[str]:
    """Writes segments of bounded size from `files` (path, size in bytes); their names in `into`."""
    written: list[str] = []
    for part in _parts(files):
        name, documents, keys = (
            f"segment-{secrets.token_hex(8)}",
            list[Document](),
            list[NDArray[np.uint64]](),
        )
        size_bytes = sum(min(size, LARGEST_BYTES) for _, size in part)
        bits = min(_MOST_BITS, max(_FEWEST_BITS, (size_bytes // 48).bit_length()))
        for numbers, texts in _blocks(root, part, documents):
            keys.append(text_keys(texts, numbers, ranks, bits))
        write_segment(into / name, documents, sorted_unique(keys), bits, ranks)
        written.append(name)
    return written


def _parts(files: Sequence[tuple[bytes, int]]) -> Iterator[list[tuple[bytes, int]]]:
    part: list[tuple[bytes, int]] = []
    size_bytes = 0
    for file in files:
        if part and (size_bytes + file[1] > SEGMENT_BYTES or len(part) == MOST_DOCUMENTS):
            yield part
            part, size_bytes = [], 0
        part.append(file)
        size_bytes += file[1]
    if part:
        yield part


def _blocks(
    root: Path, files: Sequence[tuple[bytes, int]], documents: list[Document]
) -> Iterator[tuple[list[int], list[bytes]]]:
    """Appends each file's record to `documents`; yields the texts in blocks that fit the CPU's cache."""
    numbers: list[int] = []
    texts: list[bytes] = []
    waiting = 0
    for path, _ in files:
        found = read_file(root, path)
        if found is None:
            continue
        document, text = found
        documents.append(document)
        for start in range(0, max(len(text), 1), _PIECE_BYTES):
            numbers.append(len(documents) - 1)
            texts.append(text[start : start + _PIECE_BYTES + LONGEST_BYTES - 1])
            waiting += len(texts[-1])
            if waiting >= _BLOCK_BYTES:
                yield numbers, texts
                numbers, texts, waiting = [], [], 0
    if texts:
        yield numbers, texts
