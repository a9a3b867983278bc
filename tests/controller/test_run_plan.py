"""Resuming keeps the planned steps; a run that cannot be resumed is refused with the reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from etude.config import RunConfig
from etude.controller.forecast import continue_plan, store_plan, with_steps
from etude.errors import RunDirectoryError
from etude.observe import RunDirectory


def asked_for(directory: Path, limit_s: float = 600.0) -> RunConfig:
    sections = {"midtrain": {"num_steps": 1700}, "rl": {"num_steps": 80}}
    return RunConfig.model_validate({"runs_directory": str(directory), "max_wall_s": limit_s, **sections})


def test_a_resumed_run_keeps_its_plan_and_takes_no_other_limit(tmp_path: Path) -> None:
    asked = asked_for(tmp_path)
    run = RunDirectory.create(asked)
    store_plan(run, asked, with_steps(asked, 900, 40))
    assert run.config == with_steps(asked, 900, 40)
    for given in (asked, asked_for(tmp_path, 0.0), run.config):
        assert continue_plan(given, run, has_begun=True, is_planned=True) == run.config
    with pytest.raises(RunDirectoryError, match="this run started with 600") as caught:
        continue_plan(asked_for(tmp_path, 900.0), run, has_begun=False, is_planned=True)
    assert (caught.value.field, caught.value.received) == ("max_wall_s", 900.0)


def test_a_limit_comes_before_training_begins_or_not_at_all(tmp_path: Path) -> None:
    run = RunDirectory.create(asked_for(tmp_path, 0.0))
    late = asked_for(tmp_path)
    with pytest.raises(RunDirectoryError, match="before training"):
        continue_plan(late, run, has_begun=True, is_planned=True)
    assert continue_plan(late, run, has_begun=False, is_planned=True) == late, "nothing is trained yet"
    assert continue_plan(late, run, has_begun=True, is_planned=False) == late, "it ends a sitting there"
