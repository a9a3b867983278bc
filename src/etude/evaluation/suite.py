"""Evaluating a policy on a suite: greedily, at temperature 1, and several times at temperature 1."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from etude.errors import InfrastructureError
from etude.evaluation.sessions import OnEnd, Play, SessionRow, play_sessions, plays_of
from etude.evaluation.statistics import mean, pass_rates, summarize, verdicts_by_task
from etude.observe import summarize_behaviour
from etude.protocols import Sampler
from etude.records import SamplingParams, Task, Trajectory

if TYPE_CHECKING:
    from etude.environment.runners import EpisodeRunner


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The results of one policy on one set of tasks."""

    greedy: dict[str, Any]
    """As `summarize` returns it."""
    sampled: dict[str, Any]
    """At temperature 1."""
    behaviour: dict[str, float]
    """Metrics of the sampled sessions, per episode."""
    trajectories: tuple[Trajectory, ...]
    """The first sampled session of each task, in the order of the tasks."""
    pass_at_k: dict[str, float] = field(default_factory=dict[str, float])
    """`pass_at_8`, of eight sessions of each repeated task at temperature 1; empty where there was none."""

    def to_json(self) -> dict[str, Any]:
        return {"greedy": self.greedy, "sampled": self.sampled}


async def evaluate_policy(
    environment: EpisodeRunner,
    sampler: Sampler,
    tasks: Sequence[Task],
    name: str,
    seed: int,
    max_sessions: int,
    num_samples: int = 1,
    num_repeated: int = 0,
    on_end: OnEnd | None = None,
) -> Evaluation:
    """Runs every task once greedily and once at temperature 1; the first `num_repeated` tasks have
    `num_samples` sessions at temperature 1. `on_end`: see `play_sessions`.

    Raises InfrastructureError if most sessions failed.
    """
    again = plays_of(tasks[:num_repeated], num_samples)[len(tasks[:num_repeated]) :]
    plays: dict[str, list[Play]] = {"greedy": plays_of(tasks), "sampled": [*plays_of(tasks), *again]}
    runs: dict[str, list[Trajectory]] = {}
    for mode, temperature in (("greedy", 0.0), ("sampled", 1.0)):
        params, label = SamplingParams(temperature=temperature), f"{name}-{mode}"
        runs[mode] = await play_sessions(
            environment, sampler, plays[mode], label, seed, params, max_sessions, on_end=on_end
        )
        check_infrastructure(runs[mode])
    first = runs["sampled"][: len(tasks)]
    return Evaluation(
        summarize(tasks, runs["greedy"]),
        summarize(tasks, first),
        summarize_behaviour(first),
        tuple(first),
        _pass_at(num_samples, plays["sampled"], runs["sampled"]) if again else {},
    )


def _pass_at(k: int, plays: Sequence[Play], trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """pass@k over the tasks with `k` graded sessions; empty if there is none."""
    rows = [SessionRow.of(play.task, one) for play, one in zip(plays, trajectories, strict=True)]
    rates = pass_rates(verdicts_by_task(rows), k)
    return {f"pass_at_{k}": mean(list(rates.values()))} if rates else {}


def check_infrastructure(trajectories: Sequence[Trajectory]) -> None:
    """Raises InfrastructureError if more than half of the sessions failed through no fault of the agent."""
    failed = [trajectory for trajectory in trajectories if trajectory.reward is None]
    if 2 * len(failed) > len(trajectories):
        raise InfrastructureError(
            f"{len(failed)} of {len(trajectories)} sessions failed",
            received=failed[0].cause,
            fix="correct the cause of the first failure, and start again",
        )


def tasks_digest(tasks: Sequence[Task]) -> str:
    """Digest of a list of tasks, in order."""
    return _digest("\n".join(_task_digest(task) for task in tasks))


def _task_digest(task: Task) -> str:
    """Digest of a task's contents; 32 hexadecimal digits."""
    fields = {
        "id": task.id,
        "instruction": task.instruction,
        "files": dict(task.files),
        "hidden_files": dict(task.hidden_files),
        "solution_files": dict(task.solution_files),
        "allowed_paths": task.allowed_paths,
        "test_paths": task.test_paths,
        "hidden_test_paths": task.hidden_test_paths,
        "metadata": dict(task.metadata),
    }
    return _digest(json.dumps(fields, sort_keys=True))


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
