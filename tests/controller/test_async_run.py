"""Whole asynchronous runs on the real engine and real sandboxes."""

from pathlib import Path
from typing import Any

import pytest

from etude.config import RunConfig
from tests.controller.learning import CONFIG, learned
from tests.controller.running import (
    collected,
    final_weights,
    run_here,
)


def config(directory: Path, **rl: Any) -> RunConfig:
    """RL that changes the weights at each step, with sampling up to two steps ahead."""
    tree = CONFIG.model_dump(mode="json")
    tree |= {"runs_directory": str(directory), "initial_checkpoint": str(learned())}
    tree["rl"] |= {
        "num_steps": 4,
        "groups_per_step": 4,
        "group_size": 4,
        "level_weights": [1.0, 0.0, 0.0],
        "max_staleness": 2,
        **rl,
    }
    tree |= {
        "evaluation": {"num_tasks": 4, "num_samples": 1},
        "checkpoint": {"every_s": 0.001, "curve_every_steps": 0},
    }
    return RunConfig.model_validate(tree)


@pytest.mark.slow
@pytest.mark.parametrize("stragglers", ["abort", "carry"])
def test_over_sampled_groups_repeat_as_well(stragglers: str, tmp_path: Path) -> None:
    settings = {"extra_members": 2, "stragglers": stragglers, "num_steps": 2, "kv_on_update": "keep"}
    first, _ = run_here(config(tmp_path / "a", **settings))
    second, _ = run_here(config(tmp_path / "b", **settings))
    assert final_weights(first) == final_weights(second)
    assert collected(first) == collected(second)
