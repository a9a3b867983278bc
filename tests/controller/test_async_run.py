"""Whole asynchronous runs on the real engine and real sandboxes."""

from pathlib import Path
from typing import Any

import pytest

from etude.config import RunConfig
from etude.observe import RunDirectory
from etude.observe.metrics import read_metrics
from tests.controller.learning import CONFIG, learned
from tests.controller.running import (
    collected,
    final_weights,
    num_rl_steps,
    num_stored_parts,
    run_elsewhere,
    run_here,
    wait_until,
    weights_of,
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
    tree |= {"evaluation": {"num_tasks": 4}, "checkpoint": {"every_s": 0.001, "curve_every_steps": 0}}
    return RunConfig.model_validate(tree)


def rl_rows(run: RunDirectory) -> list[dict[str, Any]]:
    return [row for row in read_metrics(run.metrics_file) if row["kind"] == "rl"]


@pytest.mark.slow
def test_the_same_run_twice_gives_equal_weights_and_equal_sessions(tmp_path: Path) -> None:
    first, report = run_here(config(tmp_path / "a"))
    second, _ = run_here(config(tmp_path / "b"))
    assert final_weights(first) == final_weights(second)
    assert final_weights(first) != weights_of(learned())
    assert collected(first) == collected(second)
    rows = rl_rows(first)
    assert 0 < max(row["version_lag_max"] for row in rows) <= 2
    assert all(row["left_out_share"] == 0.0 for row in rows)
    assert 0 < report["throughput"]["trainer_busy_share"] < 1
    kinds = {row["kind"] for row in read_metrics(first.metrics_file)}
    assert "utilisation" in kinds


@pytest.mark.slow
@pytest.mark.parametrize("stragglers", ["abort", "carry"])
def test_over_sampled_groups_repeat_as_well(stragglers: str, tmp_path: Path) -> None:
    settings = {"extra_members": 2, "stragglers": stragglers, "num_steps": 2, "kv_on_update": "keep"}
    first, _ = run_here(config(tmp_path / "a", **settings))
    second, _ = run_here(config(tmp_path / "b", **settings))
    assert final_weights(first) == final_weights(second)
    assert collected(first) == collected(second)


@pytest.mark.slow
def test_a_killed_run_goes_on_with_nothing_lost_repeated_or_skipped(tmp_path: Path) -> None:
    settings = config(tmp_path, num_steps=6)
    with run_elsewhere(settings) as process:
        wait_until(process, lambda: num_rl_steps(settings) >= 2)
        num_stored = num_stored_parts(settings)
        wait_until(process, lambda: num_stored_parts(settings) > num_stored)  # what is new is not trained yet
        process.kill()
        process.wait()
    before = collected(RunDirectory.open(tmp_path / settings.name))
    run, report = run_here(settings, resume=True)
    assert report["rl_steps"] == 6
    after = collected(run)
    assert after[: len(before)] == before, "what was stored stays"
    assert len({identity for identity, *_ in after}) == len(after), "nothing is stored twice"
    rows = rl_rows(run)
    assert [row["step"] for row in rows] == list(range(1, 7))
    assert sum(row["groups_from_log"] for row in rows) > 0, "what was collected was not sampled again"
