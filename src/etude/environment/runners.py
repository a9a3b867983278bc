"""The seam between who asks for sessions and where they run: this process, a worker, another cluster."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass
from typing import Protocol

from etude.environment.fork_groups import ForkedEpisode, ForkPlan
from etude.protocols import Sampler
from etude.records import SamplingParams, Task, Trajectory, TrajectoryId


@dataclass(slots=True)
class EnvironmentTimes:
    """Seconds that episodes have spent, summed over episodes that ran side by side, and what they counted."""

    tools_s: float = 0.0
    grade_s: float = 0.0
    num_episodes: int = 0
    num_infrastructure_failures: int = 0
    num_moved: int = 0
    """Times that a session that waited for its tools went on with another engine, as far as these episodes
    choose engines themselves."""


def add_times(all_of: Iterable[EnvironmentTimes]) -> EnvironmentTimes:
    """Of several environments together."""
    return EnvironmentTimes(*(sum(column) for column in zip(*map(astuple, all_of), strict=True)))


def latest_times(one: EnvironmentTimes, other: EnvironmentTimes) -> EnvironmentTimes:
    """Of two reports of one environment, whichever is the older."""
    return EnvironmentTimes(*map(max, astuple(one), astuple(other)))


@dataclass(frozen=True, slots=True)
class Order:
    """What a session is made of, but for its sampler."""

    task: Task
    identity: TrajectoryId
    rng_key: tuple[int, ...]
    """Of its noise."""
    params: SamplingParams
    training: bool = False
    """When the agent is asked for summaries varies in training only."""
    plan: ForkPlan | None = None
    """Of its fork, if it is to be forked at one of its turns before it is graded."""
    first_attempt: int = 0
    """How often it has been begun before, by processes that are gone."""


class Player(Protocol):
    """Runs episodes: one agent, one task, one sandbox, from the user's words to the reward.

    Many may run at once in one event loop. A failure of the infrastructure is retried from the start, and at
    last reported as such in the trajectory; it is never raised and never a reward. Expert routes of what
    comes back are already where the run keeps them. Cancelling the call ends the session, wherever it runs,
    and tidies up behind it.
    """

    async def play(self, order: Order, sampler: Sampler) -> ForkedEpisode:
        """One episode; without a plan it is not forked, and not refused either.

        `sampler`: what continues the session if it runs in this process. Who runs it elsewhere samples there,
        and only tells a `TokenTally` how far the session has come.
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
        """One episode that is not forked."""
        return (await self.play(Order(task, identity, rng_key, params, training), sampler)).trajectory


class TimedPlayer(Player, Protocol):
    """Knows where its time went."""

    @property
    def times(self) -> EnvironmentTimes:
        """Of all episodes so far, as far as they have been reported."""
        ...
