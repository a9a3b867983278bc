"""Synchronous collection of groups: sessions of one task, whose rewards are compared with each other.

A step's groups are sampled in rounds, and all of their sessions have ended when the step is trained.
`continuous.py` collects while the trainer trains.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Protocol

from etude.algorithms.signal import Signal, as_surplus, signal_of
from etude.config import RlConfig
from etude.environment.runners import EpisodeRunner
from etude.kit.tasks import run_together
from etude.protocols import Sampler
from etude.records import Group, Task, Trajectory
from etude.rollout.curriculum import CollectorState, Curriculum, TaskSource
from etude.rollout.forks import Members, count_fork, fork_figures, fork_group
from etude.store.trajectories import TrajectoryLog

__all__ = ["Collected", "Collector", "CollectorState", "GroupCollector", "TaskSource"]

MAX_OVERSAMPLING = 2.0
_SMOOTHING = 0.7


@dataclass(frozen=True, slots=True)
class Collected:
    """One step's groups."""

    trained: tuple[Group, ...]
    """Groups that carry a signal: first those whose verdicts differ, then those whose verdicts are equal and
    whose prices or form differ."""
    dropped: tuple[Group, ...] = field(default=())
    """Groups without a signal, and those beyond what a step needs; kept for the record."""
    stale: tuple[Group, ...] = field(default=())
    """Groups that were too old to be trained on, kept for the record."""
    figures: Mapping[str, float] = field(default_factory=dict[str, float])
    """The collector's metrics since the last step."""
    exhausted: bool = False
    """Whether there are no more tasks, and no groups under way or waiting."""

    @property
    def trajectories(self) -> list[Trajectory]:
        """All sessions."""
        groups = (*self.trained, *self.dropped, *self.stale)
        return [member for group in groups for member in group.members]


class Collector(Protocol):
    """Collects the groups of each training step."""

    state: CollectorState

    def running(
        self, log: TrajectoryLog, first_step: int, num_steps: int
    ) -> AbstractAsyncContextManager[None]:
        """Context in which steps `first_step` to `num_steps` - 1 are collected; sessions that still run at
        its end are cancelled. `log`: stores the groups."""
        ...

    def on_weights_served(self, step: int) -> None:
        """Called when the weights after `step` steps have come into service: they sample from now on."""
        ...

    async def collect(self) -> Collected:
        """Returns the groups of the next step. `state` is then that from which a resumed run continues."""
        ...


class GroupCollector:
    """Samples groups until enough of them carry a signal.

    A group whose members all have the same verdict says nothing about how to solve the task: it is dropped,
    counted and replaced, unless its prices or form carry a signal. More groups than needed are sampled at
    once, by the recent share of useful ones, because a second round would run half empty; the surplus, the
    last in task order, is dropped as well.
    """

    def __init__(
        self,
        environment: EpisodeRunner,
        sampler: Sampler,
        tasks: TaskSource,
        config: RlConfig,
        run: str,
        seed: int,
    ) -> None:
        self.state = CollectorState()
        self._members = Members(environment, config, run, seed, tasks)
        self._sampler = sampler
        self._tasks = tasks
        self._config = config
        self._run = run

    @contextlib.asynccontextmanager
    async def running(self, log: TrajectoryLog, first_step: int, num_steps: int) -> AsyncIterator[None]:
        """See Collector.running: nothing runs between steps."""
        yield

    def on_weights_served(self, step: int) -> None:
        """See Collector.on_weights_served: sessions run within `collect` only, so there is nothing to do."""

    async def collect(self) -> Collected:
        """See Collector.collect. In task order, sampled by the version that the sampler serves."""
        wanted = self._config.groups_per_step
        trained: list[Group] = []
        dropped: list[Group] = []
        equal_verdicts: list[Group] = []
        counts: Counter[str] = Counter()
        curriculum = Curriculum(self._tasks, self._config.curriculum, self.state)
        for refill in range(1 + self._config.max_refill_rounds):
            missing = wanted - len(trained)
            if missing <= 0 or (refill and len(trained) >= self._config.refill_below * wanted):
                break
            groups = await self._sample_groups(curriculum, self._num_to_ask(missing), counts)
            if not groups:
                break
            signals = [(group, signal_of(group, self._config)) for group in groups]
            by_signal = {signal: [g for g, found in signals if found is signal] for signal in Signal}
            equal_verdicts += by_signal[Signal.PRICE] + by_signal[Signal.FORM]
            dropped += by_signal[Signal.NONE]
            trained += by_signal[Signal.TASK]
            if refill == 0:
                share = len(by_signal[Signal.TASK]) / len(groups)
                self.state.useful_share = update_share(self.state.useful_share, share)
        surplus = [as_surplus(group) for group in trained[wanted:]]
        trained = [*trained[:wanted], *equal_verdicts]
        figures = {"surplus_groups": float(len(surplus)), **curriculum.figures()}
        figures |= fork_figures(trained, counts) if self._config.forks.share else {}
        return Collected(
            tuple(trained), tuple(dropped + surplus), figures=figures, exhausted=curriculum.is_over
        )

    def _num_to_ask(self, missing: int) -> int:
        """How many tasks to begin: with forks there are more groups than tasks."""
        groups_per_task = 1 + self._config.forks.share
        return math.ceil(missing / (expected_share(self.state.useful_share) * groups_per_task))

    async def _sample_groups(self, curriculum: Curriculum, count: int, counts: Counter[str]) -> list[Group]:
        """Samples the groups of the next `count` tasks, each followed by that of its fork, if it has one."""
        begun: list[tuple[int, Task]] = []
        while len(begun) < count and curriculum.has_next():
            begun.append(curriculum.begin())
        size = self._config.group_size
        episodes = await run_together(
            self._members.play(task, number, index, self._sampler)
            for number, task in begun
            for index in range(size)
        )
        groups: list[Group] = []
        played: list[tuple[int, Group]] = []
        for place, (number, _) in enumerate(begun):
            members = episodes[place * size : (place + 1) * size]
            trajectories = tuple(episode.trajectory for episode in members)
            weight = self.state.price.weight
            group = Group(f"{self._run}/g{number}", "task", size, trajectories, price_weight=weight)
            played.append((number, group))
            groups.append(group)
            if (fork := fork_group(group, members[0], self._config.forks.size)) is not None:
                groups.append(fork)
            count_fork(members[0], counts)
        curriculum.resolve(played)
        return groups


def expected_share(useful_share: float) -> float:
    """The share of groups expected to be useful, bounded from below so that not far too many are sampled."""
    return max(useful_share, 1 / MAX_OVERSAMPLING)


def update_share(average: float, measured: float) -> float:
    """The running average after one more step."""
    return _SMOOTHING * average + (1 - _SMOOTHING) * measured
