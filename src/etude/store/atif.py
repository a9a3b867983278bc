"""Writes trajectories as ATIF, the Agent Trajectory Interchange Format of the Harbor project.

Each message of the agent is one `agent` step: its text, reasoning, calls and results, and in `metrics` the
token ids that the engine saw before it (`prompt_token_ids`), those it sampled (`completion_token_ids`) and
their `logprobs`. Contexts of a chain, forks and rewrites follow each other; a context begins with a step of
the `user` or the `system`, and its first step has its origin in `extra.etude`. Sub-agents are
`subagent_trajectories`, referred to from the step at which they branched off.

What the format cannot express (masks, version spans, routes, the tree of segments) is in the document's
`extra.etude`, from which our own files are read back exactly (`etude.store.atif_reading`).

Source: Harbor's RFC 0001, "Agent Trajectory Interchange Format", version 1.8. Of the additions since 1.4
these are used: `is_copied_context` (1.5), embedded sub-agents, `extra` of calls and results, and
`llm_call_count` (1.7).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from etude.records import Relation, Segment, Trajectory, Turn
from etude.store.documents import array_document, trajectory_document

ATIF_VERSION = "ATIF-v1.8"
"""The version that is written; every version 1 can be read."""

Decode = Callable[[NDArray[np.int32]], str]
"""Decodes token ids to text: a trajectory has the agent's input as tokens only."""

Document = dict[str, Any]
_SURROGATES = re.compile("[\ud800-\udfff]")
_REASONING = re.compile(r"(?:<think>)?(.*?)</think>", re.DOTALL)


def trajectory_to_atif(
    trajectory: Trajectory, *, instruction: str = "", agent_version: str = "", decode: Decode | None = None
) -> Document:
    """The trajectory as an ATIF document of plain JSON values.

    `instruction` becomes the first step, from the user. With `decode` the beginning of each context and later
    messages of users are written in full; without it these steps have no text.
    """
    parts = _split_by_agent(trajectory)
    writer = _Writer(trajectory, agent_version or "0", decode)
    root = writer.document(parts[0], instruction)
    agents = [writer.document(part, "") for part in parts[1:]]
    if agents:
        root["subagent_trajectories"] = agents
    root["extra"] = {
        "etude": {
            "trajectory": trajectory_document(trajectory),
            "arrays": [array_document(segment) for segment in trajectory.segments],
        }
    }
    return root


@dataclass(slots=True)
class _Part:
    """One agent's share of a trajectory: one document."""

    name: str
    segments: list[tuple[Segment, list[Turn]]] = field(default_factory=list[tuple[Segment, list[Turn]]])
    strays: list[Turn] = field(default_factory=list[Turn])
    """Turns whose segment is missing."""
    origin: tuple[str, int] | None = None
    """(segment, offset) in its parent at which a sub-agent began."""
    agents: list[_Part] = field(default_factory=list["_Part"])


def _split_by_agent(trajectory: Trajectory) -> list[_Part]:
    """The main agent's part, then each sub-agent's. A segment joins its parent's part if that came before."""
    counts = Counter(_clean(segment.id) for segment in trajectory.segments)
    parts = [_Part(_clean(str(trajectory.id)))]
    owners: dict[str, _Part] = {}
    turns: dict[str, list[Turn]] = {}
    for turn in trajectory.turns:
        turns.setdefault(turn.segment_id, []).append(turn)
    for number, segment in enumerate(trajectory.segments):
        owner = owners.get(segment.parent[0], parts[0]) if segment.parent else parts[0]
        if segment.relation is Relation.SUBAGENT:
            name = _clean(segment.id)
            is_taken = counts[name] > 1 or name == parts[0].name
            part = _Part(f"{name}~{number}" if is_taken else name, origin=segment.parent)
            owner.agents.append(part)
            parts.append(part)
            owner = part
        owners.setdefault(segment.id, owner)
        owner.segments.append((segment, turns.pop(segment.id, [])))
    parts[0].strays = [turn for rest in turns.values() for turn in rest]
    return parts


@dataclass(slots=True)
class _Writer:
    """Writes the documents of one trajectory."""

    trajectory: Trajectory
    version: str
    decode: Decode | None
    model: str = field(init=False)
    """The oldest policy version: the document's model name."""
    summaries: set[tuple[str, int]] = field(init=False)
    """(segment, offset) at which a context was summarised."""

    def __post_init__(self) -> None:
        oldest = self.trajectory.oldest_version
        self.model = _clean(str(oldest)) if oldest else ""
        self.summaries = {
            segment.parent
            for segment in self.trajectory.segments
            if segment.parent and segment.relation is Relation.SUMMARY
        }

    def document(self, part: _Part, instruction: str) -> Document:
        """One agent's document, without its `extra`."""
        trajectory, steps = self.trajectory, _Steps()
        for segment, turns in part.segments:
            self._add_segment(steps, segment, turns)
        for turn in part.strays:
            steps.add(self._agent_step(turn, None, steps.next_id))
        steps.set_instruction(_clean(instruction))
        for agent in part.agents:
            steps.add_reference(agent.origin, agent.name, _clean(str(trajectory.id)))
        agent_id = next((segment.agent_id for segment, _ in part.segments), "main")
        reward, metrics = trajectory.reward, [step["metrics"] for step in steps.steps if "metrics" in step]
        return {
            "schema_version": ATIF_VERSION,
            "session_id": _clean(str(trajectory.id)),
            "trajectory_id": part.name,
            "agent": {
                "name": "etude",
                "version": self.version,
                "model_name": self.model,
                "extra": {"agent_id": agent_id, "harness_digest": trajectory.harness_digest},
            },
            "steps": steps.steps,
            "final_metrics": {
                "total_prompt_tokens": sum(each["prompt_tokens"] for each in metrics),
                "total_completion_tokens": sum(each["completion_tokens"] for each in metrics),
                "total_steps": len(steps.steps),
                "extra": {
                    "status": str(trajectory.status),
                    "cause": trajectory.cause,
                    "reward": None if reward is None else reward.total,
                    "reward_task": None if reward is None else reward.task,
                    "reward_terms": {} if reward is None else dict(reward.terms),
                    "reward_version": None if reward is None else reward.version,
                    "timings_s": dict(trajectory.timings),
                },
            },
        }

    def _add_segment(self, steps: _Steps, segment: Segment, turns: Sequence[Turn]) -> None:
        """Adds the segment's given and sampled messages, in the order of their tokens."""
        shared = segment.parent[1] if segment.parent and segment.relation is Relation.FORK else 0
        given = [
            (span.start, 0, span)
            for span in segment.turn_spans
            if span.role in ("user", "system") and span.start >= shared
        ]
        written = [(turn.start, 1, turn) for turn in turns]
        first = len(steps.steps)
        for _, _, item in sorted([*given, *written], key=lambda entry: entry[:2]):
            if isinstance(item, Turn):
                steps.add(self._agent_step(item, segment, steps.next_id), (segment.id, item.end))
            else:
                text = self.decode(segment.tokens[item.start : item.end]) if self.decode else ""
                steps.add({"source": item.role, "message": _clean(text)})
        if first < len(steps.steps):
            origin = {"segment": segment.id, "relation": str(segment.relation)}
            origin |= {"parent": list(segment.parent)} if segment.parent else {}
            ours = steps.steps[first].setdefault("extra", {}).setdefault("etude", {})
            ours.update(origin)

    def _agent_step(self, turn: Turn, segment: Segment | None, number: int) -> Document:
        """One message with its calls and results; with `metrics` if its segment is known."""
        text, reasoning = split_reasoning(_clean(turn.text))
        step: Document = {"source": "agent", "message": text, "llm_call_count": 1}
        if reasoning is not None:
            step["reasoning_content"] = reasoning
        names = [f"call_{number}_{index}" for index in range(len(turn.calls))]
        if turn.calls:
            step["tool_calls"] = [_call_document(name, turn, at) for at, name in enumerate(names)]
        if turn.results:
            # In a turn without calls a result has no call.
            sources = [*names, *[None] * len(turn.results)]
            results = zip(sources, turn.results, strict=False)
            step["observation"] = {"results": [_result_document(name, result) for name, result in results]}
        if (turn.segment_id, turn.end) in self.summaries and not turn.calls:
            step["extra"] = {"etude": {"summary": True}}
        if segment is not None:
            versions = list(_versions_in(segment, turn.start, turn.end))
            model = _clean(versions[0][2]) if versions else self.model
            # A step without a model name has the document's.
            step |= {} if model == self.model else {"model_name": model}
            step["metrics"] = _metrics(turn, segment, versions)
        return step


@dataclass(slots=True)
class _Steps:
    """The numbered steps of one document."""

    steps: list[Document] = field(default_factory=list[Document])
    ends: list[tuple[tuple[str, int], Document]] = field(
        default_factory=list[tuple[tuple[str, int], Document]]
    )
    """(segment, offset) at which each agent's message ended."""

    @property
    def next_id(self) -> int:
        return len(self.steps) + 1

    def add(self, step: Document, end: tuple[str, int] | None = None) -> None:
        self.steps.append({"step_id": self.next_id, **step})
        if end is not None:
            self.ends.append((end, self.steps[-1]))

    def set_instruction(self, instruction: str) -> None:
        """Makes the instruction the first message: in the user's first step, or in a new one."""
        head = next((step for step in self.steps if step["source"] != "system"), None)
        if head is None or head["source"] != "user":
            place = 0 if head is None else self.steps.index(head)
            self.steps.insert(place, {"step_id": 0, "source": "user", "message": instruction})
            for number, step in enumerate(self.steps, 1):
                step["step_id"] = number
        elif instruction:
            head["message"] = instruction

    def add_reference(self, origin: tuple[str, int] | None, name: str, session: str) -> None:
        """Adds a reference to a sub-agent to the last message before it, or to the first step."""
        before = [step for end, step in self.ends if origin and end[0] == origin[0] and end[1] <= origin[1]]
        step = before[-1] if before else self.steps[0]
        results = step.setdefault("observation", {}).setdefault("results", [])
        results.append({"subagent_trajectory_ref": [{"trajectory_id": name, "session_id": session}]})


def split_reasoning(text: str) -> tuple[str, str | None]:
    """(text without reasoning, reasoning or None) of a message whose reasoning is marked with `<think>`."""
    found = _REASONING.match(text)
    if found is None:
        return text, None
    return text[found.end() :], found[1]


def _call_document(name: str, turn: Turn, at: int) -> Document:
    call = turn.calls[at]
    arguments = {_clean(key): _clean(value) for key, value in call.arguments.items()}
    document: Document = {
        "tool_call_id": name,
        "function_name": _clean(call.name),
        "arguments": arguments,
    }
    return document if call.error is None else {**document, "extra": {"error": call.error}}


def _result_document(name: str | None, result: Any) -> Document:
    extra = {
        "error": None if result.error is None else str(result.error),
        "finished": result.finished,
        "duration_s": result.duration_s,
        "facts": dict(result.facts),
    }
    return {"source_call_id": name, "content": _clean(result.output), "extra": extra}


def _metrics(turn: Turn, segment: Segment, versions: Sequence[tuple[int, int, str]]) -> Document:
    """Tokens and log-probabilities of a step, and the policy versions that sampled them."""
    return {
        "prompt_tokens": turn.start,
        "completion_tokens": turn.end - turn.start,
        "prompt_token_ids": segment.tokens[: turn.start].tolist(),
        "completion_token_ids": segment.tokens[turn.start : turn.end].tolist(),
        "logprobs": segment.logprobs[turn.start : turn.end].tolist(),
        "extra": {"versions": [list(version) for version in versions]},
    }


def _versions_in(segment: Segment, start: int, end: int) -> Iterator[tuple[int, int, str]]:
    """(start, end, version) of each run of one policy version, as positions within the message."""
    for span in segment.version_spans:
        first, last = max(span.start, start), min(span.end, end)
        if first < last:
            yield first - start, last - start, str(span.version)


def _clean(text: str) -> str:
    """Text that UTF-8 can encode: lone surrogates become U+FFFD."""
    return text if text.isascii() else _SURROGATES.sub("\ufffd", text)
