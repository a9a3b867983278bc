"""Interface for running episodes: in this process, in a worker, or in another cluster."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass
from typing import Protocol

from etude.environment.fork_groups import ForkedEpisode, ForkPlan
from etude.protocols import Sampler
from etude.records import SamplingParams, Task, Trajectory, TrajectoryId


@dataclass(slots=True)
class EnvironmentTimes:
    """Seconds that episodes have spent, summed over concurrent episodes, and counters."""

    tools_s: float = 0.0
    grade_s: float = 0.0
    num_episodes: int = 0
    num_infrastructure_failures: int = 0
    num_moved: int = 0
    """Times that a session moved to another engine after its tools, where these episodes choose engines."""


def add_times(all_of: Iterable[EnvironmentTimes]) -> EnvironmentTimes:
    """The sum over several environments."""
    return EnvironmentTimes(*(sum(column) for column in zip(*map(astuple, all_of), strict=True)))


def latest_times(one: EnvironmentTimes, other: EnvironmentTimes) -> EnvironmentTimes:
    """The newer of two reports of one environment, in whatever order they are given."""
    return EnvironmentTimes(*map(max, astuple(one), astuple(other)))


@dataclass(frozen=True, slots=True)
class EpisodeRequest:
    """Everything that determines a session, except its sampler."""

    task: Task
    identity: TrajectoryId
    rng_key: tuple[int, ...]
    """Key of its sampling noise."""
    params: SamplingParams
    training: bool = False
    """In training the point at which the agent is asked for a summary is random."""
    plan: ForkPlan | None = None
    """How to fork it at one of its turns before it is graded; None: it is not forked."""
    first_attempt: int = 0
    """Number of earlier attempts, by processes that have ended."""


class EpisodeRunner(Protocol):
    """Runs episodes: one agent on one task in one sandbox, from the instruction to the reward.

    Many may run concurrently in one event loop. After an infrastructure failure the episode is retried from
    the start, and in the end reported as failed in the trajectory; the failure is never raised and never a
    reward. Expert routes of returned trajectories are already in the run's blob store. Cancelling the call
    ends the session, wherever it runs, and cleans up.
    """

    async def play(self, request: EpisodeRequest, sampler: Sampler) -> ForkedEpisode:
        """Runs one episode; without a plan it is neither forked nor is a fork refused.

        `sampler`: continues the session if it runs in this process. An implementation that runs it in another
        process samples there, and only reports progress to it if it is a `TokenProgress`.
        """
        ...

    async def run(
        self,
        task: Task,
        identity: TrajectoryId,
        sampler: Sampler,
        rng_key: tuple[int, ...],
        params: SamplingParams,
        training: bool = False,
    ) -> Trajectory:
        """Runs one episode that is not forked."""
        return (
            await self.play(EpisodeRequest(task, identity, rng_key, params, training), sampler)
        ).trajectory


class TimedEpisodeRunner(EpisodeRunner, Protocol):
    """A player that measures its time."""

    @property
    def times(self) -> EnvironmentTimes:
        """Times of all episodes reported so far."""
        ...
