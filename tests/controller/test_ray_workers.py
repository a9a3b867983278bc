"""Runs over Ray whose sessions are in rollout workers, and whose evaluation is beside training."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from etude.config import RunConfig
from etude.controller.arrangement import is_reproducible, keeps_schedule, part_resources
from etude.observe import RunDirectory
from etude.observe.metrics import read_metrics
from etude.observe.workers import WorkerFiles
from etude.store.blobs import FileBlobs
from etude.store.trajectories import TrajectoryLog
from tests.controller.running import (
    changed,
    collected,
    final_weights,
    num_rl_steps,
    run_elsewhere,
    run_here,
    tiny_config,
    wait_until,
)
from tests.controller.sandbox_servers import sandbox_servers
from tests.controller.test_ray import fault_modes, in_processes, kill_one, over_ray, processes
from tests.controller.test_resume import learning_config, rl_figures
from tests.sandbox.test_lifecycle import eventually

pytest.importorskip("ray")

SMALL: dict[str, Any] = {part: {"cpus": 0.3} for part in ("trainer", "engine", "worker", "evaluation")}


@pytest.mark.slow
def test_where_every_sum_has_a_fixed_order_workers_give_the_run_of_one_process(tmp_path: Path) -> None:
    here, _ = run_here(changed(learning_config(tmp_path / "here"), numerics="invariant"))
    config = over_ray(tmp_path / "there", workers=2, engines=2, **SMALL)
    there, report = run_here(changed(config, numerics="invariant"))
    assert there.environment["reproducible"]
    assert collected(there) == collected(here)
    assert final_weights(there) == final_weights(here)
    assert rl_figures(there) == rl_figures(here)
    assert report["faults"] == {}
    assert report["throughput"]["episodes"] > 0


@pytest.mark.slow
def test_sessions_outlive_their_workers_and_none_is_lost_or_comes_twice(tmp_path: Path) -> None:
    config = over_ray(tmp_path, workers=2, **SMALL)
    config = changed(config, rl={"max_staleness": 2, "num_steps": 10}, evaluation={"every_steps": 2})
    with run_elsewhere(config) as process:
        for number, part in enumerate(("worker-0", "engine-0", "worker-1")):
            wait_until(process, lambda number=number: num_rl_steps(config) > number)
            assert kill_one(part)
            wait_until(process, lambda number=number: fault_modes(config).count("lost") > number)
        output = process.communicate(timeout=300)[0]
        assert process.returncode == 0, output
    assert eventually(lambda: not processes(""), 60.0), "parts outlive the run"
    run = RunDirectory.open(Path(config.runs_directory) / config.name)
    report = run.read_json(run.report_file)
    assert report is not None
    assert report["rl_steps"] == config.rl.num_steps
    faults = report["faults"]
    assert faults.pop("restarted") >= 2, "the run may be over before the last one is up again"
    assert faults == {"lost": 3}
    members = [m for group in TrajectoryLog(run.trajectories).read() for m in group.members]
    assert max(Counter(str(member.id) for member in members).values()) == 1
    assert all(member.reward is not None for member in members), "no session was lost"
    routes = FileBlobs(run.path / "routes")
    for segment in (segment for member in members for segment in member.segments):
        assert segment.routes is None or len(routes.get(segment.routes)) == len(segment.tokens)
    rows = [row for row in read_metrics(run.metrics_file) if row["kind"] == "evaluation"]
    during = [row for row in rows if row["split"] == "during"]
    assert during
    for row in during:
        assert row["versions"].endswith(f"@{row['step']}"), row
        assert "," not in row["versions"], "all of its tokens are of the version that is judged"


@pytest.mark.slow
def test_workers_join_and_leave_and_a_sandbox_server_dies_and_each_session_counts_once(
    tmp_path: Path,
) -> None:
    with sandbox_servers(tmp_path, 2) as (doomed, staying):
        file = tmp_path / "servers.toml"
        file.write_text(doomed.section("doomed") + staying.section("staying"))
        config = over_ray(tmp_path, workers=1, most_workers=2, drain_s=1.0, **SMALL)
        config = changed(config, sandbox={"servers_file": str(file)}, rl={"num_steps": 6, "max_staleness": 2})
        run = RunDirectory(Path(config.runs_directory) / config.name)
        files = WorkerFiles(run.path)
        with run_elsewhere(config) as process:
            wait_until(process, lambda: states(run) == ["up", "up"])
            wait_until(process, lambda: num_rl_steps(config) > 0 and doomed.num_live() > 0)
            doomed.kill()
            files.write_request(1)
            wait_until(process, lambda: states(run) == ["up"])
            files.write_request(2)
            output = process.communicate(timeout=600)[0]
            assert process.returncode == 0, output
        assert staying.num_live() == 0, "the run leaves nothing there"
    assert states(run) == []
    report = run.read_json(run.report_file)
    assert report["rl_steps"] == config.rl.num_steps
    assert report["faults"] == {}
    events = [row["mode"] for row in read_metrics(run.metrics_file) if row["kind"] == "workers"]
    assert events[:2] == ["joined", "left"]
    members = [m for group in TrajectoryLog(run.trajectories).read() for m in group.members]
    assert max(Counter(str(member.id) for member in members).values()) == 1
    assert all(member.reward is not None for member in members), "no session was lost"
    assert max(member.attempt for member in members) >= 1, "those on the server that died began anew"


def states(run: RunDirectory) -> list[str]:
    """Of the workers, as the run tells them."""
    standing = run.read_json(run.path / "workers.json") or {"workers": {}}
    return sorted(standing["workers"].values())


def test_workers_are_parts_of_their_own_and_so_is_the_evaluation(tmp_path: Path) -> None:
    config = changed(
        in_processes(tiny_config(tmp_path), workers=2, worker={"cpus": 0.5, "failure_domain": "b"}),
        device="cuda",
    )
    config = changed(config, evaluation={"every_steps": 10})
    parts = [(one.part, one.num_cpus, one.num_gpus, one.failure_domain) for one in part_resources(config)]
    assert parts == [
        ("trainer", 1.0, 1.0, ""),
        ("engine-0", 1.0, 1.0, ""),
        ("worker-0", 0.5, 0.0, "b"),
        ("worker-1", 0.5, 0.0, "b"),
        ("evaluation", 1.0, 1.0, ""),
    ]
    assert not is_reproducible(config), "they ask the engine as they come"
    assert is_reproducible(changed(config, cluster={"workers": 0}))
    invariant = changed(config, numerics="invariant", device="cpu")
    assert is_reproducible(invariant), "which changes no bit"
    assert not keeps_schedule(invariant)
    assert not is_reproducible(changed(invariant, rl={"max_staleness": 1}))


def test_evaluation_beside_training_takes_a_process_of_its_own() -> None:
    with pytest.raises(ValueError, match=r"evaluation\.every_steps: must be 0 without executor=\"ray\""):
        RunConfig.model_validate({"evaluation": {"every_steps": 5}})


def test_workers_in_one_process_are_refused() -> None:
    with pytest.raises(ValueError, match=r"cluster\.workers: must be 0 without executor=\"ray\".*received 2"):
        RunConfig.model_validate({"cluster": {"workers": 2}})
