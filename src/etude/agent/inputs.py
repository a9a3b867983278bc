"""The inputs of a session, as values: the session is a function of them, so storing them stores it.

Applied again in order they give the same session, bit for bit; applied up to some turn, the session as it was
then. So one journal serves resuming, forking and replay.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from etude.protocols import Session
from etude.records import PolicyVersion, SampleChunk, Status, ToolCall, ToolErrorClass, ToolResult


@dataclass(frozen=True, slots=True)
class ChunksIn:
    """The chunks of one request, as far as they arrived."""

    chunks: tuple[SampleChunk, ...]


@dataclass(frozen=True, slots=True)
class ResultsIn:
    """The results of one turn."""

    results: tuple[ToolResult, ...]


@dataclass(frozen=True, slots=True)
class ArchivedIn:
    """A full context was archived, or could not be (`error`)."""

    error: str = ""


@dataclass(frozen=True, slots=True)
class PrefixMissIn:
    """The sampler no longer held the session's prefix."""


@dataclass(frozen=True, slots=True)
class UserIn:
    """Another message of the user."""

    text: str


@dataclass(frozen=True, slots=True)
class StopIn:
    """The session was ended from outside."""

    status: Status
    cause: str


Input = ChunksIn | ResultsIn | ArchivedIn | PrefixMissIn | UserIn | StopIn


def apply(session: Session, given: Input) -> None:
    """Applies an input to a session."""
    match given:
        case ChunksIn(chunks):
            for chunk in chunks:
                session.on_chunk(chunk)
        case ResultsIn(results):
            session.on_results(results)
        case ArchivedIn(error):
            session.on_archived(error)
        case PrefixMissIn():
            session.on_prefix_miss()
        case UserIn(text):
            session.on_user(text)
        case StopIn(status, cause):
            session.stop(status, cause)


def merge(chunks: Iterable[SampleChunk]) -> tuple[SampleChunk, ...]:
    """Merges neighbouring chunks where that loses nothing: engines send one token at a time."""
    merged: list[SampleChunk] = []
    run: list[SampleChunk] = []
    for chunk in chunks:
        if run and not _follows(run[-1], chunk, routed=any(part.routes is not None for part in run)):
            merged.append(_joined(run))
            run = []
        run.append(chunk)
    return (*merged, _joined(run)) if run else ()


def _follows(before: SampleChunk, chunk: SampleChunk, routed: bool) -> bool:
    """Whether the two can be merged: same versions, and routes that continue where the last ones ended."""
    if (before.version, before.kv_oldest) != (chunk.version, chunk.kv_oldest) or before.finish is not None:
        return False
    if chunk.routes is None or not routed:
        return chunk.routes is None or (not routed and before.routes is None)
    return before.routes is not None and before.routes_start + len(before.routes) == chunk.routes_start


def _joined(run: Sequence[SampleChunk]) -> SampleChunk:
    if len(run) == 1:
        return run[0]
    routed = [chunk for chunk in run if chunk.routes is not None]
    return replace(
        run[-1],
        tokens=np.concatenate([chunk.tokens for chunk in run]),
        logprobs=np.concatenate([chunk.logprobs for chunk in run]),
        routes=np.concatenate([chunk.routes for chunk in routed if chunk.routes is not None])
        if routed
        else None,
        routes_start=routed[0].routes_start if routed else 0,
    )


def to_document(given: Input) -> dict[str, Any]:
    """The input as plain JSON values; exact."""
    match given:
        case ChunksIn(chunks):
            return {"kind": "chunks", "chunks": [_chunk_document(chunk) for chunk in chunks]}
        case ResultsIn(results):
            return {"kind": "results", "results": [result_document(result) for result in results]}
        case ArchivedIn(error):
            return {"kind": "archived", "error": error}
        case PrefixMissIn():
            return {"kind": "prefix_miss"}
        case UserIn(text):
            return {"kind": "user", "text": text}
        case StopIn(status, cause):
            return {"kind": "stop", "status": status.value, "cause": cause}


def from_document(document: Mapping[str, Any]) -> Input:
    """Inverse of `to_document`. Raises KeyError, ValueError or TypeError for anything else."""
    match document["kind"]:
        case "chunks":
            return ChunksIn(tuple(_chunk(chunk) for chunk in document["chunks"]))
        case "results":
            return ResultsIn(tuple(result_of(result) for result in document["results"]))
        case "archived":
            return ArchivedIn(document["error"])
        case "prefix_miss":
            return PrefixMissIn()
        case "user":
            return UserIn(document["text"])
        case "stop":
            return StopIn(Status(document["status"]), document["cause"])
        case kind:
            raise ValueError(f"unknown kind {kind!r}")


def result_document(result: ToolResult) -> dict[str, Any]:
    """A result as plain JSON values."""
    return {**asdict(result), "facts": dict(result.facts)}


def result_of(document: Mapping[str, Any]) -> ToolResult:
    """Inverse of `result_document`."""
    error = document["error"]
    return ToolResult(**{**document, "error": None if error is None else ToolErrorClass(error)})


def call_document(call: ToolCall) -> dict[str, Any]:
    """A call as plain JSON values."""
    return {"name": call.name, "arguments": dict(call.arguments), "error": call.error}


def _chunk_document(chunk: SampleChunk) -> dict[str, Any]:
    return {
        "tokens": _packed(chunk.tokens),
        "logprobs": _packed(chunk.logprobs),
        "version": asdict(chunk.version),
        "kv_oldest": asdict(chunk.kv_oldest),
        "routes": None if chunk.routes is None else _packed(chunk.routes),
        "routes_start": chunk.routes_start,
        "finish": chunk.finish,
        "prefix_digest": chunk.prefix_digest,
    }


def _chunk(document: Mapping[str, Any]) -> SampleChunk:
    return SampleChunk(
        tokens=_unpacked(document["tokens"]),
        logprobs=_unpacked(document["logprobs"]),
        version=PolicyVersion(**document["version"]),
        kv_oldest=PolicyVersion(**document["kv_oldest"]),
        routes=None if document["routes"] is None else _unpacked(document["routes"]),
        routes_start=document["routes_start"],
        finish=document["finish"],
        prefix_digest=document["prefix_digest"],
    )


def _packed(array: NDArray[Any]) -> dict[str, Any]:
    data = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode("ascii")
    return {"dtype": array.dtype.str, "shape": list(array.shape), "data": data}


def _unpacked(packed: Mapping[str, Any]) -> NDArray[Any]:
    data = base64.b64decode(packed["data"])
    return np.frombuffer(data, dtype=np.dtype(packed["dtype"])).reshape(packed["shape"])
