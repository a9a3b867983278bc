"""A whole run whose sessions `etude sample` plays, in processes of their own behind a relay."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from etude.kit.ports import free_port
from etude.observe import RunDirectory
from tests.controller.clusters.running import audit, config, make_token, sample_options
from tests.controller.running import collected, num_rl_steps, run_elsewhere, wait_until

pytest.importorskip("fastapi", reason="needs etude[serve]")

_COMMAND = """
import time
real = time.time
time.time = lambda: real() + {skew_s}
from etude.cli import main
main()
"""


@contextlib.contextmanager
def command(log: Path, *arguments: str, skew_s: float = 0.0) -> Iterator[subprocess.Popen[bytes]]:
    """`etude` in a process of its own whose wall clock is so many seconds fast; killed in the end if it still
    runs."""
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", _COMMAND.format(skew_s=skew_s), *arguments],
            stdout=output,
            stderr=output,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def check_whole(run: RunDirectory, num_steps: int) -> None:
    found = audit(run)
    assert (found.steps, found.lost, found.repeated) == (num_steps, 0, 0)
    assert found.max_lag <= 2


@pytest.mark.slow
def test_a_run_that_is_killed_goes_on_with_what_its_clusters_had_brought(tmp_path: Path) -> None:
    token, port = make_token(tmp_path / "token"), free_port()
    settings = config(tmp_path, f"127.0.0.1:{port}", token)
    log, control = tmp_path / "a.log", f"http://127.0.0.1:{port}"
    with command(log, *sample_options(control, str(tmp_path / "weights"), token, "a")) as cluster:
        with run_elsewhere(settings) as process:
            wait_until(process, lambda: num_rl_steps(settings) >= 1, 240.0)
            process.kill()
            process.wait()
        before = collected(RunDirectory.open(tmp_path / settings.name))
        with run_elsewhere(settings, resume=True) as process:
            output = process.communicate(timeout=300)[0]
            assert process.returncode == 0, output + log.read_text()
        assert cluster.wait(120) == 0, log.read_text()
    run = RunDirectory.open(tmp_path / settings.name)
    assert collected(run)[: len(before)] == before
    check_whole(run, 4)
