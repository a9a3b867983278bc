"""Difficulty of tasks: by their tests, or by a model's pass rate."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from etude.config import RunConfig
from etude.controller.task_sets import check_task_set
from etude.errors import TaskError
from etude.evaluation import EvaluationResult, ModeResult, session_figures
from etude.tasks.calibration import calibrate
from tests.cli.commands import etude
from tests.evaluation.rows import rows_of
from tests.tasks.harbor_tasks import write_task

METADATA = """
[metadata]
kind = "planted_bug"
difficulty = "easy"   # by its tests
calibration = "not calibrated"

[metadata.etude]
id = "%s"
"""


def metadata(directory: Path) -> dict[str, object]:
    return tomllib.loads((directory / "task.toml").read_text())["metadata"]


def evaluate(directory: Path, verdicts: dict[str, str]) -> Path:
    rows = tuple(rows_of(verdicts))
    modes = {"sampled": ModeResult(1.0, session_figures(rows), rows)}
    EvaluationResult({"name": "m"}, "tasks", 0, modes, {}).write(directory)
    return directory


def test_the_share_of_sessions_that_pass_says_how_difficult_a_task_is(tmp_path: Path) -> None:
    tasks = {name: write_task(tmp_path / "tasks" / name, toml=METADATA % name) for name in "abc"}
    found = evaluate(tmp_path / "found", {"a": "+-----?-", "b": "--------"})
    ran = etude("tasks", "calibrate", str(tmp_path / "tasks"), str(found))
    assert (ran.exit_code, ran.stderr) == (0, "2 tasks: 1 hard, 1 not calibrated\n")
    assert metadata(tasks["a"]) == {
        "kind": "planted_bug",
        "difficulty": "hard",
        "calibration": "1 of 7 sessions pass",
        "etude": {"id": "a"},
    }
    assert {metadata(tasks[one])["difficulty"] for one in "bc"} == {"easy"}
    assert {metadata(tasks[one])["calibration"] for one in "bc"} == {"not calibrated"}


def test_a_task_is_calibrated_whatever_variables_it_needs_to_be_played(tmp_path: Path) -> None:
    path = write_task(tmp_path / "tasks/a", toml='env = { KEY = "${NOWHERE_SET}" }\n', image="a")
    assert (
        etude(
            "tasks", "calibrate", str(tmp_path / "tasks"), str(evaluate(tmp_path / "e", {"a": "+"}))
        ).exit_code
        == 0
    )
    assert metadata(path)["calibration"] == "1 of 1 sessions pass"


def test_a_directory_of_other_tasks_is_refused(tmp_path: Path) -> None:
    write_task(tmp_path / "tasks/a", toml=METADATA % "a")
    found = evaluate(tmp_path / "found", {"elsewhere": "+"})
    ran = etude("tasks", "calibrate", str(tmp_path / "tasks"), str(found))
    assert ran.exit_code == 2
    assert "holds none of the tasks that were evaluated" in ran.stderr


def test_a_task_without_metadata_gets_some(tmp_path: Path) -> None:
    task = write_task(tmp_path / "a")
    calibrate(task, 2, 3)
    assert metadata(task) == {"difficulty": "easy", "calibration": "2 of 3 sessions pass"}


def test_metadata_that_are_no_table_of_their_own_are_left_alone(tmp_path: Path) -> None:
    task = write_task(tmp_path / "a")
    before = 'metadata = {difficulty = "easy"}\n' + (task / "task.toml").read_text()
    (task / "task.toml").write_text(before)
    with pytest.raises(TaskError, match="its metadata cannot be edited"):
        calibrate(task, 1, 2)
    assert (task / "task.toml").read_text() == before


def test_a_run_can_name_the_metadata_of_its_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for name, level in {"a": "easy", "b": "hard"}.items():
        write_task(tmp_path / "tasks" / name, toml=f'[metadata]\ndifficulty = "{level}"\n', image="a/b:c")
    config = RunConfig.model_validate({"sandbox": {"backend": "podman"}})
    checked = check_task_set(tmp_path / "tasks", "--suite", config, only={"difficulty": "easy"})
    assert [one.name for one in checked] == ["a"]
    with pytest.raises(TaskError, match="holds no task whose metadata have difficulty = 'medium'"):
        check_task_set(tmp_path / "tasks", "--suite", config, only={"difficulty": "medium"})
