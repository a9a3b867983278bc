from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.algorithms.signal import Signal
from etude.records import Group, RewardBreakdown
from etude.rollout.buffer import GroupBuffer
from tests.store.builders import make_trajectory


def group(number: int, step: int, num_members: int = 2) -> Group:
    """A group whose tokens version `step` sampled."""
    members = (make_trajectory(index, group=number, step=step) for index in range(num_members))
    return Group(f"g{number}", "task", num_members, tuple(members))


def new_buffer(bound: int = 1, wanted: int = 2, num_steps: int = 100, most: int = 50, mask: bool = False):
    return GroupBuffer(bound, wanted, 0, num_steps, most, mask)


def numbers(waiting) -> list[int]:
    return [one.number for one in waiting]


def test_as_many_groups_may_be_open_as_the_steps_within_the_bound_take() -> None:
    buffer = new_buffer(bound=2, wanted=4)
    assert buffer.num_may_begin(1.0) == 12
    assert buffer.num_may_begin(0.5) == 24, "as many as half of which are useful"
    for number in range(5):
        buffer.begin(number)
    assert buffer.num_may_begin(1.0) == 7
    buffer.put(0, group(0, 0), Signal.TASK)
    assert buffer.num_may_begin(1.0) == 7, "a group that waits keeps its place"
    buffer.put(1, group(1, 0), Signal.NONE)
    assert buffer.num_may_begin(1.0) == 8, "one without signal gives it back at once"


def test_groups_of_one_verdict_take_no_place_from_those_that_a_step_wants() -> None:
    buffer = new_buffer(bound=1, wanted=2)
    for number in range(4):
        buffer.begin(number)
        buffer.put(number, group(number, 0), Signal.PRICE)
    assert buffer.num_may_begin(1.0) == 4
    assert not buffer.is_ready(1.0), "it goes on for groups whose verdicts differ"


def test_no_more_groups_begin_than_the_steps_that_are_left_take() -> None:
    buffer = new_buffer(bound=4, wanted=2, num_steps=2)
    assert buffer.num_may_begin(1.0) == 4
    for number in range(2):
        buffer.begin(number)
        buffer.put(number, group(number, 0), Signal.TASK)
    buffer.pop_step()
    buffer.serving = 1
    assert buffer.num_may_begin(1.0) == 2


def test_while_a_step_is_taken_there_is_room_for_those_after_it_only() -> None:
    buffer = new_buffer(bound=1, wanted=2)
    for number in range(2):
        buffer.begin(number)
        buffer.put(number, group(number, 0), Signal.TASK)
    buffer.pop_step()
    assert buffer.num_may_begin(1.0) == 2, "version 0 still samples, and step 1 is the last that may train it"
    buffer.serving = 1
    assert buffer.num_may_begin(1.0) == 4


def test_a_step_waits_for_a_group_that_no_later_one_could_train() -> None:
    buffer = new_buffer(bound=1, wanted=1)
    for number in range(3):
        buffer.begin(number)
    buffer.put(1, group(1, 0), Signal.TASK)
    assert buffer.is_ready(1.0)
    assert numbers(buffer.pop_step().trained) == [1]
    buffer.serving = 1
    buffer.put(2, group(2, 0), Signal.TASK)
    assert buffer.lacks_only_oldest
    assert not buffer.is_ready(1.0), "group 0 is of version 0: step 1 is its last"
    buffer.put(0, group(0, 0), Signal.TASK)
    assert buffer.is_ready(1.0)
    assert numbers(buffer.pop_step().trained) == [0, 2], "both are due, though a step wants one"


def test_the_oldest_group_is_trained_first_and_groups_come_in_task_order() -> None:
    buffer = new_buffer(bound=3, wanted=2)
    for number, step in ((0, 2), (1, 1), (2, 0), (3, 3)):
        buffer.begin(number)
        buffer.put(number, group(number, step), Signal.TASK)
    buffer.begin(9)
    buffer.put(9, group(9, 3), Signal.FORM)
    assert numbers(buffer.pop_step().trained) == [1, 2, 9], "those that teach form come on top, and last"


def test_what_is_too_old_all_the_same_is_left_out_and_kept_for_the_record() -> None:
    buffer = new_buffer(bound=1, wanted=1)
    buffer.step = buffer.serving = 5
    for number, step in ((0, 3), (1, 4)):
        buffer.begin(number)
        buffer.put(number, group(number, step), Signal.TASK)
    taken = buffer.pop_step()
    assert (numbers(taken.trained), numbers(taken.stale)) == ([1], [0])


def test_masking_waits_for_nobody_and_trains_on_what_is_young_enough() -> None:
    buffer = new_buffer(bound=1, wanted=1, mask=True)
    buffer.begin(0)
    buffer.step = buffer.serving = 5
    assert not buffer.waits_for_oldest
    young, old = make_trajectory(0, group=1, step=5), make_trajectory(1, group=1, step=2)
    buffer.begin(1)
    buffer.put(1, Group("g1", "task", 2, (young, old)), Signal.TASK)
    buffer.put(0, group(0, 1), Signal.TASK)
    taken = buffer.pop_step()
    assert (numbers(taken.trained), numbers(taken.stale)) == ([1], [0])
    kept, masked = taken.trained[0].group.members
    assert kept.num_sampled_tokens == young.num_sampled_tokens
    assert masked.num_sampled_tokens == 0 and taken.masked_tokens == old.num_sampled_tokens
    assert masked.reward == old.reward, "its outcome still counts in the group's baseline"


def test_a_step_goes_on_with_less_where_nothing_carries_a_signal() -> None:
    buffer = new_buffer(bound=1, wanted=2, most=3)
    for number in range(3):
        assert not buffer.is_ready(1.0)
        buffer.begin(number)
        buffer.put(number, group(number, 0), Signal.NONE)
    assert buffer.is_ready(1.0)
    taken = buffer.pop_step()
    assert (taken.trained, numbers(taken.dropped)) == ([], [0, 1, 2])
    assert not buffer.is_ready(1.0)


def test_where_nothing_may_begin_any_more_the_last_step_takes_what_there_is() -> None:
    buffer = new_buffer(bound=1, wanted=3, num_steps=1)
    for number in range(2):
        buffer.begin(number)
    for number in range(2):
        assert not buffer.is_ready(1.5)
        buffer.put(number, group(number, 0), Signal.TASK)
    assert buffer.is_ready(1.5), "two groups with their forks were expected to be enough"
    assert numbers(buffer.pop_step().trained) == [0, 1]


def test_a_late_member_joins_the_group_that_waits() -> None:
    buffer = new_buffer()
    buffer.begin(0)
    buffer.put(0, group(0, 0, 2), Signal.TASK)
    buffer.put(0, group(0, 0, 3), Signal.TASK)
    assert buffer.is_waiting(0)
    (taken,) = buffer.pop_step().trained
    assert len(taken.group.members) == 3
    assert not buffer.is_waiting(0)


def test_members_that_sampled_nothing_do_not_make_a_group_old() -> None:
    buffer = new_buffer(bound=0)
    buffer.serving = buffer.step = 7
    buffer.begin(0)
    nothing = replace(make_trajectory(0), segments=(), reward=RewardBreakdown(0.0))
    buffer.put(0, Group("g0", "task", 1, (nothing,)), Signal.FORM)
    assert numbers(buffer.pop_step().trained) == [0]


@given(
    seed=st.integers(0, 2**32),
    bound=st.integers(1, 4),
    wanted=st.integers(1, 4),
    num_steps=st.integers(1, 12),
)
def test_the_bound_holds_and_nothing_is_dropped_in_any_interleaving(
    seed: int, bound: int, wanted: int, num_steps: int
) -> None:
    """Groups end in any order, and the trainer's versions come into service late."""
    source = Random(seed)
    buffer = GroupBuffer(bound, wanted, 0, num_steps, 1_000, mask=False)
    began: dict[int, int] = {}
    trained: list[int] = []
    done = 0
    while done < num_steps:
        while buffer.num_may_begin(1.0) and source.random() < 0.7:
            began[len(began)] = buffer.serving
            buffer.begin(len(began) - 1)
        if buffer.under_way and source.random() < 0.8:
            number = source.choice(sorted(buffer.under_way))
            signal = source.choice([Signal.TASK, Signal.TASK, Signal.NONE])
            buffer.put(number, group(number, began[number], 1), signal)
        if source.random() < 0.3:
            buffer.serving = done
        if buffer.serving == done and buffer.is_ready(1.0):
            taken = buffer.pop_step()
            assert not taken.stale
            assert all(done - one.oldest_step <= bound for one in taken.trained)
            trained += numbers(taken.trained)
            done += 1
    assert len(trained) == len(set(trained))


@pytest.mark.parametrize("signal", [Signal.TASK, Signal.NONE])
def test_under_way_is_who_has_begun_and_is_not_whole(signal: Signal) -> None:
    buffer = new_buffer()
    buffer.begin(3)
    assert list(buffer.under_way) == [3]
    buffer.put(3, group(3, 0), signal)
    assert not buffer.under_way
