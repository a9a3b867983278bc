"""Collecting groups: eight sessions from one task, judged against each other.

This is the synchronous way: a step's groups are sampled in rounds, and all of their sessions have ended when
the step is trained. `continuous.py` has the other one.
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
from etude.environment.runners import Player
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
    """Groups that carry a signal: first those whose verdicts differ, then those that were solved or failed as
    a whole and teach something all the same."""
    dropped: tuple[Group, ...] = field(default=())
    """Groups that teach nothing, and those that a step had no place for; kept for the record."""
    stale: tuple[Group, ...] = field(default=())
    """Groups that were too old to be trained on, kept for the record."""
    figures: Mapping[str, float] = field(default_factory=dict[str, float])
    """What the collector has to say of the time since the last step."""
    exhausted: bool = False
    """Whether no task is left, and no group of one."""

    @property
    def trajectories(self) -> list[Trajectory]:
        """All sessions."""
        groups = (*self.trained, *self.dropped, *self.stale)
        return [member for group in groups for member in group.members]


class Collector(Protocol):
    """Gives the trainer its groups, step by step."""

    state: CollectorState

    def running(
        self, log: TrajectoryLog, first_step: int, num_steps: int
    ) -> AbstractAsyncContextManager[None]:
        """Within it steps `first_step` to `num_steps` - 1 are collected; sessions that are under way at its
        end are cancelled. `log`: where groups are kept."""
        ...

    def in_service(self, step: int) -> None:
        """Says that the weights after so many steps are those that sample."""
        ...

    async def collect(self) -> Collected:
        """The groups of the next step. `state` is then that from which a resumed run goes on after it."""
        ...


class GroupCollector:
    """Samples groups until enough of them carry a signal.

    Where the task's verdict is the same for all members, the group says nothing about how to solve it: it is
    dropped, counted and replaced, unless its prices or its form teach something. More groups than needed are
    asked for at once, by the share that was useful lately, because a second round would run half empty; those
    that were not needed after all, the last in task order, are dropped as well.
    """

    def __init__(
        self,
        environment: Player,
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
        """See Collector.running: there is nothing to begin or to end."""
        yield

    def in_service(self, step: int) -> None:
        """See Collector.in_service: nothing is sampled but between two steps."""

    async def collect(self) -> Collected:
        """See Collector.collect. In task order, sampled from whatever the sampler serves."""
        wanted = self._config.groups_per_step
        trained: list[Group] = []
        dropped: list[Group] = []
        beside: list[Group] = []
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
            beside += by_signal[Signal.PRICE] + by_signal[Signal.FORM]
            dropped += by_signal[Signal.NONE]
            trained += by_signal[Signal.TASK]
            if refill == 0:
                share = len(by_signal[Signal.TASK]) / len(groups)
                self.state.useful_share = learn_share(self.state.useful_share, share)
        surplus = [as_surplus(group) for group in trained[wanted:]]
        trained = [*trained[:wanted], *beside]
        figures = {"surplus_groups": float(len(surplus)), **curriculum.figures()}
        figures |= fork_figures(trained, counts) if self._config.forks.share else {}
        return Collected(
            tuple(trained), tuple(dropped + surplus), figures=figures, exhausted=curriculum.is_over
        )

    def _num_to_ask(self, missing: int) -> int:
        """How many tasks to begin: with their forks they make more groups than there are tasks."""
        groups_per_task = 1 + self._config.forks.share
        return math.ceil(missing / (expected_share(self.state.useful_share) * groups_per_task))

    async def _sample_groups(self, curriculum: Curriculum, count: int, counts: Counter[str]) -> list[Group]:
        """The groups of the next `count` tasks, each followed by that of its fork, if it has one."""
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
            trajectories = tuple(one.trajectory for one in members)
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
    """The share of groups that is counted on to be useful: never so few that far too many are asked for."""
    return max(useful_share, 1 / MAX_OVERSAMPLING)


def learn_share(known: float, seen: float) -> float:
    """The running share after one more step."""
    return _SMOOTHING * known + (1 - _SMOOTHING) * seen
