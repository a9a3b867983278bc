import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import etude as package
from etude.config import parse_config
from etude.errors import ToolArgumentError
from etude.observe import Observer, RunDirectory
from etude.store import TrajectoryLog, trajectory_from_atif
from etude.tasks.harbor import read_harbor
from tests.cli.commands import etude, stand_in
from tests.observe.report_data import finished_report, write_finished_run
from tests.store.builders import make_group, make_trajectory, same


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(parse_config({"runs_directory": str(tmp_path / "runs"), "name": "demo"}))


@pytest.mark.parametrize(
    "command",
    [
        [],
        ["train"],
        ["eval"],
        ["agent"],
        ["report"],
        ["doctor"],
        ["trajectory", "list"],
        ["trajectory", "show"],
        ["tasks", "show"],
        ["tasks", "export"],
        ["config", "show"],
        ["config", "docs"],
    ],
)
def test_every_command_has_help(command: list[str]) -> None:
    result = etude(*command, "--help")
    assert result.exit_code == 0, result.output
    assert "Usage" in result.stdout


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\nsys.argv = ['etude', '--help']\n"
        "import etude.cli, etude.config, etude.records\n"
        "try:\n    etude.cli.main()\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
        "heavy = {'torch', 'transformers', 'matplotlib', 'pyarrow', 'numba', 'pandas'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_version() -> None:
    assert etude("--version").stdout == f"etude {package.__version__}\n"


def test_a_missing_option_is_a_usage_error() -> None:
    assert etude("train").exit_code == 2


def test_report_is_built_anew(run: RunDirectory) -> None:
    write_finished_run(run)
    result = etude("report", str(run.path))
    assert result.stdout.strip() == str(run.html_file)
    assert "83.3 %" in run.html_file.read_text()


def test_report_of_no_run_is_refused(tmp_path: Path) -> None:
    result = etude("report", str(tmp_path))
    assert result.exit_code == 2
    assert "not a run directory" in result.stderr


def test_eval_prints_a_table_and_json(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = {**finished_report()["heldout_after"], "behaviour": {"calls": 7.9}}
    asked: list[Any] = []

    def evaluate_run(
        run: RunDirectory, split: str, num_tasks: int, checkpoint: str | None, observer: Observer
    ) -> Any:
        asked.append((run.path, split, num_tasks, checkpoint))
        return measured

    stand_in(monkeypatch, "etude.controller.evaluate", "evaluate_run", evaluate_run)
    table = etude("eval", str(run.path), "--tasks", "12", "--split", "validation", "--checkpoint", "best")
    assert asked == [(run.path, "validation", 12, "best")]
    assert "83.3 %" in table.stdout
    assert "tool calls per session" in table.stdout
    assert json.loads(etude("eval", str(run.path), "--json").stdout) == measured
    assert asked[1] == (run.path, "heldout", 240, None)
    assert etude("eval", str(run.path), "--split", "train").exit_code == 2


@pytest.fixture
def stored(run: RunDirectory) -> RunDirectory:
    TrajectoryLog(run.trajectories).append([make_group(number) for number in range(2)])
    return run


def test_trajectories_are_listed(stored: RunDirectory) -> None:
    result = etude("trajectory", "list", str(stored.path), "--limit", "3")
    assert "run/task/e0/g0/2" in result.stdout
    assert "run/task/e0/g0/3" not in result.stdout
    rows = json.loads(etude("trajectory", "list", str(stored.path), "--json").stdout)
    assert len(rows) == 16
    assert rows[0] == {
        "id": "run/task/e0/g0/0", "task": "task", "group": 0, "index": 0, "status": "done", "reward": 0.95,
    }  # fmt: skip


def test_a_trajectory_is_shown_by_id_or_ending(stored: RunDirectory) -> None:
    for identity in ("run/task/e0/g1/2", "g1/2"):
        result = etude("trajectory", "show", str(stored.path), identity)
        assert result.exit_code == 0, result.output
        assert "run/task/e0/g1/2" in result.stdout
        assert "malformed -0.05" in result.stdout
        assert "def tally" in result.stdout


@pytest.mark.parametrize(("identity", "words"), [("2", "2 trajectories end so"), ("x", "no such trajectory")])
def test_an_unclear_id_is_refused(stored: RunDirectory, identity: str, words: str) -> None:
    result = etude("trajectory", "show", str(stored.path), identity)
    assert result.exit_code == 2
    assert words in result.stderr


def test_a_trajectory_is_printed_as_json_and_atif(stored: RunDirectory) -> None:
    arguments = ("trajectory", "show", str(stored.path), "g1/2")
    made = make_trajectory(2, group=1)
    document = json.loads(etude(*arguments, "--json").stdout)
    assert document["arrays"][0]["tokens"] == made.segments[0].tokens.tolist()
    assert same(trajectory_from_atif(json.loads(etude(*arguments, "--atif").stdout)), made)


def test_a_task_is_shown_with_its_fix() -> None:
    result = etude("tasks", "show", "3", "--split", "heldout", "--solution")
    assert result.exit_code == 0, result.output
    assert "tests/test_all.py" in result.stdout
    assert "+++ b/" in result.stdout


def test_tasks_are_exported_as_harbor_directories(tmp_path: Path) -> None:
    target = tmp_path / "tasks"
    result = etude("tasks", "export", str(target), "--split", "heldout", "--count", "2")
    assert result.exit_code == 0, result.output
    paths = [Path(line) for line in result.stdout.splitlines()]
    tasks = [read_harbor(path) for path in paths]
    assert sorted(path.name for path in target.iterdir()) == sorted(task.id for task in tasks)
    assert all(task.metadata["split"] == "heldout" for task in tasks)
    again = etude("tasks", "export", str(target))
    assert again.exit_code == 2
    assert "is not empty" in again.stderr


def test_config_show_prints_toml_that_loads_again(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text(etude("config", "show", "--set", "rl.num_steps=3").stdout)
    again = etude("config", "show", "--config", str(path)).stdout
    assert again == path.read_text()
    assert "num_steps = 3" in again


def test_the_committed_reference_is_up_to_date() -> None:
    committed = Path(package.__file__).parents[2] / "docs" / "config.md"
    assert etude("config", "docs").stdout == committed.read_text(), "run: etude config docs > docs/config.md"


def test_every_field_of_the_reference_is_documented() -> None:
    rows = [line for line in etude("config", "docs").stdout.splitlines() if line.startswith("| `")]
    assert len(rows) > 60
    assert [row for row in rows if row.rstrip("| ").count("|") < 4] == []


@pytest.mark.parametrize("command", [["tasks", "show", "0"], ["config", "docs"]])
def test_output_that_nobody_reads_is_no_result_and_no_traceback(command: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    line = [sys.executable, "-c", "from etude.cli import main; main()", *command]
    try:
        done = subprocess.run(
            line, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=120, check=False
        )
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_an_error_of_the_agent_has_no_traceback(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> Any:
        raise ToolArgumentError("too large", field="PATH")

    stand_in(monkeypatch, "etude.controller.evaluate", "evaluate_run", fail)
    result = etude("eval", str(run.path))
    assert result.exit_code == 2
    assert "PATH: too large" in result.stderr
