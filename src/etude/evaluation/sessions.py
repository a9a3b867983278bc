"""Sessions of an evaluation: played concurrently, stored as they end, and summarised in one row each.

plays ──> [ runner ] ──> trajectory log ──> rows ──> figures
             ^                │
             └── only those ──┘  that are not stored yet: a killed evaluation resumes where it was
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from etude.errors import StoreError
from etude.kit.tasks import run_together
from etude.protocols import Sampler
from etude.records import Group, SamplingParams, Task, Trajectory, TrajectoryId
from etude.store.trajectories import TrajectoryLog

if TYPE_CHECKING:
    from etude.environment.runners import EpisodeRunner

OnEnd = Callable[[Trajectory], None]
_CLUSTER_KEYS = ("repository", "family")


@dataclass(frozen=True, slots=True)
class Play:
    """One session to be played: the task, its index in the suite, and the index of the sample."""

    number: int
    task: Task
    sample: int = 0


def plays_of(tasks: Sequence[Task], num_samples: int = 1) -> list[Play]:
    """`num_samples` sessions of each task, ordered by sample, then by task."""
    return [Play(number, task, sample) for sample in range(num_samples) for number, task in enumerate(tasks)]


async def play_sessions(
    runner: EpisodeRunner,
    sampler: Sampler,
    plays: Sequence[Play],
    name: str,
    seed: int,
    params: SamplingParams,
    max_sessions: int,
    log: TrajectoryLog | None = None,
    on_end: OnEnd | None = None,
) -> list[Trajectory]:
    """Plays the sessions of `plays`, at most `max_sessions` at once, and returns them in that order.

    With a `log` each session is stored when it ends, and sessions already stored under the same `name` are
    not played again; sessions that the infrastructure failed are not stored, so that the next call retries
    them. `on_end` is called for each, stored ones included. The noise of a session depends on `seed`, its
    task's index and its sample alone. Raises what the runner raises, and StoreError for a damaged log.
    """
    known = {} if log is None else _stored(log, name)
    free = asyncio.Semaphore(max_sessions)

    async def play(one: Play) -> Trajectory:
        identity = TrajectoryId(name, one.task.id, 0, one.number, one.sample)
        if identity not in known:
            async with free:
                rng_key = (seed, one.number, one.sample)
                known[identity] = await runner.run(one.task, identity, sampler, rng_key, params)
            if log is not None and known[identity].reward is not None:
                log.append([Group(str(identity), "task", 1, (known[identity],))])
        if on_end is not None:
            on_end(known[identity])
        return known[identity]

    return await run_together(play(planned) for planned in plays)


def _stored(log: TrajectoryLog, name: str) -> dict[TrajectoryId, Trajectory]:
    return {member.id: member for group in log.read() for member in group.members if member.id.run == name}


@dataclass(frozen=True, slots=True)
class SessionRow:
    """The outcome of one session: all that figures and comparisons need."""

    task: str
    cluster: str
    """Tasks of one cluster (repository, family; else the task itself) may succeed or fail together."""
    sample: int
    status: str
    passed: bool | None
    """None: voided, because the infrastructure failed."""
    reward: float | None
    tokens: float
    """Sampled; for an external endpoint estimated from bytes."""
    input_tokens: float
    """Read by the model: for each message all tokens before it, as if nothing were cached."""
    turns: int
    calls: int
    parallel_turns: int
    malformed: int
    seconds: float
    """Sampling, tools and grading."""
    cause: str = ""

    @classmethod
    def of(cls, task: Task, trajectory: Trajectory, units_per_token: float = 1.0) -> SessionRow:
        """`units_per_token`: entries of the trajectory per token; for an external endpoint they are bytes."""
        facts, voided = trajectory.facts, trajectory.reward is None
        return cls(
            task=task.id,
            cluster=cluster_of(task),
            sample=trajectory.id.index,
            status=trajectory.status.value,
            passed=None if voided else bool(facts.get("passed")),
            reward=None if trajectory.reward is None else trajectory.reward.total,
            tokens=trajectory.num_sampled_tokens / units_per_token,
            input_tokens=_num_read(trajectory) / units_per_token,
            turns=int(facts.get("num_turns", 0)),
            calls=int(facts.get("num_calls", 0)),
            parallel_turns=int(facts.get("parallel_turns", 0)),
            malformed=int(facts.get("malformed", 0)),
            seconds=sum(trajectory.timings.values()),
            cause=trajectory.cause,
        )

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> SessionRow:
        """Inverse of `to_json`. Raises StoreError."""
        try:
            return cls(**document)
        except TypeError as error:
            raise StoreError(
                "is not a session of an evaluation", field="sessions", received=str(error)
            ) from error


def cluster_of(task: Task) -> str:
    """The repository or family of a task, or its own id."""
    found = (str(task.metadata[key]) for key in _CLUSTER_KEYS if key in task.metadata)
    return next(found, task.id)


def _num_read(trajectory: Trajectory) -> int:
    return sum(
        span.start
        for segment in trajectory.segments
        for span in segment.turn_spans
        if span.role == "assistant" and segment.sampled[span.start : span.end].any()
    )
