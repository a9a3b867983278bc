"""What some runners of episodes can do besides running them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass
from typing import Protocol, runtime_checkable

from etude.environment.fork_groups import ForkedEpisode, ForkPlan
from etude.protocols import EpisodeRunner, Sampler
from etude.records import SamplingParams, Task, TrajectoryId


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


class TimedRunner(EpisodeRunner, Protocol):
    """Knows where its time went."""

    @property
    def times(self) -> EnvironmentTimes:
        """Of all episodes so far, as far as they have been told of."""
        ...


@runtime_checkable
class ForkingRunner(EpisodeRunner, Protocol):
    """Can fork a session in its middle."""

    async def run_forked(
        self,
        task: Task,
        identity: TrajectoryId,
        sampler: Sampler,
        rng_key: tuple[int, ...],
        params: SamplingParams,
        plan: ForkPlan,
    ) -> ForkedEpisode:
        """One training episode; before it is graded it is forked at one of its turns, as planned."""
        ...
