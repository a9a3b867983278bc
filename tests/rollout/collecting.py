"""An environment with given verdicts, and helpers to collect from it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

from etude.config import RlConfig
from etude.environment.episodes import Environment
from etude.environment.fork_groups import ForkedEpisode
from etude.environment.runners import EpisodeRequest, EpisodeRunner
from etude.protocols import Sampler
from etude.records import RewardBreakdown, SamplingParams, Status, Task, TrajectoryId
from etude.rollout import GroupCollector
from tests.environment.playing import TASK, scripted
from tests.store.builders import make_trajectory

Verdicts = Callable[[int, int], float | None]
"""(task number, index in the group) -> the task's part of the reward; None: the infrastructure failed."""


class GivenVerdicts(EpisodeRunner):
    """Stands in for an Environment: no session is played, the verdict of each is known beforehand."""

    def __init__(self, verdicts: Verdicts) -> None:
        self.asked: list[tuple[TrajectoryId, tuple[int, ...], SamplingParams]] = []
        self.running = self.most_running = 0
        self._verdicts = verdicts

    async def play(self, request: EpisodeRequest, sampler: object) -> ForkedEpisode:
        """A session of one step of the event loop."""
        identity = request.identity
        self.asked.append((identity, request.rng_key, request.params))
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        await asyncio.sleep(0)
        self.running -= 1
        verdict = self._verdicts(identity.group, identity.index)
        if verdict is None:
            return ForkedEpisode(
                replace(make_trajectory(), id=identity, status=Status.INFRASTRUCTURE, reward=None)
            )
        return ForkedEpisode(replace(make_trajectory(), id=identity, reward=RewardBreakdown(verdict)))


def task_source(number: int) -> Task:
    return replace(TASK, id=f"task-{number}")


def new_collector(environment: Any, sampler: Sampler | None = None, **settings: Any) -> GroupCollector:
    """A collector over a (stand-in for an) environment."""
    config = RlConfig.model_validate({"updates_per_step": 1, "refill_below": 1.0, **settings})
    return GroupCollector(
        cast(Environment, environment), sampler or scripted([]), task_source, config, "run", seed=3
    )
