"""Runs over Ray actors. Ray takes seconds to start, so that most of these are slow."""

import os
import signal
import socket
from pathlib import Path

import pytest

from etude.config import ClusterConfig, RunConfig
from etude.controller.arrangement import check_executor, part_resources
from etude.errors import ConfigError, ResourceError
from etude.observe import RunDirectory
from etude.observe.machine import available_cores
from etude.observe.metrics import read_metrics
from etude.weights import WeightStore
from tests.controller.running import (
    collected,
    final_weights,
    num_rl_steps,
    run_elsewhere,
    tiny_config,
    wait_until,
)
from tests.controller.test_resume import learning_config, rl_figures

pytest.importorskip("ray")


def over_ray(directory: Path, **cluster: object) -> RunConfig:
    """The same run in processes of its own."""
    return in_processes(learning_config(directory), **cluster)


def in_processes(config: RunConfig, **cluster: object) -> RunConfig:
    """That run over Ray."""
    settings = {"heartbeat_s": 0.5, "backoff_s": 0.1, **cluster}
    tree = config.model_dump(mode="json", exclude_none=True)
    return RunConfig.model_validate(tree | {"executor": "ray", "cluster": settings})


def processes(name: str) -> list[int]:
    """Ids of the actor processes of a part; not of those that tests beside these have started."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                of_part = (entry / "cmdline").read_bytes().startswith(f"ray::etude-{name}".encode())
                if of_part and not _of_other_tests(int(entry.name)):
                    found.append(int(entry.name))
            except OSError:
                continue  # it has ended
    return found


def _of_other_tests(pid: int) -> bool:
    """Whether a process comes from another pytest. Raises OSError where one of its line ends meanwhile."""
    while pid not in (0, 1, os.getpid()):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if any(word.rpartition(b"/")[2] == b"pytest" for word in words):
            return True
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return False


def kill_one(name: str) -> bool:
    """Kills a process of the part, if there is one."""
    found = processes(name)
    if found:
        os.kill(found[0], signal.SIGKILL)
    return bool(found)


def fault_modes(config: RunConfig) -> list[str]:
    """What became of parts, in order."""
    rows = read_metrics(Path(config.runs_directory) / config.name / "metrics.jsonl")
    return [row["mode"] for row in rows if row["kind"] == "fault"]


@pytest.mark.slow
def test_over_ray_a_trainer_on_two_ranks_publishes_parts_and_trains_as_in_one_place(tmp_path: Path) -> None:
    """Both ranks' parts reach the engines through a store, here in the run's process and there in actors; the
    trainer is killed with its ranks, and another takes its place."""
    runs: list[RunDirectory] = []
    for name, made in (("local", learning_config), ("ray", over_ray)):
        store = tmp_path / f"{name}-store"
        more = {"parallel": {"ranks": 2, "fsdp": 2}, "weights": {"url": str(store), "lease_s": 1.0}}
        tree = made(tmp_path / name).model_dump(mode="json", exclude_none=True)
        config = RunConfig.model_validate(tree | more)
        with run_elsewhere(config) as process:
            if name == "ray":
                wait_until(process, lambda config=config: num_rl_steps(config) >= 1)
                assert kill_one("trainer")
            output = process.communicate(timeout=300)[0]
            assert process.returncode == 0, output
        runs.append(RunDirectory.open(Path(config.runs_directory) / config.name))
        files = [
            file.name for commit in WeightStore.open(str(store)).commits().values() for file in commit.files
        ]
        assert {name.rpartition("/")[2].split("-")[1] for name in files} == {"0000", "0001"}
    local, ray = runs
    assert collected(ray) == collected(local)
    assert final_weights(ray) == final_weights(local)
    assert rl_figures(ray) == rl_figures(local)


def _bound() -> socket.socket:
    return socket.create_server(("127.0.0.1", 0))


def test_an_address_that_nobody_listens_at_is_told_before_a_run_begins(tmp_path: Path) -> None:
    with _bound() as free:
        port = free.getsockname()[1]
    with pytest.raises(ConfigError, match=r"cluster\.address: does not answer.*ray start --head"):
        check_executor(in_processes(tiny_config(tmp_path), address=f"127.0.0.1:{port}"))


def test_an_address_where_something_else_listens_is_told_within_the_time_allowed(tmp_path: Path) -> None:
    with _bound() as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(ConfigError, match=r"does not answer like a Ray cluster.*connect_timeout_s"):
            check_executor(in_processes(tiny_config(tmp_path), address=address, connect_timeout_s=1.0))


def test_parts_that_do_not_fit_the_machine_are_told_before_a_run_begins(tmp_path: Path) -> None:
    cores = available_cores()
    config = in_processes(tiny_config(tmp_path), engines=cores + 1)
    with pytest.raises(ResourceError, match=rf"more CPU than there is: trainer .*CPU {cores} of {cores + 2}"):
        check_executor(config)
    with pytest.raises(ResourceError, match="more memory than there is"):
        check_executor(in_processes(tiny_config(tmp_path), engine={"cpus": 0.1, "memory_bytes": 1 << 60}))
    check_executor(in_processes(tiny_config(tmp_path), trainer={"cpus": 0.5}, engine={"cpus": 0.5}))


def test_parts_take_a_gpu_each_where_the_run_computes_on_one(tmp_path: Path) -> None:
    config = in_processes(tiny_config(tmp_path), engines=2, engine={"gpus": 0.5, "failure_domain": "b"})
    config = config.model_copy(update={"device": "cuda"})
    ranks = config.parallel.model_copy(update={"ranks": 3})
    assert part_resources(config.model_copy(update={"parallel": ranks}))[0].num_gpus == 3.0
    parts = part_resources(config)
    assert [(one.part, one.num_gpus, one.failure_domain) for one in parts] == [
        ("trainer", 1.0, ""),
        ("engine-0", 0.5, "b"),
        ("engine-1", 0.5, "b"),
    ]


def test_an_address_is_a_host_and_a_port() -> None:
    with pytest.raises(ValueError, match="must be HOST:PORT, received 'head'"):
        ClusterConfig(address="head")


def test_what_goes_on_in_one_process_only_is_refused_over_ray() -> None:
    with pytest.raises(ValueError, match='executor: must be "local"'):
        RunConfig.model_validate({"executor": "ray", "rl": {"stream": {"source": "runs/x"}}})


def test_a_part_that_says_nothing_must_be_given_longer_than_between_two_heartbeats() -> None:
    with pytest.raises(ValueError, match=r"silent_s: must be above heartbeat_s=2\.0"):
        ClusterConfig(silent_s=1.0)
