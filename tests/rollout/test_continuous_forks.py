"""Forked groups during training: over a simulated engine, and scripted over real sessions."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from benchmarks.simulation.rollout import SimulatedEnvironment, run_virtual

from etude.config import RlConfig
from etude.environment.fork_groups import ForkedEpisode, ForkRefusal, branch_of
from etude.environment.runners import EpisodeRequest
from etude.protocols import Sampler
from etude.records import Group, GroupOrigin, Trajectory
from etude.rollout import Collected, ContinuousCollector
from etude.rollout.curriculum import CollectorState
from etude.store.trajectories import TrajectoryLog
from tests.environment.playing import FAILS, SOLVES, new_environment, script_of
from tests.fakes.scripted import ScriptedSampler
from tests.rollout.collecting import task_source
from tests.rollout.test_continuous import Played, lags, number_of, paced_steps, play, stored

FORKS = {"share": 0.5, "size": 3, "turn": "random"}


class Forking:
    """A simulated environment that forks: siblings are sessions of their own, told the forked one's start."""

    def __init__(self, inner: SimulatedEnvironment) -> None:
        self._inner = inner

    @property
    def most_running(self) -> int:
        return self._inner.most_running

    async def play(self, request: EpisodeRequest, sampler: Sampler) -> ForkedEpisode:
        played = await self._inner.play(request, sampler)
        forked, plan = played.trajectory, request.plan
        if plan is None:
            return played
        if len(forked.turns) < 2:
            return ForkedEpisode(forked, refused=ForkRefusal.TOO_SHORT)
        at = forked.turns[1]
        origin = GroupOrigin(at.segment_id, at.start, "")
        siblings = await asyncio.gather(
            *(
                self._inner.run(request.task, one.identity, sampler, one.rng_key, request.params, True)
                for one in plan.siblings
            )
        )
        facts = {"fork_prefix_tokens": at.start, "fork_cached_tokens": at.start - 1}
        branches = tuple(_left(one, at.start, facts) for one in siblings)
        return ForkedEpisode(forked, branches, origin)


def _left(sibling: Trajectory, start: int, facts: dict[str, Any]) -> Trajectory:
    """A sibling's records as they would be, had it been told the forked session's start."""
    (segment,) = sibling.segments
    offset = min(start, len(segment.tokens) - 1)
    return branch_of(sibling, GroupOrigin(segment.id, offset, ""), sibling.id, facts)


def played(path: Path, **options: Any) -> Played:
    return play(path, wrap=Forking, **{"forks": FORKS, **options})


def fork_of(batch: Collected) -> dict[int, Group]:
    return {number_of(group): group for group in batch.trained if group.kind == "fork"}


def resolved(run: Played) -> list[int]:
    """Numbers whose task groups were trained on or dropped; a number of which only the fork was trained
    counts with the group beside it, which was dropped."""
    groups = (g for batch in run.batches for g in (*batch.trained, *batch.dropped, *batch.stale))
    return [number_of(group) for group in groups if group.kind == "task"]


@pytest.mark.slow
@pytest.mark.parametrize("bound", [1, 3])
def test_the_bound_holds_with_forks_too_and_a_fork_is_taken_with_its_task_s_group(
    bound: int, tmp_path: Path
) -> None:
    run = played(tmp_path, max_staleness=bound)
    assert 0 < max(lags(run)) <= bound
    assert all(not batch.stale for batch in run.batches)
    assert sum(batch.figures["forks_trained"] for batch in run.batches) > 0
    made = sum(batch.figures["forks"] for batch in run.batches)
    taken = [g for b in run.batches for g in (*b.trained, *b.dropped) if g.kind == "fork"]
    assert made >= len(taken) > 0
    for batch in run.batches:
        tasks = {number_of(g) for g in (*batch.trained, *batch.dropped) if g.kind == "task"}
        assert {number_of(g) for g in (*batch.trained, *batch.dropped)} == tasks


def test_no_task_is_resolved_twice_or_left_out_where_some_are_forked(tmp_path: Path) -> None:
    run = played(tmp_path, num_steps=8)
    numbers = resolved(run)
    assert len(numbers) == len(set(numbers))
    state = run.states[-1]
    assert sorted([*numbers, *state.pending]) == list(range(state.next_task))


def test_places_of_siblings_are_kept_from_the_beginning(tmp_path: Path) -> None:
    run = played(tmp_path, max_sessions=9, max_staleness=4, forks={"share": 1.0, "size": 5})
    assert run.environment.most_running <= 9
    assert sum(batch.figures["forks"] for batch in run.batches) > 0
    assert run.batches[-1].figures["blocked_by_slots_share"] > 0


@pytest.mark.parametrize("stragglers", ["abort", "carry"])
def test_a_forked_session_is_waited_for_where_others_are_late(stragglers: str, tmp_path: Path) -> None:
    run = played(tmp_path, extra_members=2, stragglers=stragglers, forks={**FORKS, "share": 1.0})
    groups = [g for b in run.batches for g in (*b.trained, *b.dropped)]
    forks = {number_of(g): g for g in groups if g.kind == "fork"}
    assert len(forks) > 5
    assert {m.id.index for g in forks.values() for m in g.members} == {6, 7, 8}, "behind the group's six"
    for group in groups:
        if group.kind == "task":
            assert group.members[0].id.index == 0
    aborted = sum(batch.figures["stragglers_aborted"] for batch in run.batches)
    carried = sum(batch.figures["stragglers_carried"] for batch in run.batches)
    assert aborted > 0 if stragglers == "abort" else carried > 0


def test_with_masking_old_tokens_of_a_forked_unit_are_left_out_of_both_groups(tmp_path: Path) -> None:
    run = played(tmp_path, max_staleness=1, train_s=1.0, num_steps=10, stale="mask")
    assert max(lags(run)) <= 1
    assert sum(batch.figures["stale_masked_tokens"] for batch in run.batches) > 0


@pytest.mark.slow
@pytest.mark.parametrize("stop_at_s", [75.0, 140.0, 200.0])
def test_after_a_kill_forks_come_from_the_log_with_their_groups(stop_at_s: float, tmp_path: Path) -> None:
    killed = played(tmp_path, num_steps=8, stop_at_s=stop_at_s)
    assert len(killed.numbers) < 8
    state = killed.states[len(killed.numbers) - 1] if killed.numbers else CollectorState()
    before = {(m.id, len(m.segments[0].tokens)) for m in stored(tmp_path)}
    later = played(tmp_path, num_steps=8, first_step=len(killed.numbers), state=state)
    killed.batches = killed.batches[: len(killed.numbers)]
    numbers = resolved(killed) + resolved(later)
    assert len(numbers) == len(set(numbers))
    assert sorted([*numbers, *later.states[-1].pending]) == list(range(later.states[-1].next_task))
    after = [(m.id, len(m.segments[0].tokens)) for m in stored(tmp_path)]
    assert len({identity for identity, _ in after}) == len(after), "nothing is stored twice"
    assert before <= set(after)
    forks = [g.id for run in (killed, later) for b in run.batches for g in b.trained if g.kind == "fork"]
    assert len(forks) == len(set(forks)) > 0
    assert sum(batch.figures["groups_from_log"] for batch in later.batches) > 0


def test_a_run_that_was_killed_before_its_first_step_trains_stored_forks_first(tmp_path: Path) -> None:
    first = played(tmp_path, num_steps=1)
    ids = {group.id for group in first.batches[0].trained}
    again = played(tmp_path, num_steps=1)
    assert {group.id for group in again.batches[0].trained} == ids
    assert again.batches[0].figures["groups_from_log"] > 0
    assert again.batches[0].figures["forks"] == 0.0, "none was made anew"


def test_on_a_paced_schedule_forked_episodes_arrive_in_turns_only(tmp_path: Path) -> None:
    numbers = run_virtual(paced_steps(TrajectoryLog(tmp_path), 4, wrap=Forking, forks=FORKS))
    assert len(numbers) == 4
    assert any(len(step) > len(set(step)) for step in numbers), "a number's two groups"


def test_where_the_schedule_comes_to_its_end_forked_episodes_still_arrive(tmp_path: Path) -> None:
    steps = paced_steps(TrajectoryLog(tmp_path), 4, 20.0, wrap=Forking, forks=FORKS)
    assert len(run_virtual(steps)) == 4


def test_real_sessions_are_forked_while_others_run(tmp_path: Path) -> None:
    def solved(session_id: str) -> Any:
        return SOLVES if int(session_id.partition("~")[0].rpartition("/")[2]) % 2 else FAILS

    async def collect() -> Collected:
        sampler = ScriptedSampler(script_of(solved), route_shape=(2, 2))
        config = RlConfig.model_validate(
            {
                "max_staleness": 1, "groups_per_step": 4, "group_size": 2, "updates_per_step": 1,
                "forks": {"share": 1.0, "size": 3, "turn": "first_edit"},
            }
        )  # fmt: skip
        collector = ContinuousCollector(new_environment(), sampler, task_source, config, "run", 3, 64)
        collector.on_weights_served(0)
        async with collector.running(TrajectoryLog(tmp_path), 0, 1):
            batch = await collector.collect()
        assert not sampler.open_sessions
        return batch

    batch = asyncio.run(collect())
    assert {group.kind for group in batch.trained} == {"task", "fork"}
    for fork in fork_of(batch).values():
        assert [m.id.index for m in fork.members] == [2, 3, 4]
    assert all(TrajectoryLog(tmp_path).contains(m.id) for g in batch.trained for m in g.members)
