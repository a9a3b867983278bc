import dataclasses
import io
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from etude.cli.output import program
from etude.cli.trajectory_printing import SessionPrinter
from etude.observe import RunDirectory
from etude.records import ToolCall
from etude.store import TrajectoryLog, trajectory_from_atif, trajectory_to_atif
from tests.cli.commands import etude
from tests.controller.recorded import FINISH, LIST, TEST, make_run, solving, task_of
from tests.fakes.scripted_model import write_script
from tests.store.builders import make_chain, make_group, same

pytestmark = pytest.mark.filterwarnings("ignore:the unisolated sandbox")

SOLVED, GAVE_UP = "g0/0", "g0/1"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    return make_run(tmp_path)


@pytest.fixture
def chain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    monkeypatch.chdir(tmp_path)
    return make_run(tmp_path, summaries=True)


def test_a_term_that_took_nothing_is_not_in_the_header() -> None:
    output, one = io.StringIO(), make_chain()
    assert one.reward is not None
    reward = dataclasses.replace(one.reward, terms={"malformed": -0.0, "brevity": 0.1})
    SessionPrinter(Console(file=output), dataclasses.replace(one, reward=reward), None).header()
    assert "brevity +0.10" in output.getvalue() and "malformed" not in output.getvalue()


def test_hints_name_the_program_as_it_can_be_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "project/.venv/bin/python"))
    for place, name in (("project", ".venv/bin/etude"), ("project/a/b", "etude")):
        (tmp_path / place).mkdir(parents=True)
        monkeypatch.chdir(tmp_path / place)
        assert program() == name


def write_atif(path: Path, trajectory: Any) -> str:
    path.write_text(json.dumps(trajectory_to_atif(trajectory)))
    return str(path)


@pytest.mark.parametrize("command", ["list", "show", "diff", "replay", "fork"])
def test_every_command_has_help(command: str) -> None:
    result = etude("trajectory", command, "--help")
    assert result.exit_code == 0, result.output
    assert "Usage" in result.stdout


@pytest.mark.slow
def test_runs_at_hand_are_searched_where_none_is_named(run: RunDirectory) -> None:
    for words in ([str(run.path), SOLVED], [SOLVED], ["demo/train-0-0/e0/g0/0"], ["train-0-0/e0/g0/0"]):
        result = etude("trajectory", "show", *words)
        assert result.exit_code == 0, result.output
        assert "demo/train-0-0/e0/g0/0" in result.stdout


def test_no_run_at_hand_is_a_mistake_to_mend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = etude("trajectory", "show", SOLVED)
    assert result.exit_code == 2
    assert "name the run directory before the id" in result.stderr


@pytest.mark.parametrize("command", ["show", "diff", "replay"])
def test_an_id_is_missing(run: RunDirectory, command: str) -> None:
    result = etude("trajectory", command, str(run.path))
    assert result.exit_code == 2
    assert "session id" in result.stderr


def test_an_unknown_id_has_a_suggestion(run: RunDirectory) -> None:
    result = etude("trajectory", "show", str(run.path), "g0/7")
    assert result.exit_code == 2
    assert "no such trajectory" in result.stderr
    assert "did you mean demo/train-0-0/e0/g0/" in result.stderr


def test_an_ambiguous_id_lists_what_it_may_mean(run: RunDirectory) -> None:
    result = etude("trajectory", "show", str(run.path), "demo/train")
    assert result.exit_code == 2
    assert "2 trajectories begin with this" in result.stderr
    assert "demo/train-0-0/e0/g0/0, demo/train-0-0/e0/g0/1" in result.stderr


def test_a_part_of_an_id_lists_what_it_may_mean(run: RunDirectory) -> None:
    for part in ("train-0-0", "train-0-0/e0", "/e0/g0/"):
        result = etude("trajectory", "show", str(run.path), part)
        assert result.exit_code == 2
        assert "2 trajectories have this in their ids" in result.stderr
        assert "demo/train-0-0/e0/g0/0, demo/train-0-0/e0/g0/1" in result.stderr


def test_a_torn_store_is_reported(run: RunDirectory) -> None:
    (part,) = run.trajectories.glob("*.parquet")
    part.write_bytes(part.read_bytes()[:-10])
    result = etude("trajectory", "show", str(run.path), SOLVED)
    assert result.exit_code == 3
    assert part.name in result.stderr
    assert "damaged" in result.stderr


def test_a_log_without_a_run_is_read(tmp_path: Path) -> None:
    TrajectoryLog(tmp_path / "log").append([make_group(0)])
    assert etude("trajectory", "show", str(tmp_path / "log"), "g0/3").exit_code == 0
    listed = etude("trajectory", "list", str(tmp_path / "log"), "--json")
    assert len(json.loads(listed.stdout)) == 8


def test_sessions_of_an_evaluation_are_shown_in_words(run: RunDirectory, tmp_path: Path) -> None:
    evaluation = tmp_path / "judged"
    shutil.copytree(run.trajectories, evaluation / "trajectories")
    (evaluation / "plan.json").write_text(json.dumps({"target": {"place": str(run.path)}}))
    shown = [etude("trajectory", "show", str(place), SOLVED) for place in (run.path, evaluation)]
    assert shown[1].exit_code == 0, shown[1].output
    assert shown[1].stdout == shown[0].stdout


@pytest.mark.parametrize("turn", [0, 6, -1])
def test_a_turn_out_of_range_is_refused(run: RunDirectory, turn: int) -> None:
    for command in ("show", "replay"):
        result = etude("trajectory", command, str(run.path), SOLVED, "--turn", str(turn))
        assert result.exit_code == 2
        assert "a number from 1 to 5" in result.stderr


def test_one_turn_is_shown_with_its_tokens(run: RunDirectory) -> None:
    result = etude("trajectory", "show", str(run.path), SOLVED, "--turn", "1", "--tokens")
    assert "turn 1" in result.stdout
    assert "turn 2" not in result.stdout
    assert "'<list_dir>'" in result.stdout
    document = json.loads(etude("trajectory", "show", SOLVED, "--turn", "1", "--json").stdout)
    assert document["calls"] == [["list_dir", {}, None]]
    assert len(document["tokens"]) == len(document["logprobs"]) == document["end"] - document["start"]
    assert len(document["prompt_tokens"]) == document["start"]


def test_a_chain_is_shown_with_its_contexts_and_summaries(chain: RunDirectory) -> None:
    result = etude("trajectory", "show", SOLVED)
    assert "context 1 of 2  root" in result.stdout
    assert "context 2 of 2  summary of context 1 at token 526" in result.stdout
    assert "turn 4  summary" in result.stdout
    assert "[context 2; earlier ones in full: .etude/history/]" in result.stdout
    document = json.loads(etude("trajectory", "show", SOLVED, "--turn", "4", "--json").stdout)
    assert document["summary"] is True


def test_atif_has_the_words_of_each_context(chain: RunDirectory) -> None:
    document = json.loads(etude("trajectory", "show", SOLVED, "--atif").stdout)
    said = [step["message"] for step in document["steps"] if step["source"] == "user"]
    assert len(said) == 2
    assert "so far 1" in said[1]
    stored = next(TrajectoryLog(chain.trajectories).read()).members[0]
    assert same(trajectory_from_atif(document), stored)


def test_equal_sessions_have_no_difference(run: RunDirectory) -> None:
    result = etude("trajectory", "diff", SOLVED, SOLVED)
    assert result.exit_code == 0
    assert "the same: 5 turns" in result.stdout


def test_the_first_turn_that_differs_is_shown(run: RunDirectory) -> None:
    result = etude("trajectory", "diff", SOLVED, GAVE_UP)
    assert result.exit_code == 1
    assert "turns that are the same: 1" in result.stdout
    assert "turn 2 differs: tokens, text, calls, results" in result.stdout
    assert "+<finish></finish><|end|>" in result.stdout
    document = json.loads(etude("trajectory", "diff", SOLVED, GAVE_UP, "--json").stdout)
    assert document["divergence"]["turn"] == 2
    assert document["outcome"]["reward"] == [1.0, 0.0]
    coloured = etude("trajectory", "diff", SOLVED, GAVE_UP, FORCE_COLOR="1", TERM="xterm-256color")
    assert "\x1b[32m" in coloured.stdout


def test_a_file_is_compared_with_a_stored_session(run: RunDirectory, tmp_path: Path) -> None:
    stored = next(TrajectoryLog(run.trajectories).read()).members[0]
    file = write_atif(tmp_path / "one.json", stored)
    assert etude("trajectory", "diff", str(run.path), SOLVED, file).exit_code == 0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not JSON"),
        ("[]", "not a JSON object"),
        ('{"schema_version": "ATIF-v2.0"}', "ATIF version 1"),
    ],
)
def test_a_file_that_is_no_atif_is_reported(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "a.json").write_text(text)
    result = etude("trajectory", "show", str(tmp_path / "a.json"))
    assert result.exit_code == 3
    assert words in result.stderr
    assert etude("trajectory", "show", str(tmp_path / "none.json")).exit_code == 2


def test_a_replay_without_difference_succeeds(run: RunDirectory) -> None:
    result = etude("trajectory", "replay", SOLVED, "--backend", "unisolated")
    assert result.exit_code == 0, result.output
    assert "5 turns, 6 calls replayed" in result.stdout
    assert "no difference" in result.stdout


def test_a_chain_is_replayed(chain: RunDirectory) -> None:
    result = etude("trajectory", "replay", SOLVED, "--backend", "unisolated", "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert (document["equal"], document["turns"], document["calls"]) == (True, 6, 6)


def test_a_replay_with_a_difference_says_where_and_fails(run: RunDirectory, tmp_path: Path) -> None:
    stored = next(TrajectoryLog(run.trajectories).read()).members[0]
    document = trajectory_to_atif(stored)
    document["extra"]["etude"]["trajectory"]["turns"][0]["results"][0][0] += "\nghost.py"
    (tmp_path / "one.json").write_text(json.dumps(document))
    from etude.tasks.harbor import write_harbor

    write_harbor(task_of(run.config), tmp_path / "task")
    words = ["replay", str(tmp_path / "one.json"), "--task", str(tmp_path / "task")]
    result = etude("trajectory", *words, "--backend", "unisolated")
    assert result.exit_code == 1
    assert "turn 1, call 1: list_dir gave another result" in result.stdout
    assert "-ghost.py" in result.stdout
    found = json.loads(etude("trajectory", *words, "--json").stdout)
    (difference,) = found["differences"]
    assert (difference["turn"], difference["position"]) == (1, 1)
    assert "-ghost.py" in difference["diff"]
    assert not found["equal"]


def test_a_replay_needs_its_task(tmp_path: Path) -> None:
    file = write_atif(tmp_path / "one.json", make_chain(2))
    result = etude("trajectory", "replay", file)
    assert result.exit_code == 2
    assert "--task" in result.stderr


def test_an_unknown_backend_is_refused(run: RunDirectory) -> None:
    result = etude("trajectory", "replay", SOLVED, "--backend", "cloud")
    assert result.exit_code == 2
    assert "unknown sandbox backend" in result.stderr


def test_a_fork_goes_on_and_is_written(run: RunDirectory, tmp_path: Path) -> None:
    script = write_script(
        tmp_path / "s.json", [(LIST,), (ToolCall("list_dir", {"path": "tests"}),), (FINISH,)]
    )
    options = ["--turn", "1", "--run", script, "--backend", "unisolated"]
    result = etude("trajectory", "fork", SOLVED, *options, "--output", str(tmp_path / "new.json"))
    assert result.exit_code == 0, result.output
    assert "demo+fork1/train-0-0/e0/g0/0" in result.stdout
    assert "1 turn, 1 call replayed" in result.stderr
    parted = etude("trajectory", "diff", SOLVED, str(tmp_path / "new.json"), "--json")
    assert json.loads(parted.stdout)["divergence"]["turn"] == 2
    document = json.loads(etude("trajectory", "fork", SOLVED, *options, "--json").stdout)
    assert document["replay"]["equal"]
    assert document["trajectory"]["facts"]["forked_at"] == 1
    shown = json.loads(etude("trajectory", "show", SOLVED, "--json").stdout)
    for arrays in (document["trajectory"]["arrays"][0], shown["arrays"][0]):
        assert len(arrays["sampled"]) == len(arrays["tokens"]) and {*arrays["sampled"]} == {True, False}


def test_a_fork_is_taken_up_by_the_agent(run: RunDirectory, tmp_path: Path) -> None:
    messages = solving(task_of(run.config))
    script = write_script(tmp_path / "s.json", messages)
    words = ["--turn", "2", "--run", script, "--into", str(tmp_path / "mine"), "--json"]
    result = etude("trajectory", "fork", SOLVED, "--backend", "unisolated", *words)
    assert result.exit_code == 0, result.output
    handed = json.loads(result.stdout)
    session = handed["session"]
    resumed = etude("agent", "--resume", session, "--backend", "unisolated", "--approve", "full")
    assert resumed.exit_code == 0, resumed.output
    task = task_of(run.config)
    path = str(task.metadata["path"])
    assert (tmp_path / "mine" / path).read_text() == task.solution_files[path]


@pytest.mark.parametrize("turn", ["6", "-1"])
def test_a_fork_at_no_turn_is_refused(run: RunDirectory, tmp_path: Path, turn: str) -> None:
    script = write_script(tmp_path / "s.json", [(TEST,)])
    result = etude("trajectory", "fork", SOLVED, "--turn", turn, "--run", script)
    assert result.exit_code == 2
    assert "a number from 0 to 5" in result.stderr


def test_a_fork_of_a_file_needs_a_run(tmp_path: Path) -> None:
    result = etude("trajectory", "fork", write_atif(tmp_path / "one.json", make_chain(2)), "--turn", "1")
    assert result.exit_code == 2
    assert "--run" in result.stderr
