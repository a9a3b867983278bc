"""The wire format: lossless round trips, and malformed data refused with the field's name."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.agent.inputs import call_document
from etude.environment.grading import Outcome, Verdict
from etude.environment.history import History, SessionTurn, TurnConflictError, differences
from etude.environment.wire import (
    MAX_CALLS,
    OUTCOME,
    calls_of,
    known_of,
    outcome_document,
    status_of_text,
    task_document,
    task_of,
    turn_document,
)
from etude.errors import UserError
from etude.records import RewardBreakdown, Status, Task, ToolCall, ToolErrorClass, ToolResult

texts = st.text(max_size=20)
values = st.one_of(texts, st.integers(-9, 9), st.booleans(), st.floats(allow_nan=False, allow_infinity=False))
any_calls = st.lists(
    st.builds(ToolCall, texts, st.dictionaries(texts, texts, max_size=3), st.none() | texts), max_size=4
)
any_results = st.builds(
    ToolResult,
    texts,
    st.none() | st.sampled_from(ToolErrorClass),
    st.booleans(),
    st.floats(0, 9),
    st.dictionaries(texts, values, max_size=3),
)
files = st.dictionaries(texts, texts, max_size=3)
names = st.lists(texts, max_size=3).map(tuple)
tasks = st.builds(
    Task, texts, texts, files, files, st.just({}), names, names, names,
    st.dictionaries(texts, values, max_size=2), names,
)  # fmt: skip
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)


def sent(document: Any) -> Any:
    """As the other side reads it."""
    return json.loads(json.dumps(document))


@given(any_calls, st.dictionaries(st.integers(0, 3), any_results, max_size=3))
def test_turns_cross_the_wire(calls: list[ToolCall], known: dict[int, ToolResult]) -> None:
    raw = sent(turn_document(3, calls, known))
    assert calls_of(raw["calls"]) == calls
    assert known_of(raw["known"]) == known


@given(tasks)
def test_tasks_cross_the_wire(task: Task) -> None:
    assert task_of(sent(task_document(task))) == task


@given(st.sampled_from(Status), texts, st.floats(-1, 1))
def test_outcomes_cross_the_wire(status: Status, cause: str, penalty: float) -> None:
    reward = RewardBreakdown(1.0, {"malformed": penalty}, "1")
    outcome = Outcome(status, Verdict(True, 1, 0, cause, 0.5), reward)
    assert OUTCOME.validate_python(sent(outcome_document(outcome))) == outcome


@given(json_values)
def test_nonsense_is_refused_and_nothing_else(raw: Any) -> None:
    for read, fitting in ((calls_of, list), (known_of, dict), (task_of, object)):
        if isinstance(raw, fitting):
            try:
                read(raw)  # type: ignore[operator]
            except UserError as error:
                assert error.field is not None


def test_too_many_calls_and_unknown_states_are_refused() -> None:
    with pytest.raises(UserError, match="too many"):
        calls_of([call_document(ToolCall("x"))] * (MAX_CALLS + 1))
    with pytest.raises(UserError, match="unknown status"):
        status_of_text("great")
    assert status_of_text(None) is None
    assert status_of_text("limit") is Status.LIMIT


@given(st.lists(any_calls, max_size=4), st.data())
def test_a_history_knows_its_turns(turns: list[list[ToolCall]], data: st.DataObject) -> None:
    history = History()
    for number, calls in enumerate(turns):
        results = tuple(ToolResult(f"{number}.{place}") for place in range(len(calls)))
        history.add(SessionTurn(tuple(calls), results, key=f"k{number}"))
        history.archive(f"{number}.md", "text")
    for number, calls in enumerate(turns):
        assert history.find(number, None, calls) is history.turns[number]
        assert history.find(None, f"k{number}", calls) is history.turns[number]
        with pytest.raises(TurnConflictError):
            history.find(number, None, [*calls, ToolCall("more")])
    assert history.find(len(turns), None, []) is None
    assert history.find(None, "new", []) is None
    with pytest.raises(UserError, match="skips"):
        history.find(len(turns) + 1, None, [])
    turn = data.draw(st.integers(0, len(turns)))
    cut = history.until(turn)
    assert cut.turns == history.turns[:turn]
    assert [entry.turn for entry in cut.archives] == [
        n for n in range(1, turn + 1) if n < turn or turn == len(turns)
    ]
    assert cut.size_bytes <= history.size_bytes


def test_differences_ignore_how_long_a_call_took() -> None:
    call = ToolCall("read_file")
    turn = SessionTurn((call, call), (ToolResult("a", duration_s=1.0), ToolResult("b")))
    found = differences(4, turn, [ToolResult("a", duration_s=2.0), ToolResult("c")])
    assert [(one.turn, one.position, one.received.output) for one in found] == [(4, 1, "c")]
    assert json.loads(json.dumps(asdict(found[0])))["expected"]["output"] == "b"
