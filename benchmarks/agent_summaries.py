"""The self-summary task: a trained model on trails of more files than its context holds. See `agent.py`."""

from __future__ import annotations

import asyncio
import statistics
from pathlib import Path

from common import Figures

from etude.config import RunConfig
from etude.controller.compute import resolve_evaluation, use_sampling_threads
from etude.controller.engines import serve_model
from etude.controller.evaluate import load_policy
from etude.controller.families import open_family
from etude.controller.parts import open_parts
from etude.evaluation import clopper_pearson, play_sessions, plays_of
from etude.observe import RunDirectory
from etude.records import SamplingParams, Status, Task, Trajectory


def measure_summaries(run: Path) -> Figures:
    """Greedy pass rates on the run's held-out trails, with summaries and without."""
    directory = RunDirectory.open(run)
    config = resolve_evaluation(directory)
    use_sampling_threads(config)
    tasks = open_family(config).evaluation_tasks("heldout", config.evaluation.num_tasks)
    off = config.model_copy(update={"agent": config.agent.model_copy(update={"summary_at_tokens": 0})})
    trained = _play(directory, config, tasks, "final")
    without = _play(directory, off, tasks, "final")
    low, high = clopper_pearson(sum(_passed(trajectory) for trajectory in trained), len(trained))
    lengths = [
        sum(len(segment.tokens) for segment in trajectory.segments)
        for trajectory in trained
        if _passed(trajectory)
    ]
    return {
        "summary_task_pass_with": _rate(trained),
        "summary_task_pass_with_low": low,
        "summary_task_pass_with_high": high,
        "summary_task_pass_without": _rate(without),
        "summary_task_files": float(config.tasks.trail_heldout_lengths[0]),
        "summary_task_calls": statistics.median(
            float(trajectory.facts["num_calls"]) for trajectory in trained
        ),
        "summary_task_contexts": statistics.median(float(len(trajectory.segments)) for trajectory in trained),
        "tokens_over_window": statistics.median(lengths) / config.agent.max_tokens if lengths else 0.0,
        "summary_task_ended_by_limit_without": sum(
            trajectory.status is Status.LIMIT for trajectory in without
        )
        / len(without),
    }


def _play(run: RunDirectory, config: RunConfig, tasks: list[Task], checkpoint: str) -> list[Trajectory]:
    tokenizer, model = load_policy(run, checkpoint)

    async def play() -> list[Trajectory]:
        async with open_parts(config, tokenizer, model) as parts:
            await serve_model(parts.weights, parts.service, model, config.name)
            greedy = SamplingParams(temperature=0.0)
            return await play_sessions(
                parts.environment,
                parts.service,
                plays_of(tasks),
                checkpoint,
                config.seed,
                greedy,
                config.engine.num_slots,
            )

    return asyncio.run(play())


def _passed(trajectory: Trajectory) -> bool:
    return bool(trajectory.facts.get("passed"))


def _rate(trajectories: list[Trajectory]) -> float:
    return sum(map(_passed, trajectories)) / len(trajectories)
