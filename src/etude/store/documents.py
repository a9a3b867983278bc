"""Converts records to plain JSON values and back, exactly.

Arrays of tokens are not part of a trajectory's document: they have documents of their own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from etude.errors import StoreError
from etude.records import (
    BlobRef,
    Group,
    GroupOrigin,
    PolicyVersion,
    Relation,
    RewardBreakdown,
    SamplingParams,
    Segment,
    Status,
    ToolCall,
    ToolErrorClass,
    ToolResult,
    Trajectory,
    TrajectoryId,
    Turn,
    TurnSpan,
    VersionSpan,
)

Document = dict[str, Any]
Arrays = tuple[NDArray[np.int32], NDArray[np.bool_], NDArray[np.float32]]
"""A segment's tokens, which of them were sampled, and their log-probabilities, each [T]."""


def trajectory_document(trajectory: Trajectory) -> Document:
    """Everything of a trajectory but its segments' token arrays."""
    reward = trajectory.reward
    return {
        **_fields(trajectory),
        "id": list(astuple(trajectory.id)),
        "segments": [segment_document(segment) for segment in trajectory.segments],
        "turns": [_turn_document(turn) for turn in trajectory.turns],
        "status": str(trajectory.status),
        "reward": None if reward is None else {**_fields(reward), "terms": dict(reward.terms)},
        "timings": dict(trajectory.timings),
        "facts": dict(trajectory.facts),
    }


def trajectory_from_document(document: Mapping[str, Any], arrays: Sequence[Arrays]) -> Trajectory:
    """The trajectory of a document and, per segment, its (tokens, sampled, logprobs)."""
    reward = document["reward"]
    segments = zip(document["segments"], arrays, strict=True)
    more = {
        "id": TrajectoryId(*document["id"]),
        "segments": tuple(segment_from_document(segment, *parts) for segment, parts in segments),
        "turns": tuple(_turn_from_document(turn) for turn in document["turns"]),
        "status": Status(document["status"]),
        "reward": RewardBreakdown(**reward) if reward is not None else None,
        "snapshots": tuple(document["snapshots"]),
    }
    return Trajectory(**{**document, **more})


def segment_document(segment: Segment) -> Document:
    """Everything of a segment but `tokens`, `sampled` and `logprobs`."""
    return {
        **{name: value for name, value in _fields(segment).items() if name not in _ARRAYS},
        "version_spans": [_span_document(span) for span in segment.version_spans],
        "kv_oldest_spans": [_span_document(span) for span in segment.kv_oldest_spans],
        "turn_spans": [list(astuple(span)) for span in segment.turn_spans],
        "sampling": asdict(segment.sampling),
        "routes": asdict(segment.routes) if segment.routes else None,
        "support": asdict(segment.support) if segment.support else None,
        "relation": str(segment.relation),
    }


def segment_from_document(
    document: Mapping[str, Any],
    tokens: NDArray[np.int32],
    sampled: NDArray[np.bool_],
    logprobs: NDArray[np.float32],
) -> Segment:
    """The segment of a document and its arrays, each [T]."""
    parent = document["parent"]
    more = {
        "version_spans": tuple(_span_from_document(span) for span in document["version_spans"]),
        "kv_oldest_spans": tuple(_span_from_document(span) for span in document["kv_oldest_spans"]),
        "turn_spans": tuple(TurnSpan(*span) for span in document["turn_spans"]),
        "sampling": SamplingParams(**document["sampling"]),
        "routes": _blob_from_document(document["routes"]),
        "support": _blob_from_document(document["support"]),
        "parent": (parent[0], parent[1]) if parent else None,
        "relation": Relation(document["relation"]),
    }
    return Segment(**{**document, **more}, tokens=tokens, sampled=sampled, logprobs=logprobs)


def array_document(segment: Segment) -> Document:
    """Token arrays as JSON: ids, the runs of sampled tokens as [start, end), log-probabilities."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], segment.sampled, [False]]).astype(np.int8)))
    return {
        "tokens": segment.tokens.tolist(),
        "sampled": edges.reshape(-1, 2).tolist(),
        "logprobs": segment.logprobs.tolist(),
    }


def arrays_of(document: Mapping[str, Any]) -> Arrays:
    """Inverse of `array_document`. Raises KeyError, TypeError or ValueError for other documents."""
    tokens = np.array(document["tokens"], dtype=np.int32)
    sampled = np.zeros(len(tokens), dtype=np.bool_)
    for start, end in document["sampled"]:
        sampled[start:end] = True
    return tokens, sampled, np.array(document["logprobs"], dtype=np.float32)


def group_document(group: Group) -> Document:
    """A group without its members."""
    document = {**_fields(group), "origin": asdict(group.origin) if group.origin else None}
    del document["members"]
    return document


def group_from_document(document: Mapping[str, Any], members: Sequence[Trajectory]) -> Group:
    """The group of a document with these members."""
    origin = document["origin"]
    return Group(**{**document, "origin": GroupOrigin(**origin) if origin else None}, members=tuple(members))


def dump_json(document: Any, name: str) -> str:
    """The document as compact JSON. Raises StoreError, which names `name`, for values that JSON lacks."""
    try:
        return json.dumps(document, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        raise StoreError(
            f"holds a value that JSON cannot represent: {error}",
            field=name,
            fix="facts, timings and arguments must be plain JSON values",
        ) from error


_ARRAYS = ("tokens", "sampled", "logprobs")


def _fields(record: Any) -> Document:
    """A record's fields by name, without converting nested records; tuples become lists."""
    found = {field.name: getattr(record, field.name) for field in fields(record)}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}


def _span_document(span: VersionSpan) -> list[Any]:
    return [span.start, span.end, list(astuple(span.version))]


def _span_from_document(document: Sequence[Any]) -> VersionSpan:
    start, end, version = document
    return VersionSpan(start, end, PolicyVersion(*version))


def _turn_document(turn: Turn) -> Document:
    return {
        **_fields(turn),
        "calls": [[call.name, dict(call.arguments), call.error] for call in turn.calls],
        "results": [
            [result.output, result.error, result.finished, result.duration_s, dict(result.facts)]
            for result in turn.results
        ],
        "malformed": [list(span) for span in turn.malformed],
    }


def _turn_from_document(document: Mapping[str, Any]) -> Turn:
    more = {
        "calls": tuple(ToolCall(*call) for call in document["calls"]),
        "results": tuple(_result_from_document(result) for result in document["results"]),
        "malformed": tuple((start, end) for start, end in document.get("malformed", ())),
    }
    return Turn(**{**document, **more})


def _result_from_document(document: Sequence[Any]) -> ToolResult:
    output, error, finished, duration_s, facts = document
    return ToolResult(output, ToolErrorClass(error) if error else None, finished, duration_s, facts)


def _blob_from_document(document: Mapping[str, Any] | None) -> BlobRef | None:
    return BlobRef(**{**document, "shape": tuple(document["shape"])}) if document else None
