"""What some runners of episodes can do besides running them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass
from typing import Protocol

from etude.environment.fork_groups import ForkedEpisode, ForkPlan
from etude.protocols import EpisodeRunner, Sampler
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
    """What a session is made of, but for its sampler: see EpisodeRunner.run."""

    task: Task
    identity: TrajectoryId
    rng_key: tuple[int, ...]
    params: SamplingParams
    training: bool = False
    plan: ForkPlan | None = None
    """Of its fork, if it is to be forked at one of its turns before it is graded."""
    first_attempt: int = 0
    """How often it has been begun before, by processes that are gone."""


class Player(EpisodeRunner, Protocol):
    """Runs episodes, and can fork a session in its middle."""

    async def play(self, order: Order, sampler: Sampler) -> ForkedEpisode:
        """One episode, as `run` does it; without a plan it is not forked, and not refused either."""
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
        """See EpisodeRunner.run."""
        return (await self.play(Order(task, identity, rng_key, params, training), sampler)).trajectory


class TimedPlayer(Player, Protocol):
    """Knows where its time went."""

    @property
    def times(self) -> EnvironmentTimes:
        """Of all episodes so far, as far as they have been reported."""
        ...
