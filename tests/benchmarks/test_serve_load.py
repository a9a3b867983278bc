"""The load generator's command: output, sessions and exit codes."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.serve_load import EXIT_ERRORS

import etude
from benchmarks import serve_load
from etude.cli.exits import EXIT_INFRASTRUCTURE, EXIT_MISTAKE
from etude.records import Segment
from etude.store import TrajectoryLog
from tests.fakes.replica import FakeReplica, fake_replica
from tests.inference.router.threads import in_thread
from tests.store.builders import make_group

SMALL = ("--sessions", "4", "--turns", "2", "--prompt", "10-20", "--observation", "3-6", "--output", "4-8")


def play(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the command as a user would, in this process."""
    with (
        contextlib.redirect_stdout(io.StringIO()) as output,
        contextlib.redirect_stderr(io.StringIO()) as errors,
    ):
        try:
            code = serve_load.main(arguments)
        except SystemExit as end:
            code = end.code
    assert isinstance(code, int)
    return subprocess.CompletedProcess(arguments, code, output.getvalue(), errors.getvalue())


def test_a_load_prints_a_table_and_json() -> None:
    with in_thread(fake_replica(FakeReplica(token_s=0.001))) as url:
        shown = play(url, *SMALL)
        assert shown.returncode == 0, shown.stderr
        assert "time to first token" in shown.stdout
        assert "8 turns against fake" in shown.stderr
        report = json.loads(play(url, *SMALL, "--json").stdout)
    assert (report["turns"], report["errors"]) == (8, {})
    assert report["output_tokens_per_s"] > 0
    assert 0 < report["cache_hit_rate"] < 1


def test_the_defaults_fit_a_model_of_short_context() -> None:
    with in_thread(fake_replica(FakeReplica(context=767))) as url:
        done = play(url, "--sessions", "3", "--json")
    assert done.returncode == 0, done.stderr
    assert (json.loads(done.stdout)["turns"], json.loads(done.stdout)["errors"]) == (18, {})
    assert "3 sessions are shortened to the model's context of 767 tokens" in done.stderr


def test_recorded_sessions_are_played(tmp_path: Path) -> None:
    TrajectoryLog(tmp_path).append([make_group(size=2)])
    with in_thread(fake_replica(FakeReplica())) as url:
        done = play(url, "--recorded", str(tmp_path), "--json")
    assert json.loads(done.stdout)["errors"] == {}


def test_the_tokens_of_a_run_are_sent_as_they_were_recorded(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("")
    group = make_group(size=2)
    TrajectoryLog(tmp_path / "trajectories").append([group])
    replica = FakeReplica()
    with in_thread(fake_replica(replica)) as url:
        done = play(url, "--recorded", str(tmp_path), "--api", "tokens", "--json")
    assert json.loads(done.stdout)["errors"] == {}
    sent = [tuple(body["prompt"]) for body in replica.requests]
    for member in group.members:
        for segment in member.segments:
            for prompt in _prompts(segment):
                sent.remove(prompt)
    assert not sent, "and nothing else was sent"


def _prompts(segment: Segment) -> list[tuple[int, ...]]:
    """All tokens before each answer of a segment."""
    starts = [n for n in range(1, len(segment.tokens)) if segment.sampled[n] and not segment.sampled[n - 1]]
    return [tuple(segment.tokens[:start].tolist()) for start in starts]


def test_turns_without_an_answer_are_counted_and_make_the_command_fail() -> None:
    replica = FakeReplica()
    with in_thread(fake_replica(replica)) as url:
        replica.cut_after = 1
        done = play(url, *SMALL, "--model", "fake")
        assert done.returncode == EXIT_ERRORS
        replica.cut_after, replica.token_s = None, 0.5
        done = play(url, *SMALL, "--turn-limit-s", "0.6")
        assert done.returncode == EXIT_ERRORS
        assert "error timeout: 4 turns" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (("--output", "many"), "--output"),
        (("--prompt", "9-3"), "--prompt"),
        (("--turns", "0"), "--turns"),
        (("--output", "40-4"), "--output"),
        (("--rate", "2", "--concurrency", "2"), "--rate"),
        (("--sessions", "0"), "--sessions"),
        (("--turn-limit-s", "soon"), "--turn-limit-s"),
        (("--api", "tokens"), "--recorded"),
        (("--api", "soap"), "--api"),
        (("--extra", "[1]"), "--extra"),
        (("--recorded", "/nowhere/at/all"), "recorded"),
        (("--key-file", "/nowhere/at/all"), "--key-file"),
    ],
)
def test_mistakes_in_a_load_are_named(arguments: tuple[str, str], field: str) -> None:
    done = play("http://127.0.0.1:9", *arguments)
    assert done.returncode == EXIT_MISTAKE
    assert field in done.stderr


def test_a_server_that_refuses_to_be_measured_is_no_mistake_of_the_user() -> None:
    with in_thread(fake_replica(FakeReplica(refuse=True))) as url:
        done = play(url, *SMALL, "--model", "fake")
    assert done.returncode == EXIT_INFRASTRUCTURE
    assert "error: 503" in done.stderr


def test_a_server_that_is_not_there_is_named() -> None:
    done = play("http://127.0.0.1:9", *SMALL)
    assert done.returncode == EXIT_MISTAKE
    assert "url" in done.stderr


@pytest.mark.slow
def test_it_starts_from_any_directory_without_torch(tmp_path: Path) -> None:
    command = [sys.executable, "-X", "importtime", serve_load.__file__, "--help"]
    environment = {**os.environ, "PYTHONPATH": str(Path(etude.__file__).parents[1])}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert (done.returncode, done.stdout.partition("\n")[0]) == (0, "usage: serve_load.py URL [options]")
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "httpx" in imported
    assert not {"torch", "transformers", "etude.inference.engine"} & imported
