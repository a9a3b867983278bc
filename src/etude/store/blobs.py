"""Blob stores for large arrays that records refer to: expert routes, supports of truncated sampling.

They store arrays of numbers or booleans. What is read is equal in dtype (little-endian), shape and content,
read-only, and checked against the digest in its reference.
"""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from etude.errors import StoreError
from etude.kit.durable import make_directory, write_bytes
from etude.records import BlobRef, Trajectory

FILE_URL = re.compile(r"file:([0-9a-f]{2}/[0-9a-f]{32}\.bin)")


class MemoryBlobs:
    """Blobs within one process, under `memory:<number>`; each lives until it is discarded."""

    def __init__(self) -> None:
        self._arrays: dict[str, NDArray[Any]] = {}
        self._numbers = itertools.count()

    def put(self, array: NDArray[Any]) -> BlobRef:
        """Stores a copy. Raises StoreError for arrays of other types."""
        copy = np.array(_portable(array), order="C")
        copy.setflags(write=False)
        url = f"memory:{next(self._numbers)}"
        self._arrays[url] = copy
        return BlobRef(url, _digest(copy), copy.dtype.name, copy.shape)

    def get(self, ref: BlobRef) -> NDArray[Any]:
        """The stored array, not a copy. Raises StoreError if it was discarded or does not match."""
        array = self._arrays.get(ref.url)
        if array is None:
            raise _missing(ref)
        return _checked(array, ref)

    def discard(self, ref: BlobRef) -> None:
        """Frees the array. Unknown references are ignored."""
        self._arrays.pop(ref.url, None)

    def __len__(self) -> int:
        """Number of arrays held."""
        return len(self._arrays)


class FileBlobs:
    """Blobs as files named by their digest, under `file:<path within the directory>`.

    The urls are relative, so that a run directory can be moved. Equal arrays share a file.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def put(self, array: NDArray[Any]) -> BlobRef:
        """Writes the array durably unless a file with its content exists. Raises StoreError."""
        portable = np.ascontiguousarray(_portable(array)).reshape(array.shape)
        digest = _digest(portable)
        name = f"{digest[:2]}/{digest}.bin"
        path = self._directory / name
        if not path.exists():
            try:
                make_directory(path.parent)
                write_bytes(path, portable.tobytes())
            except OSError as error:
                raise StoreError(
                    f"could not be written: {error.strerror}",
                    field=name,
                    fix="check the disk's free space and permissions",
                ) from error
        return BlobRef(f"file:{name}", digest, portable.dtype.name, portable.shape)

    def get(self, ref: BlobRef) -> NDArray[Any]:
        """Reads the array. Raises StoreError if it is missing, damaged or not in this store."""
        found = FILE_URL.fullmatch(ref.url)
        if found is None:
            raise StoreError("is not a blob of this store", field="url", received=ref.url)
        try:
            data = (self._directory / found[1]).read_bytes()
        except OSError as error:
            raise _missing(ref) from error
        try:
            array = np.frombuffer(data, dtype=np.dtype(ref.dtype)).reshape(ref.shape)
        except (TypeError, ValueError) as error:
            raise _damaged(ref, str(error)) from error
        return _checked(array, ref)


BlobStore = MemoryBlobs | FileBlobs


class PermanentBlobs(FileBlobs):
    """Blobs that a run keeps after training on them."""

    def discard(self, ref: BlobRef) -> None:
        """Does nothing: later training on the run's trajectories needs the array."""


def blobs_of(trajectory: Trajectory) -> list[BlobRef]:
    """References to the arrays of a trajectory that are in a blob store."""
    refs = (ref for segment in trajectory.segments for ref in (segment.routes, segment.support))
    return [ref for ref in refs if ref is not None]


Blobs = MemoryBlobs | PermanentBlobs
"""Store of a run's expert routes: until they are trained on, or permanently."""


def open_blobs(routes: Path | None) -> Blobs:
    """A store for expert routes: permanent in that directory, or in memory until they are trained on."""
    return MemoryBlobs() if routes is None else PermanentBlobs(routes)


def _portable(array: NDArray[Any]) -> NDArray[Any]:
    """The array in little-endian byte order. Raises StoreError unless it has numbers or booleans."""
    if array.dtype.kind not in "biufc":
        raise StoreError(
            "only arrays of numbers or booleans can be kept", field="dtype", received=str(array.dtype)
        )
    return array.astype(array.dtype.newbyteorder("<"), copy=False)


def _checked(array: NDArray[Any], ref: BlobRef) -> NDArray[Any]:
    if array.dtype.name != ref.dtype or array.shape != ref.shape:
        raise _damaged(ref, f"it is {array.dtype.name}{list(array.shape)}")
    if _digest(array) != ref.digest:
        raise _damaged(ref, "its digest differs")
    return array


def _digest(array: NDArray[Any]) -> str:
    return xxhash.xxh3_128_hexdigest(array.tobytes())


def _missing(ref: BlobRef) -> StoreError:
    return StoreError("no such blob", field="url", received=ref.url)


def _damaged(ref: BlobRef, reason: str) -> StoreError:
    return StoreError(
        f"this blob does not match its reference: {reason}",
        field="url",
        received=ref.url,
        fix="restore it, or leave its trajectory out",
    )
