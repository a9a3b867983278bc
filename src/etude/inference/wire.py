"""What goes between a sampler and its client over a network, as bytes: exact, checked, and no pickle.

    message := "ETWM" format:u16 head_bytes:u32 head array* xxh3_64:u64 of all before    little-endian
    head    := JSON {"content": ..., "arrays": [[dtype, shape], ...]}

Arrays lie behind the head in their order, in C order and little-endian; in the content stands their number.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from etude.errors import EtudeError, SamplerError
from etude.inference.exchange import Command, Event
from etude.records import PolicyVersion, SampleChunk, SampleRequest, SamplingParams, Scores
from etude.serving.errors import decode_error, encode_error

MAGIC = b"ETWM"
FORMAT_VERSION = 1
_HEAD = struct.Struct("<4sHI")
_CHECKSUM = struct.Struct("<Q")
_DTYPES = frozenset(("int32", "int64", "float32", "float64", "uint8", "uint16"))
_MAX_RANK = 3
T = TypeVar("T")
Array = NDArray[Any]


class DamagedMessageError(SamplerError):
    """A message that is cut, altered, or of another format."""


# ---- messages -----------------------------------------------------------------------------------


def pack(content: Any, arrays: Sequence[Array]) -> bytes:
    """A message of JSON values and arrays."""
    listed = [[array.dtype.name, list(array.shape)] for array in arrays]
    head = json.dumps({"content": content, "arrays": listed}, separators=(",", ":")).encode()
    parts = [_HEAD.pack(MAGIC, FORMAT_VERSION, len(head)), head]
    parts += [np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<")).tobytes() for array in arrays]
    body = b"".join(parts)
    return body + _CHECKSUM.pack(xxh3_64_intdigest(body))


def unpack(data: bytes) -> tuple[Any, list[Array]]:
    """The reverse of `pack`. Raises DamagedMessageError."""
    try:
        return _unpack(data)
    except (struct.error, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DamagedMessageError(f"the message is damaged: {error}", field="body") from error


def _unpack(data: bytes) -> tuple[Any, list[Array]]:
    end = len(data) - _CHECKSUM.size
    magic, version, head_bytes = _HEAD.unpack_from(data, 0)
    if (magic, version) != (MAGIC, FORMAT_VERSION):
        raise ValueError(f"neither {MAGIC!r} nor version {FORMAT_VERSION}: {magic!r}, {version}")
    if _CHECKSUM.unpack_from(data, end)[0] != xxh3_64_intdigest(data[:end]):
        raise ValueError("cut or altered")
    place = _HEAD.size + head_bytes
    head = json.loads(data[_HEAD.size : place])
    arrays: list[Array] = []
    for name, shape in head["arrays"]:
        if name not in _DTYPES or len(shape) > _MAX_RANK or any(type(n) is not int or n < 0 for n in shape):
            raise ValueError(f"an array of {name} {shape}")
        dtype = np.dtype(name)
        size = dtype.itemsize * math.prod(shape)
        if place + size > end:
            raise ValueError("arrays are cut")
        found = np.frombuffer(data, dtype.newbyteorder("<"), size // dtype.itemsize, place)
        arrays.append(found.astype(dtype).reshape(shape))
        place += size
    if place != end:
        raise ValueError("more bytes than arrays")
    return head["content"], arrays


# ---- records ------------------------------------------------------------------------------------


def _put(record: Any, arrays: list[Array]) -> dict[str, Any]:
    """A record's fields that are not at their defaults, as JSON values."""
    found: dict[str, Any] = {}
    for one in fields(record):
        value = getattr(record, one.name)
        if isinstance(value, np.ndarray):
            arrays.append(value)
            value = {"array": len(arrays) - 1}
        elif isinstance(value, PolicyVersion | SamplingParams):
            value = {type(value).__name__: asdict(value)}
        elif isinstance(value, frozenset):
            value = {"set": sorted(value)}
        elif isinstance(value, tuple):
            value = {"tuple": list(value)}
        if value is not None:
            found[one.name] = value
    return found


def _take(kind: Callable[..., T], row: Mapping[str, Any], arrays: Sequence[Array]) -> T:
    return kind(**{name: _value(value, arrays) for name, value in row.items()})


def _value(value: Any, arrays: Sequence[Array]) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    match kind:
        case "array":
            return arrays[inner]
        case "PolicyVersion":
            return PolicyVersion(**inner)
        case "SamplingParams":
            return SamplingParams(**inner)
        case "set":
            return frozenset(inner)
        case "tuple":
            return tuple(inner)
        case _:
            raise ValueError(f"a value of kind {kind!r}")


def error_row(error: EtudeError) -> dict[str, Any]:
    """An error as JSON values. One that only the server knows is an engine's failure to its client."""
    return {**encode_error(error), "kind": type(error).__name__}


# ---- what is sent -------------------------------------------------------------------------------


def _reading(read: Callable[[Any, list[Array]], T], data: bytes) -> T:
    content, arrays = unpack(data)
    try:
        return read(content, arrays)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise DamagedMessageError(f"the message says something else: {error!r}", field="body") from error


def pack_commands(commands: Sequence[Command]) -> bytes:
    """For `Exchange.exchange` elsewhere."""
    arrays: list[Array] = []
    rows = [
        [name, _put(value, arrays) if isinstance(value, SampleRequest) else value] for name, value in commands
    ]
    return pack(rows, arrays)


def unpack_commands(data: bytes) -> list[Command]:
    """The reverse. Raises DamagedMessageError."""

    def read(content: Any, arrays: list[Array]) -> list[Command]:
        found: list[Command] = []
        for name, value in content:
            if name == "stream":
                found.append((name, _take(SampleRequest, value, arrays)))
            elif name in ("open", "close", "abort") and isinstance(value, str):
                found.append((name, value))
            elif name == "beside":
                session, other = value
                if not (isinstance(session, str) and isinstance(other, str)):
                    raise ValueError(f"must name two sessions: {value!r}")
                found.append((name, (session, other)))
            else:
                raise ValueError(f"no such command: {name!r}")
        return found

    return _reading(read, data)


def pack_events(events: Sequence[Event]) -> bytes:
    """What `Exchange.poll` told."""
    arrays: list[Array] = []
    rows: list[list[Any]] = []
    for request_id, item in events:
        if isinstance(item, SampleChunk):
            rows.append([request_id, "chunk", _put(item, arrays)])
        elif item is None:
            rows.append([request_id, "end", None])
        else:
            rows.append([request_id, "error", error_row(item)])
    return pack(rows, arrays)


def unpack_events(data: bytes) -> list[Event]:
    """The reverse. Raises DamagedMessageError."""

    def read(content: Any, arrays: list[Array]) -> list[Event]:
        found: list[Event] = []
        for request_id, kind, row in content:
            if kind == "chunk":
                found.append((request_id, _take(SampleChunk, row, arrays)))
            elif kind == "error":
                error = decode_error(row, otherwise=SamplerError)
                fits = isinstance(error, EtudeError)
                found.append((request_id, error if fits else SamplerError(str(error))))
            elif kind == "end":
                found.append((request_id, None))
            else:
                raise ValueError(f"no such event: {kind!r}")
        return found

    return _reading(read, data)


def pack_question(tokens: NDArray[np.int32], version: PolicyVersion) -> bytes:
    """The arguments of `Sampler.score`."""
    return pack(asdict(version), [tokens])


def unpack_question(data: bytes) -> tuple[NDArray[np.int32], PolicyVersion]:
    """The reverse. Raises DamagedMessageError."""

    def read(content: Any, arrays: list[Array]) -> tuple[NDArray[np.int32], PolicyVersion]:
        (tokens,) = arrays
        return tokens.astype(np.int32, copy=False), PolicyVersion(**content)

    return _reading(read, data)


def pack_scores(scores: Scores) -> bytes:
    """What `Sampler.score` gave."""
    arrays: list[Array] = []
    return pack(_put(scores, arrays), arrays)


def unpack_scores(data: bytes) -> Scores:
    """The reverse. Raises DamagedMessageError."""
    return _reading(lambda content, arrays: _take(Scores, content, arrays), data)
