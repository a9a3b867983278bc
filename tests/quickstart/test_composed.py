"""Composed tasks: every combination of bug kinds belongs to one split, every bug counts, and each test run
shows the next bug."""

from __future__ import annotations

from random import Random

import pytest

from etude.errors import TaskError
from etude.records import Task, ToolCall
from etude_quickstart.composed import DIRECTORY, Combination, ComposedGenerator, combinations_of
from etude_quickstart.frozen import acting_tasks
from etude_quickstart.functions import function_hash
from etude_quickstart.generator import FUNCTION_SPLITS, FunctionSplit, split_of_hash
from etude_quickstart.mutations import BUG_KINDS
from etude_quickstart.part_expert import PartExpert
from etude_quickstart.skill import PERFECT_SKILL
from tests.quickstart.playing import passes
from tests.quickstart.test_expert import play_expert


def test_every_combination_of_kinds_is_of_one_split() -> None:
    for size in (2, 3):
        found = [
            frozenset(chosen) for split in FUNCTION_SPLITS for chosen in set_of(combinations_of(split, size))
        ]
        assert len(set(found)) == len(found), "in whatever order"
        assert all(len(chosen) == size for chosen in found)
    assert combinations_of("train", 3) == []


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_every_kind_is_known_from_other_pairs(split: FunctionSplit) -> None:
    assert {kind for pair in combinations_of(split, 2) for kind in pair} == set(BUG_KINDS)


def set_of(chosen: list[Combination]) -> set[frozenset[str]]:
    """The combinations as sets, without their order."""
    return {frozenset(kinds) for kinds in chosen}


def test_judged_pairs_and_triples_are_never_trained_on() -> None:
    trained = {frozenset(kinds_of(ComposedGenerator(3).task(index))) for index in range(60)}
    assert trained <= set_of(combinations_of("train", 2))
    judged = [kinds_of(task) for task in acting_tasks("composed", "heldout", 24)]
    assert [len(kinds) for kinds in judged] == [2, 3] * 12
    assert not set_of(combinations_of("train", 2)) & {frozenset(kinds) for kinds in judged}
    assert len(set(judged[::2])) == len(combinations_of("heldout", 2)) == 12, "each held-out pair"


def kinds_of(task: Task) -> tuple[str, ...]:
    return tuple(str(task.metadata["bug_kind"]).split("+"))


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_only_all_fixes_together_pass(split: FunctionSplit) -> None:
    for index in range(6):
        task = ComposedGenerator(4, split).task(index)
        assert len(task.solution_files) == task.metadata["level"]
        fixed = {**task.files, **task.solution_files}
        assert passes(task, fixed) and passes(task, fixed, hidden=True)
        for broken in (*task.solution_files, None):
            partly = {path: task.files[path] for path in task.solution_files if broken in (None, path)}
            assert not passes(task, {**fixed, **partly})
            assert not passes(task, {**fixed, **partly}, hidden=True)


def test_a_perfect_expert_of_parts_goes_where_the_test_run_points() -> None:
    for index in range(12):
        task = ComposedGenerator(5).part(index)
        (path,) = task.solution_files
        begins_elsewhere = index % 2 == 1 and path != max(task.files.keys() - set(task.test_paths))
        expert = PartExpert(task, Random(index), PERFECT_SKILL, detour=float(index % 2))
        workspace, turns = play_expert(task, expert)
        assert passes(task, workspace.files, hidden=True)
        calls = [part for parts, _ in turns for part in parts if isinstance(part, ToolCall)]
        first_run = next(number for number, call in enumerate(calls) if call.name == "run_tests")
        read = [call.arguments["path"] for call in calls if call.name == "read_file"]
        assert calls[first_run + 1] == ToolCall("read_file", {"path": path})
        assert len(read) == 1 + begins_elsewhere and path not in read[:-1]


def test_the_name_of_a_failing_test_gives_the_path() -> None:
    task = ComposedGenerator(5).task(0)
    names = [path.removeprefix(f"{DIRECTORY}/").removesuffix(".py") for path in task.solution_files]
    assert all(f"def test_{name}():" in task.files[task.test_paths[0]] for name in names)
    assert not any(name in task.instruction for name in names)


def test_functions_are_of_their_split() -> None:
    for index in range(5):
        task = ComposedGenerator(6, "heldout").task(index)
        hashes = {split_of_hash(function_hash(source)) for source in task.solution_files.values()}
        assert hashes == {"heldout"}


def test_unknown_splits_are_refused() -> None:
    with pytest.raises(TaskError, match="split"):
        ComposedGenerator(0, "heldout_family")  # pyright: ignore[reportArgumentType]
