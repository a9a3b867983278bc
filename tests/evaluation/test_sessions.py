import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from etude.evaluation import SessionRow, play_sessions, plays_of
from etude.evaluation.sessions import cluster_of
from etude.records import SamplingParams, Trajectory
from etude.store import TrajectoryLog
from tests.environment.playing import SOLVES, TASK, new_environment, run_episode, scripted
from tests.rollout.collecting import GivenVerdicts, task_source

TASKS = [task_source(number) for number in range(4)]


def play(
    environment: GivenVerdicts, log: TrajectoryLog | None = None, num_samples: int = 1, **more: Any
) -> list[Trajectory]:
    plays, params = plays_of(TASKS, num_samples), SamplingParams(temperature=0.5)
    return asyncio.run(
        play_sessions(cast(Any, environment), scripted([]), plays, "eval", 5, params, 3, log, **more)
    )


def test_sessions_come_in_order_and_only_so_many_at_once() -> None:
    environment = GivenVerdicts(lambda number, sample: float(number % 2))
    ended: list[Trajectory] = []
    trajectories = play(environment, num_samples=2, on_end=ended.append)
    assert [(t.id.task, t.id.index) for t in trajectories] == [
        (task.id, sample) for sample in range(2) for task in TASKS
    ]
    assert [t.reward.task for t in trajectories if t.reward] == [0.0, 1.0, 0.0, 1.0] * 2
    assert environment.most_running == 3
    assert len({key for _, key, _ in environment.asked}) == len(ended) == 8
    assert {params.temperature for _, _, params in environment.asked} == {0.5}


def test_what_was_stored_is_not_played_again_and_what_was_voided_is(tmp_path: Path) -> None:
    class KilledError(Exception):
        """Ends the evaluation in its middle."""

    def killed_at_two(number: int, sample: int) -> float | None:
        if number == 2:
            raise KilledError
        return None if number == 1 else 1.0

    with pytest.raises(KilledError):
        play(GivenVerdicts(killed_at_two), TrajectoryLog(tmp_path))
    assert len(TrajectoryLog(tmp_path)) == 1, "the first; the second was voided"
    second = GivenVerdicts(lambda number, sample: 0.0)
    ended: list[Trajectory] = []
    again = play(second, TrajectoryLog(tmp_path), on_end=ended.append)
    assert [identity.group for identity, _, _ in second.asked] == [1, 2, 3]
    assert [t.reward.task for t in again if t.reward] == [1.0, 0.0, 0.0, 0.0]
    assert len(ended) == 4
    third = GivenVerdicts(lambda number, sample: 0.0)
    play(third, TrajectoryLog(tmp_path), num_samples=2)
    assert [(identity.group, identity.index) for identity, _, _ in third.asked] == [(n, 1) for n in range(4)]


def test_a_session_becomes_a_row() -> None:
    trajectory = run_episode(new_environment(), scripted(SOLVES))
    row = SessionRow.of(TASK, trajectory)
    assert (row.task, row.cluster, row.passed, row.turns, row.calls) == ("tally", "tally", True, 4, 4)
    assert row.tokens == trajectory.num_sampled_tokens
    spans = [span for span in trajectory.segments[0].turn_spans if span.role == "assistant"]
    assert row.input_tokens == sum(span.start for span in spans) > row.tokens
    assert SessionRow.of(TASK, trajectory, 4.0).tokens == row.tokens / 4
    assert SessionRow.from_json(row.to_json()) == row
    assert SessionRow.of(TASK, replace(trajectory, reward=None)).passed is None


def test_tasks_of_a_repository_or_family_are_one_cluster() -> None:
    assert cluster_of(replace(TASK, metadata={"family": "sums"})) == "sums"
    assert cluster_of(replace(TASK, metadata={"family": "sums", "repository": "a/b"})) == "a/b"
