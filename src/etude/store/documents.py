"""Records as plain JSON values, and back, exactly.

Arrays of tokens are not part of a trajectory's document: they have documents of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
    identity = trajectory.id
    return {
        "id": [identity.run, identity.task, identity.epoch, identity.group, identity.index],
        "segments": [segment_document(segment) for segment in trajectory.segments],
        "turns": [_turn_document(turn) for turn in trajectory.turns],
        "status": str(trajectory.status),
        "cause": trajectory.cause,
        "reward": _reward_document(trajectory.reward),
        "attempt": trajectory.attempt,
        "harness_digest": trajectory.harness_digest,
        "image_digest": trajectory.image_digest,
        "snapshots": list(trajectory.snapshots),
        "timings": dict(trajectory.timings),
        "tenant": trajectory.tenant,
        "consent": trajectory.consent,
        "cluster": trajectory.cluster,
        "facts": dict(trajectory.facts),
    }


def trajectory_from_document(
    document: Mapping[str, Any],
    arrays: Sequence[Arrays],
) -> Trajectory:
    """The trajectory of a document and, per segment, its (tokens, sampled, logprobs)."""
    reward = document["reward"]
    segments = zip(document["segments"], arrays, strict=True)
    return Trajectory(
        id=TrajectoryId(*document["id"]),
        segments=tuple(segment_from_document(segment, *parts) for segment, parts in segments),
        turns=tuple(_turn_from_document(turn) for turn in document["turns"]),
        status=Status(document["status"]),
        cause=document["cause"],
        reward=RewardBreakdown(**reward) if reward is not None else None,
        attempt=document["attempt"],
        harness_digest=document["harness_digest"],
        image_digest=document["image_digest"],
        snapshots=tuple(document["snapshots"]),
        timings=document["timings"],
        tenant=document["tenant"],
        consent=document["consent"],
        cluster=document["cluster"],
        facts=document["facts"],
    )


def segment_document(segment: Segment) -> Document:
    """Everything of a segment but `tokens`, `sampled` and `logprobs`."""
    return {
        "id": segment.id,
        "trajectory_id": segment.trajectory_id,
        "version_spans": [_span_document(span) for span in segment.version_spans],
        "kv_oldest_spans": [_span_document(span) for span in segment.kv_oldest_spans],
        "turn_spans": [[span.start, span.end, span.role] for span in segment.turn_spans],
        "sampling": asdict(segment.sampling),
        "tokenizer_digest": segment.tokenizer_digest,
        "template_digest": segment.template_digest,
        "routes": asdict(segment.routes) if segment.routes else None,
        "support": asdict(segment.support) if segment.support else None,
        "agent_id": segment.agent_id,
        "parent": list(segment.parent) if segment.parent else None,
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
    return Segment(
        id=document["id"],
        trajectory_id=document["trajectory_id"],
        tokens=tokens,
        sampled=sampled,
        logprobs=logprobs,
        version_spans=tuple(_span_from_document(span) for span in document["version_spans"]),
        kv_oldest_spans=tuple(_span_from_document(span) for span in document["kv_oldest_spans"]),
        turn_spans=tuple(TurnSpan(*span) for span in document["turn_spans"]),
        sampling=SamplingParams(**document["sampling"]),
        tokenizer_digest=document["tokenizer_digest"],
        template_digest=document["template_digest"],
        routes=_blob_from_document(document["routes"]),
        support=_blob_from_document(document["support"]),
        agent_id=document["agent_id"],
        parent=(parent[0], parent[1]) if parent else None,
        relation=Relation(document["relation"]),
    )


def array_document(segment: Segment) -> Document:
    """Token arrays as JSON: ids, the runs of sampled tokens as [start, end), log-probabilities."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], segment.sampled, [False]]).astype(np.int8)))
    return {
        "tokens": segment.tokens.tolist(),
        "sampled": edges.reshape(-1, 2).tolist(),
        "logprobs": segment.logprobs.tolist(),
    }


def arrays_of(document: Mapping[str, Any]) -> Arrays:
    """What `array_document` was given. Raises KeyError, TypeError, ValueError for anything else."""
    tokens = np.array(document["tokens"], dtype=np.int32)
    sampled = np.zeros(len(tokens), dtype=np.bool_)
    for start, end in document["sampled"]:
        sampled[start:end] = True
    return tokens, sampled, np.array(document["logprobs"], dtype=np.float32)


def group_document(group: Group) -> Document:
    """A group without its members."""
    origin = asdict(group.origin) if group.origin else None
    return {
        "id": group.id,
        "kind": group.kind,
        "expected": group.expected,
        "origin": origin,
        "price_weight": group.price_weight,
    }


def group_from_document(document: Mapping[str, Any], members: Sequence[Trajectory]) -> Group:
    """The group of a document with these members."""
    origin = document["origin"]
    return Group(
        id=document["id"],
        kind=document["kind"],
        expected=document["expected"],
        members=tuple(members),
        origin=GroupOrigin(**origin) if origin else None,
        price_weight=document.get("price_weight", 1.0),
    )


def _span_document(span: VersionSpan) -> list[Any]:
    version = span.version
    return [
        span.start,
        span.end,
        [version.lineage, version.step, version.digest, version.format, version.adapter],
    ]


def _span_from_document(document: Sequence[Any]) -> VersionSpan:
    start, end, version = document
    return VersionSpan(start, end, PolicyVersion(*version))


def _turn_document(turn: Turn) -> Document:
    return {
        "segment_id": turn.segment_id,
        "start": turn.start,
        "end": turn.end,
        "text": turn.text,
        "calls": [[call.name, dict(call.arguments), call.error] for call in turn.calls],
        "results": [
            [result.output, result.error, result.finished, result.duration_s, dict(result.facts)]
            for result in turn.results
        ],
        "malformed": [list(span) for span in turn.malformed],
    }


def _turn_from_document(document: Mapping[str, Any]) -> Turn:
    return Turn(
        segment_id=document["segment_id"],
        start=document["start"],
        end=document["end"],
        text=document["text"],
        calls=tuple(ToolCall(*call) for call in document["calls"]),
        results=tuple(_result_from_document(result) for result in document["results"]),
        malformed=tuple((start, end) for start, end in document.get("malformed", ())),
    )


def _result_from_document(document: Sequence[Any]) -> ToolResult:
    output, error, finished, duration_s, facts = document
    return ToolResult(output, ToolErrorClass(error) if error else None, finished, duration_s, facts)


def _reward_document(reward: RewardBreakdown | None) -> Document | None:
    if reward is None:
        return None
    return {"task": reward.task, "terms": dict(reward.terms), "version": reward.version}


def _blob_from_document(document: Mapping[str, Any] | None) -> BlobRef | None:
    return BlobRef(**{**document, "shape": tuple(document["shape"])}) if document else None
