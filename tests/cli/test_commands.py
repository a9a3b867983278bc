import errno
import json
import os
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import etude as package
from etude.cli import doctor
from etude.config import parse_config
from etude.controller.evaluate import find_checkpoint
from etude.controller.evaluation import EvaluationRequest
from etude.errors import ToolArgumentError
from etude.evaluation import EvaluationResult, ModeResult, session_figures
from etude.observe import Observer, RunDirectory
from etude.store import TrajectoryLog, trajectory_from_atif
from etude.tasks.harbor import read_harbor
from tests.cli.commands import etude
from tests.evaluation.rows import numbered, rows_of
from tests.observe.report_data import write_finished_run
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
        ["eval", "run"],
        ["eval", "compare"],
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
    rows = (*rows_of(numbered("+" * 10 + "-" * 2)),)
    modes = {"greedy": ModeResult(0.0, session_figures(rows), rows)}
    asked: list[Any] = []

    def evaluate(request: EvaluationRequest, observer: Observer) -> EvaluationResult:
        asked.append(request)
        return EvaluationResult({"label": "demo"}, request.suite, 0, modes, {})

    monkeypatch.setattr("etude.controller.evaluation.evaluate", evaluate)
    options = ("--tasks", "12", "--split", "validation", "--checkpoint", "best", "--samples", "8")
    table = etude("eval", str(run.path), *options).stdout
    assert "demo on validation, 12 tasks" in table
    assert "83.3 % (51.6 to 97.9)" in table
    assert "tool calls per session" in table
    assert (asked[0].suite, asked[0].num_tasks, asked[0].num_samples) == ("validation", 12, 8)
    assert asked[0].options.checkpoint == "best"
    measured = json.loads(etude("eval", str(run.path), "--json").stdout)
    assert measured["greedy"]["pass_rate"] == pytest.approx(10 / 12)
    assert (asked[1].target, asked[1].suite, asked[1].num_tasks) == (str(run.path), "heldout", 240)
    smaller = etude("eval", str(run.path), "--suite", "tasks")
    assert "demo on tasks, 12 tasks" in smaller.stdout and "--tasks" not in smaller.stderr
    assert "| solved (pass@1) | 83.3 %" in etude("eval", "--markdown", str(run.path)).stdout


def test_a_run_that_was_stopped_has_no_model_and_says_how_to_get_one(run: RunDirectory) -> None:
    (run.checkpoints / "latest").mkdir()
    for command in ("eval", "serve"):
        result = etude(command, str(run.path))
        assert result.exit_code == 2
        assert "has no trained model yet" in result.stderr
        assert "mid-training" not in result.stderr, "it may be a run of `etude sft`, or of RL alone"
        assert "--resume" in result.stderr and "export" in result.stderr and "latest" in result.stderr


def test_a_run_that_was_stopped_in_rl_gives_the_model_before_it_and_warns(run: RunDirectory) -> None:
    (run.checkpoints / "midtrained").mkdir()
    with pytest.warns(UserWarning, match=r"has not ended: .*midtrained, from before RL"):
        assert find_checkpoint(run, None).name == "midtrained"
    with warnings.catch_warnings(action="error"):
        assert find_checkpoint(run, "midtrained").name == "midtrained"


def test_eval_refuses_what_it_does_not_know(run: RunDirectory, tmp_path: Path) -> None:
    (run.checkpoints / "final").mkdir()
    for options, words in (
        ((str(run.path), "--split", "train"), "one of heldout, validation, heldout_family, observed_train, "),
        ((str(run.path), "--checkpoint", "none"), "no such checkpoint"),
        ((str(tmp_path),), "neither a run, nor a checkpoint, nor an address"),
        ((str(run.path), "--tool-calls", "shouted"), "is not one of"),
        (("compare", str(tmp_path), str(tmp_path)), "cannot be read"),
    ):
        result = etude("eval", *options)
        assert (result.exit_code, words in result.stderr) == (2, True), result.stderr


@pytest.fixture
def stored(run: RunDirectory) -> RunDirectory:
    TrajectoryLog(run.trajectories).append([make_group(number) for number in range(2)])
    return run


def test_trajectories_are_listed(stored: RunDirectory) -> None:
    result = etude("trajectory", "list", str(stored.path), "--limit", "3")
    assert "run/task/e0/g0/2" in result.stdout
    assert "run/task/e0/g0/3" not in result.stdout
    assert result.stderr == "the first 3 of 16 sessions; --limit 16 lists all\n"
    assert etude("trajectory", "list", str(stored.path)).stderr == ""
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


@pytest.mark.parametrize(
    ("identity", "words"), [("2", "2 trajectories end with this"), ("x", "no such trajectory")]
)
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
    unknown = etude("tasks", "export", str(target / "more"), "--split", "none")
    assert "unknown split" in unknown.stderr and "train, heldout" in unknown.stderr


def test_making_tasks_in_containers_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    result = etude("tasks", "make", str(tmp_path), "--out", str(tmp_path / "tasks"), "--backend", "podman")
    assert result.exit_code == 2 and "layered images" in result.stderr and "use local" in result.stderr
    assert not (tmp_path / "tasks").exists()


def test_tasks_of_the_families_of_acting_are_shown_by_the_names_of_their_suites() -> None:
    shown = etude("tasks", "show", "0", "--split", "composed_heldout")
    assert shown.exit_code == 0
    assert shown.stdout.startswith("eval-composed_heldout-0000: ")
    shown = etude("tasks", "show", "1", "--split", "observed_train")
    assert shown.stdout.startswith("eval-observed_train-0001: ")
    refused = etude("tasks", "show", "0", "--split", "unseen")
    assert (refused.exit_code, "one of train, heldout, validation, " in refused.stderr) == (2, True)


def test_tasks_for_training_are_those_of_the_seed_and_the_configured_family() -> None:
    show = ("tasks", "show", "3", "--set", "seed=5")
    assert etude(*show).stdout.startswith("train-5-3: ")
    assert etude(*show, "--seed", "6").stdout.startswith("train-6-3: ")
    assert etude(*show, "--set", "tasks.family=trails").stdout.startswith("trail-train-5-3: ")


def test_sessions_that_cannot_be_written_are_refused_before_one_is_played(
    tmp_path: Path,
) -> None:
    (tmp_path / "file").touch()
    result = etude("tasks", "sessions", str(tmp_path / "file/s.jsonl"))
    assert result.exit_code == 2 and "file" in result.stderr and "fix: name another path" in result.stderr
    assert "Not a directory" in result.stderr or "File exists" in result.stderr
    result = etude("tasks", "sessions", str(tmp_path))
    assert (result.exit_code, "error: FILE: is a directory" in result.stderr) == (2, True)


def test_a_full_disk_is_named_without_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("etude.kit.durable.make_directory", fill)
    result = etude("tasks", "sessions", "s.jsonl")
    assert result.exit_code == 2 and result.stderr.startswith("error: No space left on device")


def test_a_family_whose_sessions_are_no_chats_has_none_to_write(tmp_path: Path) -> None:
    file = tmp_path / "chats.jsonl"
    result = etude("tasks", "sessions", str(file), "--set", "tasks.family=trails")
    assert (result.exit_code, "cannot be written as chats" in result.stderr) == (2, True)
    assert not file.exists()


def test_a_place_that_cannot_be_written_is_a_mistake_in_words(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = etude("tasks", "export", str(tmp_path / "file" / "tasks"), "--count", "1")
    assert result.exit_code == 2
    assert "Not a directory" in result.stderr and "fix: name another path" in result.stderr


def test_config_show_prints_toml_that_loads_again(tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text(etude("config", "show", "--set", "rl.num_steps=3").stdout)
    again = etude("config", "show", str(path)).stdout
    assert again == path.read_text() == etude("config", "show", "--config", str(path)).stdout
    assert "num_steps = 3" in again
    twice = etude("plan", str(path), "--config", str(path))
    assert (twice.exit_code, "name one file" in twice.stderr) == (2, True)


def test_only_tasks_of_train_have_a_seed() -> None:
    done = etude("tasks", "show", "0", "--seed", "5", "--split", "heldout")
    assert done.exit_code == 2 and "only the split train has a seed" in done.stderr


def test_a_run_whose_mcp_server_does_not_start_gets_no_directory(tmp_path: Path) -> None:
    pytest.importorskip("mcp", reason="needs the extra mcp")
    server = ("--set", "agent.mcp.bad.command=/no/such", "--set", 'agent.mcp.bad.where="host"')
    done = etude(
        "train",
        "--config",
        "configs/quickstart.toml",
        "--set",
        f"runs_directory={tmp_path / 'runs'}",
        *server,
    )
    assert done.exit_code == 2 and "agent.mcp.bad.command: there is no such program here" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_the_committed_reference_is_up_to_date() -> None:
    committed = Path(package.__file__).parents[2] / "docs" / "config.md"
    assert etude("config", "docs").stdout == committed.read_text(), "run: etude config docs > docs/config.md"


def test_every_field_of_the_reference_is_documented() -> None:
    rows = [line for line in etude("config", "docs").stdout.splitlines() if line.startswith("| `")]
    assert len(rows) > 60
    assert [row for row in rows if row.rstrip("| ").count("|") < 4] == []


@pytest.mark.slow
def test_output_that_nobody_reads_is_no_result_and_no_traceback() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    line = [sys.executable, "-c", "from etude.cli import main; main()", "config", "docs"]
    try:
        done = subprocess.run(
            line, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=120, check=False
        )
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize(("module", "told"), [("acp.schema", "agent-client-protocol"), ("etude.x", None)])
def test_a_missing_package_is_named_and_a_missing_module_of_ours_is_a_defect(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, module: str, told: str | None
) -> None:
    def fail(*arguments: Any) -> Any:
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)

    monkeypatch.setattr("etude.controller.evaluation.evaluate", fail)
    result = etude("eval", str(run.path))
    if told is None:
        assert isinstance(result.exception, ModuleNotFoundError)
    else:
        assert result.exit_code == 2
        assert f"-m pip install '{told}" in result.stderr


def test_lines_in_a_pipe_are_whole(tmp_path: Path) -> None:
    words = " ".join(["word"] * 100)
    group = make_group(size=1)
    member = group.members[0]
    member = replace(member, turns=(replace(member.turns[0], text=words),))
    TrajectoryLog(tmp_path / "log").append([replace(group, members=(member,))])
    assert words in etude("trajectory", "show", str(tmp_path / "log"), "g0/0").stdout
    checkpoint = tmp_path / ("c" * 120)
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text('{"model_type": "qwen3_moe"}')
    shown = etude("checkpoint", "show", str(checkpoint)).stdout
    assert len(shown.splitlines()) == 2 and "c" * 120 in shown and "qwen3_moe" in shown


def test_the_doctor_tells_what_more_there_could_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(doctor, "is_installed", lambda package: package != "ray")
    found = {part["name"]: part for part in json.loads(etude("doctor", "--json").stdout)["parts"]}
    assert found["mcp"]["present"] and not found["mcp"]["fix"]
    assert "pip install 'ray" in found["ray"]["fix"]
    assert not found["C compiler"]["present"] and "gcc" in found["C compiler"]["fix"]
    assert not found["buildah"]["present"] and "apt-get install buildah" in found["buildah"]["fix"]
    assert {part["kind"] for part in found.values()} == {"package", "program", "sandbox"}
    text = etude("doctor").stdout
    assert all(part["adds"] in text and part["fix"] in text for part in found.values())


def test_an_error_of_the_agent_has_no_traceback(run: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> Any:
        raise ToolArgumentError("too large", field="PATH")

    monkeypatch.setattr("etude.controller.evaluation.evaluate", fail)
    result = etude("eval", str(run.path))
    assert result.exit_code == 2
    assert "PATH: too large" in result.stderr
