from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from etude.controller.judging import choose_examples, session_text
from etude.evaluation import Evaluation
from etude.records import Task, ToolCall, ToolResult, Trajectory, Turn
from tests.environment.playing import FAILS, SOLVES, TASK, new_environment, run_episode, scripted
from tests.store.builders import make_trajectory


def judged(number: int, level: int, passed: bool, parallel_turns: int = 0) -> tuple[Task, Trajectory]:
    task = replace(TASK, id=f"t{number}", metadata={"level": level, "bug_kind": "operator"})
    facts = {"passed": passed, "parallel_turns": parallel_turns}
    return task, make_trajectory(task=task.id, facts=facts)


def choose(pairs: list[tuple[Task, Trajectory]], before: Mapping[str, Any] | None, count: int = 2):
    after = Evaluation({}, {}, {}, tuple(trajectory for _, trajectory in pairs))
    return choose_examples([task for task, _ in pairs], before, after, count)


def before(**passed: bool) -> dict[str, Any]:
    return {"texts": {name: f"{name} before" for name in passed}, "passed": passed}


def test_examples_are_tasks_that_were_failed_and_are_solved() -> None:
    pairs = [judged(0, 1, False), judged(1, 1, True), judged(2, 2, True), judged(3, 3, True)]
    chosen = choose(pairs, before(t0=False, t1=True, t2=False, t3=False), count=9)
    assert [example["task"] for example in chosen] == ["t2", "t3"]
    assert chosen[0]["before"] == "t2 before"
    assert chosen[0]["title"] == "test_tally fails (level 2, operator)"


def test_sessions_with_parallel_calls_come_first_and_levels_differ() -> None:
    pairs = [judged(0, 1, True), judged(1, 1, True, 2), judged(2, 2, True, 1), judged(3, 3, True)]
    chosen = choose(pairs, before(t0=False, t1=False, t2=False, t3=False))
    assert [example["task"] for example in chosen] == ["t1", "t2"]


def test_without_figures_from_before_there_are_no_examples() -> None:
    assert choose([judged(0, 1, True)], None) == []
    assert choose([judged(0, 1, True)], before(t7=False)) == []


def test_a_session_reads_as_messages_answers_and_verdict() -> None:
    solved = session_text(run_episode(new_environment(), scripted(SOLVES))).splitlines()
    assert solved[0].startswith("[1] <read_file>")
    assert "    1\tdef tally(xs):" in solved
    assert "    1 passed" in solved
    assert "<|end|>" not in "".join(solved)
    assert solved[-1] == "-> done, passes the hidden tests"
    failed = session_text(run_episode(new_environment(), scripted(FAILS)))
    assert failed.endswith("-> done, fails the hidden tests")


def test_results_of_several_lines_are_all_indented() -> None:
    turn = Turn("s", 0, 1, "hello<|end|>", (ToolCall("x"),), (ToolResult("a\nb"), ToolResult("c")))
    text = session_text(make_trajectory(turns=(turn,), facts={}))
    assert text.splitlines()[:4] == ["[1] hello", "    a", "    b", "    c"]
