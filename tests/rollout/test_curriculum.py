from dataclasses import asdict, replace

from hypothesis import given
from hypothesis import strategies as st

from etude.config import CurriculumConfig
from etude.records import Group, RewardBreakdown, Task
from etude.rollout.curriculum import CollectorState, Curriculum, LevelRecord
from tests.environment.playing import TASK
from tests.store.builders import make_trajectory


def tasks(number: int) -> Task:
    """Levels 1, 2, 3 in turn."""
    return replace(TASK, id=f"task-{number}", metadata={"level": 1 + number % 3})


def group(number: int, passed: float, num_tokens: int = 40) -> Group:
    members = (
        replace(make_trajectory(i, group=number, num_tokens=num_tokens), reward=RewardBreakdown(passed))
        for i in range(2)
    )
    return Group(f"g{number}", "task", 2, tuple(members))


def begin(curriculum: Curriculum, count: int) -> list[int]:
    return [curriculum.begin()[0] for _ in range(count)]


def test_by_default_tasks_come_in_their_own_order() -> None:
    state = CollectorState()
    curriculum = Curriculum(tasks, CurriculumConfig(), state)
    assert begin(curriculum, 5) == [0, 1, 2, 3, 4]
    assert (state.next_task, state.pending) == (5, [0, 1, 2, 3, 4])
    curriculum.resolve([(3, group(3, 0.0)), (0, group(0, 1.0))])
    assert state.pending == [1, 2, 4]


def test_a_resumed_run_begins_with_what_was_begun_and_not_resolved() -> None:
    state = CollectorState(next_task=9, pending=[7, 4])
    curriculum = Curriculum(tasks, CurriculumConfig(), state)
    assert begin(curriculum, 4) == [7, 4, 9, 10]


def test_levels_outside_of_the_band_are_passed_over_but_for_probes() -> None:
    config = CurriculumConfig(pass_band=(0.1, 0.9), min_groups=2, probe_every=4)
    state = CollectorState()
    curriculum = Curriculum(tasks, config, state)
    numbers = begin(curriculum, 6)
    curriculum.resolve((n, group(n, {0: 1.0, 1: 0.5, 2: 0.0}[n % 3])) for n in numbers)
    coming = begin(curriculum, 16)
    assert sum(number % 3 == 1 for number in coming) == 11, "the level within the band"
    assert sum(number % 3 == 0 for number in coming) <= 3
    assert coming == sorted(coming) and len(set(coming)) == len(coming)
    assert state.levels["1"].num_passed_over > state.levels["2"].num_passed_over == 0


def test_a_level_comes_back_when_its_pass_rate_does() -> None:
    config = CurriculumConfig(pass_band=(0.1, 1.0), min_groups=1, probe_every=2)
    state = CollectorState(levels={"1": LevelRecord(5, 0.0, 20.0, 0)})
    curriculum = Curriculum(tasks, config, state)
    while state.levels["1"].pass_rate < 0.1:
        number, _ = curriculum.begin()
        curriculum.resolve([(number, group(number, 1.0))])
    coming = begin(curriculum, 9)
    assert sum(number % 3 == 0 for number in coming) == 3


def test_of_the_tasks_ahead_those_with_the_longest_sessions_come_first() -> None:
    levels = {
        str(level): LevelRecord(9, 0.5, tokens, 0) for level, tokens in ((1, 10.0), (2, 30.0), (3, 20.0))
    }
    curriculum = Curriculum(tasks, CurriculumConfig(longest_first=6), CollectorState(levels=levels))
    assert begin(curriculum, 8) == [1, 4, 2, 5, 0, 3, 7, 10]


def test_a_level_that_nobody_knows_yet_comes_first() -> None:
    levels = {"1": LevelRecord(9, 0.5, 10.0, 0)}
    curriculum = Curriculum(tasks, CurriculumConfig(longest_first=3), CollectorState(levels=levels))
    assert begin(curriculum, 3) == [1, 2, 0]


def test_what_is_learnt_follows_the_newest_groups() -> None:
    state = CollectorState()
    curriculum = Curriculum(tasks, CurriculumConfig(), state)
    for number in begin(curriculum, 30):
        curriculum.resolve([(number, group(number, float(number >= 15), 40 if number < 15 else 80))])
    assert state.levels["1"].num_groups == 10
    assert 0.6 < state.levels["1"].pass_rate < 0.8
    assert 30 < state.levels["1"].tokens < 40


def test_the_state_is_plain_values_and_comes_back_from_them() -> None:
    state = CollectorState(3, 0.5, [1, 2], {"1": LevelRecord(1, 0.5, 20.0, 2)})
    assert CollectorState(**asdict(state)) == state
    assert CollectorState(next_task=4, useful_share=0.25) == CollectorState(4, 0.25)


@given(data=st.data(), ahead=st.integers(1, 5), probe_every=st.integers(1, 4), kills=st.integers(0, 3))
def test_over_any_restarts_every_number_is_resolved_once_or_passed_over(
    data: st.DataObject, ahead: int, probe_every: int, kills: int
) -> None:
    config = CurriculumConfig(
        pass_band=(0.2, 0.8), min_groups=1, probe_every=probe_every, longest_first=ahead
    )
    state, resolved = CollectorState(), []
    for _ in range(kills + 1):
        state = CollectorState(**asdict(state))
        curriculum = Curriculum(tasks, config, state)
        open_numbers: list[int] = []
        for _ in range(data.draw(st.integers(0, 12))):
            open_numbers += begin(curriculum, 1)
            if data.draw(st.booleans()):
                number = open_numbers.pop(data.draw(st.integers(0, len(open_numbers) - 1)))
                curriculum.resolve([(number, group(number, data.draw(st.sampled_from([0.0, 0.5, 1.0]))))])
                resolved.append(number)
    assert len(resolved) == len(set(resolved))
    passed_over = set(range(state.next_task)) - set(resolved) - set(state.pending)
    assert not set(resolved) & set(state.pending)
    assert len(passed_over) <= sum(record.num_passed_over for record in state.levels.values())
