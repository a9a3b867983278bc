"""`etude sandbox`: one-shot runs, the commands against a server, images, the doctor."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from etude.kit.ports import free_port
from etude.sandbox.backends import open_backend
from tests.cli import commands

ETUDE = [sys.executable, "-c", "from etude.cli import main; main()"]
START_S = 30.0

pytestmark = pytest.mark.skipif(bool(open_backend("local").doctor()), reason="no namespaces here")


def etude(*arguments: str, code: int = 0) -> str:
    """Output of a command that ends with `code`, in this process."""
    result = commands.etude("sandbox", *arguments)
    assert result.exit_code == code, (arguments, result.stdout, result.stderr, result.exception)
    return result.stdout.strip() if code == 0 else result.stdout + result.stderr


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """State directory of a running server."""
    state = tmp_path_factory.mktemp("state")
    port = free_port()
    arguments = ["sandbox", "serve", "--port", str(port), "--state", str(state), "--max-live", "8"]
    with subprocess.Popen([*ETUDE, *arguments], stderr=subprocess.PIPE, text=True) as process:
        end_s = time.monotonic() + START_S
        while time.monotonic() < end_s:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.05)
        yield state
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGTERM)
        process.wait(START_S)
    assert not (state / "server.json").exists(), "a server that ended is not found any more"


def test_a_one_shot_run_copies_the_directory_and_passes_output_and_code_on(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("hello\n")
    out = tmp_path / "out"
    text = etude(
        "run", "--dir", str(tmp_path), "--save", str(out), "--", "cat a.txt; echo new > b.txt; exit 3", code=3
    )
    assert "hello" in text
    assert (out / "b.txt").read_text() == "new\n"
    assert not (tmp_path / "b.txt").exists()


def test_a_one_shot_run_ends_at_its_timeout() -> None:
    assert "timeout" in etude("run", "--timeout", "0.3", "--", "sleep", "30", code=124)


def test_unknown_backends_images_and_directories_are_mistakes(tmp_path: Path) -> None:
    assert "unknown sandbox backend" in etude("run", "--backend", "lxc", "--", "true", code=2)
    assert "no such directory" in etude("run", "--dir", str(tmp_path / "none"), "--", "true", code=2)
    assert "nothing-there" in etude(
        "run", "--image", "nothing-there", "--state", str(tmp_path), "--", "true", code=2
    )


def test_without_a_server_the_commands_say_how_to_start_one(tmp_path: Path) -> None:
    assert "etude sandbox serve" in etude("list", "--state", str(tmp_path), code=2)


def test_a_token_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    url, missing = "http://127.0.0.1:1", str(tmp_path / "none")
    assert "--token-file: cannot be read" in etude("list", "--server", url, "--token-file", missing, code=2)
    moved = ("migrate", "x", url, "--server", url, "--target-token-file", missing)
    assert "--target-token-file: cannot be read" in etude(*moved, code=2)


@pytest.mark.slow
def test_a_sandbox_lives_on_the_server_between_commands(server: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("1\n")
    state = ("--state", str(server))
    one = etude("create", *state, "--dir", str(tmp_path))
    etude("exec", *state, one, "--", "echo 2 >> a.txt")
    two = etude("fork", *state, one)
    etude("exec", *state, two, "--", "echo 3 >> a.txt")
    assert etude("exec", *state, one, "cat", "a.txt").split() == ["1", "2"]
    assert etude("exec", *state, two, "cat", "a.txt").split() == ["1", "2", "3"]
    refused = etude("pause", *state, "--mode", "full", one, code=2)
    assert 'pause("filesystem") works here' in refused
    assert 'vm or gvisor backend: open_backend("vm")' in refused
    etude("pause", *state, one)
    states = {row["id"]: row["state"] for row in json.loads(etude("list", *state, "--json"))}
    assert states == {one: "paused", two: "running"}
    etude("resume", *state, one)
    snapshot = etude("snapshot", *state, one, "--name", "kept")
    assert f"{snapshot}  filesystem" in etude("snapshots", *state)
    three = etude("create", *state, "--snapshot", snapshot)
    assert etude("exec", *state, three, "cat", "a.txt").split() == ["1", "2"]
    assert etude("exec", *state, three, "--", "exit 7", code=7) == ""
    for sandbox in (one, two, three):
        etude("kill", *state, sandbox)
    etude("snapshots", *state, "--delete", snapshot)
    assert json.loads(etude("list", *state, "--json")) == []
    assert "no such sandbox" in etude("exec", *state, one, "true", code=3).lower()


@pytest.mark.slow
def test_a_damaged_snapshot_is_shown_as_such_and_can_be_deleted(server: Path) -> None:
    state = ("--state", str(server))
    box = etude("create", *state)
    whole, torn = etude("snapshot", *state, box), etude("snapshot", *state, box, "--name", "mine")
    (server / "snapshots" / torn / "template").unlink()
    listed = {row["id"]: row["damaged"] for row in json.loads(etude("snapshots", *state, "--json"))}
    assert listed[whole] is None
    assert "template" in listed[torn]
    lines = etude("snapshots", *state).splitlines()
    assert [line.split()[1] for line in lines] == ["filesystem", "damaged"]
    assert "the snapshot lacks" in etude("create", *state, "--snapshot", torn, code=3)
    for snapshot in (torn, whole):
        etude("snapshots", *state, "--delete", snapshot)
    assert etude("snapshots", *state) == ""
    etude("kill", *state, box)


@pytest.mark.slow
@pytest.mark.parametrize("address", ["localhost", "http://"])
def test_an_address_without_its_scheme_is_told_the_right_form(tmp_path: Path, address: str) -> None:
    said = etude("list", "--server", address, "--state", str(tmp_path), code=2)
    assert "must begin with http:// or https://" in said
    assert "fix: write http://" in said
    assert "--peer" in etude("serve", "--peer", address, "--state", str(tmp_path), code=2)


@pytest.mark.slow
def test_the_doctor_finds_a_backend_that_works(tmp_path: Path) -> None:
    output = subprocess.run(
        [*ETUDE, "sandbox", "doctor", "--json", "--state", str(tmp_path)],
        capture_output=True, text=True, timeout=300, check=True,
    ).stdout  # fmt: skip
    findings = {row["backend"]: row for row in json.loads(output)}
    assert findings["local"]["works"]
    assert all(row["works"] or row["problems"] for row in findings.values())


@pytest.mark.slow
@pytest.mark.foreign
@pytest.mark.skipif(os.geteuid() != 0, reason="layers made by root belong to nobody")
@pytest.mark.skipif(shutil.which("buildah") is None, reason="buildah is not installed")
def test_an_image_is_built_from_scratch_listed_exported_and_taken_in_again(tmp_path: Path) -> None:
    context, state = tmp_path / "context", ("--state", str(tmp_path / "state"))
    context.mkdir()
    (context / "hello").write_text("hi\n")
    (context / "Dockerfile").write_text("FROM scratch\nCOPY hello /app/hello\nWORKDIR /app\n")
    etude("image", "build", str(context), "--name", "mine", *state)
    archive = tmp_path / "mine.tar"
    etude("image", "export", "mine", str(archive), *state)
    missing = tmp_path / "none" / "mine.tar"
    assert f"mkdir -p {missing.parent}" in etude("image", "export", "mine", str(missing), *state, code=2)
    for name in ("a b", "../x", "a//b", "é", "-x", ""):
        said = etude("image", "import", *state, "--", str(archive), name, code=2)
        assert "is not a valid image name" in said, name
    etude("image", "import", str(archive), "again", *state)
    assert etude("image", "list", *state).split() == ["again", "mine"]
    etude("image", "remove", "again", *state)
    (context / "Dockerfile").write_text("FROM scratch\nFETCH x\n")
    assert "FETCH" in etude("image", "build", str(context), *state, code=2)
    assert "--base NAME=VALUE" in etude("image", "build", str(context), "--base", "x", *state, code=2)
    assert (tmp_path / "state/images/buildah/storage").exists()
    etude("image", "prune", *state)
    assert not (tmp_path / "state/images/buildah/storage").exists()
    assert etude("image", "list", *state).split() == ["mine"]
