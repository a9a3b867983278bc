"""One trajectory with its arrays as bytes that travel between machines: whole, or refused.

    magic | BLAKE3 of the rest (32 bytes) | zstd frame of: length of the header (8 bytes), header, arrays

The header is the trajectory's document and, segment by segment, dtypes and shapes of its arrays, those of its
expert routes included: a reference to somebody else's blob store would mean nothing to the reader.
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
from etude.store.documents import Arrays, trajectory_document, trajectory_from_document

MAGIC = b"ETDB\x01\n"
_DIGEST_BYTES = 32
_LENGTH_BYTES = 8
_LEVEL = 3
_TOKEN_TYPES = (("tokens", np.dtype("<i4")), ("sampled", np.dtype("bool")), ("logprobs", np.dtype("<f4")))
_DAMAGE = (
    zstandard.ZstdError, ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError
)  # fmt: skip
"""What reading raises for bytes that `pack_trajectory` has not packed."""

GetBlob = Callable[[BlobRef], NDArray[Any]]
PutBlob = Callable[[NDArray[Any]], BlobRef]


def pack_trajectory(trajectory: Trajectory, get_blob: GetBlob) -> bytes:
    """The trajectory, with the arrays that it names by reference. Raises StoreError for facts that are not
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
            kept = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
            described.append({"dtype": kept.dtype.str, "shape": list(kept.shape)})
            parts.append(kept.tobytes())
        blobs.append(described)
    try:
        header = json.dumps(
            {
                "trajectory": trajectory_document(trajectory),
                "lengths": [len(segment.tokens) for segment in trajectory.segments],
                "blobs": blobs,
            },
            separators=(",", ":"),
        ).encode()
    except (TypeError, ValueError) as error:
        raise StoreError(
            f"holds something that JSON cannot: {error}",
            field=str(trajectory.id),
            fix="facts, timings and arguments must be plain JSON values",
        ) from error
    content = b"".join([len(header).to_bytes(_LENGTH_BYTES, "little"), header, *parts])
    packed = zstandard.ZstdCompressor(level=_LEVEL).compress(content)
    return MAGIC + blake3(packed).digest() + packed


class Bundle:
    """An unpacked trajectory whose blobs are kept nowhere yet."""

    def __init__(self, trajectory: Trajectory, blobs: list[tuple[NDArray[Any] | None, ...]]) -> None:
        self.trajectory = trajectory
        """Without its blobs."""
        self._blobs = blobs

    def settle(self, put_blob: PutBlob) -> Trajectory:
        """The trajectory, with its arrays kept by `put_blob` and named."""
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
    """What `pack_trajectory` packed, at most `max_bytes` of it. Raises StoreError for anything else."""
    start = len(MAGIC) + _DIGEST_BYTES
    if not data.startswith(MAGIC) or len(data) < start:
        raise _damaged("it does not begin as one")
    packed = data[start:]
    if blake3(packed).digest() != data[len(MAGIC) : start]:
        raise _damaged("its hash is another")
    try:
        size = zstandard.frame_content_size(packed)
        if not 0 <= size <= max_bytes:
            raise StoreError(
                "unpacks to more than is taken",
                field="session",
                received=size,
                fix="clusters.max_result_bytes",
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
        tokens, sampled, logprobs = (arrays.take(kind, (length,)) for _, kind in _TOKEN_TYPES)
        segments.append((tokens, sampled, logprobs))
        routes, support = (
            None if one is None else arrays.take(np.dtype(one["dtype"]), tuple(one["shape"]))
            for one in described
        )
        blobs.append((routes, support))
    arrays.check_end()
    document = header["trajectory"]
    for segment in document["segments"]:
        segment["routes"] = segment["support"] = None
    return Bundle(trajectory_from_document(document, segments), blobs)


class _Arrays:
    """Reads the content of a bundle from its beginning. Raises ValueError."""

    def __init__(self, content: bytes) -> None:
        self._content = content
        self._place = _LENGTH_BYTES + int.from_bytes(content[:_LENGTH_BYTES], "little")
        self.header = json.loads(content[_LENGTH_BYTES : self._place])

    def take(self, kind: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
        """The next array, writable."""
        if kind.kind not in "biufc" or min(shape, default=0) < 0:
            raise ValueError(f"no array of {kind}{list(shape)}")
        count = math.prod(shape)
        array = np.frombuffer(self._content, kind, count, self._place).reshape(shape)
        self._place += array.nbytes
        return array.copy()

    def check_end(self) -> None:
        """Raises ValueError if there is more."""
        if self._place != len(self._content):
            raise ValueError("there is more than it says")


def _damaged(reason: str) -> StoreError:
    return StoreError(
        f"is no whole session: {reason}", field="session", fix="send it again, or let it be sampled again"
    )
