"""Forecast of a run's time on this machine, and the plan of steps that fits a time limit.

    speeds of this machine ──> forecast (the run's first message) ──> with `max_wall_s`: steps of each stage

Everything here is arithmetic on measured speeds (`probing.py`); no clock is read. A plan is stored for good:

config.toml        the planned steps, without a limit: every training from it takes the same ones
environment.json   `asked`: limit and steps of the command, with which the run is resumed
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from etude.config import EvaluationConfig, RunConfig
from etude.errors import ConfigError, RunDirectoryError
from etude.evaluation.acting import MASKED_SAMPLES, ActingTasks
from etude.observe import RunDirectory

MIN_RL_SHARE = 0.4
"""Share of `max_wall_s` that reinforcement learning gets, unless it needs less."""
MIN_MIDTRAIN_SHARE = 0.4
"""Smallest share of the configured mid-training steps in a plan: a model that has learnt less solves no task,
and reinforcement learning then has no signal. With the quickstart's model and 3,072 tokens a step, 400 steps
solved 0 % of the tasks at temperature 1, 850 steps 20 %."""


@dataclass(frozen=True, slots=True)
class Speeds:
    """Wall seconds on this machine."""

    midtrain_step_s: float
    rl_step_s: float
    """Sampling, training and publishing of one step."""
    evaluation_s: float
    """Evaluation of `evaluation.num_tasks` tasks, each once greedily and once at temperature 1."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """Wall seconds of a run's parts."""

    begun_s: float
    """Time that has passed already."""
    midtrain_s: float
    rl_s: float
    evaluation_s: float
    """All evaluations together."""

    @staticmethod
    def of(
        config: RunConfig,
        speeds: Speeds,
        begun_s: float,
        num_evaluations: float,
        num_groups: int | None = None,
    ) -> Forecast:
        """The forecast for the configured steps, or until a finite set of tasks is exhausted; a run with an
        initial checkpoint has no mid-training. `num_groups`: of all epochs; None for an endless source of
        tasks."""
        num_midtrain = 0 if config.initial_checkpoint is not None else config.midtrain.num_steps
        num_rl = config.rl.num_steps
        if num_groups is not None:
            useful = num_groups * config.plan.useful_share
            num_rl = min(num_rl, math.ceil(useful / config.rl.groups_per_step))
        return Forecast(
            begun_s,
            num_midtrain * speeds.midtrain_step_s,
            num_rl * speeds.rl_step_s,
            num_evaluations * speeds.evaluation_s,
        )

    @property
    def total_s(self) -> float:
        """Time of the whole run."""
        return self.begun_s + self.midtrain_s + self.rl_s + self.evaluation_s

    def describe(self) -> str:
        """The forecast as text, such as `about 14 min: mid-training 7, RL 5, evaluation 2`."""
        size, unit, digits = 1.0, "s", 0
        if self.total_s >= 5400:
            size, unit, digits = 3600.0, "h", 1
        elif self.total_s >= 120:
            size, unit = 60.0, "min"
        parts = {
            "so far": self.begun_s,
            "mid-training": self.midtrain_s,
            "RL": self.rl_s,
            "evaluation": self.evaluation_s,
        }
        rounded = {name: f"{seconds / size:.{digits}f}" for name, seconds in parts.items()}
        shown = ", ".join(f"{name} {number}" for name, number in rounded.items() if float(number))
        return f"about {self.total_s / size:.{digits}f} {unit}: {shown}"


def evaluation_sizes(
    settings: EvaluationConfig, num_heldout: int, *, has_other_families: bool, acting: Sequence[ActingTasks]
) -> list[tuple[str, float]]:
    """Name and size of each evaluation of a run, in order: half of them precede reinforcement learning.
    Speeds.evaluation_s is the time of size 1. `num_heldout`: number of held-out tasks. `acting`: kinds of
    tasks that only acting solves."""
    num_repeated = min(num_heldout, settings.num_repeated_tasks)
    played = num_heldout + num_repeated * (settings.num_samples - 1) / 2
    before, after = [("before", played)], [("after", played)]
    if has_other_families:
        others = float(min(settings.num_tasks, settings.num_family_tasks))
        before, after = [*before, ("family before", others)], [*after, ("family", others)]
    for kind in acting:
        num_played = 1 + settings.num_samples + (MASKED_SAMPLES if kind.mask else 0)
        tried = settings.num_acting_tasks * num_played / 2
        before, after = [*before, (f"{kind.name} before", tried)], [*after, (f"{kind.name} after", tried)]
    return [(name, size / settings.num_tasks) for name, size in (*before, *after)]


def with_validation(speeds: Speeds, config: RunConfig) -> Speeds:
    """Speeds with the validation sessions added to an RL step's time, at the pace of evaluations."""
    session_s = speeds.evaluation_s / (2 * config.evaluation.num_tasks)
    return replace(speeds, rl_step_s=speeds.rl_step_s + config.rl.validation_sessions * session_s)


def plan_steps(config: RunConfig, speeds: Speeds, begun_s: float, num_evaluations: float) -> RunConfig:
    """A configuration whose steps take `max_wall_s` at these speeds, all evaluations included, and which has
    no limit itself: a run of it takes the same steps on any machine.

    Steps that fit stay as they are. Otherwise both stages get fewer, in proportion, but reinforcement
    learning gets at least MIN_RL_SHARE of the time or all of its steps. Raises ConfigError where mid-training
    would have less than MIN_MIDTRAIN_SHARE of its steps, or reinforcement learning none.
    """
    limit_s = config.max_wall_s
    whole = Forecast.of(config, speeds, begun_s, num_evaluations)
    num_midtrain, num_rl = config.midtrain.num_steps, config.rl.num_steps
    if whole.total_s > limit_s:
        rest_s = limit_s - whole.begun_s - whole.evaluation_s
        rl_s = rest_s
        if whole.midtrain_s:
            in_proportion_s = rest_s * whole.rl_s / (whole.midtrain_s + whole.rl_s)
            most_s = rest_s - _least_midtrain(config) * speeds.midtrain_step_s
            least_s = max(MIN_RL_SHARE * limit_s, speeds.rl_step_s)
            rl_s = min(whole.rl_s, max(least_s, min(in_proportion_s, most_s)))
            num_midtrain = _count_steps(rest_s - rl_s, speeds.midtrain_step_s)
        if whole.rl_s:
            num_rl = _count_steps(rl_s, speeds.rl_step_s)
        too_few = num_midtrain < _least_midtrain(config) or (whole.rl_s and num_rl < 1)
        if rest_s < 0 or too_few:
            raise _too_short(config, speeds, whole)
    return with_steps(config, num_midtrain, num_rl)


def with_steps(config: RunConfig, num_midtrain: int, num_rl: int) -> RunConfig:
    """A configuration with these steps, and no time limit."""
    midtrain = config.midtrain.model_copy(update={"num_steps": num_midtrain})
    rl = config.rl.model_copy(update={"num_steps": num_rl})
    return config.model_copy(update={"max_wall_s": 0.0, "midtrain": midtrain, "rl": rl})


def _count_steps(seconds: float, step_s: float) -> int:
    return math.floor(seconds / step_s + 1e-6)  # tolerates rounding of a time that is just enough


def _least_midtrain(config: RunConfig) -> int:
    return math.ceil(MIN_MIDTRAIN_SHARE * config.midtrain.num_steps)


def _too_short(config: RunConfig, speeds: Speeds, whole: Forecast) -> ConfigError:
    """The error with the time of the shortest plan: the least of everything, and RL's share of the sum."""
    fixed_s = whole.begun_s + whole.evaluation_s
    if whole.midtrain_s:
        fixed_s += _least_midtrain(config) * speeds.midtrain_step_s
    rl_s = min(whole.rl_s, max(speeds.rl_step_s, fixed_s * MIN_RL_SHARE / (1 - MIN_RL_SHARE)))
    if not whole.midtrain_s:
        rl_s = min(whole.rl_s, speeds.rl_step_s)
    least_s = math.ceil(fixed_s + rl_s + 1)
    return ConfigError(
        f"is too short on this machine: the shortest useful plan takes {least_s} s, and all steps "
        f"take {whole.describe()}",
        field="max_wall_s",
        received=config.max_wall_s,
        fix=f"set it to {least_s} or more, or to 0 for all steps",
    )


def store_plan(run: RunDirectory, asked: RunConfig, planned: RunConfig) -> None:
    """Writes the planned steps into the run's configuration. `asked`: before they were planned."""
    keys = {"midtrain.num_steps": asked.midtrain.num_steps, "rl.num_steps": asked.rl.num_steps}
    run.update_environment({"asked": {"max_wall_s": asked.max_wall_s, **keys}})
    run.replace_config(with_steps(run.config, planned.midtrain.num_steps, planned.rl.num_steps))


def continue_plan(config: RunConfig, run: RunDirectory, *, has_begun: bool, is_planned: bool) -> RunConfig:
    """The configuration with which a run is resumed: with the steps planned when it was begun, if any.

    `has_begun`: whether the run was forecast or trained already. `is_planned`: whether a time limit becomes a
    plan. Raises RunDirectoryError for a new limit after the run has begun.
    """
    if not is_planned:
        return config
    stored, asked = run.config, run.environment.get("asked")
    known = stored.max_wall_s if asked is None else asked["max_wall_s"]
    if (asked is not None or has_begun) and config.max_wall_s not in (0.0, known):
        raise RunDirectoryError(
            "cannot change, as a limit becomes a number of steps before training; this run started with "
            f"{known:g}",
            field="max_wall_s",
            received=config.max_wall_s,
            fix="resume without it, to run all planned steps, or start another run with --name NAME",
        )
    if asked is not None:
        return with_steps(config, stored.midtrain.num_steps, stored.rl.num_steps)
    return config.model_copy(update={"max_wall_s": 0.0}) if has_begun else config
