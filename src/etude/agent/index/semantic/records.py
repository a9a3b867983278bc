"""What is kept of a file's content: its text, its chunks, their terms. Written once, found by content."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass

import numpy as np
import zstandard
from blake3 import blake3

from etude.agent.index.semantic.chunks import CHUNKER_VERSION, Chunk, chunk_file, chunk_hash, chunker_key
from etude.agent.index.semantic.embedding import FEED_VERSION, feed
from etude.agent.index.semantic.lexical import TermCounts
from etude.agent.index.semantic.words import count_terms
from etude.errors import StoreError

__all__ = ["HASH_BYTES", "FileRecord", "content_key", "make_record", "read_record", "write_record"]

HASH_BYTES = 16
SYMBOL_WEIGHT = 4
"""A word of a chunk's name counts as so many in its lines."""
RECORD_VERSION = 1
_MAGIC = b"ESR1"
_COUNTS = struct.Struct("<4sIII")


@dataclass(frozen=True, slots=True, eq=False)
class FileRecord:
    """The chunks of one content."""

    chunks: tuple[Chunk, ...]
    hashes: tuple[bytes, ...]
    """Names of the chunks' vectors."""
    terms: TermCounts
    """Words of the chunks' lines and names; a document is a chunk."""


def content_key(path: str, digest: bytes) -> bytes:
    """Names the record of a content, by its BLAKE3 digest, under a path: this picks the grammar."""
    versions = f"{RECORD_VERSION}/{FEED_VERSION}/{CHUNKER_VERSION}/{chunker_key(path)}"
    return blake3(digest + versions.encode()).digest(length=HASH_BYTES)


def make_record(path: str, content: bytes) -> FileRecord:
    """Cuts a file and counts its words: a millisecond or two for an ordinary one."""
    chunks = tuple(chunk_file(path, content))
    return FileRecord(
        chunks,
        tuple(chunk_hash(feed(chunk.symbol, chunk.text)) for chunk in chunks),
        TermCounts.of([count_terms(((chunk.text, 1), (chunk.symbol, SYMBOL_WEIGHT))) for chunk in chunks]),
    )


def write_record(record: FileRecord) -> bytes:
    """Bytes for the store."""
    head = [[c.first_line, c.last_line, c.symbol, c.kind, c.text] for c in record.chunks]
    text = json.dumps(head, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")
    terms = record.terms
    arrays = (terms.docs.astype(np.uint32), terms.terms, terms.counts)
    body = b"".join((text, *record.hashes, *(array.tobytes() for array in arrays)))
    packed = zstandard.ZstdCompressor(3, write_checksum=True).compress(body)
    return _COUNTS.pack(_MAGIC, len(text), len(record.chunks), len(terms.docs)) + packed


def read_record(data: bytes) -> FileRecord:
    """What `write_record` wrote. Raises `StoreError` for anything else."""
    try:
        return _read(data)
    except (struct.error, zstandard.ZstdError, ValueError, TypeError, IndexError) as error:
        raise StoreError("a file's record in the code index is damaged", fix="delete the store") from error


def _read(data: bytes) -> FileRecord:
    magic, text_bytes, num_chunks, num_terms = _COUNTS.unpack_from(data)
    if magic != _MAGIC:
        raise ValueError("not a record")
    length = text_bytes + num_chunks * HASH_BYTES + num_terms * 9
    body = memoryview(_decompress(data[_COUNTS.size :], length))
    head = json.loads(bytes(body[:text_bytes]).decode("utf-8", "surrogatepass"))
    at = text_bytes
    hashes = tuple(bytes(body[at + i * HASH_BYTES : at + (i + 1) * HASH_BYTES]) for i in range(num_chunks))
    at += num_chunks * HASH_BYTES
    docs = np.frombuffer(body, np.uint32, num_terms, at).astype(np.int32)
    terms = np.frombuffer(body, np.uint32, num_terms, at + num_terms * 4)
    counts = np.frombuffer(body, np.uint8, num_terms, at + num_terms * 8)
    if len(head) != num_chunks or (num_terms and not 0 <= docs.min() <= docs.max() < num_chunks):
        raise ValueError("counts disagree")
    chunks = tuple(
        Chunk(int(first), int(last), str(name), str(kind), str(text))
        for first, last, name, kind, text in head
    )
    return FileRecord(chunks, hashes, TermCounts(num_chunks, docs, terms, counts))


def _decompress(frame: bytes, length: int) -> bytes:
    """One whole frame of `length` bytes, and nothing behind it. A flipped bit may turn the checksum into such
    bytes, and a frame's own length into more than any memory has."""
    if zstandard.frame_content_size(frame) != length:
        raise ValueError("wrong length")
    return zstandard.ZstdDecompressor().decompress(frame, allow_extra_data=False)
