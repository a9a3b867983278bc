"""How `etude agent` ends: exit codes, withheld changes, closed pipes, and invalid invocations."""

import json
import shlex
import subprocess
from pathlib import Path

import pytest
from typer.testing import Result

from etude.sandbox.backends import open_backend
from tests.cli.agent_scripts import (
    FINISH,
    MEND,
    READ,
    TALLY,
    command,
    environment,
    make_repository,
    ran,
    session_folders,
)
from tests.fakes.scripted_model import write_script

MENDED = TALLY.replace("= 1", "= 0")
SECRET = {"name": "write_file", "arguments": {"path": "secret.env", "text": "theirs\n"}}
pytestmark = pytest.mark.skipif(bool(open_backend("local").doctor()), reason="no sandboxes here")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    make_repository(tmp_path / "repo")
    return tmp_path


@pytest.fixture
def git_root(root: Path) -> Path:
    subprocess.run(("git", "init", "-q"), cwd=root / "repo", check=True)
    (root / "repo" / ".gitignore").write_text("secret.env\nbuild/\n")
    return root


def agent(root: Path, messages, *arguments: str, stdin: str = "", backend: str = "local") -> Result:
    script = write_script(root / "script.json", messages)
    more = ("--model", script, "--tools", "full", "--backend", backend)
    return ran(root, str(root / "repo"), *more, *arguments, stdin=stdin)


def shell(text: str) -> dict:
    return {"name": "run_command", "arguments": {"command": text}}


def result_of(done: Result) -> dict:
    return json.loads(done.stdout.splitlines()[-1])


def test_an_ignored_file_that_the_agent_wrote_is_kept_back_for_the_true_reason(git_root: Path) -> None:
    (git_root / "repo" / "secret.env").write_text("mine\n")
    done = agent(git_root, [[MEND, SECRET], [READ], [FINISH]], "-p", "fix it", "--apply")
    assert done.exit_code == 4, done.stderr
    assert (git_root / "repo" / "secret.env").read_text() == "mine\n"
    assert (git_root / "repo" / "lib" / "tally.py").read_text() == MENDED
    assert done.stdout.count("not written: secret.env: git ignores it") == 1, "and that is told once"
    assert "1 file changed" in done.stderr
    assert "kept back: secret.env: git ignores it" in done.stderr


def test_programs_are_told_what_was_kept_back(git_root: Path) -> None:
    done = agent(git_root, [[SECRET], [FINISH]], "-p", "fix it", "--apply", "--json")
    assert done.exit_code == 4
    result = result_of(done)
    assert (result["status"], result["kept_back"]) == ("done", {"secret.env": "git ignores it"})
    again = agent(git_root, [[MEND], [FINISH]], "-p", "fix it", "--apply", "--json")
    assert again.exit_code == 0
    assert result_of(again)["kept_back"] == {}


def test_a_preview_says_so_too(git_root: Path) -> None:
    done = agent(git_root, [[SECRET], [FINISH]], "-p", "fix it")
    assert done.exit_code == 4
    assert "the agent changed no file" not in done.stderr


def test_a_hook_that_the_agent_wrote_is_kept_back(git_root: Path) -> None:
    hook = {"name": "write_file", "arguments": {"path": ".git/hooks/pre-commit", "text": "x"}}
    done = agent(git_root, [[hook], [FINISH]], "-p", "fix it", "--apply")
    assert done.exit_code == 4
    assert "never copied into or out of the sandbox" in done.stdout
    assert not (git_root / "repo" / ".git" / "hooks" / "pre-commit").exists()


def test_what_commands_leave_among_builds_is_told_and_is_no_failure(git_root: Path) -> None:
    make = shell("mkdir -p build/o __pycache__; touch build/o/a.o build/b.o __pycache__/x.pyc")
    done = agent(git_root, [[make], [READ], [FINISH]], "-p", "build it", "--apply", backend="local")
    assert done.exit_code == 0, done.stderr
    assert done.stdout.count("ignored by git, and so left in the sandbox: build") == 1
    secret = agent(git_root, [[shell("touch secret.env")], [FINISH]], "-p", "x", "--apply", backend="local")
    assert secret.exit_code == 4


def test_a_locked_file_loses_nothing(root: Path) -> None:
    lock = shell(
        "echo '# more' >> tests/test_all.py; echo new > new.txt; chmod 000 lib/tally.py tests new.txt"
    )
    done = agent(root, [[MEND], [lock], [FINISH]], "-p", "fix it", "--apply", backend="local")
    assert done.exit_code == 0, done.stderr
    assert (root / "repo" / "lib" / "tally.py").read_text() == MENDED
    assert (root / "repo" / "tests" / "test_all.py").read_text().endswith("# more\n")
    assert (root / "repo" / "new.txt").read_text() == "new\n"


@pytest.mark.slow
def test_changes_that_are_too_large_are_no_success(root: Path) -> None:
    large = shell("echo x > small.txt; head -c 40000000 /dev/zero > large.bin")
    done = agent(root, [[large], [FINISH]], "-p", "x", "--apply", "--json", backend="local")
    assert done.exit_code == 4
    assert result_of(done)["kept_back"] == {".": "the changes are too large to carry"}
    mended = [[large], [shell("rm large.bin")], [FINISH]]
    done = agent(root, mended, "-p", "x", "--apply", backend="local")
    assert done.exit_code == 0, done.stderr
    assert (root / "repo" / "small.txt").read_text() == "x\n"


@pytest.mark.slow
@pytest.mark.parametrize(("more", "until"), [(["--json"], '"changed"'), ([], "+    total = 0")])
def test_a_closed_pipe_ends_it_quietly_with_everything_kept(root: Path, more: list[str], until: str) -> None:
    long = shell("yes | head -c 30000")
    script = write_script(root / "script.json", [[MEND], *[[READ, long]] * 60, [FINISH]])
    child = subprocess.Popen(
        command(str(root / "repo"), "--model", script, "-p", "fix it", "--apply", *more),
        env=environment(root),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None and child.stderr is not None
    for line in child.stdout:
        if until in line:
            break
    child.stdout.close()
    said = child.stderr.read()
    assert child.wait(timeout=60) == 141, said
    assert "Traceback" not in said and "rror" not in said
    child.stderr.close()
    assert (root / "repo" / "lib" / "tally.py").read_text() == MENDED
    write_script(root / "script.json", [[FINISH]] * 70)
    done = ran(root, "--resume", "last", "--backend", "local", "-p", "go on", "--json")
    assert done.exit_code == 0, done.stderr
    assert 1 < result_of(done)["turns"] < 62


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "status", "said"),
    [
        ("-p x >&-", 0, "the agent changed no file"),
        ("-p x > /dev/full", 2, "standard output: cannot be written"),
        ("--json <&-", 2, "standard input is empty"),
    ],
)
def test_a_stream_that_cannot_be_used_is_no_traceback(root: Path, more: str, status: int, said: str) -> None:
    script = write_script(root / "script.json", [["words"], [FINISH]])
    line = shlex.join(command(str(root / "repo"), "--model", script, "--backend", "local"))
    done = subprocess.run(
        f"{line} {more}", env=environment(root), shell=True, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == status, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("stdin", ["", "\n \n"])
def test_json_without_an_instruction_and_without_input_is_refused(root: Path, stdin: str) -> None:
    done = agent(root, [[FINISH]], "--json", stdin=stdin)
    assert done.exit_code == 2
    assert "standard input is empty" in done.stderr
    assert result_of(done)["error"] == "ConfigError"
    assert session_folders(root) == []


def test_json_takes_its_instruction_from_standard_input(root: Path) -> None:
    done = agent(root, [[MEND], [FINISH]], "--json", "--approve", "full", stdin="\nfix it\n")
    assert done.exit_code == 0, done.stderr
    assert (root / "repo" / "lib" / "tally.py").read_text() == MENDED
    again = ran(root, "--resume", "last", "--backend", "local", "--json")
    assert again.exit_code == 2
    assert "standard input is empty" in again.stderr


@pytest.mark.parametrize(
    ("arguments", "field", "said"),
    [
        (["--tools", "core"], "--tools", "keeps the tools"),
        (["--temperature", "1"], "--temperature", "name the model again"),
        (["--context-tokens", "4096"], "--context-tokens", "name the model again"),
        (["--tool-calls", "text"], "--tool-calls", "name the model again"),
        (["--index", "none"], "--index", "name the model again"),
    ],
)
def test_an_option_that_a_session_cannot_take_is_refused(
    root: Path, arguments: list[str], field: str, said: str
) -> None:
    agent(root, [[FINISH]], "-p", "x")
    done = ran(root, "--resume", "last", "--backend", "local", "-p", "x", *arguments)
    assert done.exit_code == 2, done.output
    assert f"error: {field}" in done.stderr
    assert said in done.stderr


@pytest.mark.parametrize("value", ["-3", "nan", "inf", "-inf", "-0.001"])
def test_an_impossible_temperature_is_refused_at_once(root: Path, value: str) -> None:
    done = agent(root, [[FINISH]], "-p", "x", "--temperature", value)
    assert done.exit_code == 2
    assert "--temperature: is not a valid temperature" in done.stderr
    assert f"received: {float(value)!r}" in done.stderr
    assert "fix: give 0" in done.stderr
    assert session_folders(root) == []


def test_an_instruction_that_says_nothing_is_refused(root: Path) -> None:
    done = agent(root, [[FINISH]], "-p", " ")
    assert done.exit_code == 2
    assert "is empty" in done.stderr


def test_the_whole_machine_is_refused_with_a_way_out(root: Path) -> None:
    script = write_script(root / "script.json", [[FINISH]])
    done = ran(root, "/", "--model", script, "--backend", "local", "-p", "x")
    assert done.exit_code == 2
    assert "the root directory" in done.stderr
    assert "fix: name the directory of one project" in done.stderr
