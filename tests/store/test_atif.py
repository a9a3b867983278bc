import contextlib
import copy
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from etude.errors import StoreError
from etude.records import PolicyVersion, Relation, Status, ToolCall, ToolErrorClass, ToolResult, Trajectory
from etude.store import ATIF_VERSION, parse_atif, trajectory_from_atif, trajectory_to_atif
from tests.store.builders import make_chain, make_trajectory, same, trajectories, trees


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(trajectories())
def test_our_own_files_come_back_equal(trajectory: Trajectory) -> None:
    text = json.dumps(trajectory_to_atif(trajectory))
    assert same(trajectory_from_atif(json.loads(text)), trajectory)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(trees())
def test_trees_come_back_equal_and_keep_the_rules_of_the_format(trajectory: Trajectory) -> None:
    document = json.loads(json.dumps(trajectory_to_atif(trajectory)))
    assert same(trajectory_from_atif(document), trajectory)
    check_rules(document)
    sampled = sum(segment.num_sampled_tokens for segment in trajectory.segments)
    documents = [document, *document.get("subagent_trajectories", [])]
    assert sum(one["final_metrics"]["total_completion_tokens"] for one in documents) == sampled
    agents = sum(segment.relation is Relation.SUBAGENT for segment in trajectory.segments)
    assert len(documents) == 1 + agents


@given(trees())
def test_trees_of_others_keep_messages_calls_and_answers(trajectory: Trajectory) -> None:
    document = trajectory_to_atif(trajectory)
    del document["extra"]
    theirs = trajectory_from_atif(json.loads(json.dumps(document)))
    assert len(theirs.turns) == len(trajectory.turns)
    key = [(turn.end - turn.start, len(turn.calls), len(turn.results)) for turn in trajectory.turns]
    read = [(turn.end - turn.start, len(turn.calls), len(turn.results)) for turn in theirs.turns]
    assert sorted(read) == sorted(key)
    assert theirs.num_sampled_tokens == trajectory.num_sampled_tokens


def check_rules(document: dict[str, Any]) -> None:
    """The rules of ATIF 1.8 that a schema cannot say, and that its agents' names can be resolved."""
    assert document["steps"]
    agents = document.get("subagent_trajectories", [])
    names = {agent["trajectory_id"] for agent in agents}
    assert len(names) == len(agents)
    referred: set[str] = set()
    for one in (document, *agents):
        for number, step in enumerate(one["steps"], 1):
            assert step["step_id"] == number
            if step["source"] != "agent":
                assert not {"model_name", "reasoning_content", "tool_calls", "metrics"} & set(step)
            known = {call["tool_call_id"] for call in step.get("tool_calls", [])}
            for result in step.get("observation", {}).get("results", []):
                assert result.get("source_call_id") in {*known, None}
                referred |= {ref["trajectory_id"] for ref in result.get("subagent_trajectory_ref", [])}
    assert referred == names


def test_a_chain_is_one_document_whose_contexts_follow_each_other() -> None:
    chain = make_chain(3)
    words = {0: "fix it", 1: "fix it, context 2", 2: "fix it, context 3"}
    first = int(chain.segments[0].tokens[0])
    document = trajectory_to_atif(chain, decode=lambda tokens: words[int(tokens[0]) - first])
    check_rules(document)
    assert "subagent_trajectories" not in document
    sources = [step["source"] for step in document["steps"]]
    assert sources == ["user", "agent", "agent"] * 3
    openings = [step for step in document["steps"] if step["source"] == "user"]
    assert [step["message"] for step in openings] == list(words.values())
    assert [step["extra"]["etude"]["relation"] for step in openings] == ["root", "summary", "summary"]
    assert openings[1]["extra"]["etude"]["parent"] == [chain.segments[0].id, 40]
    marked = [
        step["step_id"]
        for step in document["steps"]
        if step.get("extra", {}).get("etude") == {"summary": True}
    ]
    assert marked == [3, 6]
    del document["extra"]
    theirs = trajectory_from_atif(document)
    assert [segment.tokens.tolist() for segment in theirs.segments] == [
        segment.tokens[: segment.turn_spans[-1].end].tolist() for segment in chain.segments
    ]


def test_errors_reasoning_and_reward_have_their_places() -> None:
    one = make_trajectory(num_turns=1)
    failed = ToolResult("error: no such file", ToolErrorClass.UNEXPECTED_ENVIRONMENT, duration_s=0.5)
    (turn,) = one.turns
    broken = ToolCall("read_file", {"path": "a"}, "unclosed path")
    turn = replace(turn, text="<think>Look first.</think>Reading.", calls=(broken,), results=(failed,))
    document = trajectory_to_atif(replace(one, turns=(turn,)))
    step = document["steps"][-1]
    assert (step["message"], step["reasoning_content"]) == ("Reading.", "Look first.")
    assert step["tool_calls"][0]["extra"] == {"error": "unclosed path"}
    assert step["observation"]["results"][0]["extra"]["error"] == "unexpected_environment"
    assert document["final_metrics"]["extra"]["reward_terms"] == {"malformed": -0.05}
    del document["extra"]
    theirs = trajectory_from_atif(document)
    assert theirs.turns[0].text == turn.text
    assert theirs.turns[0].calls == turn.calls
    assert theirs.turns[0].results == (failed,)
    assert theirs.reward is not None
    assert (theirs.reward.total, theirs.reward.version) == (pytest.approx(0.95), "imported")


def test_a_fork_of_others_begins_where_its_tokens_part() -> None:
    document = foreign()
    (segment,) = make_trajectory().segments
    turn = make_trajectory().turns[1]
    again = copy.deepcopy(document["steps"][2])
    again["step_id"] = 4
    again["metrics"]["completion_token_ids"] = [1, 2, 3]
    again["metrics"]["logprobs"] = [-1.0, -1.0, -1.0]
    document["steps"].append(again)
    first, forked = trajectory_from_atif(document).segments
    assert (forked.relation, forked.parent) == (Relation.FORK, (first.id, turn.start))
    assert forked.tokens.tolist() == [*segment.tokens[: turn.start].tolist(), 1, 2, 3]


def test_steps_carry_what_the_format_names() -> None:
    trajectory = make_trajectory()
    document = trajectory_to_atif(trajectory, instruction="test_tally fails", agent_version="1.2")
    segment, turn = trajectory.segments[0], trajectory.turns[1]
    assert document["schema_version"] == ATIF_VERSION
    assert document["session_id"] == str(trajectory.id)
    agent = document["agent"]
    assert (agent["name"], agent["version"], agent["model_name"]) == ("etude", "1.2", "run@0")
    assert [step["step_id"] for step in document["steps"]] == [1, 2, 3]
    assert [step["source"] for step in document["steps"]] == ["user", "agent", "agent"]
    assert document["steps"][0]["message"] == "test_tally fails"
    step = document["steps"][2]
    (call,) = step["tool_calls"]
    assert (call["function_name"], call["arguments"]) == ("read_file", {"path": "lib/tally.py"})
    assert step["observation"]["results"][0]["source_call_id"] == call["tool_call_id"]
    assert step["metrics"]["prompt_token_ids"] == segment.tokens[: turn.start].tolist()
    assert step["metrics"]["completion_token_ids"] == segment.tokens[turn.start : turn.end].tolist()
    assert step["metrics"]["logprobs"] == segment.logprobs[turn.start : turn.end].tolist()
    assert document["final_metrics"]["total_completion_tokens"] == trajectory.num_sampled_tokens


def foreign() -> dict[str, Any]:
    """The same session as another harness would write it."""
    document = trajectory_to_atif(make_trajectory(), instruction="fix it")
    del document["extra"], document["final_metrics"]
    document["agent"] = {"name": "another", "version": "1", "model_name": "some-model"}
    return document


def test_a_foreign_file_is_rebuilt_from_its_token_ids() -> None:
    ours = make_trajectory()
    theirs = trajectory_from_atif(foreign())
    (segment,) = theirs.segments
    assert segment.tokens.tolist() == ours.segments[0].tokens.tolist()
    assert segment.sampled.tolist() == ours.segments[0].sampled.tolist()
    assert segment.logprobs.tolist() == ours.segments[0].logprobs.tolist()
    assert str(theirs.oldest_version) == "some-model@0"
    assert [turn.calls for turn in theirs.turns] == [turn.calls for turn in ours.turns]
    assert theirs.status is Status.DONE
    assert theirs.reward is None


@pytest.mark.parametrize("version", [PolicyVersion("run", 3), PolicyVersion("run", 3, adapter="run")])
def test_a_foreign_file_that_names_our_model_has_its_version(version: PolicyVersion) -> None:
    document = foreign()
    document["agent"]["model_name"] = str(version)
    assert trajectory_from_atif(document).oldest_version == version


def test_a_rewritten_context_begins_a_new_segment() -> None:
    document = foreign()
    second = copy.deepcopy(document["steps"][2])
    second["metrics"]["prompt_token_ids"] = [7, 8, 9]
    document["steps"][2] = second
    first, rewritten = trajectory_from_atif(document).segments
    assert rewritten.parent == (first.id, len(first.tokens))
    assert rewritten.tokens.tolist() == [7, 8, 9, *second["metrics"]["completion_token_ids"]]


def test_a_file_without_token_ids_keeps_its_words_and_has_no_tokens() -> None:
    document = foreign()
    for step in document["steps"][1:]:
        del step["metrics"]
    theirs = trajectory_from_atif(document)
    assert [turn.calls for turn in theirs.turns] == [turn.calls for turn in make_trajectory().turns]
    assert [turn.results[0].output for turn in theirs.turns] == [
        turn.results[0].output for turn in make_trajectory().turns
    ]
    assert theirs.num_sampled_tokens == 0
    assert theirs.facts == {"imported": ATIF_VERSION, "steps_without_token_ids": 2}


def test_a_file_of_an_older_version_with_pictures_is_read() -> None:
    document = {
        "schema_version": "ATIF-v1.6",
        "session_id": "s",
        "agent": {"name": "other", "version": "1"},
        "steps": [
            {"step_id": 1, "source": "user", "message": "look"},
            {
                "step_id": 2,
                "source": "agent",
                "message": [
                    {"type": "text", "text": "seen"},
                    {"type": "image", "source": {"media_type": "image/png", "path": "a.png"}},
                ],
                "tool_calls": [
                    {"tool_call_id": "x", "function_name": "f", "arguments": {"n": 3, "deep": [True]}},
                    {"tool_call_id": "y", "function_name": "g", "arguments": {}},
                ],
                "observation": {
                    "results": [{"source_call_id": "y", "content": "second"}, {"content": "first"}]
                },
            },
        ],
        "continued_trajectory_ref": "next.json",
    }
    (turn,) = trajectory_from_atif(document).turns
    assert turn.text == "seen\n[image a.png]"
    assert turn.calls[0] == ToolCall("f", {"n": "3", "deep": "[true]"})
    assert [result.output for result in turn.results] == ["first", "second"]
    assert trajectory_from_atif(document).facts["continued_in"] == "next.json"


@pytest.mark.parametrize("version", ["ATIF-v2.0", "ATIF-v1.", "ATIF-v1.x", "1.8", None, 1.8])
def test_another_version_is_a_typed_error(version: object) -> None:
    with pytest.raises(StoreError) as raised:
        trajectory_from_atif({**foreign(), "schema_version": version})
    assert (raised.value.field, raised.value.received) == ("schema_version", version)


@pytest.mark.parametrize("data", [b"", b"\xff\xfe", b"{", b"[]", b"3", b"null", b"[" * 100_000, b"{}"])
def test_garbage_is_a_typed_error(data: bytes) -> None:
    with pytest.raises(StoreError):
        parse_atif(data, "a.json")


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_a_damaged_file_is_read_or_a_typed_error(data: st.DataObject) -> None:
    document = foreign() if data.draw(st.booleans()) else trajectory_to_atif(make_chain(2))
    place: Any = document
    for _ in range(data.draw(st.integers(1, 6))):
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        if not keys:
            break
        key = data.draw(st.sampled_from(keys))
        if not isinstance(place[key], dict | list) or not place[key] or data.draw(st.integers(0, 3)) == 0:
            place[key] = data.draw(_json)
            break
        place = place[key]
    with contextlib.suppress(StoreError):
        trajectory_from_atif(document)


@pytest.mark.parametrize("damage", ["schema_version", "steps"])
def test_a_missing_field_is_a_typed_error(damage: str) -> None:
    document = foreign()
    del document[damage]
    with pytest.raises(StoreError):
        trajectory_from_atif(document)


def test_logprobs_of_another_length_are_refused() -> None:
    document = foreign()
    document["steps"][1]["metrics"]["logprobs"].pop()
    with pytest.raises(StoreError, match="logprobs"):
        trajectory_from_atif(document)
