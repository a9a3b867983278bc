"""Runs with forks, from a model that plays: reproducible, exact over a kill, over one process and several."""

import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from etude.config import RunConfig
from etude.observe import RunDirectory
from etude.observe.metrics import read_metrics
from etude.store.trajectories import TrajectoryLog
from tests.controller.running import (
    collected,
    final_weights,
    num_stored_parts,
    run_elsewhere,
    run_here,
    wait_until,
)
from tests.controller.test_ray import kill_one
from tests.controller.test_resume import learning_config, num_rl_steps, rl_figures

FORKS = {"share": 1.0, "size": 3, "turn": "random"}


def forking_config(directory: Path, **rl: Any) -> RunConfig:
    tree = learning_config(directory).model_dump(mode="json", exclude_none=True)
    tree["rl"] |= {"num_steps": 3, "forks": FORKS, **rl}
    return RunConfig.model_validate(tree)


def over_ray(directory: Path, cluster: dict[str, Any], **rl: Any) -> RunConfig:
    """The same in processes of its own."""
    settings = {"heartbeat_s": 0.5, "backoff_s": 0.1, **cluster}
    tree = forking_config(directory, **rl).model_dump(mode="json", exclude_none=True)
    return RunConfig.model_validate(tree | {"executor": "ray", "cluster": settings})


def figures(run: RunDirectory, kind: str = "rl") -> Counter[str]:
    """Sums over the rows of a kind."""
    total = Counter[str]()
    for row in read_metrics(run.metrics_file):
        if row["kind"] == kind:
            total.update({name: value for name, value in row.items() if isinstance(value, (int, float))})
    return total


def check_forks(run: RunDirectory) -> None:
    """There are some, all stored, none of them twice; siblings found their prefix in the engine's cache."""
    found = figures(run)
    assert found["forks"] > 0 and found["fork_sessions_failed"] == 0
    assert 0 < found["fork_prefix_cached_tokens"] < found["fork_prefix_tokens"]
    groups = list(TrajectoryLog(run.trajectories).read())
    ids = [member.id for group in groups for member in group.members]
    assert len(ids) == len(set(ids))
    tasks = {group.id for group in groups if group.kind == "task"}
    forks = [group for group in groups if group.kind == "fork"]
    assert forks and all(group.id.removesuffix("+fork") in tasks for group in forks)
    assert all(group.complete for group in forks)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """The run in one process, which others are compared with."""
    return run_here(forking_config(tmp_path_factory.mktemp("undisturbed")))[0]


@pytest.mark.slow
def test_a_run_with_forks_repeats_bit_for_bit_also_over_a_kill(
    undisturbed: RunDirectory, tmp_path: Path
) -> None:
    check_forks(undisturbed)
    config = forking_config(tmp_path / "broken")
    with run_elsewhere(config) as process:
        wait_until(process, lambda: num_rl_steps(config) >= 1)
        process.send_signal(signal.SIGKILL)
        process.wait()
    resumed, _ = run_here(config, resume=True)
    assert final_weights(resumed) == final_weights(undisturbed)


@pytest.mark.slow
def test_with_sampling_ahead_a_run_with_forks_repeats_bit_for_bit(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"max_staleness": 2, "forks": {**FORKS, "share": 0.5}}
    first, report = run_here(forking_config(tmp_path / "a", **settings))
    check_forks(first)
    rows = list(read_metrics(first.metrics_file))
    assert 0 < max(row.get("version_lag_max", 0) for row in rows) <= 2
    assert all(row["left_out_share"] == 0.0 for row in rows if row["kind"] == "rl")
    assert 0 < report["throughput"]["trainer_busy_share"] < 1
    assert "utilisation" in {row["kind"] for row in rows}
    second, _ = run_here(forking_config(tmp_path / "b", **settings))
    assert collected(first) == collected(second)
    assert final_weights(first) == final_weights(second)


@pytest.mark.slow
def test_a_killed_run_that_samples_ahead_trains_the_forks_that_it_had(tmp_path: Path) -> None:
    config = forking_config(tmp_path, max_staleness=2, num_steps=4)
    with run_elsewhere(config) as process:
        wait_until(process, lambda: num_rl_steps(config) >= 1)
        num_stored = num_stored_parts(config)
        wait_until(process, lambda: num_stored_parts(config) > num_stored)  # what is new is not trained yet
        process.kill()
        process.wait()
    before = collected(RunDirectory.open(tmp_path / config.name))
    run, report = run_here(config, resume=True)
    assert report["rl_steps"] == 4
    assert collected(run)[: len(before)] == before, "what was stored stays"
    check_forks(run)
    assert figures(run)["groups_from_log"] > 0, "what was collected was not sampled again"


@pytest.mark.slow
def test_over_ray_forks_give_the_same_tokens_and_weights_as_in_one_process(
    undisturbed: RunDirectory, tmp_path: Path
) -> None:
    pytest.importorskip("ray")
    there, report = run_here(over_ray(tmp_path, {}))
    assert report["faults"] == {}
    assert report["throughput"]["decode_tokens"] > 0
    assert there.environment["reproducible"]
    check_forks(there)
    assert collected(there) == collected(undisturbed)
    assert final_weights(there) == final_weights(undisturbed)
    assert rl_figures(there) == rl_figures(undisturbed)


@pytest.mark.slow
def test_over_ray_waiting_sessions_move_to_an_engine_that_has_come_back(tmp_path: Path) -> None:
    """It comes back with nothing to do, while the other one has all sessions."""
    pytest.importorskip("ray")
    cluster = {"engines": 2, "engine": {"cpus": 0.4}, "trainer": {"cpus": 0.4}}
    config = over_ray(tmp_path, cluster, max_staleness=2, num_steps=14)
    with run_elsewhere(config) as process:
        wait_until(process, lambda: num_rl_steps(config) >= 1)
        assert kill_one("engine-0")
        output = process.communicate(timeout=600)[0]
        assert process.returncode == 0, output
    run = RunDirectory.open(Path(config.runs_directory) / config.name)
    assert figures(run, "utilisation")["sessions_moved"] > 0
    check_forks(run)
    assert all(status in ("done", "limit") for _, status, *_ in collected(run)), "no session was lost"
