"""Evaluates a model on a suite of tasks.

target ──open──> sessions (greedy, then sampled) ──stored──> OUT/trajectories ──> result.json, result.md
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from etude.config import RunConfig
from etude.controller.backends import open_run_backend
from etude.controller.evaluation_targets import (
    Target,
    TargetOptions,
    find_target,
    open_target,
)
from etude.controller.families import open_family
from etude.controller.starting import resolve_servers
from etude.controller.task_sets import load_task_set
from etude.errors import ConfigError
from etude.evaluation import (
    EvaluationResult,
    ModeResult,
    Play,
    Prices,
    SessionRow,
    check_infrastructure,
    play_sessions,
    plays_of,
    session_figures,
    summarize,
    tasks_digest,
)
from etude.evaluation.results import PLAN, TRAJECTORIES
from etude.kit.durable import make_directory, write_json
from etude.observe import Observer, RunDirectory, SilentObserver, summarize_behaviour
from etude.records import Task, Trajectory
from etude.store.trajectories import TrajectoryLog


@dataclass(frozen=True, slots=True)
class EvaluationRequest:
    """Settings of an evaluation."""

    target: str
    """A run's directory, a checkpoint's, or the address of an OpenAI-compatible endpoint."""
    suite: str = "heldout"
    """A split of the target's family of tasks, or a directory of Harbor task directories."""
    num_tasks: int = 240
    num_samples: int = 1
    temperature: float | None = None
    """None: once greedily and `num_samples` times at temperature 1; an endpoint at its own temperature."""
    max_sessions: int = 0
    """Limit of concurrent sessions; 0: the target's default."""
    out: Path | None = None
    """Where sessions and results are stored; an evaluation with the same directory continues from there."""
    prices: Prices | None = None
    options: TargetOptions = field(default_factory=TargetOptions)


def evaluate(request: EvaluationRequest, observer: Observer) -> EvaluationResult:
    """Plays the suite and returns the result, which is also written to `out`.

    Raises UserError for a target, a suite or a directory that cannot be used, InfrastructureError if most
    sessions failed through no fault of the agent.
    """
    target = find_target(request.target, request.options)
    tasks = load_suite(request.suite, request.num_tasks, target.config, observer)
    config = target.config
    agent = resolve_servers(
        config.agent, lambda: open_run_backend(config.sandbox), lambda: next(iter(tasks), None)
    )
    target = replace(target, config=config.model_copy(update={"agent": agent}))
    with contextlib.ExitStack() as stack:
        log = None
        if request.out is not None:
            make_directory(request.out)
            stack.enter_context(RunDirectory(request.out).lock())
            _check_plan(request.out, _plan(request, target, tasks))
            log = TrajectoryLog(request.out / TRAJECTORIES)
        result = asyncio.run(_Evaluation(request, target, tasks, log, observer).play())
        if request.out is not None:
            result.write(request.out)
    return result


def load_suite(suite: str, num_tasks: int, config: RunConfig, observer: Observer | None = None) -> list[Task]:
    """The first tasks of a suite; of a directory, only verified ones. A plain name is a split if there is one
    of that name, else a directory. Raises ConfigError, TaskError."""
    if Path(suite).name == suite or not Path(suite).is_dir():
        family = open_family(config, observer)
        if suite in family.splits:
            return family.evaluation_tasks(suite, num_tasks)
        if not Path(suite).is_dir():
            raise ConfigError(
                "is neither a split of the family nor a directory",
                field="--suite",
                received=suite,
                fix=f"one of {', '.join(family.splits)}, or a directory of tasks",
            )
    tasks, notes = load_task_set(Path(suite), "--suite", config, observer)
    for words in notes:
        (observer or SilentObserver()).say(words)
    return tasks[:num_tasks]


@dataclass(slots=True)
class _Evaluation:
    """One process of an evaluation."""

    request: EvaluationRequest
    target: Target
    tasks: Sequence[Task]
    log: TrajectoryLog | None
    observer: Observer
    num_ended: int = 0
    num_graded: int = 0
    num_passed: int = 0

    async def play(self) -> EvaluationResult:
        request = self.request
        modes = _modes(request, self.target)
        plays = {mode: plays_of(self.tasks, count) for mode, (_, count) in modes.items()}
        num_sessions = sum(map(len, plays.values()))
        self.observer.stage_begins(f"evaluation on {request.suite}", num_sessions, unit="session")
        runs: dict[str, list[Trajectory]] = {}
        try:
            async with open_target(self.target, request.temperature) as opened:
                for mode, (temperature, _) in modes.items():
                    params = opened.params
                    if temperature is not None:
                        params = replace(params, temperature=temperature)
                    runs[mode] = await play_sessions(
                        opened.runner,
                        opened.sampler,
                        plays[mode],
                        f"eval-{mode}",
                        self.target.config.seed,
                        params,
                        request.max_sessions or opened.max_sessions,
                        self.log,
                        self._on_end,
                    )
                    check_infrastructure(runs[mode])
                units = opened.units_per_token
        finally:
            self.observer.stage_ends()
        results = {
            mode: ModeResult(temperature, *self._figures(plays[mode], runs[mode], units))
            for mode, (temperature, _) in modes.items()
        }
        behaviour = summarize_behaviour(list(runs.values())[-1])
        about = self.target.describe()
        return EvaluationResult(about, request.suite, self.target.config.seed, results, behaviour)

    def _on_end(self, trajectory: Trajectory) -> None:
        self.num_ended += 1
        if trajectory.reward is not None:
            self.num_graded += 1
            self.num_passed += bool(trajectory.facts.get("passed"))
        rate = {"pass_rate": self.num_passed / self.num_graded} if self.num_graded else {}
        self.observer.stage_advances(self.num_ended, rate)

    def _figures(
        self, plays: Sequence[Play], trajectories: Sequence[Trajectory], units: float
    ) -> tuple[dict[str, Any], tuple[SessionRow, ...]]:
        tasks = [play.task for play in plays]
        rows = tuple(SessionRow.of(*pair, units) for pair in zip(tasks, trajectories, strict=True))
        return {**summarize(tasks, trajectories), **session_figures(rows, self.request.prices)}, rows


def _modes(request: EvaluationRequest, target: Target) -> dict[str, tuple[float | None, int]]:
    """Name -> temperature and samples."""
    if request.temperature is not None or target.kind == "endpoint":
        name = "greedy" if request.temperature == 0 else "sampled"
        return {name: (request.temperature, request.num_samples)}
    return {"greedy": (0.0, 1), "sampled": (1.0, request.num_samples)}


def _plan(request: EvaluationRequest, target: Target, tasks: Sequence[Task]) -> dict[str, Any]:
    """What must be equal for stored sessions to be used again; the number of samples may grow."""
    return {
        "target": target.describe(),
        "suite": request.suite,
        "tasks": tasks_digest(tasks),
        "temperature": request.temperature,
        "seed": target.config.seed,
    }


def _check_plan(out: Path, plan: Mapping[str, Any]) -> None:
    """Writes the plan into a new directory. Raises ConfigError for the directory of another evaluation."""
    file = out / PLAN
    if not file.exists():
        write_json(file, plan)
        return
    before: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    other = [name for name in plan if before.get(name) != plan[name]]
    if other:
        raise ConfigError(
            f"holds an evaluation that differs in: {', '.join(other)}",
            field="--out",
            received=str(out),
            fix="name another directory, or remove this one",
        )
