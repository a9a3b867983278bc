"""`etude agent --in-place`: the agent works on the directory itself."""

import json
import os
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest
from typer.testing import Result

from etude.sandbox.backends import open_backend
from tests.cli.agent_scripts import (
    FINISH,
    MEND,
    SESSION,
    TALLY,
    command,
    environment,
    make_repository,
    plain_tokens,
    ran,
    recorded_tokens,
)
from tests.fakes.scripted_model import write_script

MENDED = TALLY.replace("= 1", "= 0")
BUILD = "mkdir -p build && cp /bin/true build/prog && ./build/prog && echo $PWD $HOME && touch /tmp/elsewhere"
pytestmark = pytest.mark.skipif(bool(open_backend("local").doctor()), reason="no sandboxes here")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    make_repository(tmp_path / "repo")
    subprocess.run(("git", "init", "-q"), cwd=tmp_path / "repo", check=True)
    (tmp_path / "repo" / ".gitignore").write_text("build/\n.env\n")
    (tmp_path / "repo" / ".env").write_text("mine\n")
    return tmp_path


def call(name: str, **arguments: str) -> dict:
    return {"name": name, "arguments": arguments}


def agent(root: Path, messages, *arguments: str, stdin: str = "", backend: str = "local") -> Result:
    script = write_script(root / "script.json", messages)
    more = ("--model", script, "--tools", "full", "--backend", backend, "--in-place")
    return ran(root, str(root / "repo"), *more, *arguments, stdin=stdin)


def contents(directory: Path) -> dict[str, tuple[int, int, bytes]]:
    """Owner, mode and content of each file, but for git's own."""
    files = {path: path.lstat() for path in directory.rglob("*") if path.is_file()}
    return {
        str(path.relative_to(directory)): (status.st_uid, status.st_mode, path.read_bytes())
        for path, status in files.items()
        if ".git" not in path.parts
    }


def test_edits_and_commands_change_the_directory_itself_and_nothing_else(root: Path) -> None:
    (root / "repo" / "lib" / "tally.py").chmod(0o755)
    before = contents(root / "repo")
    messages = [[MEND], [call("run_command", command=f"{BUILD}; cat .env; touch /usr/x {root}/x")], [FINISH]]
    done = agent(root, messages, "-p", "fix it", "--apply", "--json")
    assert done.exit_code == 0, done.stderr
    events = [json.loads(line) for line in done.stdout.splitlines()]
    output = next(
        one["result"]["output"] for one in events if one["event"] == "call_ended" and one["turn"] == 2
    )
    assert output.startswith(f"{root}/repo /tmp\nmine\n") and "/usr/x': Read-only" in output, output
    after = contents(root / "repo")
    owner, mode, program = after.pop("build/prog")
    assert (owner, mode & 0o777, program) == (os.geteuid(), 0o755, Path("/bin/true").read_bytes())
    assert after.pop("lib/tally.py") == (*before.pop("lib/tally.py")[:2], MENDED.encode())
    assert after == before
    assert {path.name for path in root.iterdir()} == {"repo", "script.json", "state"}
    assert not Path("/tmp/elsewhere").exists()


def test_the_tokens_are_those_of_a_rollout(root: Path) -> None:
    (root / "repo" / ".gitignore").unlink()
    (root / "repo" / ".env").unlink()
    script = write_script(root / "script.json", SESSION)
    before = plain_tokens(root / "repo", script, "fix it")
    done = ran(
        root,
        str(root / "repo"),
        "--model",
        script,
        "--in-place",
        "-p",
        "fix it",
        "--apply",
        "--venv",
        "none",
    )
    assert done.exit_code == 0, done.stderr
    assert np.array_equal(recorded_tokens(root, script), before)


def test_what_nobody_answers_is_refused_and_the_flags_that_allow_it_are_named(root: Path) -> None:
    before = contents(root / "repo")
    messages = [[MEND, call("run_command", command="touch x")], [FINISH]]
    done = agent(root, messages, "-p", "fix it")
    assert done.exit_code == 4
    assert contents(root / "repo") == before
    assert (
        "2 calls refused for lack of an answer; --approve auto-edit allows edits, --approve full commands"
        in done.stderr
    )
    done = agent(root, messages, "-p", "fix it", "--approve", "auto-edit", "--json")
    assert json.loads(done.stdout.splitlines()[-1])["refused"] == 1
    assert (root / "repo" / "lib" / "tally.py").read_text() == MENDED and not (root / "repo" / "x").exists()


def test_undo_reverts_edits_but_not_what_someone_else_or_a_command_changed(root: Path) -> None:
    repository = root / "repo"
    (repository / "lib" / "tally.py").chmod(0o755)
    before = contents(repository)
    edits = [
        MEND,
        call("delete_file", path="tests", recursive="true"),
        call("write_file", path="a", text="a"),
    ]
    later = call("run_command", command="echo made > made; echo more >> a")
    messages = [edits, [later], ["Done.", FINISH]]
    said = "fix it\n/undo\n/diff\n/quit\n"
    done = agent(root, messages, "--approve", "full", stdin=said)
    assert done.exit_code == 0, done.stderr
    after = contents(repository)
    assert after.pop("made")[2] == b"made\n" and after.pop("a")[2] == b"a\nmore\n"[:1] + b"more\n"
    assert after == before
    assert "not written: a: it was changed meanwhile" in done.stdout
    assert "changes by commands" in done.stdout
    again = ran(root, "--resume", "last", stdin="/undo\n/approve preview\n/quit\n")
    assert "in place" in again.stderr and "there is nothing to undo" in again.stderr
    assert "cannot be previewed" in again.stderr


@pytest.mark.filterwarnings("ignore:the unisolated sandbox")
def test_a_killed_program_leaves_the_directory_whole(root: Path) -> None:
    """Without isolation: a sandbox of this kind removes its folder at its end."""
    backend = "unisolated"
    before = contents(root / "repo")
    sleep = call("run_command", command="echo begun > begun; sleep 600")
    script = write_script(root / "script.json", [[MEND], [sleep], ["Went on.", FINISH]])
    words = (
        str(root / "repo"),
        "--in-place",
        "--backend",
        backend,
        "--model",
        script,
        "-p",
        "x",
        "--apply",
        "--json",
    )
    child = subprocess.Popen(command(*words), env=environment(root), stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    for event in child.stdout:
        if '"call_started", "turn": 2' in event:
            break
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    after = contents(root / "repo")
    after.pop("begun", None)
    assert after.pop("lib/tally.py")[2] == MENDED.encode()
    assert after == {path: file for path, file in before.items() if path != "lib/tally.py"}
    done = ran(root, "--resume", "last", "--backend", backend, stdin="/undo\n/quit\n")
    assert done.exit_code == 0, done.stderr
    assert "interrupted; it may have run or not" in done.stdout, "a command does not run twice"
    assert (root / "repo" / "lib" / "tally.py").read_text() == TALLY


@pytest.mark.filterwarnings("ignore:the unisolated sandbox")
def test_without_isolation_commands_have_the_users_rights_and_that_is_said(root: Path) -> None:
    outside = call("run_command", command=f"echo $HOME > {root}/outside; touch inside")
    done = agent(root, [[outside], [FINISH]], "-p", "x", "--apply", backend="unisolated")
    assert done.exit_code == 0, done.stderr
    assert "run with all of your permissions" in done.stderr
    assert (root / "outside").read_text() == f"{Path.home()}\n"
    assert sorted(path.name for path in (root / "repo").iterdir()) == [
        ".env", ".git", ".gitignore", "inside", "lib", "tests"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--backend", "podman"), "--backend podman"),
        (("--image", "python"), "--image python"),
        (("--dockerfile", "Dockerfile"), "--dockerfile Dockerfile"),
        (("--approve", "preview"), "cannot be previewed"),
        (("--index", "words"), "grep searches the directory as it is"),
    ],
)
def test_what_needs_a_copy_is_refused_in_place(root: Path, words: tuple[str, ...], said: str) -> None:
    script = write_script(root / "script.json", [[FINISH]])
    done = ran(root, str(root / "repo"), "--model", script, "--in-place", "-p", "x", *words)
    assert done.exit_code == 2 and said in done.stderr and "fix:" in done.stderr, done.stderr


def test_a_home_directory_is_not_worked_on_in_place(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(root / "repo" / "lib"))
    done = agent(root, [[FINISH]], "-p", "x")
    assert done.exit_code == 2 and "holds your home directory" in done.stderr


def test_a_session_on_a_copy_does_not_go_on_in_place(root: Path) -> None:
    script = write_script(root / "script.json", [[FINISH], [FINISH]])
    assert ran(root, str(root / "repo"), "--model", script, "--backend", "local", "-p", "x").exit_code == 0
    done = ran(root, "--resume", "last", "--in-place", "-p", "x")
    assert done.exit_code == 2 and "the session works on a copy" in done.stderr
