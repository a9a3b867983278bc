"""Reference solutions become sessions of tools, which pass as an agent's would."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from etude.agent.tools.edit_lines import replace_lines
from etude.config import RunConfig
from etude.controller.expert_chats import ScriptedSession
from etude.controller.families import open_family
from etude.controller.references import FileRead, Hunk, find_hunks, find_named, plan_reads, play_references
from etude.observe import SilentObserver
from etude.records import Task, ToolCall
from etude.tasks.harbor import write_harbor
from tests.environment.target import TARGET

LINES = st.lists(st.sampled_from(["a", "b", "    c", ""]), min_size=1, max_size=30)


class Observed(SilentObserver):
    def __init__(self) -> None:
        self.lines = list[str]()

    def say(self, text: str) -> None:
        self.lines.append(text)


def config(tools: str = "core", **tasks: str) -> RunConfig:
    sections = {"sandbox": {"backend": "unisolated"}, "agent": {"tools": tools}, "tasks": tasks}
    return RunConfig.model_validate(sections)


def play(tasks: list[Task], tools: str = "core") -> tuple[list[ScriptedSession], list[str]]:
    observer = Observed()
    return asyncio.run(play_references(tasks, 10, config(tools), observer)), observer.lines


def calls_of(session: ScriptedSession) -> list[ToolCall]:
    return [part for turn in session.turns for part in turn.parts if isinstance(part, ToolCall)]


@given(LINES, LINES)
def test_edits_from_below_make_the_solution_of_any_text(before: list[str], after: list[str]) -> None:
    old, new = ("".join(f"{line}\n" for line in lines) for lines in (before, after))
    text = old
    for hunk in reversed(find_hunks(old, new)):
        text = replace_lines(text, hunk.start, hunk.end, hunk.text)
    assert text == new or after == [""], "a file of one blank line cannot be written by lines"


def test_a_reference_is_found_read_edited_tested_and_finished() -> None:
    task = replace(TARGET, instruction="`tally` is wrong. Please fix it.")
    [session], said = play([task])
    names = [call.name for call in calls_of(session)]
    assert names == ["grep", "read_file", "edit_lines", "run_tests", "finish"]
    assert "tally" in session.turns[0].outputs[0]
    assert session.turns[-1].outputs == () and not said
    [unsearched], _ = play([task], "read_file,edit_lines,finish")
    [found, around] = [
        next(c for c in calls_of(one) if c.name == "read_file") for one in (session, unsearched)
    ]
    assert found.arguments["limit"] == "40" != around.arguments["limit"], "nothing has shown the line"


def test_the_definition_that_is_looked_for_is_named_as_code_and_not_by_a_path() -> None:
    known = [("EUI", 1), ("__init__", 2), ("ei", 5)]
    named = find_named("`EUI.ei` in netaddr/eui/__init__.py: an `else`.", known, 6)
    assert named == (("EUI", "ei"), 5), "the class shows which of the methods it is"
    assert find_named("The class EUI is wrong, see eui/__init__.py", known, 6) == (("EUI",), 1)
    wanted = "`EUI().x` ends in `TypeError`; ei and __init__ are fine."
    assert find_named(wanted, known, 6) == (("EUI",), 1)
    assert find_named("Nothing of it is named.", known, 6) is None


def test_of_two_definitions_of_a_name_the_one_above_the_change_is_read() -> None:
    known = [("mask", 2), ("mask", 6)]
    found = [find_named("`ip.mask = 2` fails.", known, line) for line in (1, 3, 7)]
    assert found == [(("mask",), 2), (("mask",), 2), (("mask",), 6)]


def test_grep_shows_each_line_that_is_read_from() -> None:
    rows = ["x = 1"] * 500
    rows[9], rows[379] = "def near():", "def far():"
    text = "\n".join(rows)
    near, next_page, far = Hunk(12, 13, "x"), Hunk(55, 55, "x"), Hunk(400, 401, "x")
    assert plan_reads("`near` is wrong", text, [near]) == [FileRead(("near",), ((10, 40),))]
    assert plan_reads("`near` is wrong", text, [near, next_page]) == [
        FileRead(("near",), ((10, 40), (50, 40)))
    ]
    both = [FileRead(("near",), ((10, 40),)), FileRead(("far",), ((380, 40),))]
    assert plan_reads("`near` is wrong", text, [near, far]) == both, "the second is above what is changed"
    assert plan_reads("`near` is wrong", text, [far]) == both
    assert plan_reads("It is wrong", text, [far]) == both[1:]
    assert plan_reads("`near` is wrong", "", [near]) == [FileRead((), ((4, 18),))], "nothing shows a line"


def test_what_cannot_be_played_is_left_out_with_its_reason() -> None:
    wrong = replace(TARGET, id="wrong", solution_files=dict.fromkeys(TARGET.solution_files, "x = 1\n"))
    unsolved = replace(TARGET, id="unsolved", solution_files={})
    new = replace(TARGET, id="new", solution_files={**TARGET.solution_files, "lib/more.py": "x = 1\n"})
    sessions, said = play([wrong, TARGET, unsolved, new])
    assert [one.instruction for one in sessions] == [TARGET.instruction]
    assert sorted(said) == [
        "1 task left out: has no reference solution that changes a file",
        "1 task left out: its session does not pass",
        "1 task left out: needs the tool write_file",
    ]
    [session], _ = play([new], "full")
    assert "write_file" in [call.name for call in calls_of(session)]


def test_tasks_are_held_out_by_the_split_that_they_name(tmp_path: Path) -> None:
    for name, split in (("a", "train"), ("b", "heldout"), ("c", "validation"), ("d", "train")):
        write_harbor(replace(TARGET, id=name, metadata={"split": split}), tmp_path / "tasks" / name)
    family = open_family(config(family="directory", directory=str(tmp_path / "tasks")))
    assert list(family.splits) == ["heldout", "validation"]
    assert [task.id for task in family.evaluation_tasks("heldout", 9)] == ["b"]
    assert [task.id for task in family.evaluation_tasks("validation", 9)] == ["c"]
    assert len(family.sessions(9, SilentObserver())) == 2
