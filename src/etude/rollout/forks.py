"""Fork groups: sessions that branch off one session of a task's group at one of its turns.

In the configured share of groups the first session is forked. The fork's members are the siblings alone, with
indices after the group's own: the turn is chosen from what the forked session did, so including its own
ending would bias the comparison within the group.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from etude.config import ForkConfig, RlConfig
from etude.environment.fork_groups import ForkedEpisode, ForkPlan, SiblingSpec
from etude.environment.runners import EpisodeRequest, EpisodeRunner
from etude.protocols import Sampler
from etude.records import Group, SamplingParams, Status, Task, TrajectoryId
from etude.rollout.curriculum import TaskSource
from etude.rollout.epochs import epoch_of

_COUNTED = (
    "forks",
    "fork_sessions",
    "fork_sessions_failed",
    "fork_tokens",
    "fork_prefix_tokens",
    "fork_prefix_cached_tokens",
)
"""Reported for every step, even without a fork."""

_CHOICE = 1 << 20
"""Last part of the random key that chooses a turn; no session index is so large."""


def is_forked(number: int, share: float) -> bool:
    """Whether group `number` is forked: of the first n groups, `share` * n, rounded down."""
    return math.floor((number + 1) * share) > math.floor(number * share)


def plan_fork(identity: TrajectoryId, config: ForkConfig, group_size: int, seed: int) -> ForkPlan:
    """The fork of a group's session. A function of its arguments: a resumed run plans the same."""
    siblings = (replace(identity, index=group_size + n) for n in range(config.size))
    places = tuple(SiblingSpec(sibling, (seed, sibling.group, sibling.index)) for sibling in siblings)
    return ForkPlan(config.turn, places, (seed, identity.group, _CHOICE))


@dataclass(frozen=True, slots=True)
class Members:
    """Plays the sessions of a collector's groups."""

    runner: EpisodeRunner
    config: RlConfig
    run: str
    """Name of the run."""
    seed: int
    tasks: TaskSource
    """The source of the tasks."""

    @property
    def num_asked(self) -> int:
        """Sessions that a group begins; indices of a fork's sessions follow theirs."""
        return self.config.group_size + self.config.extra_members

    def is_forked(self, number: int, index: int) -> bool:
        """Whether this member of group `number` is to be forked."""
        return index == 0 and is_forked(number, self.config.forks.share)

    async def play(self, task: Task, number: int, index: int, sampler: Sampler) -> ForkedEpisode:
        """Plays one member, with its siblings if it is to be forked."""
        identity = TrajectoryId(self.run, task.id, epoch_of(self.tasks, number), number, index)
        params = SamplingParams(temperature=self.config.temperature)
        request = EpisodeRequest(task, identity, (self.seed, number, index), params, training=True)
        if self.is_forked(number, index):
            plan = plan_fork(identity, self.config.forks, self.num_asked, self.seed)
            request = replace(request, plan=plan)
        return await self.runner.play(request, sampler)


def fork_group(group: Group, episode: ForkedEpisode, size: int) -> Group | None:
    """The group of a fork's siblings; None if no fork was made. `group`: that of the forked session."""
    if episode.origin is None:
        return None
    return Group(f"{group.id}+fork", "fork", size, episode.siblings, episode.origin, group.price_weight)


def count_fork(episode: ForkedEpisode, counts: Counter[str]) -> None:
    """Adds the outcome of a fork, if one was requested, to `counts`."""
    if episode.refused is not None:
        counts[f"forks_refused_{episode.refused}"] += 1
    if episode.origin is not None:
        siblings = episode.siblings
        counts["forks"] += 1
        counts["fork_sessions"] += len(siblings)
        counts["fork_sessions_failed"] += sum(sibling.status is Status.INFRASTRUCTURE for sibling in siblings)
        counts["fork_tokens"] += sum(sibling.num_sampled_tokens for sibling in siblings)
        measured = [sibling for sibling in siblings if sibling.facts["fork_cached_tokens"] is not None]
        counts["fork_prefix_tokens"] += sum(sibling.facts["fork_prefix_tokens"] for sibling in measured)
        counts["fork_prefix_cached_tokens"] += sum(s.facts["fork_cached_tokens"] for s in measured)


def fork_figures(trained: Sequence[Group], counts: Counter[str]) -> dict[str, float]:
    """Metrics of a step's forks."""
    useful = sum(group.kind == "fork" for group in trained)
    return {name: float(counts[name]) for name in {**dict.fromkeys(_COUNTED), **counts}} | {
        "forks_trained": float(useful)
    }
