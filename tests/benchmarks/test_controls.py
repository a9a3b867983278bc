"""The controls have the time, the seed and the settings of the run that they are compared with."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import controls
import pytest

from etude.config import RunConfig

RUN = cast(
    Any,
    SimpleNamespace(
        name="seed-3",
        path=Path("runs/seed-3"),
        checkpoints=Path("runs/seed-3/checkpoints"),
        config=RunConfig(name="seed-3", seed=3, max_wall_s=565.0),
    ),
)
STAGES = {"midtrain_s": 200.0, "rl_s": 300.0, "evaluation_s": 24.0}


def test_more_midtraining_takes_the_time_of_both_stages() -> None:
    config = controls.midtraining_control(RUN, STAGES)
    assert config.midtrain.num_steps == RUN.config.midtrain.num_steps * 5 // 2
    assert (config.rl.num_steps, config.seed, config.name) == (0, 3, "seed-3-midtraining")
    assert config.initial_checkpoint is None
    assert config.max_wall_s == 0


def test_on_policy_rejection_starts_where_rl_did_and_lasts_as_long() -> None:
    config = controls.on_policy_control(RUN, STAGES)
    assert config.initial_checkpoint == "runs/seed-3/checkpoints/midtrained"
    assert config.max_wall_s == pytest.approx(324.0)
    assert config.rl == RUN.config.rl.model_copy(update={"algorithm": "rejection_sampling"})
    assert config.seed == 3


def test_rejection_sampling_shares_the_time_between_sampling_and_fine_tuning() -> None:
    throughput = {"rollout_s": 200.0, "training_tokens_per_s": 10_000.0}
    report = {"stages": STAGES, "rl_steps": 80, "throughput": throughput}
    config, num_tokens = controls.sampling_control(RUN, report)
    assert config.rl.num_steps == 60
    assert config.rl.optimizer.learning_rate == 0
    assert num_tokens == 1_500_000
    judged = controls.evaluation_of(RUN, Path("tuned"))
    assert (judged.initial_checkpoint, judged.rl.num_steps) == ("tuned", 0)


def test_the_lead_is_that_over_the_worst_seed() -> None:
    def row(rl: float, other: float) -> dict[str, dict[str, float]]:
        return {
            "reinforcement": {"greedy": rl, "sampled": rl},
            "rejection": {"greedy": other, "sampled": other},
        }

    figures = controls.compare({"a": row(0.9, 0.5), "b": row(0.8, 0.7)})
    assert figures == pytest.approx({"greedy_lead_over_rejection": 0.1, "sampled_lead_over_rejection": 0.1})
