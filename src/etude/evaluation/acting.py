"""Metrics of tasks that can only be solved by acting: do first edits depend on the output of a test run?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from etude.evaluation.sessions import OnEnd, SessionRow, play_sessions, plays_of
from etude.evaluation.statistics import mean, pass_rates, summarize, verdicts_by_task
from etude.evaluation.suite import check_infrastructure
from etude.protocols import Sampler
from etude.records import SamplingParams, Task, Trajectory

if TYPE_CHECKING:
    from etude.environment.runners import EpisodeRunner

MASKED_SAMPLES = 4
"""Sessions of each task in the ablation."""


@dataclass(frozen=True, slots=True)
class ActingTasks:
    """A family of tasks that can only be solved by acting; a run reports its metrics separately."""

    name: str
    """In reports."""
    mask: Callable[[Task], Task] | None = None
    """For the ablation: the same task with uninformative failing tests. None: no ablation."""
    ceiling: float = 1.0
    """The chance of a right first edit without a test run."""


async def evaluate_family(
    environment: EpisodeRunner,
    sampler: Sampler,
    tasks: Sequence[Task],
    name: str,
    seed: int,
    max_sessions: int,
    num_samples: int,
    on_end: OnEnd | None = None,
) -> dict[str, Any]:
    """Plays every task once greedily and `num_samples` times at temperature 1. `on_end`: see `play_sessions`.

    Keys: `num_tasks`; `greedy` and `sampled` (over all samples) as `summarize` gives them; `pass_at_<k>` for
    k = `num_samples`; `turns` per sampled session. Raises InfrastructureError if most sessions failed.
    """
    figures: dict[str, Any] = {"num_tasks": len(tasks)}
    for mode, temperature, count in (("greedy", 0.0, 1), ("sampled", 1.0, num_samples)):
        plays = plays_of(tasks, count)
        params, label = SamplingParams(temperature=temperature), f"{name}-{mode}"
        played = await play_sessions(
            environment, sampler, plays, label, seed, params, max_sessions, on_end=on_end
        )
        check_infrastructure(played)
        figures[mode] = summarize([play.task for play in plays], played)
        if mode == "sampled":
            rows = [SessionRow.of(play.task, one) for play, one in zip(plays, played, strict=True)]
            rates = pass_rates(verdicts_by_task(rows), num_samples)
            figures |= {
                f"pass_at_{num_samples}": mean(list(rates.values())),
                "turns": mean([float(row.turns) for row in rows if row.passed is not None]),
                "edits_after_run_share": edits_after_run_share(played),
            }
    return figures


async def evaluate_masked(
    environment: EpisodeRunner,
    sampler: Sampler,
    tasks: Sequence[Task],
    ceiling: float,
    name: str,
    seed: int,
    max_sessions: int,
    on_end: OnEnd | None = None,
) -> dict[str, Any]:
    """Plays masked tasks, whose failing tests are uninformative, at temperature 1. `on_end`: see
    `play_sessions`.

    Keys: `first_edit_ceiling`, as given; `masked_ablation`, the share of right first edits, which can exceed
    the ceiling by chance only; `masked_sessions`, the number of sessions.
    """
    plays = plays_of(tasks, MASKED_SAMPLES)
    params = SamplingParams(temperature=1.0)
    played = await play_sessions(environment, sampler, plays, name, seed, params, max_sessions, on_end=on_end)
    check_infrastructure(played)
    graded = [session for session in played if session.reward is not None]
    return {
        "first_edit_ceiling": ceiling,
        "masked_ablation": mean([bool(session.facts["first_edit_right"]) for session in graded]),
        "masked_sessions": len(graded),
    }


def edits_after_run_share(trajectories: Sequence[Trajectory]) -> float:
    """The share of the sessions with an edit whose first edit came after a turn with a test run."""
    return mean([after for t in trajectories if (after := _first_edit_after_run(t)) is not None])


def _first_edit_after_run(trajectory: Trajectory) -> bool | None:
    """None without an edit. A run in the edit's own message does not count: its output came later."""
    has_run = False
    for turn in trajectory.turns:
        kinds = {result.facts.get("kind") for result in turn.results if result.facts.get("changed", True)}
        if "edit" in kinds:
            return has_run
        has_run |= "test" in kinds
    return None
