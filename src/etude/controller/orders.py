"""What a run asks of whoever plays a session elsewhere: a rollout worker, or another cluster."""

from __future__ import annotations

from dataclasses import dataclass

from etude.records import SamplingParams, Task, TrajectoryId


@dataclass(frozen=True, slots=True)
class Order:
    """What a session is made of, but for its sampler: see EpisodeRunner.run."""

    task: Task
    identity: TrajectoryId
    rng_key: tuple[int, ...]
    params: SamplingParams
    training: bool
