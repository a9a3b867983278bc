"""Reads ATIF trajectories: our own files exactly, those of other programs from their steps.

Nothing is ever re-tokenised: if steps have token ids, segments are rebuilt from them; otherwise text, calls
and results remain, which can be shown, compared and replayed, but not trained on.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from blake3 import blake3

from etude.errors import StoreError
from etude.records import (
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
from etude.store.documents import arrays_of, trajectory_from_document

_VERSION = re.compile(r"ATIF-v1\.\d{1,3}")
_POLICY = re.compile(r"(.+)@(\d{1,9})(?:\+(.+))?", re.DOTALL)
_FIX = "export it again, as ATIF-v1.0 to ATIF-v1.8"
_ERRORS = {str(kind): kind for kind in ToolErrorClass}


def trajectory_from_atif(document: Mapping[str, Any]) -> Trajectory:
    """The trajectory of an ATIF document of any version 1: exact if we wrote it, else rebuilt from its steps.

    Rebuilt trajectories have status `done`, the consent `imported`, and policy versions named after their
    models. Raises StoreError, naming the field, if the document violates the format.
    """
    if not isinstance(document, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise StoreError("is not a JSON object", field="document", received=type(document).__name__, fix=_FIX)
    version = document.get("schema_version")
    if not isinstance(version, str) or not _VERSION.fullmatch(version):
        raise StoreError("is not ATIF version 1", field="schema_version", received=version, fix=_FIX)
    extra = document.get("extra")
    ours = extra.get("etude") if isinstance(extra, Mapping) else None
    try:
        return _from_ours(ours) if ours is not None else _from_steps(document)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, IndexError) as error:
        raise StoreError(
            f"is not valid ATIF: {type(error).__name__}: {error}",
            field="extra.etude" if ours is not None else "steps",
            fix="export the trajectory again",
        ) from error


def parse_atif(data: bytes, name: str = "file") -> Trajectory:
    """The trajectory of an ATIF file's bytes. Raises StoreError, also for invalid JSON."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise StoreError(f"is not JSON: {error}", field=name, fix="name an ATIF JSON file") from error
    return trajectory_from_atif(document)


def _from_ours(extra: Mapping[str, Any]) -> Trajectory:
    return trajectory_from_document(extra["trajectory"], [arrays_of(item) for item in extra["arrays"]])


def _from_steps(document: Mapping[str, Any]) -> Trajectory:
    """Rebuilds a trajectory that another program wrote."""
    name = document.get("session_id") or document.get("trajectory_id")
    if name is None:
        name = "atif-" + blake3(json.dumps(document, sort_keys=True).encode()).hexdigest()[:16]
    reader = _Reader(str(name))
    reader.read(document, "main", None)
    facts: dict[str, Any] = {"imported": document["schema_version"]}
    if reader.num_without_ids:
        facts["steps_without_token_ids"] = reader.num_without_ids
    if document.get("continued_trajectory_ref"):
        facts["continued_in"] = str(document["continued_trajectory_ref"])
    return Trajectory(
        id=TrajectoryId("imported", str(name), 0, 0, 0),
        segments=tuple(draft.segment() for draft in reader.drafts),
        turns=tuple(reader.turns),
        status=Status.DONE,
        reward=_reward(document),
        consent="imported",
        facts=facts,
    )


def _reward(document: Mapping[str, Any]) -> RewardBreakdown | None:
    """The reward in the file: `reward` in the `extra` of its final metrics."""
    extra = (document.get("final_metrics") or {}).get("extra") or {}
    value = extra.get("reward")
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return RewardBreakdown(float(value), version="imported")


@dataclass(slots=True, eq=False)
class _Draft:
    """A segment that is being rebuilt."""

    id: str
    session: str
    agent_id: str
    relation: Relation
    parent: tuple[str, int] | None
    tokens: list[int] = field(default_factory=list[int])
    spans: list[tuple[int, int, str, list[float]]] = field(
        default_factory=list[tuple[int, int, str, list[float]]]
    )
    """(start, end, model, logprobs) of each message."""

    def segment(self) -> Segment:
        length = len(self.tokens)
        sampled = np.zeros(length, dtype=np.bool_)
        logprobs = np.zeros(length, dtype=np.float32)
        for start, end, _, values in self.spans:
            sampled[start:end] = True
            logprobs[start:end] = values
        versions = tuple(VersionSpan(start, end, _policy(model)) for start, end, model, _ in self.spans)
        return Segment(
            id=self.id,
            trajectory_id=self.session,
            tokens=np.array(self.tokens, dtype=np.int32),
            sampled=sampled,
            logprobs=logprobs,
            version_spans=versions,
            kv_oldest_spans=versions,
            turn_spans=tuple(TurnSpan(start, end, "assistant") for start, end, _, _ in self.spans),
            sampling=SamplingParams(),
            tokenizer_digest="",
            template_digest="",
            agent_id=self.agent_id,
            parent=self.parent,
            relation=self.relation,
        )


@dataclass(slots=True)
class _Reader:
    """Reads one file's documents: the agent's, then its sub-agents'."""

    session: str
    drafts: list[_Draft] = field(default_factory=list[_Draft])
    turns: list[Turn] = field(default_factory=list[Turn])
    num_without_ids: int = 0

    def read(self, document: Mapping[str, Any], agent_id: str, parent: tuple[str, int] | None) -> None:
        """Reads one document. A step whose prompt continues the last one's tokens stays in its segment."""
        model = str((document.get("agent") or {}).get("model_name") or "unknown")
        draft: _Draft | None = None
        origins: dict[str, tuple[str, int]] = {}
        copied = False
        for step in _list(document["steps"]):
            copied = copied or bool(step.get("is_copied_context"))
            if step["source"] == "agent" and not step.get("is_copied_context"):
                draft = self._add_step(step, draft, agent_id, parent, model, copied)
                copied = False
            for name in _agents_of(step):
                origins[name] = (draft.id, len(draft.tokens)) if draft else (f"{self.session}#0", 0)
        if draft is None and not self.drafts:
            self._begin(agent_id, Relation.ROOT, None)
        for agent in _list(document.get("subagent_trajectories") or []):
            name = str(agent["trajectory_id"])
            self.read(agent, name, origins.get(name, (f"{self.session}#0", 0)))

    def _add_step(
        self,
        step: Mapping[str, Any],
        draft: _Draft | None,
        agent_id: str,
        parent: tuple[str, int] | None,
        model: str,
        copied: bool,
    ) -> _Draft:
        """Adds a message of the agent to the segment that it continues, or to a new one; returns it."""
        ids = _token_ids(step)
        if draft is None:
            draft = self._begin(agent_id, Relation.SUBAGENT if parent else Relation.ROOT, parent)
        elif ids is not None and draft.tokens and ids[0][: len(draft.tokens)] != draft.tokens:
            relation, origin = self._origin(ids[0], draft, copied)
            draft = self._begin(agent_id, relation, origin)
        start = end = len(draft.tokens)
        if ids is None:
            self.num_without_ids += 1
        else:
            prompt, completion, logprobs = ids
            start, end = len(prompt), len(prompt) + len(completion)
            draft.tokens = prompt + completion
            draft.spans.append((start, end, str(step.get("model_name") or model), logprobs))
        self.turns.append(_turn(draft.id, step, start, end))
        return draft

    def _origin(self, prompt: Sequence[int], last: _Draft, copied: bool) -> tuple[Relation, tuple[str, int]]:
        """How a new context was derived: a fork repeats another's tokens up to one of its messages."""
        best: tuple[str, int] | None = None
        for draft in self.drafts:
            for start, _, _, _ in draft.spans:
                if start <= len(prompt) and (best is None or start > best[1]) and start > 0:
                    best = (draft.id, start) if list(prompt[:start]) == draft.tokens[:start] else best
        if best is not None:
            return Relation.FORK, best
        return Relation.SUMMARY if copied else Relation.REWRITE, (last.id, len(last.tokens))

    def _begin(self, agent_id: str, relation: Relation, parent: tuple[str, int] | None) -> _Draft:
        draft = _Draft(f"{self.session}#{len(self.drafts)}", self.session, agent_id, relation, parent)
        self.drafts.append(draft)
        return draft


def _policy(model: str) -> PolicyVersion:
    """The policy version of a name written by us (`lineage@step+adapter`), else step 0 of that lineage."""
    found = _POLICY.fullmatch(model)
    if found is None:
        return PolicyVersion(model, 0)
    return PolicyVersion(found[1], int(found[2]), adapter=found[3])


def _token_ids(step: Mapping[str, Any]) -> tuple[list[int], list[int], list[float]] | None:
    """(prompt ids, completion ids, logprobs) of an agent's step; None if it has no ids."""
    metrics = step.get("metrics") or {}
    prompt, completion = metrics.get("prompt_token_ids"), metrics.get("completion_token_ids")
    if prompt is None or completion is None:
        return None
    for name, ids in (("prompt_token_ids", prompt), ("completion_token_ids", completion)):
        if not isinstance(ids, list) or not all(type(token) is int for token in ids):
            raise ValueError(f"{name} of step {step.get('step_id')} must be whole numbers")
    logprobs = metrics.get("logprobs") or [0.0] * len(completion)
    if len(logprobs) != len(completion):
        raise ValueError(f"{len(logprobs)} logprobs for {len(completion)} completion tokens")
    return list(prompt), list(completion), [float(value) for value in logprobs]


def _turn(segment_id: str, step: Mapping[str, Any], start: int, end: int) -> Turn:
    """A step's text, calls and results. Results are in call order, whatever their order in the file."""
    text, reasoning = _text(step["message"]), step.get("reasoning_content")
    if reasoning:
        text = f"<think>{reasoning}</think>{text}"
    names: list[str] = []
    calls: list[ToolCall] = []
    for call in _list(step.get("tool_calls") or []):
        names.append(str(call.get("tool_call_id")))
        arguments = {str(name): _argument(value) for name, value in call["arguments"].items()}
        error = (call.get("extra") or {}).get("error")
        calls.append(ToolCall(call["function_name"], arguments, error if isinstance(error, str) else None))
    answers: dict[str, ToolResult] = {}
    loose: list[ToolResult] = []
    for document in _list((step.get("observation") or {}).get("results") or []):
        if document.get("content") is None and document.get("subagent_trajectory_ref"):
            continue
        source, result = document.get("source_call_id"), _result(document)
        if source in names and source in answers:
            result = replace(result, output=f"{answers[source].output}\n{result.output}")
        if source in names:
            answers[source] = result
        else:
            loose.append(result)
    return Turn(segment_id, start, end, text, tuple(calls), _in_call_order(names, answers, loose))


def _in_call_order(
    names: Sequence[str], answers: Mapping[str, ToolResult], loose: Sequence[ToolResult]
) -> tuple[ToolResult, ...]:
    """One result for each call; results that name no call fill the gaps in order, the rest comes last."""
    if not answers and len(loose) < len(names):
        return tuple(loose)
    rest = iter(loose)
    ordered = [answers[name] if name in answers else next(rest, ToolResult("")) for name in names]
    return (*ordered, *rest)


def _result(document: Mapping[str, Any]) -> ToolResult:
    extra = document.get("extra") or {}
    facts, duration = extra.get("facts"), extra.get("duration_s")
    return ToolResult(
        _text(document.get("content") or ""),
        _ERRORS.get(str(extra.get("error"))),
        extra.get("finished") is True,
        float(duration) if isinstance(duration, int | float) else 0.0,
        facts if isinstance(facts, dict) else {},
    )


def _agents_of(step: Mapping[str, Any]) -> list[str]:
    """Names of the embedded sub-agents that a step refers to."""
    return [
        str(reference["trajectory_id"])
        for result in _list((step.get("observation") or {}).get("results") or [])
        for reference in result.get("subagent_trajectory_ref") or ()
        if reference.get("trajectory_id")
    ]


def _text(content: Any) -> str:
    """Text of a message or result; images and audio are replaced by their paths."""
    if isinstance(content, str):
        return content
    parts: list[str] = []
    for part in _list(content):
        source = part.get("source") or {}
        parts.append(part["text"] if part["type"] == "text" else f"[{part['type']} {source.get('path', '')}]")
    return "\n".join(parts)


def _argument(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"a list was expected, not {type(value).__name__}")
    return value
