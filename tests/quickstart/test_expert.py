"""The scripted expert plays by the rules, errs at the configured rates, and not at all with perfect skill."""

from __future__ import annotations

from dataclasses import fields, replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.errors import ConfigError, TaskError
from etude.records import Task, ToolCall, ToolErrorClass, ToolResult
from etude_quickstart.expert import MAX_CALLS_PER_TURN, MAX_TURNS, Expert
from etude_quickstart.generator import TaskGenerator
from etude_quickstart.malformed import malform
from etude_quickstart.skill import PERFECT_SKILL, ExpertSkill
from tests.quickstart.playing import Workspace, passes

Turns = list[tuple[tuple[ToolCall | str, ...], list[ToolResult]]]


def play(task: Task, seed: int, skill: ExpertSkill | None = None) -> tuple[Workspace, Turns]:
    """Plays a whole session of the expert with this skill."""
    return play_expert(task, Expert(task, Random(seed), skill))


def play_expert(task: Task, expert: Expert) -> tuple[Workspace, Turns]:
    """Plays a whole session of this expert."""
    workspace = Workspace(task)
    turns: Turns = []
    results: list[ToolResult] | None = None
    while not expert.done:
        parts = tuple(expert.message(results))
        results = [
            workspace.run(part)
            if isinstance(part, ToolCall)
            else ToolResult("error: malformed", ToolErrorClass.MALFORMED)
            for part in parts
        ]
        turns.append((parts, results))
    return workspace, turns


@given(st.integers(0, 10_000), st.integers(0, 10_000), st.sampled_from(["train", "heldout"]))
def test_a_perfect_expert_solves_every_task(index: int, seed: int, split: str) -> None:
    task = TaskGenerator(5, split).task(index)  # pyright: ignore[reportArgumentType]
    workspace, turns = play(task, seed, PERFECT_SKILL)
    assert passes(task, workspace.files, hidden=True)
    assert all(isinstance(part, ToolCall) for parts, _ in turns for part in parts)
    assert sum(call.name.startswith(("edit", "search")) for call in calls_of(turns)) == 1


@given(st.integers(0, 10_000), st.integers(0, 10_000))
def test_limits_are_never_exceeded_and_every_session_finishes(index: int, seed: int) -> None:
    wild = ExpertSkill(*(0.5 for _ in range(len(fields(ExpertSkill)))))
    for skill in (None, wild):
        _, turns = play(TaskGenerator(6).task(index), seed, skill)
        assert len(turns) <= MAX_TURNS
        assert all(1 <= len(parts) <= MAX_CALLS_PER_TURN for parts, _ in turns)
        assert turns[-1][0][-1] == ToolCall("finish")


@given(st.integers(0, 10_000), st.integers(0, 10_000))
def test_files_are_read_before_they_are_edited_unless_it_edits_blindly(index: int, seed: int) -> None:
    _, turns = play(TaskGenerator(7).task(index), seed, ExpertSkill(blind_edit=0.0))
    read: set[str] = set()
    for parts, results in turns:
        for part in parts:
            if isinstance(part, ToolCall) and part.name in ("edit_lines", "search_replace"):
                assert part.arguments["path"] in read
        for part, result in zip(parts, results, strict=True):
            if isinstance(part, ToolCall) and part.name == "read_file" and result.error is None:
                read.add(part.arguments["path"])


@given(st.integers(0, 10_000), st.integers(0, 10_000))
def test_paths_are_seen_before_they_are_named(index: int, seed: int) -> None:
    _, turns = play(TaskGenerator(8).task(index), seed)
    seen = ""
    for parts, results in turns:
        for part in parts:
            if isinstance(part, ToolCall) and "path" in part.arguments:
                directory, _, name = part.arguments["path"].partition("/")
                assert part.arguments["path"] in seen or f"{directory}.{name[:-3]}" in seen
        seen += "\n".join(result.output for result in results)


def test_sessions_are_reproducible() -> None:
    task = TaskGenerator(0).task(3)
    assert play(task, 11)[1] == play(task, 11)[1]
    assert any(play(task, 11)[1] != play(task, seed)[1] for seed in range(12, 20))


@pytest.mark.slow
def test_default_skill_leaves_room_and_shows_every_mistake() -> None:
    generator = TaskGenerator(9)
    solved = malformed = given_up = untested = parallel = first_edits = 0
    for index in range(400):
        task = generator.task(index)
        workspace, turns = play(task, index)
        solved += passes(task, workspace.files, hidden=True)
        malformed += any(isinstance(part, str) for parts, _ in turns for part in parts)
        parallel += any(len(parts) > 1 for parts, _ in turns)
        names = [call.name for call in calls_of(turns)]
        given_up += not passes(task, workspace.files)
        untested += "run_tests" not in names
        first_edits += "edit_lines" in names or "search_replace" in names
    assert 0.5 < solved / 400 < 0.8
    assert min(malformed, given_up, untested, parallel) > 0
    assert first_edits > 380


def calls_of(turns: Turns) -> list[ToolCall]:
    return [part for parts, _ in turns for part in parts if isinstance(part, ToolCall)]


def test_an_edit_that_failed_is_not_counted_on() -> None:
    task = TaskGenerator(0).task(1)
    refused = False
    results: list[ToolResult] | None = None
    workspace, expert = Workspace(task), Expert(task, Random(1), PERFECT_SKILL)
    while not expert.done:
        parts = tuple(expert.message(results))
        results = []
        for part in parts:
            assert isinstance(part, ToolCall)
            if part.name.startswith(("edit", "search")) and not refused:
                refused = True
                results.append(ToolResult("error: busy", ToolErrorClass.UNEXPECTED_ENVIRONMENT))
            else:
                results.append(workspace.run(part))
    assert refused
    assert passes(task, workspace.files, hidden=True)


def test_an_edit_that_changed_nothing_is_followed_by_another_one() -> None:
    skill = replace(PERFECT_SKILL, right_edit=0.0, idle=1.0)
    for index in range(30):
        task = TaskGenerator(0).task(index)
        workspace, turns = play(task, index, skill)
        edits = [call for call in calls_of(turns) if call.name.startswith(("edit", "search"))]
        assert "no change" in [result.output for _, results in turns for result in results]
        assert len(edits) == 2
        assert edits[0] != edits[1]
        assert passes(task, workspace.files, hidden=True)


@pytest.mark.slow
def test_a_second_try_has_odds_of_its_own() -> None:
    clumsy = replace(PERFECT_SKILL, right_edit=0.0)
    tasks = [TaskGenerator(0).task(index) for index in range(60)]

    def num_solved(skill: ExpertSkill) -> int:
        return sum(
            passes(task, play(task, seed, skill)[0].files, hidden=True) for seed, task in enumerate(tasks)
        )

    assert num_solved(clumsy) > 50
    assert num_solved(replace(clumsy, retry=0.0)) < 20  # an idle edit is followed by another one all the same
    assert num_solved(replace(clumsy, right_retry=0.0)) < 15


def test_tasks_that_the_expert_cannot_play_are_refused() -> None:
    task = TaskGenerator(0).task(0)
    with pytest.raises(TaskError, match="names no test"):
        Expert(replace(task, instruction="mend it"), Random(0))
    with pytest.raises(TaskError, match="exactly one file"):
        Expert(replace(task, solution_files={}), Random(0))
    with pytest.raises(TaskError, match="keep their number"):
        Expert(replace(task, solution_files={next(iter(task.solution_files)): "pass\n"}), Random(0))


def test_skill_refuses_what_is_no_probability() -> None:
    with pytest.raises(ConfigError, match=r"skill\.retry"):
        ExpertSkill(retry=1.5)


def test_malformed_calls_are_not_the_call() -> None:
    call = ToolCall("edit_lines", {"path": "lib/tally.py", "start": "3", "text": "    return a"})
    right = "<edit_lines><path>lib/tally.py</path><start>3</start><text>    return a</text></edit_lines>"
    texts = {malform(call, Random(seed)) for seed in range(50)}
    assert right not in texts
    assert len(texts) == 5


def test_a_rewrite_is_the_whole_body_and_mends_everything_at_once() -> None:
    skill = replace(PERFECT_SKILL, rewrite=1.0, right_edit=0.0, search_replace=0.0)
    for index in range(20):
        task = TaskGenerator(0).task(index)
        workspace, turns = play(task, index, skill)
        edits = [call.arguments for call in calls_of(turns) if call.name == "edit_lines"]
        for edit in edits:
            lines = task.files[edit["path"]].removesuffix("\n").split("\n")
            assert lines[int(edit["start"]) - 2].endswith('"""')
            assert int(edit.get("end", edit["start"])) == len(lines)
        if len(edits) > 1:  # a wrong first edit may pass the visible tests
            assert passes(task, workspace.files, hidden=True)
