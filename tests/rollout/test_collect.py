import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.algorithms.signal import is_surplus
from etude.records import Group, SamplingParams
from tests.environment.playing import FAILS, SOLVES, new_environment, script_of, verdicts
from tests.fakes.scripted import ScriptedSampler
from tests.rollout.collecting import GivenVerdicts, new_collector


def numbers(groups: Sequence[Group]) -> list[int]:
    """Task numbers of groups, in their order."""
    return [group.members[0].id.group for group in groups]


def split_by_index(number: int, index: int) -> float:
    """Every group has variance."""
    return float(index % 2)


def test_groups_are_whole_sessions_of_one_task_under_ids_of_their_own() -> None:
    environment = GivenVerdicts(split_by_index)
    collected = asyncio.run(new_collector(environment, groups_per_step=3, group_size=4).collect())
    assert [group.id for group in collected.trained] == ["run/g0", "run/g1", "run/g2"]
    assert all(group.complete and group.kind == "task" for group in collected.trained)
    assert {m.id.task for m in collected.trained[1].members} == {"task-1"}
    assert [m.id.index for m in collected.trained[1].members] == [0, 1, 2, 3]
    keys = [key for _, key, _ in environment.asked]
    assert len(set(keys)) == 12
    assert (3, 2, 1) in keys


def test_rollouts_are_sampled_at_the_configured_temperature() -> None:
    environment = GivenVerdicts(split_by_index)
    asyncio.run(new_collector(environment, groups_per_step=1, temperature=0.75).collect())
    assert {params for _, _, params in environment.asked} == {SamplingParams(temperature=0.75)}


def test_groups_without_variance_are_dropped_kept_for_the_record_and_replaced() -> None:
    def odd_groups_agree(number: int, index: int) -> float:
        return float(number % 4 == 1) if number % 2 else float(index % 2)

    collector = new_collector(GivenVerdicts(odd_groups_agree), groups_per_step=4, max_refill_rounds=3)
    collected = asyncio.run(collector.collect())
    assert numbers(collected.trained)[:4] == [0, 2, 4, 6]
    assert numbers(collected.dropped)[:3] == [1, 3, 5]
    assert len(collected.trajectories) == 8 * (len(collected.trained) + len(collected.dropped))


def test_a_step_trains_the_number_of_groups_asked_for_and_keeps_the_record_of_others() -> None:
    """The share that was useful lately was one half, and now all groups are."""
    collector = new_collector(GivenVerdicts(split_by_index), groups_per_step=3)
    collector.state.useful_share = 0.5
    collected = asyncio.run(collector.collect())
    assert numbers(collected.trained) == [0, 1, 2]
    assert numbers(collected.dropped) == [3, 4, 5]
    assert collected.figures["surplus_groups"] == 3


def test_a_step_that_is_full_enough_waits_for_no_further_round() -> None:
    def three_of_four(number: int, index: int) -> float:
        return float(index % 2 and number % 4 != 3)

    for refill_below, num_groups in ((0.75, 4), (0.8, 6)):
        collector = new_collector(
            GivenVerdicts(three_of_four), groups_per_step=4, group_size=2, refill_below=refill_below
        )
        asyncio.run(collector.collect())
        assert collector.state.next_task == num_groups


def test_refilling_ends_and_the_step_goes_on_with_less() -> None:
    collector = new_collector(GivenVerdicts(lambda n, i: 1.0), groups_per_step=2, max_refill_rounds=2)
    collected = asyncio.run(collector.collect())
    assert collected.trained == ()
    assert numbers(collected.dropped) == list(range(collector.state.next_task))
    assert len(collected.dropped) >= 3 * 2


def test_the_share_of_useful_groups_decides_how_many_are_asked_for() -> None:
    settings: dict[str, Any] = {"groups_per_step": 4, "group_size": 2, "max_refill_rounds": 0}
    collector = new_collector(GivenVerdicts(lambda n, i: float(i % 2 and n % 2)), **settings)
    assert collector.state.useful_share == 1.0
    asked = []
    for _ in range(12):
        before = collector.state.next_task
        asyncio.run(collector.collect())
        asked.append(collector.state.next_task - before)
    assert asked[0] == 4
    assert collector.state.useful_share == pytest.approx(0.5, abs=0.05)
    assert asked[-1] in (7, 8)
    hopeless = new_collector(GivenVerdicts(lambda n, i: 0.0), **settings)
    for _ in range(8):
        asyncio.run(hopeless.collect())
    before = hopeless.state.next_task
    asyncio.run(hopeless.collect())
    assert hopeless.state.next_task - before == 8, "never more than twice as many"


def test_sessions_that_the_infrastructure_failed_make_no_variance() -> None:
    def verdict(number: int, index: int) -> float | None:
        if number == 0:
            return 1.0 if index == 0 else None
        if number == 1:
            return None
        return (None, 0.0, 1.0, 1.0)[index]

    collector = new_collector(GivenVerdicts(verdict), groups_per_step=3, group_size=4, max_refill_rounds=0)
    collected = asyncio.run(collector.collect())
    assert numbers(collected.dropped) == [0, 1]
    assert numbers(collected.trained) == [2]
    assert collected.trained[0].complete


@given(
    useful=st.lists(st.booleans(), min_size=1, max_size=40),
    groups_per_step=st.integers(1, 5),
    refills=st.integers(0, 3),
    steps=st.integers(1, 4),
    cut=st.integers(0, 3),
)
def test_no_task_is_repeated_or_skipped_and_a_resumed_run_asks_for_the_very_next(
    useful: list[bool], groups_per_step: int, refills: int, steps: int, cut: int
) -> None:
    def verdict(number: int, index: int) -> float:
        return float(index % 2) if useful[number % len(useful)] else 0.0

    async def collect(num_steps: int, collector: Any) -> list[list[int]]:
        seen = []
        for _ in range(num_steps):
            collected = await collector.collect()
            every = [*collected.trained, *collected.dropped]
            assert all(useful[number % len(useful)] for number in numbers(collected.trained))
            surplus = [number for number in numbers(collected.dropped) if useful[number % len(useful)]]
            assert len(surplus) == collected.figures["surplus_groups"]
            assert surplus == [group.members[0].id.group for group in collected.dropped if is_surplus(group)]
            assert not any(map(is_surplus, collected.trained))
            assert all(number > max(numbers(collected.trained)) for number in surplus)
            seen.append(sorted(numbers(every)))
        return seen

    def make() -> Any:
        return new_collector(
            GivenVerdicts(verdict),
            groups_per_step=groups_per_step,
            group_size=2,
            max_refill_rounds=refills,
        )

    whole = make()
    undisturbed = asyncio.run(collect(steps, whole))
    flat = [number for step in undisturbed for number in step]
    assert flat == list(range(whole.state.next_task))
    assert 0.0 <= whole.state.useful_share <= 1.0
    first = make()
    before = asyncio.run(collect(min(cut, steps), first))
    second = make()
    second.state = replace(first.state)
    assert before + asyncio.run(collect(steps - min(cut, steps), second)) == undisturbed


def test_real_sessions_are_grouped_and_judged() -> None:
    def play(session_id: str):
        index = int(session_id.partition("~")[0].rpartition("/")[2])
        return SOLVES if index % 3 == 0 else FAILS

    sampler = ScriptedSampler(script_of(play))
    collector = new_collector(new_environment(), sampler, groups_per_step=2, group_size=4)
    collected = asyncio.run(collector.collect())
    assert verdicts(collected.trained[0].members) == {
        f"run/task-0/e0/g0/{index}": float(index % 3 == 0) for index in range(4)
    }


def test_a_defect_in_one_session_ends_the_whole_collection() -> None:
    def broken(number: int, index: int) -> float:
        raise ZeroDivisionError("a defect")

    environment = GivenVerdicts(broken)
    with pytest.raises(ZeroDivisionError):
        asyncio.run(new_collector(environment, groups_per_step=1).collect())
