"""What a step reports: the same figures however the batch was cut, and by version lag."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from etude.records import Group, PolicyVersion, Trajectory, VersionSpan
from tests.model.builders import small_model
from tests.training.builders import Rollouts, as_group, rl_config, trainer_of

TIMES = {"train_s"}


def test_figures_do_not_depend_on_micro_batches() -> None:
    rollouts = Rollouts(small_model(9))
    groups = [rollouts.group([1.0, 0.0, 1.0]), rollouts.group([0.0, 1.0])]
    loss = {"kind": "clip", "correction": {"token_high": 1.5}}
    configs = (rl_config(loss, updates_per_step=2, micro_batch_tokens=tokens) for tokens in (10_000, 1))
    whole, cut = (trainer_of(config, rollouts).step(groups) for config in configs)
    assert whole.keys() == cut.keys()
    for name in whole.keys() - TIMES:
        assert cut[name] == pytest.approx(whole[name], rel=2e-2, abs=1e-3), name
    assert 0 < whole["masked_share"] < 1
    assert 0 < whole["clipped_share"] < 1
    assert whole["ratio_p01"] < whole["ratio_p50"] < whole["ratio_p99"] <= whole["ratio_max"]
    assert 0 < whole["effective_share"] < 1


def _sampled_at(member: Trajectory, *steps: int, lineage: str = "run", digest: str = "") -> Trajectory:
    """The member with its tokens dealt evenly over versions of these steps."""
    (segment,) = member.segments
    bounds = np.linspace(0, len(segment.tokens), len(steps) + 1).astype(int).tolist()
    spans = tuple(
        VersionSpan(start, end, PolicyVersion(lineage, step, digest))
        for start, end, step in zip(bounds, bounds[1:], steps, strict=False)
    )
    object.__setattr__(segment, "version_spans", spans)
    return member


def _mixed(rollouts: Rollouts) -> Group:
    return as_group(
        [
            _sampled_at(rollouts.member(1.0, 40), 0, 1),
            _sampled_at(rollouts.member(0.0, 30), 2),
            _sampled_at(rollouts.member(0.0, 30), 2, lineage="other"),
        ]
    )


def test_figures_are_told_by_version_lag() -> None:
    rollouts = Rollouts(small_model(0))
    trainer = trainer_of(rl_config({"kind": "clip"}), rollouts)
    trainer.step([rollouts.group([1.0, 0.0])])
    trainer.step([rollouts.group([1.0, 0.0])])
    metrics = trainer.step([_mixed(rollouts)])
    assert metrics["version_lag_max"] == 2
    tokens = {name: metrics[f"{name}_tokens"] for name in ("lag0", "lag1", "lag2", "lag_unknown")}
    assert sum(tokens.values()) == metrics_tokens(_mixed(Rollouts(small_model(0))))
    known = tokens["lag1"] + 2 * tokens["lag2"]
    assert metrics["version_lag_mean"] == pytest.approx(
        known / (tokens["lag0"] + tokens["lag1"] + tokens["lag2"])
    )
    for figure in ("ratio_p50", "ratio_p99", "clipped_share", "k1", "k3", "entropy", "effective_share"):
        parts = [metrics[f"{lag}_{figure}"] for lag in tokens]
        assert min(parts) <= metrics[figure] + 1e-3 and metrics[figure] <= max(parts) + 1e-3, figure


def metrics_tokens(group: Group) -> int:
    return sum(member.num_sampled_tokens for member in group.members)


def test_a_version_that_a_kill_lost_is_not_taken_for_the_one_that_followed(tmp_path: Path) -> None:
    """Both have the same step, and other weights."""
    rollouts = Rollouts(small_model(0))
    trainer = trainer_of(rl_config(), rollouts)
    trainer.step([rollouts.group([1.0, 0.0])])
    kept = trainer.publish().version
    assert kept.step == 1
    for step in (1, 2):  # of the step before as well, also once the run was resumed
        members = [_sampled_at(rollouts.member(reward, 30), 1, digest="lost") for reward in (1.0, 0.0)]
        ours = [_sampled_at(rollouts.member(reward, 30), 1, digest=kept.digest) for reward in (1.0, 0.0)]
        metrics = trainer.step([as_group(members), as_group(ours)])
        assert metrics["lag_unknown_tokens"] == metrics[f"lag{step - 1}_tokens"] > 0
        trainer.save(tmp_path / str(step))
        trainer = trainer_of(rl_config(), rollouts)
        trainer.restore(tmp_path / str(step))


def test_drift_is_not_taken_for_a_difference_between_trainer_and_engine() -> None:
    rollouts = Rollouts(small_model(0))
    trainer = trainer_of(rl_config(), rollouts)
    trainer.step([rollouts.group([1.0, 0.0])])
    old = trainer.step([as_group([_sampled_at(m, 0) for m in rollouts.group([1.0, 0.0]).members])])
    assert old["k3"] > 1e-4
    assert (old["parity_k3"], old["parity_max"]) == (0.0, 0.0)
    fresh = Rollouts(trainer.model)
    now = trainer_of(rl_config(), fresh, 0)
    now.model.load_state_dict(trainer.model.state_dict())
    same = now.step([fresh.group([1.0, 0.0])])
    assert same["parity_max"] < 1e-5
    assert not [name for name in same if name.startswith("lag")]
