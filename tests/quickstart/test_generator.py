"""Every generated task is broken, fixable, in its split, and deterministic."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.errors import TaskError
from etude.records import Task
from etude_quickstart.families import FAMILIES, HELD_OUT_FAMILIES
from etude_quickstart.functions import function_hash
from etude_quickstart.generator import SPLITS, Split, TaskGenerator, bug_kinds_of, split_of_hash
from etude_quickstart.mutations import BUG_KINDS
from tests.quickstart.playing import passes, run_tests

SEEDS = st.integers(0, 50)
INDICES = st.integers(0, 100_000)


def source_files(task: Task) -> dict[str, str]:
    return {path: text for path, text in task.files.items() if not path.startswith("tests/")}


def solved(task: Task) -> dict[str, str]:
    return {**task.files, **task.solution_files}


@given(SEEDS, st.sampled_from(SPLITS), INDICES)
def test_tasks_fail_before_the_fix_and_pass_after_it(seed: int, split: Split, index: int) -> None:
    task = TaskGenerator(seed, split).task(index)
    assert not passes(task, task.files)
    assert not passes(task, task.files, hidden=True)
    assert passes(task, solved(task))
    assert passes(task, solved(task), hidden=True)


@given(SEEDS, st.sampled_from(SPLITS), INDICES)
def test_one_line_of_one_file_is_wrong(seed: int, split: Split, index: int) -> None:
    task = TaskGenerator(seed, split).task(index)
    (path, fixed), *others = task.solution_files.items()
    assert not others
    pairs = zip(task.files[path].split("\n"), fixed.split("\n"), strict=True)
    wrong = [line for line, (now, right) in enumerate(pairs, 1) if now != right]
    assert wrong == [task.metadata["line"]]
    assert path == task.metadata["path"]
    assert path.endswith(f"/{task.metadata['function']}.py")
    assert task.metadata["function_hash"] == function_hash(fixed)


@given(SEEDS, st.sampled_from(SPLITS), INDICES)
def test_the_instruction_names_the_only_failing_test(seed: int, split: Split, index: int) -> None:
    task = TaskGenerator(seed, split).task(index)
    passed, failed = run_tests(task.files, task.test_paths[0])
    assert list(failed) == [task.metadata["test"]]
    assert re.findall(r"test_\w+", task.instruction) == list(failed)
    level = task.metadata["level"]
    assert len(source_files(task)) == (2 if level == 1 else 3)
    assert len(passed) == (2 if level == 2 else 1)
    if level == 3:
        helper = task.metadata["function"]
        assert f"import {helper}\n" not in task.files["tests/test_all.py"]
        (name,) = failed
        caller = next(text for path, text in task.files.items() if path.endswith(f"/{name[5:]}.py"))
        assert f"import {helper}\n" in caller


@given(SEEDS, st.sampled_from(SPLITS), INDICES)
def test_all_functions_belong_to_the_split(seed: int, split: Split, index: int) -> None:
    task = TaskGenerator(seed, split).task(index)
    others = {path: text for path, text in source_files(task).items() if path not in task.solution_files}
    assert {split_of_hash(function_hash(text)) for text in others.values()} == {
        "heldout" if split == "heldout_family" else split
    }
    fixed = next(iter(task.solution_files.values()))
    family = task.metadata["family"]
    if split == "heldout_family":
        assert family in {entry.name for entry in HELD_OUT_FAMILIES}
    else:
        assert split_of_hash(function_hash(fixed)) == split
        assert family in {entry.name for entry in FAMILIES}


@pytest.mark.slow
@pytest.mark.parametrize("split", SPLITS)
def test_a_task_is_a_function_of_seed_split_and_index(split: Split) -> None:
    forward, backward = TaskGenerator(1, split), TaskGenerator(1, split)
    tasks = [forward.task(index) for index in range(12)]
    assert tasks == [backward.task(index) for index in reversed(range(12))][::-1]
    assert tasks != [TaskGenerator(2, split).task(index) for index in range(12)]
    assert len({task.id for task in tasks}) == 12


@pytest.mark.slow
def test_level_weights_choose_levels() -> None:
    generator = TaskGenerator(0, level_weights=(0, 0, 1))
    assert {generator.task(index).metadata["level"] for index in range(10)} == {3}
    levels = Counter(TaskGenerator(0).task(index).metadata["level"] for index in range(300))
    assert min(levels.values()) > 70


@pytest.mark.slow
def test_every_bug_kind_and_most_families_turn_up() -> None:
    tasks = [TaskGenerator(0).task(index) for index in range(500)]
    assert {task.metadata["bug_kind"] for task in tasks} == set(BUG_KINDS)
    assert len({task.metadata["family"] for task in tasks}) > 0.9 * len(FAMILIES)
    assert set(bug_kinds_of("train")) == set(BUG_KINDS)


def test_splits_take_their_shares_of_hashes() -> None:
    counts = Counter(split_of_hash(f"{value:016x}") for value in range(1600))
    assert counts == {"train": 1300, "validation": 100, "heldout": 200}


def test_hidden_tests_hold_more_cases_than_visible_ones() -> None:
    for index in range(20):
        task = TaskGenerator(0).task(index)
        hidden = task.hidden_files["tests/test_hidden.py"].count("assert")
        assert hidden >= 2 * task.files["tests/test_all.py"].count("assert")


def test_nothing_but_sources_may_be_changed() -> None:
    task = TaskGenerator(0).task(0)
    assert task.allowed_paths == ("lib/**", "core/**", "util/**")
    assert task.hidden_test_paths == tuple(task.hidden_files)


@pytest.mark.parametrize("weights", [(1, 1), (0, 0, 0), (1, -1, 1)])
def test_impossible_weights_are_refused(weights: tuple[float, ...]) -> None:
    with pytest.raises(TaskError, match="level_weights"):
        TaskGenerator(0, level_weights=weights)


def test_an_unknown_split_is_refused() -> None:
    with pytest.raises(TaskError, match="one of train, validation, heldout, heldout_family"):
        TaskGenerator(0, "test")  # pyright: ignore[reportArgumentType]
