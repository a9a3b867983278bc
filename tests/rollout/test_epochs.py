"""Epochs over tasks: order, ends, and accounts that survive kills."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import asdict, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.config import CurriculumConfig
from etude.errors import ConfigError, TaskError
from etude.records import Group, RewardBreakdown, Task, TestScript
from etude.rollout.curriculum import CollectorState, Curriculum, LevelRecord
from etude.rollout.epochs import EpochSource
from tests.environment.playing import TASK
from tests.store.builders import make_trajectory


def some_tasks(count: int) -> list[Task]:
    return [replace(TASK, id=f"task-{number}", metadata={"level": number % 2}) for number in range(count)]


def group(number: int, passed: float, num_tokens: int = 40) -> Group:
    members = (
        replace(make_trajectory(i, group=number, num_tokens=num_tokens), reward=RewardBreakdown(passed))
        for i in range(2)
    )
    return Group(f"g{number}", "task", 2, tuple(members))


def ids_of(source: EpochSource, epoch: int) -> list[str]:
    return [source(number).id for number in range(epoch * len(source), (epoch + 1) * len(source))]


def play(curriculum: Curriculum, verdicts: dict[str, float]) -> list[str]:
    """Plays what is left, one task after the other; their ids."""
    played: list[str] = []
    while curriculum.has_next():
        number, task = curriculum.begin()
        curriculum.resolve([(number, group(number, verdicts.get(task.id, 0.5)))])
        played.append(task.id)
    return played


def test_tasks_with_other_scripts_of_their_own_are_other_tasks() -> None:
    digests = {
        EpochSource([replace(TASK, verifier=TestScript(archive))], seed=0).digest
        for archive in (b"one", b"two")
    }
    assert len(digests) == 2


def test_each_epoch_has_every_task_once_in_an_order_of_its_own() -> None:
    source = EpochSource(some_tasks(8), seed=3)
    epochs = [ids_of(source, epoch) for epoch in range(4)]
    assert all(sorted(epoch) == sorted(epochs[0]) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert [source.epoch_of(number) for number in (0, 7, 8, 23)] == [0, 0, 1, 2]


def test_an_order_hangs_on_the_seed_and_not_on_how_tasks_are_listed() -> None:
    tasks = some_tasks(8)
    assert ids_of(EpochSource(tasks, 3), 1) == ids_of(EpochSource(tasks[::-1], 3), 1)
    assert ids_of(EpochSource(tasks, 3), 1) != ids_of(EpochSource(tasks, 4), 1)
    # Numbers of a run that is resumed must mean what they did, under other versions of Python as well.
    assert ids_of(EpochSource(some_tasks(4), 0), 0) == ["task-1", "task-0", "task-3", "task-2"]


def test_no_tasks_and_two_of_one_id_are_refused() -> None:
    with pytest.raises(TaskError, match="there are none"):
        EpochSource([], 0)
    with pytest.raises(TaskError, match=r"two tasks have this id.*task-1"):
        EpochSource([*some_tasks(3), *some_tasks(2)[1:]], 0)


def test_after_the_last_epoch_nothing_comes() -> None:
    state = CollectorState()
    curriculum = Curriculum(EpochSource(some_tasks(3), 0, num_epochs=2), CurriculumConfig(), state)
    assert not curriculum.is_over
    assert Counter(play(curriculum, {})) == dict.fromkeys(["task-0", "task-1", "task-2"], 2)
    assert curriculum.is_over and not curriculum.has_next()
    assert (state.next_task, state.pending) == (6, [])
    assert curriculum.figures() == {"epoch": 1.0}


def test_without_a_number_of_epochs_tasks_never_end() -> None:
    curriculum = Curriculum(EpochSource(some_tasks(2), 0), CurriculumConfig(), CollectorState())
    assert sorted(curriculum.begin()[1].id for _ in range(10)) == ["task-0"] * 5 + ["task-1"] * 5
    assert not curriculum.is_over


def test_a_task_outside_of_the_band_is_passed_over_by_itself_but_for_probes() -> None:
    config = CurriculumConfig(pass_band=(0.1, 0.9), probe_every=3)
    state = CollectorState()
    curriculum = Curriculum(EpochSource(some_tasks(4), 0, num_epochs=8), config, state)
    played = Counter(play(curriculum, {"task-1": 1.0, "task-2": 0.0}))
    assert played == {"task-0": 8, "task-3": 8, "task-1": 3, "task-2": 3}, "once, then one epoch in three"
    assert state.num_passed_over == 10
    assert curriculum.figures() == {"epoch": 7.0, "tasks_passed_over": 10.0}
    assert state.levels["1"].num_passed_over == 0, "what is known of the task itself decides"


def test_a_task_that_nobody_knows_is_judged_by_its_level() -> None:
    config = CurriculumConfig(pass_band=(0.1, 0.9), probe_every=100)
    state = CollectorState(levels={"1": LevelRecord(9, 1.0, 20.0)})
    curriculum = Curriculum(EpochSource(some_tasks(4), 0, num_epochs=1), config, state)
    assert sorted(play(curriculum, {})) == ["task-0", "task-2"]


def test_the_look_ahead_orders_by_the_length_of_the_tasks_themselves_and_ends_with_the_epoch() -> None:
    source = EpochSource(some_tasks(3), 0, num_epochs=2)
    curriculum = Curriculum(source, CurriculumConfig(longest_first=5), CollectorState())
    tokens = {"task-0": 20, "task-1": 60, "task-2": 40}
    orders: list[list[str]] = []
    for _ in range(2):
        begun = [curriculum.begin() for _ in range(3)]
        orders.append([task.id for _, task in begun])
        curriculum.resolve((number, group(number, 0.5, tokens[task.id])) for number, task in begun)
    assert sorted(orders[0]) == sorted(tokens)
    assert orders[1] == ["task-1", "task-2", "task-0"]


def test_a_run_goes_on_with_the_tasks_that_it_began_with_or_not_at_all() -> None:
    tasks = some_tasks(3)
    state = CollectorState()
    Curriculum(EpochSource(tasks, 0), CurriculumConfig(), state).begin()
    again = CollectorState(**asdict(state))
    moved = [replace(task, directory="/elsewhere") for task in tasks]
    assert Curriculum(EpochSource(moved, 0), CurriculumConfig(), again).begin()[0] == 0
    changed = [replace(tasks[0], instruction="Another."), *tasks[1:]]
    for other in (EpochSource(changed, 0), EpochSource(tasks[:2], 0), tasks.__getitem__):
        with pytest.raises(ConfigError, match="differ from those that the run started with"):
            Curriculum(other, CurriculumConfig(), CollectorState(**asdict(state)))


ACTS = st.tuples(
    st.sampled_from(["begin", "begin", "resolve", "resolve", "save", "kill"]), st.integers(0, 11)
)


@given(
    acts=st.lists(ACTS, max_size=60),
    num_tasks=st.integers(1, 6),
    num_epochs=st.integers(1, 4),
    ahead=st.integers(1, 4),
)
def test_over_any_kills_every_task_of_every_epoch_is_resolved_once_or_passed_over(
    acts: list[tuple[str, int]], num_tasks: int, num_epochs: int, ahead: int
) -> None:
    """A kill -9 takes the books back to the last checkpoint, and with them the weights."""
    source = EpochSource(some_tasks(num_tasks), 0, num_epochs)
    config = CurriculumConfig(pass_band=(0.2, 0.8), probe_every=2, longest_first=ahead)
    saved: tuple[dict[str, Any], list[int]] = (asdict(CollectorState()), [])
    state, resolved = CollectorState(), list[int]()
    curriculum, begun = Curriculum(source, config, state), list[int]()

    def resolve(choice: int) -> None:
        number = begun.pop(choice % len(begun))
        curriculum.resolve([(number, group(number, (0.0, 0.5, 1.0)[choice % 3]))])
        resolved.append(number)

    for act, choice in acts:
        if act == "begin" and curriculum.has_next():
            begun.append(curriculum.begin()[0])
        elif act == "resolve" and begun:
            resolve(choice)
        elif act == "save":
            saved = (copy.deepcopy(asdict(state)), list(resolved))
        elif act == "kill":
            state, resolved = CollectorState(**copy.deepcopy(saved[0])), list(saved[1])
            curriculum, begun = Curriculum(source, config, state), []
    while curriculum.has_next() or begun:
        begun += [curriculum.begin()[0]] if curriculum.has_next() else []
        resolve(0)
    assert curriculum.is_over
    assert len(resolved) == len(set(resolved)), "none twice"
    assert state.next_task == num_tasks * num_epochs
    assert len(resolved) + state.num_passed_over == num_tasks * num_epochs, "none skipped"
    per_epoch = Counter((source.epoch_of(number), source(number).id) for number in resolved)
    assert set(per_epoch.values()) <= {1}
