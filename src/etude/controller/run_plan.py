"""A run's steps, once they are settled: planned for a time limit before training begins, kept ever after.

config.toml        the steps that are taken, without a limit: whoever trains it takes the same ones
environment.json   `asked`: limit and steps of the command, with which the run is resumed
"""

from __future__ import annotations

from etude.config import RunConfig
from etude.controller.forecast import with_steps
from etude.controller.midtraining import STAGE
from etude.errors import RunDirectoryError
from etude.observe import RunDirectory, read_metrics


def store_plan(run: RunDirectory, asked: RunConfig, planned: RunConfig) -> None:
    """Writes the planned steps into the run's configuration. `asked`: before they were planned."""
    run.update_environment({"asked": _steps(asked)})
    run.replace_config(with_steps(run.config, planned.midtrain.num_steps, planned.rl.num_steps))


def continue_plan(config: RunConfig, run: RunDirectory, *, has_begun: bool, is_planned: bool) -> RunConfig:
    """The configuration with which a run is resumed: the steps that were planned when it was begun, if any.

    `has_begun`: whether anything of it was forecast or trained. `is_planned`: whether a time limit becomes a
    plan. Raises RunDirectoryError for a limit that comes after the run has begun, and for a run of an earlier
    version whose mid-training was cut by the clock and stored as finished.
    """
    _check_uncut(run)
    if not is_planned:
        return config
    stored, asked = run.config, run.environment.get("asked")
    known = stored.max_wall_s if asked is None else asked["max_wall_s"]
    if (asked is not None or has_begun) and config.max_wall_s not in (0.0, known):
        raise RunDirectoryError(
            "a time limit becomes a plan of steps before training begins, and this run was begun with "
            f"{known:g}",
            field="max_wall_s",
            received=config.max_wall_s,
            fix="resume without it: the run goes on to its last step; or start another run: --name NAME",
        )
    if asked is not None:
        return with_steps(config, stored.midtrain.num_steps, stored.rl.num_steps)
    return config.model_copy(update={"max_wall_s": 0.0}) if has_begun else config


def _steps(config: RunConfig) -> dict[str, float]:
    return {
        "max_wall_s": config.max_wall_s,
        "midtrain.num_steps": config.midtrain.num_steps,
        "rl.num_steps": config.rl.num_steps,
    }


def _check_uncut(run: RunDirectory) -> None:
    """Earlier versions ended mid-training where `max_wall_s` was over, and stored no state to go on from."""
    config, midtrained = run.config, run.checkpoints / "midtrained"
    if not config.max_wall_s or not midtrained.exists():
        return
    rows = [row["step"] for row in read_metrics(run.metrics_file) if row["kind"] == STAGE]
    taken, wanted = max(rows, default=0), config.midtrain.num_steps
    if taken < wanted:
        raise RunDirectoryError(
            f"an earlier version cut its mid-training after about {taken} of {wanted} steps, when max_wall_s "
            "was over, and stored it as finished: it cannot be gone on with",
            field="run",
            received=str(run.path),
            fix=f"start another run: --name NAME; to train this model by RL alone, add "
            f"--set initial_checkpoint={midtrained}",
        )
