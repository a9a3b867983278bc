"""Collecting groups: eight sessions from one task, judged against each other."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from etude.algorithms import has_task_variance
from etude.algorithms.advantages import MALFORMED
from etude.config import RlConfig
from etude.environment.episodes import Environment
from etude.protocols import Sampler
from etude.records import Group, RewardBreakdown, SamplingParams, Status, Task, Trajectory, TrajectoryId
from etude.rollout.together import run_together

TaskSource = Callable[[int], Task]
"""Task number -> task: the same number always gives the same task."""

_MAX_OVERSAMPLING = 2.0
_SMOOTHING = 0.7


@dataclass(slots=True)
class CollectorState:
    """What a resumed run needs to go on with the very tasks that come next."""

    next_task: int = 0
    useful_share: float = 1.0
    """Running share of groups with variance: how many groups to ask for at once."""


@dataclass(frozen=True, slots=True)
class Collected:
    """One step's groups."""

    trained: tuple[Group, ...]
    """Groups that carry a signal: first those whose verdicts differ, then those that failed as a whole and
    differ in malformed calls."""
    dropped: tuple[Group, ...] = field(default=())
    """Groups without variance, kept for the record."""

    @property
    def trajectories(self) -> list[Trajectory]:
        return [member for group in (*self.trained, *self.dropped) for member in group.members]


class GroupCollector:
    """Samples groups until enough of them carry a signal.

    Where the task's verdict is the same for all members, the group says nothing about how to solve it: it is
    dropped, counted and replaced (Yu et al. 2025, dynamic sampling). More groups than needed are asked for
    at once, by the share that was useful lately, because a second round would run half empty.
    """

    def __init__(
        self,
        environment: Environment,
        sampler: Sampler,
        tasks: TaskSource,
        config: RlConfig,
        run: str,
        seed: int,
    ) -> None:
        self.state = CollectorState()
        self._environment = environment
        self._sampler = sampler
        self._tasks = tasks
        self._config = config
        self._run = run
        self._seed = seed

    async def collect(self) -> Collected:
        """The groups of the next step, in task order, sampled from whatever the sampler serves."""
        wanted = self._config.groups_per_step
        trained: list[Group] = []
        dropped: list[Group] = []
        formal: list[Group] = []
        for refill in range(1 + self._config.max_refill_rounds):
            missing = wanted - len(trained)
            if missing <= 0 or (refill and len(trained) >= self._config.refill_below * wanted):
                break
            groups = await self._sample_groups(self._num_to_ask(missing))
            useful = [group for group in groups if _is_useful(group)]
            rest = [group for group in groups if not _is_useful(group)]
            formal += [group for group in rest if _teaches_form(group)]
            dropped += [group for group in rest if not _teaches_form(group)]
            trained += useful
            self._learn_share(len(useful), len(groups), refill)
        return Collected(tuple(trained + formal), tuple(dropped))

    def _num_to_ask(self, missing: int) -> int:
        share = max(self.state.useful_share, 1 / _MAX_OVERSAMPLING)
        return math.ceil(missing / share)

    def _learn_share(self, useful: int, asked: int, refill: int) -> None:
        if refill == 0:
            old = self.state.useful_share
            self.state.useful_share = _SMOOTHING * old + (1 - _SMOOTHING) * useful / asked

    async def _sample_groups(self, count: int) -> list[Group]:
        first = self.state.next_task
        self.state.next_task += count
        numbers = range(first, first + count)
        tasks = [self._tasks(number) for number in numbers]
        size = self._config.group_size
        members = await run_together(
            self._episode(task, number, index)
            for number, task in zip(numbers, tasks, strict=True)
            for index in range(size)
        )
        return [
            Group(f"{self._run}/g{number}", "task", size, tuple(members[place * size : (place + 1) * size]))
            for place, number in enumerate(numbers)
        ]

    async def _episode(self, task: Task, number: int, index: int) -> Trajectory:
        identity = TrajectoryId(self._run, task.id, 0, number, index)
        params = SamplingParams(temperature=self._config.temperature)
        rng_key = (self._seed, number, index)
        return await self._environment.run(task, identity, self._sampler, rng_key, params, training=True)


def _is_useful(group: Group) -> bool:
    """Whether the verdicts of the members that were graded differ."""
    rewards = _rewards(group)
    return len(rewards) > 1 and has_task_variance(rewards)


def _teaches_form(group: Group) -> bool:
    """Whether all members failed, some with more malformed calls than others: that much can be learnt."""
    rewards = _rewards(group)
    failed = all(reward.task == 0.0 for reward in rewards)
    return failed and len({reward.terms.get(MALFORMED, 0.0) for reward in rewards}) > 1


def _rewards(group: Group) -> list[RewardBreakdown]:
    """Of the members that were graded."""
    return [m.reward for m in group.members if m.reward is not None and m.status is not Status.INFRASTRUCTURE]


async def run_tasks(
    environment: Environment,
    sampler: Sampler,
    tasks: Sequence[Task],
    run: str,
    seed: int,
    params: SamplingParams,
    max_sessions: int,
) -> list[Trajectory]:
    """One session per task, at most `max_sessions` at once, in the order of the tasks."""
    results: list[Trajectory] = []
    for start in range(0, len(tasks), max_sessions):
        results += await run_together(
            environment.run(task, TrajectoryId(run, task.id, 0, number, 0), sampler, (seed, number), params)
            for number, task in enumerate(tasks[start : start + max_sessions], start)
        )
    return results
