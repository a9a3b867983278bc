"""A whole run with trainer and engine in Ray actors at home, and sessions in `etude sample` elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from etude.controller.clusters.sampling import OVER
from etude.kit.ports import free_port
from etude.observe import RunDirectory
from etude.observe.metrics import read_metrics
from tests.controller.clusters.running import audit, config, make_token, sample_options, wait_for
from tests.controller.clusters.test_cluster_run import check_whole, command
from tests.controller.running import num_rl_steps, run_elsewhere, wait_until
from tests.controller.test_ray import kill_one

pytest.importorskip("fastapi", reason="needs etude[serve]")
pytest.importorskip("ray")

_DAY_S = 86_400.0


@pytest.mark.slow
def test_over_ray_a_run_trains_on_sessions_of_a_cluster_while_its_trainer_is_killed(
    tmp_path: Path,
) -> None:
    """The cluster's clock is a day fast; a second cluster comes when all is over."""
    token, port = make_token(tmp_path / "token"), free_port()
    parts = {name: {"cpus": 0.5} for name in ("trainer", "engine")}
    settings = config(
        tmp_path,
        f"127.0.0.1:{port}",
        token,
        executor="ray",
        cluster={"heartbeat_s": 0.5, "backoff_s": 0.1, **parts},
    )
    logs = {name: tmp_path / f"{name}.log" for name in ("relay", "a", "late")}
    control = f"http://127.0.0.1:{port}"
    relay_options = ("--cache", str(tmp_path / "cache"), "--port", "0", "--token", f"file:{token}")
    (tmp_path / "weights").mkdir()
    with (
        command(logs["relay"], "relay", str(tmp_path / "weights"), *relay_options) as relay_process,
        run_elsewhere(settings) as run_process,
    ):
        relay = wait_for(logs["relay"], "ready at", relay_process).split("ready at ")[1].partition(";")[0]
        with command(logs["a"], *sample_options(control, relay, token, "a"), skew_s=_DAY_S) as sampling:
            wait_until(run_process, lambda: num_rl_steps(settings) >= 1, 240.0)
            assert kill_one("trainer")
            output = run_process.communicate(timeout=300)[0]
            told = output + logs["a"].read_text()
            assert run_process.returncode == 0, told
            assert sampling.wait(120) == 0, told
        with command(logs["late"], *sample_options(control, relay, token, "late")) as late:
            assert late.wait(300) == 0, logs["late"].read_text()
            assert OVER in " ".join(logs["late"].read_text().split())
    run = RunDirectory.open(tmp_path / settings.name)
    check_whole(run, 4)
    assert set(audit(run).by_cluster) == {"a"}
    report = run.read_json(run.report_file)
    assert report is not None
    assert report["faults"] == {"lost": 1, "restarted": 1}
    rows = [row for row in read_metrics(run.metrics_file) if row["kind"] == "clusters"]
    assert rows[-1]["kept"] > 0
    assert "a-token-of-this-test" not in told + logs["relay"].read_text() + logs["late"].read_text()
