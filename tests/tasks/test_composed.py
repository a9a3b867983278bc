"""Composed tasks: every combination of bug kinds is of one split, and every bug counts."""

from __future__ import annotations

from itertools import combinations
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.errors import TaskError
from etude.tasks.composed import COMPOSED_SPLITS, ComposedGenerator, combinations_of
from etude.tasks.edits import body_span
from etude.tasks.expert import Expert
from etude.tasks.frozen import acting_tasks
from etude.tasks.functions import function_hash
from etude.tasks.generator import split_of_hash
from etude.tasks.mutations import BUG_KINDS, mutations
from etude.tasks.skill import PERFECT_SKILL
from tests.tasks.playing import passes
from tests.tasks.test_expert import play

INDICES = st.integers(0, 10_000)


def test_every_pair_and_triple_is_of_one_split() -> None:
    for size in (2, 3):
        found = [chosen for split in COMPOSED_SPLITS for chosen in combinations_of(split, size)]
        assert sorted(found) == sorted(combinations(BUG_KINDS, size))
        assert len(set(found)) == len(found)
    assert combinations_of("train", 3) == []


@pytest.mark.parametrize("split", COMPOSED_SPLITS)
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
    path = str(task.metadata["path"])
    broken, fixed = task.files[path].split("\n"), task.solution_files[path].split("\n")
    wrong = [number for number, pair in enumerate(zip(broken, fixed, strict=True)) if pair[0] != pair[1]]
    assert len(wrong) == task.metadata["level"]
    assert passes(task, {**task.files, path: "\n".join(fixed)}, hidden=True)
    for number in wrong:
        partly = [*fixed[:number], broken[number], *fixed[number + 1 :]]
        assert not passes(task, {**task.files, path: "\n".join(partly)}, hidden=True)
        assert not passes(task, {**task.files, path: "\n".join(partly)})


@given(INDICES, INDICES)
def test_a_part_has_one_bug_and_a_perfect_expert_fixes_it(index: int, seed: int) -> None:
    task = ComposedGenerator(5).part(index)
    assert task.metadata["level"] == 1
    workspace, _ = play(task, seed, PERFECT_SKILL)
    assert passes(task, workspace.files, hidden=True)


def test_functions_are_of_their_split() -> None:
    for index in range(5):
        task = ComposedGenerator(6, "heldout").task(index)
        source = task.solution_files[str(task.metadata["path"])]
        assert {split_of_hash(function_hash(one)) for one in source.split("\n\n")} == {"heldout"}


def test_mutations_and_bodies_of_every_function_of_a_file_are_found() -> None:
    task = ComposedGenerator(7).task(0)
    source = task.solution_files[str(task.metadata["path"])]
    lines = source.removesuffix("\n").split("\n")
    second = next(n for n, line in enumerate(lines, 1) if n > 1 and line.startswith("def "))
    found = {mutation.line > second for mutation in mutations(source)}
    assert found == {False, True}
    assert body_span(lines, second - 2) == (3, second - 2)
    assert body_span(lines, second + 2) == (second + 2, len(lines))


def test_an_instruction_that_names_a_file_is_enough_for_the_expert() -> None:
    task = ComposedGenerator(7).part(1)
    (call,) = Expert(task, Random(0), PERFECT_SKILL).message(None)[:1]
    assert getattr(call, "arguments", None) == {"path": task.metadata["path"]}


def test_unknown_splits_are_refused() -> None:
    with pytest.raises(TaskError, match="split"):
        ComposedGenerator(0, "heldout_family")  # pyright: ignore[reportArgumentType]
