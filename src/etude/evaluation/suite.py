"""Evaluating a policy: greedy and at temperature 1, on tasks whose functions it never saw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from etude.errors import InfrastructureError
from etude.evaluation.statistics import summarize
from etude.observe import summarize_behaviour
from etude.protocols import EpisodeRunner, Sampler
from etude.records import SamplingParams, Task, Trajectory
from etude.rollout.collect import run_tasks


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One policy on one set of tasks."""

    greedy: dict[str, Any]
    """As `summarize` gives it."""
    sampled: dict[str, Any]
    """At temperature 1."""
    behaviour: dict[str, float]
    """Of the sampled sessions, per episode."""
    trajectories: tuple[Trajectory, ...]
    """The sampled sessions, in the order of the tasks."""

    def to_json(self) -> dict[str, Any]:
        return {"greedy": self.greedy, "sampled": self.sampled}


async def evaluate_policy(
    environment: EpisodeRunner,
    sampler: Sampler,
    tasks: Sequence[Task],
    name: str,
    seed: int,
    max_sessions: int,
) -> Evaluation:
    """Runs every task once greedily and once at temperature 1. Raises InfrastructureError if most failed."""
    runs = {
        mode: await run_tasks(
            environment,
            sampler,
            tasks,
            f"{name}-{mode}",
            seed,
            SamplingParams(temperature=temperature),
            max_sessions,
        )
        for mode, temperature in (("greedy", 0.0), ("sampled", 1.0))
    }
    for trajectories in runs.values():
        check_infrastructure(trajectories)
    return Evaluation(
        summarize(tasks, runs["greedy"]),
        summarize(tasks, runs["sampled"]),
        summarize_behaviour(runs["sampled"]),
        tuple(runs["sampled"]),
    )


def check_infrastructure(trajectories: Sequence[Trajectory]) -> None:
    """Raises InfrastructureError if more than half of the sessions failed through no fault of the agent."""
    failed = [trajectory for trajectory in trajectories if trajectory.reward is None]
    if 2 * len(failed) > len(trajectories):
        raise InfrastructureError(
            f"{len(failed)} of {len(trajectories)} sessions failed", received=failed[0].cause
        )
