"""The binary wire format between a sampler and its clients: exact, checksummed, and without pickle.

    message := "ETWM" format:u16 head_bytes:u32 head array* xxh3_64:u64 of all before    little-endian
    head    := JSON {"content": ..., "arrays": [[dtype, shape], ...]}

Arrays follow the head in order, C-contiguous and little-endian. In the content, values that JSON lacks are
objects of one entry, which names their type:

    {"array": 0}   {"tuple": [...]}   {"set": [...]}   {"map": {...}}   {"error": {...}}
    {"SampleRequest": {field: value, ...}}     a record, without its fields that are None
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from etude.errors import EtudeError, SamplerError
from etude.records import (
    PolicyVersion,
    SampleChunk,
    SampleRequest,
    SamplingParams,
    Scores,
    TensorEntry,
    WeightManifest,
)
from etude.serving.errors import decode_error, encode_error

MAGIC = b"ETWM"
FORMAT_VERSION = 2
RECORDS = (PolicyVersion, SampleChunk, SampleRequest, SamplingParams, Scores, TensorEntry, WeightManifest)
_HEAD = struct.Struct("<4sHI")
_CHECKSUM = struct.Struct("<Q")
_DTYPES = frozenset(("int32", "int64", "float32", "float64", "uint8", "uint16"))
_MAX_RANK = 3
Array = NDArray[Any]


class DamagedMessageError(SamplerError):
    """A message that is cut, altered, or of another format."""


def pack(content: Any) -> bytes:
    """A message of JSON values, arrays, tuples, sets, errors and records (dataclasses)."""
    arrays: list[Array] = []
    written = _written(content, arrays)
    listed = [[array.dtype.name, list(array.shape)] for array in arrays]
    head = json.dumps({"content": written, "arrays": listed}, separators=(",", ":")).encode()
    parts = [_HEAD.pack(MAGIC, FORMAT_VERSION, len(head)), head]
    parts += [np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<")).tobytes() for array in arrays]
    body = b"".join(parts)
    return body + _CHECKSUM.pack(xxh3_64_intdigest(body))


def unpack(data: bytes, records: Iterable[type] = RECORDS) -> Any:
    """The reverse of `pack`. `records`: those that may be in it. Raises DamagedMessageError."""
    try:
        content, arrays = _split(data)
        return _read(content, arrays, {kind.__name__: kind for kind in records})
    except (struct.error, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedMessageError(f"the message is damaged: {error!r}", field="body") from error


def error_row(error: EtudeError) -> dict[str, Any]:
    """An error as JSON values. Clients decode error types that they do not know as SamplerError."""
    return {**encode_error(error), "kind": type(error).__name__}


def _split(data: bytes) -> tuple[Any, list[Array]]:
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


def _written(value: Any, arrays: list[Array]) -> Any:
    """Converts a value to JSON values; appends its arrays to `arrays`."""
    if isinstance(value, np.ndarray):
        arrays.append(value)
        return {"array": len(arrays) - 1}
    if isinstance(value, EtudeError):
        return {"error": error_row(value)}
    if isinstance(value, Mapping):
        return {"map": {key: _written(item, arrays) for key, item in value.items()}}
    if isinstance(value, frozenset):
        return {"set": sorted(value)}
    if isinstance(value, list | tuple):
        listed = [_written(item, arrays) for item in value]
        return {"tuple": listed} if isinstance(value, tuple) else listed
    if is_dataclass(value):
        found = ((field.name, getattr(value, field.name)) for field in fields(value))
        return {type(value).__name__: {name: _written(x, arrays) for name, x in found if x is not None}}
    return value


def _read(value: Any, arrays: Sequence[Array], records: Mapping[str, type]) -> Any:
    if isinstance(value, list):
        return [_read(item, arrays, records) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    match kind:
        case "array":
            return arrays[inner]
        case "tuple":
            return tuple(_read(inner, arrays, records))
        case "set":
            return frozenset(inner)
        case "map":
            return {key: _read(item, arrays, records) for key, item in inner.items()}
        case "error":
            error = decode_error(inner, otherwise=SamplerError)
            return error if isinstance(error, EtudeError) else SamplerError(str(error))
        case _:
            return records[kind](**{name: _read(item, arrays, records) for name, item in inner.items()})
