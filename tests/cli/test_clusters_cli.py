"""What `etude relay` and `etude sample` refuse, and a relay as a process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from etude.cli.exits import EXIT_INFRASTRUCTURE, EXIT_MISTAKE
from tests.cli.commands import etude

pytest.importorskip("fastapi", reason="needs etude[serve]")


def token_file(path: Path, mode: int = 0o600) -> Path:
    path.write_text("a-secret-token")
    path.chmod(mode)
    return path


def test_a_relay_that_others_reach_asks_for_a_token(tmp_path: Path) -> None:
    found = etude(
        "relay", str(tmp_path), "--cache", str(tmp_path / "cache"), "--host", "0.0.0.0", "--port", "0"
    )
    assert found.exit_code == EXIT_MISTAKE
    assert "token" in found.stderr


@pytest.mark.parametrize("command", ["relay", "sample"])
def test_a_token_that_cannot_be_had_is_said_before_anything_begins(tmp_path: Path, command: str) -> None:
    readable = token_file(tmp_path / "token", 0o644)
    more = (
        ["store", "--cache", str(tmp_path / "c")]
        if command == "relay"
        else ["--control", "http://127.0.0.1:1"]
    )
    for source, words in ((f"file:{readable}", "other users"), ("env:ETUDE_NONE", "not set")):
        found = etude(command, *more, "--token", source)
        assert found.exit_code == EXIT_MISTAKE
        assert words in found.stderr
        assert "a-secret-token" not in found.stderr


@pytest.mark.parametrize("address", ["127.0.0.1:8680", "ftp://127.0.0.1:8680", "http://h:99999", "http://"])
def test_what_is_no_address_of_a_run_is_refused_at_once(address: str) -> None:
    found = etude("sample", "--control", address, "--patience-s", "600")
    assert found.exit_code == EXIT_MISTAKE
    assert "control" in found.stderr and "http://HOST:PORT" in found.stderr


def test_a_relay_whose_cache_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    found = etude("relay", str(tmp_path), "--cache", str(tmp_path / "cache"), "--port", "0")
    assert found.exit_code == EXIT_MISTAKE
    assert "cache" in found.stderr


def test_a_run_that_does_not_answer_is_named(tmp_path: Path) -> None:
    found = etude("sample", "--control", "http://127.0.0.1:1", "--patience-s", "0.1")
    assert found.exit_code == EXIT_INFRASTRUCTURE
    assert "waits up to 0.1 s" in found.stderr
    assert "does not answer" in found.stderr


@pytest.mark.slow
def test_a_relay_serves_until_it_is_asked_to_end(tmp_path: Path) -> None:
    store, token = tmp_path / "store", token_file(tmp_path / "token")
    (store / "commits").mkdir(parents=True)
    (store / "commits" / "x").write_bytes(b"content")
    command = [sys.executable, "-c", "from etude.cli import main; main()", "relay", str(store)]
    command += ["--cache", str(tmp_path / "cache"), "--port", "0", "--token", f"file:{token}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stderr is not None
            line = process.stderr.readline()
            assert "weight relay: ready at http://127.0.0.1:" in line
            url = line.split("ready at ")[1].partition(";")[0].strip()
            headers = {"authorization": "Bearer a-secret-token"}
            assert httpx.get(f"{url}/files/commits/x", headers=headers, timeout=60).content == b"content"
            assert httpx.get(f"{url}/files/commits/x", timeout=60).status_code == 401
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
            assert "a-secret-token" not in line + process.stderr.read()
        finally:
            process.kill()
