"""The seam between who asks for sessions and where they run: this process, a worker, another cluster."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from etude.protocols.sampler import Sampler
from etude.records import SamplingParams, Task, Trajectory, TrajectoryId


class EpisodeRunner(Protocol):
    """Runs episodes: one agent, one task, one sandbox, from the user's words to the reward.

    Many may run at once in one event loop. A failure of the infrastructure is retried from the start, and at
    last reported as such in the trajectory; it is never raised and never a reward. Expert routes of what
    comes back are already where the run keeps them. Cancelling the call ends the session, wherever it runs,
    and tidies up behind it.
    """

    async def run(
        self,
        task: Task,
        identity: TrajectoryId,
        sampler: Sampler,
        rng_key: tuple[int, ...],
        params: SamplingParams,
        training: bool = False,
    ) -> Trajectory:
        """One episode.

        `sampler`: what continues the session if it runs in this process. Who runs it elsewhere samples there,
        and only tells a `TokenTally` how far the session has come. `rng_key`: of its noise. `training`: when
        the agent is asked for summaries varies in training only.
        """
        ...


@runtime_checkable
class TokenTally(Protocol):
    """Wants to know how far a session has come that samples elsewhere."""

    def tally(self, num_tokens: int) -> None:
        """The session has sampled so many tokens so far, those of failed attempts included."""
        ...
