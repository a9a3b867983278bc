"""Builders of synthetic trajectories, and strategies for property-based tests."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from hypothesis import strategies as st

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


def make_trajectory(
    index: int = 0,
    *,
    task: str = "task",
    group: int = 0,
    step: int = 0,
    num_tokens: int = 40,
    num_turns: int = 2,
    status: Status = Status.DONE,
    **changes: Any,
) -> Trajectory:
    """A plausible session: a prompt, then messages of the agent with observations between them."""
    identity = TrajectoryId("run", task, 0, group, index)
    rng = np.random.default_rng([index, group, step])
    sampled = np.zeros(num_tokens, dtype=np.bool_)
    length = num_tokens // (2 * num_turns)
    spans = [(at + length, at + 2 * length) for at in range(0, 2 * length * num_turns, 2 * length)]
    for start, end in spans:
        sampled[start:end] = True
    version = PolicyVersion("run", step, "d" * 64)
    version_spans = tuple(VersionSpan(start, end, version) for start, end in spans)
    segment = Segment(
        id=f"{identity}#0",
        trajectory_id=str(identity),
        tokens=rng.integers(0, 1024, num_tokens, dtype=np.int32),
        sampled=sampled,
        logprobs=np.where(sampled, -rng.random(num_tokens), 0).astype(np.float32),
        version_spans=version_spans,
        kv_oldest_spans=version_spans,
        turn_spans=tuple(TurnSpan(start, end, "assistant") for start, end in spans),
        sampling=SamplingParams(),
        tokenizer_digest="t" * 64,
        template_digest="m" * 64,
        routes=BlobRef("memory:0", "0" * 32, "uint8", (num_tokens, 3, 2)),
    )
    turns = tuple(
        Turn(
            segment.id,
            start,
            end,
            "<read_file><path>lib/tally.py</path></read_file>",
            (ToolCall("read_file", {"path": "lib/tally.py"}),),
            (
                ToolResult(
                    "1\tdef tally(xs):\n2\t    return 0", duration_s=0.25, facts={"path": "lib/tally.py"}
                ),
            ),
        )
        for start, end in spans
    )
    facts = {"num_turns": num_turns, "num_calls": num_turns, "finished": True}
    made = Trajectory(
        identity, (segment,), turns, status, reward=RewardBreakdown(1.0, {"malformed": -0.05}), facts=facts
    )
    return dataclasses.replace(made, **changes)


def make_group(number: int = 0, size: int = 8, **options: Any) -> Group:
    """A complete group of one task."""
    members = tuple(make_trajectory(index, group=number, **options) for index in range(size))
    return Group(f"g{number}", "task", size, members)


def same(left: Any, right: Any) -> bool:
    """Whether two records are equal in every field, arrays bit for bit and of one dtype."""
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()
    if dataclasses.is_dataclass(left):
        if type(left) is not type(right):
            return False
        names = [field.name for field in dataclasses.fields(left)]
        return all(same(getattr(left, name), getattr(right, name)) for name in names)
    if isinstance(left, tuple):
        return (
            isinstance(right, tuple)
            and len(left) == len(right)
            and all(same(a, b) for a, b in zip(left, right, strict=True))
        )
    if isinstance(left, Mapping):
        return set(left) == set(right) and all(same(left[key], right[key]) for key in left)
    return type(left) is type(right) and left == right


texts = st.text(max_size=12)
# Lone surrogates come out of files that are not UTF-8.
wild_texts = st.text(st.characters(), max_size=12)
counts = st.integers(0, 2**31 - 1)
finite = st.floats(allow_nan=False, allow_infinity=False)
facts = st.dictionaries(
    texts, st.one_of(wild_texts, st.integers(-(2**60), 2**60), finite, st.booleans()), max_size=3
)
versions = st.builds(PolicyVersion, texts, counts, texts, texts, st.none() | texts)
blobs = st.builds(BlobRef, texts, texts, texts, st.lists(counts, max_size=3).map(tuple))
samplings = st.builds(
    SamplingParams,
    temperature=st.floats(0, 10),
    top_p=st.floats(0, 1, exclude_min=True),
    top_k=st.integers(0, 100),
    min_p=st.floats(0, 1, exclude_max=True),
    max_tokens=st.integers(1, 10_000),
)


@st.composite
def segments(draw: st.DrawFn, trajectory_id: str = "run/t/e0/g0/0") -> Segment:
    length = draw(st.integers(0, 24))
    of_length = {"min_size": length, "max_size": length}
    cut = draw(st.integers(0, length))
    spans = tuple(
        VersionSpan(start, end, draw(versions)) for start, end in ((0, cut), (cut, length)) if end > start
    )
    blob = draw(st.none() | blobs)
    routes = None if blob is None else dataclasses.replace(blob, shape=(length, 3, 2))
    return Segment(
        id=draw(texts),
        trajectory_id=trajectory_id,
        tokens=np.array(draw(st.lists(counts, **of_length)), dtype=np.int32),
        sampled=np.array(draw(st.lists(st.booleans(), **of_length)), dtype=np.bool_),
        logprobs=np.array(draw(st.lists(st.floats(-100, 0, width=32), **of_length)), dtype=np.float32),
        version_spans=spans,
        kv_oldest_spans=draw(st.sampled_from([(), spans])),
        turn_spans=tuple(TurnSpan(span.start, span.end, draw(texts)) for span in spans),
        sampling=draw(samplings),
        tokenizer_digest=draw(texts),
        template_digest=draw(texts),
        routes=routes,
        support=draw(st.none() | blobs),
        agent_id=draw(texts),
        parent=draw(st.none() | st.tuples(texts, counts)),
        relation=draw(st.sampled_from(Relation)),
    )


calls = st.builds(ToolCall, wild_texts, st.dictionaries(texts, wild_texts, max_size=2), st.none() | texts)
results = st.builds(
    ToolResult, wild_texts, st.none() | st.sampled_from(ToolErrorClass), st.booleans(), finite, facts
)


@st.composite
def trajectories(draw: st.DrawFn, index: int = 0) -> Trajectory:
    made = tuple(draw(st.lists(segments(), max_size=3)))
    turns = tuple(
        Turn(
            segment.id,
            0,
            draw(st.integers(0, len(segment.tokens))),
            draw(wild_texts),
            tuple(draw(st.lists(calls, max_size=2))),
            tuple(draw(st.lists(results, max_size=2))),
            tuple(draw(st.lists(st.tuples(counts, counts), max_size=2))),
        )
        for segment in made
    )
    return Trajectory(
        id=TrajectoryId(draw(texts), draw(wild_texts), draw(counts), draw(counts), index),
        segments=made,
        turns=turns,
        status=draw(st.sampled_from(Status)),
        cause=draw(wild_texts),
        reward=draw(
            st.none() | st.builds(RewardBreakdown, finite, st.dictionaries(texts, finite, max_size=2), texts)
        ),
        attempt=draw(counts),
        harness_digest=draw(texts),
        image_digest=draw(texts),
        snapshots=tuple(draw(st.lists(texts, max_size=2))),
        timings=draw(st.dictionaries(texts, finite, max_size=2)),
        tenant=draw(texts),
        consent=draw(texts),
        cluster=draw(texts),
        facts=draw(facts),
    )


@st.composite
def trees(draw: st.DrawFn) -> Trajectory:
    """Whole trees: chains of summaries, forks, rewrites and sub-agents, as harness and recorder make them."""
    identity = TrajectoryId("run", draw(texts), 0, 0, 0)
    made: list[Segment] = []
    turns: list[Turn] = []
    for number in range(draw(st.integers(1, 5))):
        segment, said = draw(_tree_segment(str(identity), number, made))
        made.append(segment)
        turns += said
    reward = draw(st.none() | st.builds(RewardBreakdown, finite, st.dictionaries(texts, finite, max_size=2)))
    return Trajectory(identity, tuple(made), tuple(turns), draw(st.sampled_from(Status)), reward=reward)


@st.composite
def _tree_segment(
    draw: st.DrawFn, identity: str, number: int, earlier: list[Segment]
) -> tuple[Segment, list[Turn]]:
    """A segment that leaves one of the `earlier`, and the agent's messages in it."""
    relation, agent_id, parent = Relation.ROOT, "main", None
    tokens: list[int] = []
    if earlier:
        relation = draw(st.sampled_from([one for one in Relation if one is not Relation.ROOT]))
        before = draw(st.sampled_from(earlier))
        offset = draw(st.integers(0, len(before.tokens)))
        parent = (before.id, len(before.tokens) if relation is Relation.SUMMARY else offset)
        agent_id = f"agent-{number}" if relation is Relation.SUBAGENT else before.agent_id
        tokens = before.tokens[:offset].tolist() if relation is Relation.FORK else []
    spans = [TurnSpan(0, len(tokens), "system")] if tokens else []
    sampled = [False] * len(tokens)
    turns: list[Turn] = []
    name = f"{identity}#{number}"
    for _ in range(draw(st.integers(0, 3))):
        given = draw(st.lists(st.integers(0, 99), min_size=1, max_size=4))
        spans.append(TurnSpan(len(tokens), len(tokens) + len(given), "tool" if turns else "user"))
        said = draw(st.lists(st.integers(0, 99), min_size=1, max_size=4))
        start = len(tokens) + len(given)
        tokens += [*given, *said]
        sampled += [False] * len(given) + [True] * len(said)
        spans.append(TurnSpan(start, len(tokens), "assistant"))
        made = tuple(draw(st.lists(calls, max_size=2)))
        answers = tuple(draw(results) for _ in made)
        turns.append(Turn(name, start, len(tokens), draw(wild_texts), made, answers))
    version = tuple(VersionSpan(turn.start, turn.end, draw(versions)) for turn in turns)
    logprobs = np.array([-0.5 if one else 0.0 for one in sampled], dtype=np.float32)
    segment = Segment(
        id=name,
        trajectory_id=identity,
        tokens=np.array(tokens, dtype=np.int32),
        sampled=np.array(sampled, dtype=np.bool_),
        logprobs=logprobs,
        version_spans=version,
        kv_oldest_spans=version,
        turn_spans=tuple(spans),
        sampling=SamplingParams(),
        tokenizer_digest="t",
        template_digest="m",
        agent_id=agent_id,
        parent=parent,
        relation=relation,
    )
    return segment, turns


def make_chain(num_contexts: int = 3, **changes: Any) -> Trajectory:
    """A session that summarised its context `num_contexts - 1` times: each context a call, then a summary."""
    one = make_trajectory(num_tokens=40, num_turns=2)
    (first,) = one.segments
    made: list[Segment] = []
    turns: list[Turn] = []
    for number in range(num_contexts):
        name = f"{one.id}#{number}"
        parent = (made[-1].id, len(made[-1].tokens)) if made else None
        relation = Relation.SUMMARY if made else Relation.ROOT
        opening = TurnSpan(0, 10, "user")
        tokens = first.tokens + number
        spans = (opening, *first.turn_spans)
        made.append(
            dataclasses.replace(
                first, id=name, tokens=tokens, turn_spans=spans, relation=relation, parent=parent, routes=None
            )
        )
        called, last = (dataclasses.replace(turn, segment_id=name) for turn in one.turns)
        turns.append(called)
        is_summary = number + 1 < num_contexts
        turns.append(
            dataclasses.replace(last, text=f"summary {number}", calls=(), results=()) if is_summary else last
        )
    return dataclasses.replace(one, segments=tuple(made), turns=tuple(turns), **changes)


@st.composite
def groups(draw: st.DrawFn, first_index: int = 0) -> Group:
    size = draw(st.integers(0, 3))
    members = tuple(draw(trajectories(first_index + offset)) for offset in range(size))
    origin = draw(st.none() | st.builds(GroupOrigin, texts, counts, texts))
    return Group(draw(wild_texts), draw(texts), draw(counts), members, origin)
