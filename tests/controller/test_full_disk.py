"""Which files a run can do without when its disk is full."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from etude.kit.durable import write_json
from etude.model.loading import AnyModel, save_any_model
from etude.observe import RecordingObserver, read_metrics, run_directory
from etude.training.checkpoints import saving
from tests.controller.running import run_here, tiny_config


@pytest.mark.slow
def test_a_full_disk_costs_snapshots_of_the_curve_and_reports_on_the_way_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save_where_there_is_room(model: AnyModel, directory: Path, *others: Any) -> None:
        if directory.parent.name == "curve":
            raise OSError(errno.ENOSPC, "No space left on device")
        save_any_model(model, directory, *others)

    def refuse_report(path: Path, value: Any) -> None:
        if path.name == "report.json":
            raise OSError(errno.ENOSPC, "No space left on device")
        write_json(path, value)

    monkeypatch.setattr(saving, "save_any_model", save_where_there_is_room)
    monkeypatch.setattr(run_directory, "write_json", refuse_report)
    observer = RecordingObserver()
    with pytest.warns(UserWarning, match="the report is not written"):
        run, report = run_here(tiny_config(tmp_path), observer=observer)
    assert report["rl_steps"] == 2 and (run.checkpoints / "final").is_dir()
    assert not [row for row in read_metrics(run.metrics_file) if row["kind"] == "curve"]
    told = [line for line in observer.lines if "is not saved: the disk is full" in line]
    assert ["midtrain-00005" in told[0], "rl-00002" in told[-1], len(told)] == [True, True, 5]
