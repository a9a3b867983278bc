"""A whole tiny run on two ranks: started by the run itself, and by torchrun; killed and resumed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from etude.config import dump_config
from etude.config.parallel import ParallelConfig
from etude.observe import RunDirectory
from etude.observe.metrics import read_metrics
from tests.controller.running import num_rl_steps, run_elsewhere, tiny_config, wait_until
from tests.controller.test_recorded_rl import _config as recorded_config
from tests.controller.test_recorded_rl import _train as train_on_log
from tests.controller.test_recorded_rl import _weights as weights_of
from tests.controller.test_recorded_rl import recorded as recorded

_MAIN = 'if __name__ == "__main__":\n    from etude.cli import main\n\n    main()\n'
_STEPS = {"num_steps": 2, "groups_per_step": 4, "group_size": 4}


@pytest.mark.slow
def test_a_run_on_two_ranks_that_torchrun_starts_ends_with_a_report(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, rl=_STEPS)
    file, script = tmp_path / "config.toml", tmp_path / "train.py"
    file.write_text(dump_config(config))
    script.write_text(_MAIN)
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    command += ["train", "--config", str(file), "--ranks", "2"]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    run = RunDirectory.open(tmp_path / config.name)
    report = run.read_json(run.report_file)
    assert report is not None
    assert report["rl_steps"] == 2
    assert run.config.parallel.ranks == 2
    assert "heldout_after" in report
    assert [row["step"] for row in read_metrics(run.metrics_file) if row["kind"] == "rl"] == [1, 2]


@pytest.mark.slow
def test_a_run_whose_other_rank_is_killed_ends_with_an_error_and_goes_on_alone(tmp_path: Path) -> None:
    steps = {**_STEPS, "num_steps": 500}
    config = tiny_config(tmp_path, parallel={"ranks": 2}, rl=steps)
    with run_elsewhere(config) as process:
        wait_until(process, lambda: num_rl_steps(config) > 0, timeout_s=300.0)
        for pid in _ranks_of(process.pid):
            os.kill(pid, signal.SIGKILL)
        words = process.communicate(timeout=300.0)[0]
    assert process.returncode == 3, words
    assert "rank 1 ended with code -9" in words
    taken = num_rl_steps(config)
    alone = tiny_config(tmp_path, parallel={"ranks": 1}, rl=steps)
    with run_elsewhere(alone, resume=True) as process:
        wait_until(process, lambda: num_rl_steps(config) > taken, timeout_s=300.0)
        process.send_signal(signal.SIGINT)
        words = process.communicate(timeout=300.0)[0]
    assert process.returncode == 130, words


def _ranks_of(pid: int) -> list[int]:
    """The processes that the fork server below `pid` has forked."""
    parents = {
        int(entry.name): int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
        for entry in Path("/proc").iterdir()
        if entry.name.isdigit() and (entry / "stat").exists()
    }
    servers = [
        child
        for child, parent in parents.items()
        if parent == pid and b"forkserver" in Path(f"/proc/{child}/cmdline").read_bytes()
    ]
    return [child for child, parent in parents.items() if parent in servers]


@pytest.mark.slow
def test_a_recorded_run_on_two_ranks_ends_with_the_weights_of_one(tmp_path: Path, recorded: Path) -> None:
    config = recorded_config(tmp_path, recorded)
    alone, report = train_on_log(config.model_copy(update={"name": "alone"}))
    parallel = ParallelConfig(ranks=2, fsdp=2)
    together, ranked_report = train_on_log(config.model_copy(update={"name": "two", "parallel": parallel}))
    assert ranked_report["rl_steps"] == report["rl_steps"] == 3
    difference = (weights_of(alone) - weights_of(together)).abs().max()
    assert difference < 1e-4, "steps are of 1e-3"
