import asyncio
from collections.abc import Sequence
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from etude.config import RlConfig, StreamConfig
from etude.protocols import Sampler
from etude.rollout import Collected, GroupCollector
from etude.rollout.continuous import read_stored_groups
from etude.rollout.forks import is_forked
from etude.store.trajectories import TrajectoryLog
from etude.training.stream import RecordedStream
from tests.environment.playing import FAILS, FINISH, READ, SOLVES, Turn, new_environment, script_of
from tests.fakes.scripted import ScriptedSampler
from tests.rollout.collecting import task_source


def play(session_id: str) -> Sequence[Turn]:
    """Sessions of odd index solve the task."""
    return SOLVES if int(session_id.partition("~")[0].rpartition("/")[2]) % 2 else FAILS


def new_collector(sampler: Sampler | None = None, **forks: object) -> GroupCollector:
    config = RlConfig.model_validate(
        {"groups_per_step": 4, "group_size": 2, "updates_per_step": 1, "forks": {"size": 3, **forks}}
    )
    plays = sampler or ScriptedSampler(script_of(play), route_shape=(2, 2))
    return GroupCollector(new_environment(), plays, task_source, config, "run", seed=3)


def collect(collector: GroupCollector) -> Collected:
    return asyncio.run(collector.collect())


def test_forks_make_groups_of_their_own_that_count_towards_the_step() -> None:
    collected = collect(new_collector(share=1.0))
    assert [group.id for group in collected.trained] == ["run/g0", "run/g0+fork", "run/g1", "run/g1+fork"]
    assert [group.kind for group in collected.trained] == ["task", "fork"] * 2
    assert all(group.complete for group in collected.trained)
    assert [m.id.index for m in collected.trained[1].members] == [2, 3, 4]
    assert len({m.id for m in collected.trajectories}) == 10
    siblings = [m for group in collected.trained[1::2] for m in group.members]
    assert collected.figures == {
        "forks": 2.0,
        "fork_sessions": 6.0,
        "fork_sessions_failed": 0.0,
        "fork_tokens": float(sum(m.num_sampled_tokens for m in siblings)),
        "fork_prefix_tokens": 0.0,  # a scripted sampler does not tell what it held
        "fork_prefix_cached_tokens": 0.0,
        "forks_trained": 2.0,
        "surplus_groups": 0.0,
    }


def test_without_a_share_nothing_is_forked() -> None:
    collected = collect(new_collector())
    assert [group.id for group in collected.trained] == [f"run/g{n}" for n in range(4)]
    assert collected.figures == {"surplus_groups": 0.0}


def test_what_was_refused_is_counted_by_reason() -> None:
    idle = ScriptedSampler(script_of(lambda _: [[READ], [READ], [FINISH]]))
    collector = new_collector(idle, share=1.0, turn="first_edit")
    figures = collect(collector).figures
    assert figures["forks_refused_no_edit"] == collector.state.next_task
    assert figures["forks"] == 0.0


def test_two_runs_fork_the_same_sessions_at_the_same_turns() -> None:
    first, second = (collect(new_collector(share=0.5, turn="random")) for _ in range(2))
    for ours, theirs in zip(first.trained, second.trained, strict=True):
        assert (ours.id, ours.origin) == (theirs.id, theirs.origin)
        for one, other in zip(ours.members, theirs.members, strict=True):
            assert one.segments[0].tokens.tolist() == other.segments[0].tokens.tolist()


@given(share=st.floats(0, 1), count=st.integers(0, 300))
def test_the_share_of_forked_groups_is_kept_at_every_point(share: float, count: int) -> None:
    assert sum(is_forked(number, share) for number in range(count)) == int(count * share)


def test_stored_forks_come_back_with_their_task_s_group_and_are_trained_as_in_the_run(
    tmp_path: Path,
) -> None:
    collector = new_collector(share=1.0)
    collected = collect(collector)
    log = TrajectoryLog(tmp_path)
    log.append(collected.trained)
    stored = [group for part in log.part_names() for group in log.read_part(part)]
    assert [(g.id, g.kind, g.origin) for g in stored] == [(g.id, g.kind, g.origin) for g in collected.trained]
    kept = read_stored_groups(log, new_collector().state, 0)
    ids = {number: (task.id, fork and fork.id) for number, (task, fork) in kept.items()}
    assert ids == {0: ("run/g0", "run/g0+fork"), 1: ("run/g1", "run/g1+fork")}
    stream = RecordedStream(log, RlConfig(stream=StreamConfig(repeat_prompts=True)))
    assert [group.id for group in stream.next_groups(4)] == [group.id for group in collected.trained]
