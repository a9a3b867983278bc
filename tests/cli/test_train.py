import json
from pathlib import Path
from typing import Any

import pytest

from etude.cli.train import config_to_run, resumed_run
from etude.config import RunConfig
from etude.controller.forecast import store_plan, with_steps
from etude.errors import RunDirectoryError, SamplerError
from etude.observe import Observer, RunDirectory
from tests.cli.commands import etude, stand_in
from tests.observe.report_data import finished_report, write_finished_run


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "quick.toml"
    path.write_text(f'runs_directory = "{tmp_path / "runs"}"\n[rl]\nnum_steps = 7\n')
    return path


class Loop:
    """Stands in for the training loop: notes how it was called, does what it is told."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.calls: list[tuple[RunConfig, RunDirectory, bool]] = []
        self.error = error

    def __call__(
        self, config: RunConfig, run: RunDirectory, observer: Observer, resume: bool
    ) -> dict[str, Any]:
        self.calls.append((config, run, resume))
        with run.lock():
            observer.stage_begins("rl", 2)
            observer.stage_advances(1, {"reward": 0.5})
            observer.stage_ends()
            if self.error is not None:
                raise self.error
            write_finished_run(run)
            return finished_report()


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Loop:
    made = Loop()
    stand_in(monkeypatch, "etude.controller.train", "train", made)
    return made


def test_training_prints_the_results_and_where_they_are(
    loop: Loop, config_file: Path, tmp_path: Path
) -> None:
    result = etude(
        "train", "--config", str(config_file), "--set", "rl.num_steps=9", "--seed", "4", "--name", "a"
    )
    assert result.exit_code == 0, result.output
    ((config, run, resume),) = loop.calls
    assert (config.rl.num_steps, config.seed, config.name, resume) == (9, 4, "a", False)
    assert run.path == tmp_path / "runs" / "a"
    assert run.config == config
    assert run.html_file.is_file()
    for expected in (
        "83.3 %",
        "45.8 %",
        "turns with parallel calls",
        "gives <up>",
        "report.html",
        "--seed 1",
    ):
        assert expected in result.stdout
    assert "rl: 2 steps" in result.stderr
    assert "rl: 2 steps" not in result.stdout


def test_json_output_is_only_the_report(loop: Loop, config_file: Path) -> None:
    result = etude("train", "--config", str(config_file), "--json")
    assert json.loads(result.stdout) == finished_report()


@pytest.mark.slow
def test_the_short_options_win_over_set(loop: Loop, config_file: Path) -> None:
    etude(
        "train",
        "--config",
        str(config_file),
        "--set",
        "seed=1",
        "--seed",
        "2",
        "--set",
        "name=x",
        "--name",
        "5",
    )
    assert loop.calls[0][0].seed == 2
    assert loop.calls[0][0].name == "5"


@pytest.mark.slow
def test_a_second_run_of_the_same_name_is_refused_with_a_way_out(loop: Loop, config_file: Path) -> None:
    assert etude("train", "--config", str(config_file)).exit_code == 0
    result = etude("train", "--config", str(config_file))
    assert result.exit_code == 2
    assert "already exists" in result.stderr
    assert "--resume" in result.stderr
    assert "Traceback" not in result.stderr
    assert len(loop.calls) == 1


@pytest.mark.slow
def test_resuming_goes_on_with_the_run(loop: Loop, config_file: Path) -> None:
    etude("train", "--config", str(config_file))
    result = etude("train", "--config", str(config_file), "--resume")
    assert result.exit_code == 0, result.output
    assert loop.calls[1][2] is True
    assert loop.calls[1][1].path == loop.calls[0][1].path


def test_the_command_of_a_run_whose_steps_were_planned_resumes_it(config_file: Path) -> None:
    asked = config_to_run(config_file, ["max_wall_s=60"], resume=False, dropped=[])
    run = RunDirectory.create(asked)
    store_plan(run, asked, with_steps(asked, 10, 3))
    for settings in (["max_wall_s=60"], [], ["rl.num_steps=3"]):
        config = config_to_run(config_file, settings, resume=True, dropped=[])
        assert resumed_run(config)[0].path == run.path
    with pytest.raises(RunDirectoryError, match="the run was started with 3"):
        resumed_run(config_to_run(config_file, ["rl.num_steps=5"], resume=True, dropped=[]))


SERVER = ['agent.mcp.lines.command="count"', "agent.mcp.lines.tools=[]"]
OWN = ["tasks.family=own:Family", "tasks.options.most=9"]


def begin_run(config_file: Path, settings: list[str]) -> RunDirectory:
    return RunDirectory.create(config_to_run(config_file, settings, resume=False, dropped=[]))


def resume(config_file: Path, settings: list[str]) -> RunConfig:
    return resumed_run(config_to_run(config_file, settings, resume=True, dropped=[]))[1]


def test_what_is_left_out_on_resume_is_another_configuration(config_file: Path) -> None:
    begin_run(config_file, [*SERVER, *OWN])
    resume(config_file, [*SERVER, *OWN])
    for settings, key in ((OWN, "agent.mcp.lines.command"), ([*SERVER, OWN[0]], "tasks.options.most")):
        with pytest.raises(RunDirectoryError) as caught:
            resume(config_file, settings)
        assert caught.value.field == key
    with pytest.raises(RunDirectoryError, match="was started without"):
        resume(config_file, [*SERVER, *OWN, "tasks.options.least=1"])


def test_a_resumed_run_keeps_what_its_servers_offered_when_it_began(config_file: Path) -> None:
    begin_run(config_file, [*SERVER, "agent.mcp.lines.described='[1]'"])
    assert resume(config_file, SERVER).agent.mcp["lines"].described == "[1]"
    with pytest.raises(RunDirectoryError, match="described"):
        resume(config_file, [*SERVER, "agent.mcp.lines.described='[2]'"])


def test_a_run_that_named_semantic_search_before_it_had_an_index_goes_on(config_file: Path) -> None:
    tools = ["agent.tools=grep,semantic_search,finish"]
    run = begin_run(config_file, tools)
    stored = run.config_file.read_text()
    run.config_file.write_text(stored.replace('index = "words"\n', ""))
    assert run.config_file.read_text() != stored
    assert resume(config_file, tools).agent.index == run.config.agent.index == "words"


@pytest.mark.slow
def test_resuming_with_another_configuration_is_refused(loop: Loop, config_file: Path) -> None:
    etude("train", "--config", str(config_file))
    result = etude("train", "--config", str(config_file), "--resume", "--set", "rl.loss.cispo_cap=3.0")
    assert result.exit_code == 2
    assert "rl.loss.cispo_cap: the run was started with 5.0" in result.stderr


@pytest.mark.slow
def test_a_run_goes_on_with_its_parts_elsewhere(loop: Loop, config_file: Path) -> None:
    etude("train", "--config", str(config_file))
    here = ("--executor", "local", "--set", "cluster.engines=2", "--set", "cluster.trainer.cpus=0.5")
    result = etude("train", "--config", str(config_file), "--resume", *here)
    assert result.exit_code == 0, result.output
    assert loop.calls[1][0].cluster.engines == 2
    refused = etude("train", "--config", str(config_file), "--executor", "elsewhere")
    assert refused.exit_code == 2
    assert "executor" in refused.stderr


def test_resuming_what_was_never_begun_is_refused(loop: Loop, config_file: Path) -> None:
    server = ("--set", "agent.mcp.bad.command=/no/such", "--set", "agent.mcp.bad.where=host")
    result = etude("train", "--config", str(config_file), "--resume", *server)
    assert result.exit_code == 2
    assert "no run to resume" in result.stderr  # and no server was started


@pytest.mark.slow
def test_an_interrupt_names_the_command_that_resumes(
    monkeypatch: pytest.MonkeyPatch, config_file: Path
) -> None:
    stand_in(monkeypatch, "etude.controller.train", "train", Loop(KeyboardInterrupt()))
    result = etude(
        "train", "--config", str(config_file), "--set", "rl.level_weights=[1, 0, 0]", "--seed", "3"
    )
    assert result.exit_code == 130
    expected = f"etude train --config {config_file} --set 'rl.level_weights=[1, 0, 0]' --set seed=3 --resume"
    assert expected in result.stderr
    loop = Loop()
    stand_in(monkeypatch, "etude.controller.train", "train", loop)
    again = etude(
        "train",
        "--config",
        str(config_file),
        "--set",
        "rl.level_weights=[1, 0, 0]",
        "--set",
        "seed=3",
        "--resume",
    )
    assert again.exit_code == 0, again.output


def test_a_failure_of_the_system_has_an_exit_code_of_its_own(
    monkeypatch: pytest.MonkeyPatch, config_file: Path
) -> None:
    error = SamplerError("the engine died", field="engine", received=3, fix="report it")
    stand_in(monkeypatch, "etude.controller.train", "train", Loop(error))
    result = etude("train", "--config", str(config_file))
    assert result.exit_code == 3
    assert "engine: the engine died" in result.stderr
    assert "received: 3" in result.stderr
    assert "fix: report it" in result.stderr


def test_a_defect_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch, config_file: Path) -> None:
    stand_in(monkeypatch, "etude.controller.train", "train", Loop(ZeroDivisionError("a defect")))
    result = etude("train", "--config", str(config_file))
    assert isinstance(result.exception, ZeroDivisionError)


def test_an_unknown_key_is_answered_with_a_suggestion(loop: Loop, config_file: Path) -> None:
    result = etude("train", "--config", str(config_file), "--set", "rl.num_stesp=3")
    assert result.exit_code == 2
    assert "rl.num_stesp: unknown key" in result.stderr
    assert "did you mean num_steps?" in result.stderr
    assert loop.calls == []
