"""An RL step whose gradient is not finite saves its batch for inspection."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from etude.training.optimizer import OffendingBatches
from tests.model.builders import small_model
from tests.training.builders import Rollouts, as_group, rl_config, trainer_of


def test_the_batch_of_a_skipped_update_is_kept_whole(tmp_path: Path) -> None:
    rollouts = Rollouts(small_model(0))
    good, bad = rollouts.member(1.0), rollouts.member(0.0)
    offending = OffendingBatches(tmp_path, keep=2)
    trainer = trainer_of(rl_config(), rollouts, offending=offending)
    with torch.no_grad():
        trainer.model.final_norm[0] = float("inf")
    metrics = trainer.step([as_group([good, bad])])
    assert metrics["skipped_updates"] == 1
    (path,) = offending.kept()
    batch = torch.load(path, weights_only=True)
    assert not np.isfinite(batch["grad_norm"])
    kept = {sequence["segment_id"]: sequence for sequence in batch["sequences"]}
    assert kept.keys() == {good.segments[0].id, bad.segments[0].id}
    torch.testing.assert_close(
        kept[bad.segments[0].id]["logprobs"], torch.from_numpy(bad.segments[0].logprobs)
    )


def test_a_good_step_leaves_nothing(tmp_path: Path) -> None:
    rollouts = Rollouts(small_model(0))
    offending = OffendingBatches(tmp_path / "offending")
    trainer_of(rl_config(), rollouts, offending=offending).step([rollouts.group([1.0, 0.0])])
    assert offending.kept() == []
