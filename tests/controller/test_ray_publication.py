"""Weights that travel while the next step is taken, over real processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from etude.config import RunConfig
from etude.observe import RunDirectory
from etude.observe.metrics import read_metrics
from tests.controller.running import num_rl_steps, run_elsewhere, wait_until
from tests.controller.test_ray import kill_one, over_ray

pytest.importorskip("ray")


def overlapping(directory: Path, **cluster: Any) -> RunConfig:
    """Checkpoints, which wait for what is under way, are rare."""
    config = over_ray(directory, **cluster)
    rl = config.rl.model_copy(update={"max_staleness": 2, "num_steps": 6})
    checkpoint = config.checkpoint.model_copy(update={"every_s": 1e6, "curve_every_steps": 0})
    return config.model_copy(update={"rl": rl, "checkpoint": checkpoint})


def rows_of(config: RunConfig, kind: str) -> list[dict[str, Any]]:
    run = RunDirectory.open(Path(config.runs_directory) / config.name)
    return [row for row in read_metrics(run.metrics_file) if row["kind"] == kind]


@pytest.mark.slow
def test_a_trainer_that_is_killed_while_weights_travel_costs_no_step_and_no_version(tmp_path: Path) -> None:
    config = overlapping(tmp_path, engine={"cpus": 0.5}, trainer={"cpus": 0.5})
    with run_elsewhere(config) as process:
        wait_until(process, lambda: num_rl_steps(config) > 1)
        assert kill_one("trainer")
        output = process.communicate(timeout=400)[0]
        assert process.returncode == 0, output
    steps = rows_of(config, "rl")
    assert [row["step"] for row in steps] == list(range(1, 7))
    assert max(row["version_lag_max"] for row in steps) <= 2
    assert all(row["publication_s"] >= 0 for row in steps)
    assert sum(row["publication_s"] for row in steps) > 0
    measured = [row["step"] for row in rows_of(config, "parity")]
    assert measured[0] == 0 and measured[-1] == 6, "the first and the last versions are looked at"
    assert measured == sorted(set(measured))
    missed = sum(row["parity_missed"] for row in steps)
    assert len(measured) + missed >= 6
