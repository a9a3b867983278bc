"""Serialises one trajectory with its arrays to bytes that are sent between machines; damage is detected.

    magic | BLAKE3 of the rest (32 bytes) | zstd frame of: length of the header (8 bytes), header, arrays

The header is the trajectory's document and, per segment, the dtypes and shapes of its arrays. Expert routes
are included: a reference to the sender's blob store would be useless to the receiver.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import zstandard
from blake3 import blake3
from numpy.typing import NDArray

from etude.errors import StoreError
from etude.records import BlobRef, Segment, Trajectory
from etude.store.documents import Arrays, dump_json, trajectory_document, trajectory_from_document

MAGIC = b"ETDB\x01\n"
_DIGEST_BYTES = 32
_LENGTH_BYTES = 8
_LEVEL = 3
_TOKEN_TYPES = (("tokens", np.dtype("<i4")), ("sampled", np.dtype("bool")), ("logprobs", np.dtype("<f4")))
_DAMAGE = (
    zstandard.ZstdError, ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError
)  # fmt: skip
"""Errors that reading raises for bytes that are not from `pack_trajectory`."""

GetBlob = Callable[[BlobRef], NDArray[Any]]
PutBlob = Callable[[NDArray[Any]], BlobRef]


def pack_trajectory(trajectory: Trajectory, get_blob: GetBlob) -> bytes:
    """Serialises the trajectory with the arrays that it refers to. Raises StoreError for facts that are not
    plain JSON, and what `get_blob` raises."""
    parts: list[bytes] = []
    blobs: list[list[dict[str, Any] | None]] = []
    for segment in trajectory.segments:
        parts += [np.ascontiguousarray(getattr(segment, n), kind).tobytes() for n, kind in _TOKEN_TYPES]
        described: list[dict[str, Any] | None] = []
        for ref in (segment.routes, segment.support):
            if ref is None:
                described.append(None)
                continue
            array = get_blob(ref)
            portable = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
            described.append({"dtype": portable.dtype.str, "shape": list(portable.shape)})
            parts.append(portable.tobytes())
        blobs.append(described)
    document = {
        "trajectory": trajectory_document(trajectory),
        "lengths": [len(segment.tokens) for segment in trajectory.segments],
        "blobs": blobs,
    }
    header = dump_json(document, str(trajectory.id)).encode()
    content = b"".join([len(header).to_bytes(_LENGTH_BYTES, "little"), header, *parts])
    packed = zstandard.ZstdCompressor(level=_LEVEL).compress(content)
    return MAGIC + blake3(packed).digest() + packed


class Bundle:
    """An unpacked trajectory whose blobs are not in a blob store yet."""

    def __init__(self, trajectory: Trajectory, blobs: list[tuple[NDArray[Any] | None, ...]]) -> None:
        self.trajectory = trajectory
        """Without references to its blobs."""
        self._blobs = blobs

    def store_blobs(self, put_blob: PutBlob) -> Trajectory:
        """Stores the blobs with `put_blob`; returns the trajectory with references to them."""
        segments: list[Segment] = []
        for segment, (routes, support) in zip(self.trajectory.segments, self._blobs, strict=True):
            named = {
                name: put_blob(array)
                for name, array in (("routes", routes), ("support", support))
                if array is not None
            }
            segments.append(replace(segment, **named))
        return replace(self.trajectory, segments=tuple(segments))


def unpack_trajectory(data: bytes, max_bytes: int = sys.maxsize) -> Bundle:
    """Inverse of `pack_trajectory`. Raises StoreError for other bytes or a content above `max_bytes`."""
    start = len(MAGIC) + _DIGEST_BYTES
    if not data.startswith(MAGIC) or len(data) < start:
        raise _damaged("it does not begin like one")
    packed = data[start:]
    if blake3(packed).digest() != data[len(MAGIC) : start]:
        raise _damaged("its hash differs")
    try:
        size = zstandard.frame_content_size(packed)
        if not 0 <= size <= max_bytes:
            raise StoreError(
                "is too large when unpacked",
                field="session",
                received=size,
                fix="raise clusters.max_result_bytes",
            )
        return _read(zstandard.ZstdDecompressor().decompress(packed, max_output_size=max_bytes))
    except _DAMAGE as error:
        raise _damaged(str(error)) from error


def _read(content: bytes) -> Bundle:
    arrays = _Arrays(content)
    header: dict[str, Any] = arrays.header
    segments: list[Arrays] = []
    blobs: list[tuple[NDArray[Any] | None, ...]] = []
    for length, described in zip(header["lengths"], header["blobs"], strict=True):
        tokens, sampled, logprobs = (arrays.read_array(kind, (length,)) for _, kind in _TOKEN_TYPES)
        segments.append((tokens, sampled, logprobs))
        routes, support = (
            None if blob is None else arrays.read_array(np.dtype(blob["dtype"]), tuple(blob["shape"]))
            for blob in described
        )
        blobs.append((routes, support))
    arrays.check_end()
    document = header["trajectory"]
    for segment in document["segments"]:
        segment["routes"] = segment["support"] = None
    return Bundle(trajectory_from_document(document, segments), blobs)


class _Arrays:
    """Reads the content of a bundle sequentially. Raises ValueError."""

    def __init__(self, content: bytes) -> None:
        self._content = content
        self._offset = _LENGTH_BYTES + int.from_bytes(content[:_LENGTH_BYTES], "little")
        self.header = json.loads(content[_LENGTH_BYTES : self._offset])

    def read_array(self, kind: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
        """The next array, writable."""
        if kind.kind not in "biufc" or min(shape, default=0) < 0:
            raise ValueError(f"no array of {kind}{list(shape)}")
        count = math.prod(shape)
        array = np.frombuffer(self._content, kind, count, self._offset).reshape(shape)
        self._offset += array.nbytes
        return array.copy()

    def check_end(self) -> None:
        """Raises ValueError if there is more."""
        if self._offset != len(self._content):
            raise ValueError("there is more data than it declares")


def _damaged(reason: str) -> StoreError:
    return StoreError(
        f"is not a complete session: {reason}", field="session", fix="send it again, or sample it again"
    )
