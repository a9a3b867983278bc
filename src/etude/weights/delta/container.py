"""The file format of weight updates: frames of encoded tensors and a manifest.

    magic | frame of each tensor, one after another | manifest | its length | its BLAKE3 | magic

The manifest is JSON in zstd: versions of target and base, and for each tensor its entry and its frame's size
and hash. It comes last, so that an update can be streamed while it is encoded. Every byte is covered by a
hash or compared with its expected value.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

import zstandard
from blake3 import blake3
from xxhash import xxh3_64

from etude.errors import WeightUpdateError
from etude.records import PolicyVersion, TensorEntry
from etude.weights.manifest import digest_entries

MAGIC = b"ETUDEWU1"
_END = b"ETUDEEND"
_LENGTH_BYTES, _HASH_BYTES = 8, 32
_TRAILER_BYTES = _LENGTH_BYTES + _HASH_BYTES + len(_END)
_MOST_MANIFEST_BYTES = 1 << 31
_DAMAGE = (ValueError, KeyError, TypeError, AttributeError, OverflowError, zstandard.ZstdError)
"""What reading damaged bytes raises."""


@dataclass(frozen=True, slots=True)
class Frame:
    """The encoded bytes of a tensor within an update."""

    size_bytes: int
    digest: str
    """xxh3-64 of the frame, which is checked before decoding."""


@dataclass(frozen=True, slots=True)
class UpdateManifest:
    """The manifest of an update file."""

    version: PolicyVersion
    """The resulting version, with its digest."""
    base: PolicyVersion | None
    """The base version, with its digest; None for a full snapshot."""
    tensors: tuple[TensorEntry, ...]
    """Tensors of the resulting version, sorted by name."""
    frames: tuple[Frame, ...]
    """One per tensor, in the same order."""


def hash_frame(*parts: bytes | memoryview) -> str:
    """See Frame.digest."""
    digest = xxh3_64()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def pack_end(manifest: UpdateManifest) -> bytes:
    """Encodes everything after the frames."""
    packed = zstandard.compress(json.dumps(_to_json(manifest), separators=(",", ":")).encode())
    return packed + len(packed).to_bytes(_LENGTH_BYTES, "little") + blake3(packed).digest() + _END


def read_update(update: bytes | memoryview) -> tuple[UpdateManifest, list[memoryview]]:
    """Reads the manifest and the frames, checked against their hashes. Raises WeightUpdateError."""
    data = memoryview(update).cast("B")
    try:
        manifest, end = _read_manifest(data)
        frames: list[memoryview] = []
        at = len(MAGIC)
        for entry, frame in zip(manifest.tensors, manifest.frames, strict=True):
            frames.append(data[at : at + frame.size_bytes])
            at += frame.size_bytes
            if hash_frame(frames[-1]) != frame.digest:
                raise ValueError(f"the hash of {entry.name} does not match")
        if at != end:
            raise ValueError("the frames do not fill the update")
    except _DAMAGE as error:
        raise damaged(str(error)) from error
    return manifest, frames


def read_update_manifest(update: bytes | memoryview) -> UpdateManifest:
    """Reads only the manifest, checked against its hash. Raises WeightUpdateError."""
    try:
        return _read_manifest(memoryview(update).cast("B"))[0]
    except _DAMAGE as error:
        raise damaged(str(error)) from error


def damaged(problem: str, field: str = "update") -> WeightUpdateError:
    """The error for damaged bytes."""
    return WeightUpdateError(
        f"the update is damaged: {problem}", field=field, fix="fetch it again, or the full snapshot"
    )


def _read_manifest(data: memoryview) -> tuple[UpdateManifest, int]:
    """The manifest, and where the frames end."""
    if len(data) < len(MAGIC) + _TRAILER_BYTES or bytes(data[: len(MAGIC)]) != MAGIC:
        raise ValueError("the header is invalid")
    trailer = bytes(data[-_TRAILER_BYTES:])
    size = int.from_bytes(trailer[:_LENGTH_BYTES], "little")
    end = len(data) - _TRAILER_BYTES - size
    if trailer[_LENGTH_BYTES + _HASH_BYTES :] != _END or end < len(MAGIC):
        raise ValueError("the trailer is invalid")
    packed = data[end : end + size]
    if blake3(packed).digest() != trailer[_LENGTH_BYTES : _LENGTH_BYTES + _HASH_BYTES]:
        raise ValueError("the hash of its manifest does not match")
    text = zstandard.decompress(packed, max_output_size=_MOST_MANIFEST_BYTES)
    manifest = _from_json(json.loads(text))
    if digest_entries(manifest.tensors) != manifest.version.digest:
        raise ValueError("its manifest does not match its version's digest")
    return manifest, end


def _to_json(manifest: UpdateManifest) -> dict[str, Any]:
    return {
        "version": asdict(manifest.version),
        "base": None if manifest.base is None else asdict(manifest.base),
        "tensors": [
            [entry.name, entry.shape, entry.dtype, entry.digest, frame.size_bytes, frame.digest]
            for entry, frame in zip(manifest.tensors, manifest.frames, strict=True)
        ],
    }


def _from_json(values: dict[str, Any]) -> UpdateManifest:
    tensors: list[TensorEntry] = []
    frames: list[Frame] = []
    for name, shape, dtype, digest, size_bytes, frame_digest in values["tensors"]:
        tensors.append(TensorEntry(name, tuple(shape), dtype, digest))
        frames.append(Frame(size_bytes, frame_digest))
    base = None if values["base"] is None else PolicyVersion(**values["base"])
    return UpdateManifest(PolicyVersion(**values["version"]), base, tuple(tensors), tuple(frames))
