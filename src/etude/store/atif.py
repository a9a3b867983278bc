"""Trajectories as ATIF, the Agent Trajectory Interchange Format of the Harbor project: written here.

Each message of the agent is one `agent` step: its words, reasoning, calls and results, and in `metrics` the
token ids that the engine saw before it (`prompt_token_ids`), those it sampled (`completion_token_ids`) and
their `logprobs`. Contexts of a chain, forks and rewrites follow each other; what a context begins with is a
step of the `user` or the `system`, and the first step of each context says in `extra.etude` where it came
from. Sub-agents are `subagent_trajectories`, referred to from the step that they left.

What the format has no words for (masks, version spans, routes, the very tree) stands in the document's
`extra.etude`, from which our own files are read back exactly (`etude.store.atif_reading`).

Source: Harbor's RFC 0001, "Agent Trajectory Interchange Format", version 1.8; of what came after 1.4 it is
`is_copied_context` (1.5) and embedded sub-agents, `extra` of calls and results and `llm_call_count` (1.7)
that are used here.
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
"""What is written; every version 1 is read."""

Decode = Callable[[NDArray[np.int32]], str]
"""Token ids as text: a trajectory holds what the agent read as tokens only."""

Document = dict[str, Any]
_SURROGATES = re.compile("[\ud800-\udfff]")
_REASONING = re.compile(r"(?:<think>)?(.*?)</think>", re.DOTALL)


def trajectory_to_atif(
    trajectory: Trajectory, *, instruction: str = "", agent_version: str = "", decode: Decode | None = None
) -> Document:
    """The trajectory as an ATIF document of plain JSON values.

    `instruction` becomes the first step, from the user. With `decode` what each context began with, and what
    users said later, is written in full; without it these steps have no words.
    """
    parts = _take_apart(trajectory)
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
    """Turns whose segment is not there."""
    left: tuple[str, int] | None = None
    """Where in its parent a sub-agent began."""
    agents: list[_Part] = field(default_factory=list["_Part"])


def _take_apart(trajectory: Trajectory) -> list[_Part]:
    """The main agent's part, then each sub-agent's. A segment goes with its parent if that came before."""
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
            taken = counts[name] > 1 or name == parts[0].name
            part = _Part(f"{name}~{number}" if taken else name, left=segment.parent)
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
    """The oldest policy version, by which the document goes."""
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
        steps.open(_clean(instruction))
        for agent in part.agents:
            steps.refer(agent.left, agent.name, _clean(str(trajectory.id)))
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
        """What was given and what was sampled, in the order of the tokens."""
        shared = segment.parent[1] if segment.parent and segment.relation is Relation.FORK else 0
        given = [
            (span.start, 0, span)
            for span in segment.turn_spans
            if span.role in ("user", "system") and span.start >= shared
        ]
        said = [(turn.start, 1, turn) for turn in turns]
        first = len(steps.steps)
        for _, _, item in sorted([*given, *said], key=lambda entry: entry[:2]):
            if isinstance(item, Turn):
                steps.add(self._agent_step(item, segment, steps.next_id), (segment.id, item.end))
            else:
                words = self.decode(segment.tokens[item.start : item.end]) if self.decode else ""
                steps.add({"source": item.role, "message": _clean(words)})
        if first < len(steps.steps):
            came = {"segment": segment.id, "relation": str(segment.relation)}
            came |= {"parent": list(segment.parent)} if segment.parent else {}
            ours = steps.steps[first].setdefault("extra", {}).setdefault("etude", {})
            ours.update(came)

    def _agent_step(self, turn: Turn, segment: Segment | None, number: int) -> Document:
        """One message with its calls and results; `metrics` where its segment is known."""
        words, reasoning = split_reasoning(_clean(turn.text))
        step: Document = {"source": "agent", "message": words, "llm_call_count": 1}
        if reasoning is not None:
            step["reasoning_content"] = reasoning
        names = [f"call_{number}_{index}" for index in range(len(turn.calls))]
        if turn.calls:
            step["tool_calls"] = [_call_document(name, turn, at) for at, name in enumerate(names)]
        if turn.results:
            # A result may be without a call: of a turn that had none.
            sources = [*names, *[None] * len(turn.results)]
            results = zip(sources, turn.results, strict=False)
            step["observation"] = {"results": [_result_document(name, result) for name, result in results]}
        if (turn.segment_id, turn.end) in self.summaries and not turn.calls:
            step["extra"] = {"etude": {"summary": True}}
        if segment is not None:
            versions = list(_versions_in(segment, turn.start, turn.end))
            model = _clean(versions[0][2]) if versions else self.model
            # Where it is left out, it is the document's.
            step |= {} if model == self.model else {"model_name": model}
            step["metrics"] = _metrics(turn, segment, versions)
        return step


@dataclass(slots=True)
class _Steps:
    """The steps of one document as they are numbered."""

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

    def open(self, instruction: str) -> None:
        """The user's words come first: in the first step of theirs, or in one of its own."""
        head = next((step for step in self.steps if step["source"] != "system"), None)
        if head is None or head["source"] != "user":
            place = 0 if head is None else self.steps.index(head)
            self.steps.insert(place, {"step_id": 0, "source": "user", "message": instruction})
            for number, step in enumerate(self.steps, 1):
                step["step_id"] = number
        elif instruction:
            head["message"] = instruction

    def refer(self, left: tuple[str, int] | None, name: str, session: str) -> None:
        """Refers to a sub-agent from the last message before it, or from the first step."""
        before = [step for end, step in self.ends if left and end[0] == left[0] and end[1] <= left[1]]
        step = before[-1] if before else self.steps[0]
        results = step.setdefault("observation", {}).setdefault("results", [])
        results.append({"subagent_trajectory_ref": [{"trajectory_id": name, "session_id": session}]})


def split_reasoning(text: str) -> tuple[str, str | None]:
    """(words without reasoning, reasoning or None) of a message, where it is marked with `<think>`."""
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
    """Tokens and log-probabilities of a step, and which version sampled which of them."""
    return {
        "prompt_tokens": turn.start,
        "completion_tokens": turn.end - turn.start,
        "prompt_token_ids": segment.tokens[: turn.start].tolist(),
        "completion_token_ids": segment.tokens[turn.start : turn.end].tolist(),
        "logprobs": segment.logprobs[turn.start : turn.end].tolist(),
        "extra": {"versions": [list(version) for version in versions]},
    }


def _versions_in(segment: Segment, start: int, end: int) -> Iterator[tuple[int, int, str]]:
    """Runs of one policy version, as positions within the message."""
    for span in segment.version_spans:
        first, last = max(span.start, start), min(span.end, end)
        if first < last:
            yield first - start, last - start, str(span.version)


def _clean(text: str) -> str:
    """Text as other programs take it: halves of characters, which UTF-8 has no bytes for, become U+FFFD."""
    return text if text.isascii() else _SURROGATES.sub("\ufffd", text)
