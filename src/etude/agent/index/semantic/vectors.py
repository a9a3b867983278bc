"""The file of a model's vectors: rows of 8-bit numbers, appended, mapped, searched by one product.

A row is `dimension` signed bytes and one float32 that scales them: half of float16's size, and what is
cheaper to turn into float32 than float16 is. Its product with a question differs from float32's by less than
0.01. Rows are only ever added; whoever has mapped the file goes on reading what was there.
"""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from etude.agent.index.semantic.embedding import Vectors
from etude.errors import StoreError
from etude.kit.durable import sync_file

__all__ = ["VectorFile", "append_rows", "pack_rows"]

_BLOCK_ROWS = 1024
"""Rows turned into float32 at once: they stay in the second-level cache."""


def row_type(dimension: int) -> np.dtype[np.void]:
    """One row as it lies in the file."""
    return np.dtype([("bytes", np.int8, (dimension,)), ("scale", "<f4")])


def pack_rows(vectors: Vectors) -> NDArray[np.void]:
    """[rows] of `row_type`: each vector in steps of its largest number's 127th."""
    rows = np.zeros(len(vectors), row_type(vectors.shape[1]))
    largest = np.abs(vectors).max(axis=1, initial=0)
    steps = np.where(largest > 0, largest / 127, 1).astype(np.float32)
    rows["bytes"] = np.rint(vectors / steps[:, None])
    rows["scale"] = steps
    return rows


def append_rows(path: Path, num_rows: int, rows: NDArray[np.void]) -> None:
    """Writes `rows` after the first `num_rows`, over what was never published; waits for the disk."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "r+b") as file:
        start = num_rows * rows.dtype.itemsize
        if file.seek(0, os.SEEK_END) < start:
            raise StoreError(
                "the file of vectors is shorter than its index says",
                received=str(path),
                fix="delete the store",
            )
        file.truncate(start)
        file.seek(start)
        file.write(rows.tobytes())
        sync_file(file)


class VectorFile:
    """The first `num_rows` rows of a file, mapped. Raises `StoreError` if there are fewer."""

    def __init__(self, path: Path, dimension: int, num_rows: int) -> None:
        self.num_rows = num_rows
        self.dimension = dimension
        kind = row_type(dimension)
        if num_rows == 0:
            self._rows = np.zeros(0, kind)
            return
        try:
            with path.open("rb") as file:
                # Not to the file's end: a writer that starts over what was never published may shorten that.
                mapped = mmap.mmap(file.fileno(), num_rows * kind.itemsize, prot=mmap.PROT_READ)
        except (OSError, ValueError) as error:
            raise StoreError(
                "the file of vectors is missing or too short", received=str(path), fix="delete the store"
            ) from error
        self._rows = np.frombuffer(mapped, kind)

    def rows(self, numbers: NDArray[np.integer]) -> Vectors:
        """[len(numbers), dimension]"""
        rows = self._rows[numbers]
        return rows["bytes"].astype(np.float32) * rows["scale"][:, None]

    def products(self, question: NDArray[np.float32], rows: NDArray[np.integer]) -> NDArray[np.float32]:
        """[len(rows)]: of the question with each of these rows; exact but for the rounding of rows."""
        result = np.empty(len(rows), dtype=np.float32)
        values, scales = self._rows["bytes"], self._rows["scale"]
        block = np.empty((_BLOCK_ROWS, self.dimension), dtype=np.float32)
        for start in range(0, len(rows), _BLOCK_ROWS):
            part = rows[start : start + _BLOCK_ROWS]
            first, last = int(part[0]), int(part[-1])
            # Rows of one tree mostly lie in one stretch: then nothing is gathered.
            where = slice(first, last + 1) if _is_run(part) else part
            floats = block[: len(part)]
            np.copyto(floats, values[where], casting="unsafe")
            result[start : start + len(part)] = (floats @ question) * scales[where]
        return result


def _is_run(rows: NDArray[np.integer]) -> bool:
    return int(rows[-1]) - int(rows[0]) == len(rows) - 1 and bool(np.all(np.diff(rows) == 1))
