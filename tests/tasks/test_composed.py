"""Composed tasks: every combination of bug kinds is of one split, and every bug counts."""

from __future__ import annotations

from itertools import combinations
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.errors import TaskError
from etude.records import ToolCall
from etude.tasks.composed import ComposedGenerator, combinations_of
from etude.tasks.frozen import acting_tasks
from etude.tasks.functions import function_hash
from etude.tasks.generator import FUNCTION_SPLITS, TaskGenerator, split_of_hash
from etude.tasks.mutations import BUG_KINDS
from etude.tasks.part_expert import PartExpert
from etude.tasks.skill import PERFECT_SKILL
from tests.tasks.playing import passes
from tests.tasks.test_expert import play_expert

INDICES = st.integers(0, 10_000)


def test_every_pair_and_triple_is_of_one_split() -> None:
    for size in (2, 3):
        found = [chosen for split in FUNCTION_SPLITS for chosen in combinations_of(split, size)]
        assert sorted(found) == sorted(combinations(BUG_KINDS, size))
        assert len(set(found)) == len(found)
    assert combinations_of("train", 3) == []


@pytest.mark.parametrize("split", FUNCTION_SPLITS)
def test_every_kind_is_known_from_other_pairs(split: str) -> None:
    pairs = combinations_of(split, 2)  # pyright: ignore[reportArgumentType]
    assert {kind for pair in pairs for kind in pair} == set(BUG_KINDS)


@given(INDICES)
def test_trained_pairs_are_never_judged_on(index: int) -> None:
    trained = ComposedGenerator(3).task(index).metadata["bug_kind"]
    assert tuple(str(trained).split("+")) in {tuple(sorted(pair)) for pair in combinations_of("train", 2)}


def test_judged_pairs_and_triples_are_never_trained_on() -> None:
    trained = {tuple(sorted(pair)) for pair in combinations_of("train", 2)}
    tasks = acting_tasks("composed", "heldout", 24)
    judged = [tuple(str(task.metadata["bug_kind"]).split("+")) for task in tasks]
    assert [len(kinds) for kinds in judged] == [2, 3] * 12
    assert not trained & set(judged)
    assert len(set(judged[::2])) == 12, "each held-out pair once"


@given(INDICES, st.sampled_from(["train", "heldout"]))
def test_only_all_fixes_together_pass(index: int, split: str) -> None:
    task = ComposedGenerator(4, split).task(index)  # pyright: ignore[reportArgumentType]
    assert len(task.solution_files) == task.metadata["level"]
    assert all(path in task.instruction.split() for path in task.solution_files)
    fixed = {**task.files, **task.solution_files}
    assert passes(task, fixed, hidden=True)
    for path in task.solution_files:
        partly = {**fixed, path: task.files[path]}
        assert not passes(task, partly, hidden=True)
        assert not passes(task, partly)


@given(INDICES, INDICES)
def test_a_part_has_one_bug_and_a_perfect_expert_fixes_it(index: int, seed: int) -> None:
    task = ComposedGenerator(5).part(index)
    assert len(task.solution_files) == task.metadata["level"] == 1
    workspace, turns = play_expert(task, PartExpert(task, Random(seed), PERFECT_SKILL))
    assert passes(task, workspace.files, hidden=True)
    calls = [part for parts, _ in turns for part in parts if isinstance(part, ToolCall)]
    read = [call.arguments["path"] for call in calls if call.name == "read_file"]
    assert read == task.instruction.split()[1:], "each file that is named, once"


def test_functions_are_of_their_split() -> None:
    for index in range(5):
        task = ComposedGenerator(6, "heldout").task(index)
        hashes = {split_of_hash(function_hash(source)) for source in task.solution_files.values()}
        assert hashes == {"heldout"}


def test_the_expert_of_parts_needs_files_that_are_named() -> None:
    with pytest.raises(TaskError, match="names no file"):
        PartExpert(TaskGenerator(0).task(0), Random(0))


def test_unknown_splits_are_refused() -> None:
    with pytest.raises(TaskError, match="split"):
        ComposedGenerator(0, "heldout_family")  # pyright: ignore[reportArgumentType]
