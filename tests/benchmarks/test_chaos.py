"""The chaos benchmark: victims, restarts and the audit."""

from __future__ import annotations

import json
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import chaos
import chaos_run
import pytest
import torch
from chaos_audit import Audit, audit, count_old_versions
from chaos_run import KINDS, Disturbance
from chaos_services import Server
from chaos_store import Handler, Objects
from hypothesis import given
from hypothesis import strategies as st

from etude.config import RlConfig, dump_config
from etude.kit.ports import free_port
from etude.records import Group, PolicyVersion, VersionSpan
from etude.store.trajectories import TrajectoryLog
from etude.training.checkpoints.saving import STATE
from tests.controller.test_ray import over_ray
from tests.store.builders import make_trajectory


@pytest.mark.slow
def test_a_run_whose_processes_are_killed_at_random_trains_every_prompt_once(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    pytest.importorskip("s3fs")
    config = over_ray(tmp_path, workers=1, worker={"cpus": 0.2}, engine={"cpus": 0.2}, trainer={"cpus": 0.2})
    rl = config.rl.model_copy(update={"num_steps": 8, "groups_per_step": 3})
    file = tmp_path / "chaos.toml"
    file.write_text(dump_config(config.model_copy(update={"rl": rl, "numerics": "invariant"})))
    figures, _ = chaos.measure(
        file, ['executor="local"'], kills=len(KINDS), gap_s=1.0, seeds=1, directory=tmp_path
    )
    assert [figures[f"kills_{kind.replace(' ', '_')}"] > 0 for kind in KINDS].count(False) <= len(KINDS) // 2
    assert chaos.find_problems(figures, len(KINDS)) == []
    assert figures["steps"] == 8
    assert figures["same_prompts_as_undisturbed"] == figures["same_weights_as_undisturbed"] == 1.0


def _group(number: int, versions: Sequence[int], task: str = "", size: int = 2) -> Group:
    """A group whose members were sampled by these versions in turn."""
    members = []
    for index in range(size):
        made = make_trajectory(index, group=number, num_turns=len(versions))
        (segment,) = made.segments
        spans = tuple(
            VersionSpan(turn.start, turn.end, PolicyVersion("run", step))
            for turn, step in zip(segment.turn_spans, versions, strict=True)
        )
        identity = replace(made.id, task=task or f"task-{number}")
        members.append(replace(made, id=identity, segments=(replace(segment, version_spans=spans),)))
    return Group(f"run/g{number}", "task", size, tuple(members))


def _left_behind(
    directory: Path, groups: Sequence[Group], state: dict[str, Any], taken: Sequence[int]
) -> Audit:
    """The audit of a run with these logged groups, saved state and groups per step."""
    log = TrajectoryLog(directory / "trajectories")
    for group in groups:
        log.append([group])
    for name in ("latest", "final"):
        (directory / "checkpoints" / name).mkdir(parents=True)
    torch.save({"loop": state}, directory / "checkpoints" / "latest" / STATE)
    (directory / "checkpoints" / "final" / "model.safetensors").write_bytes(b"weights")
    rows = [
        {"kind": "rl", "step": step, "reward": float(step), "trained_groups": float(count)}
        | {"dropped_all_passed": 0.0, "dropped_all_failed": 0.0}
        for step, count in enumerate(taken, 1)
    ]
    fault = {"kind": "fault", "step": 1, "name": "engine-0", "mode": "lost"}
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*rows, fault, fault]))
    return audit(directory, RlConfig(num_steps=2, groups_per_step=2, group_size=2))


def test_the_audit_finds_nothing_wrong_with_a_whole_run(tmp_path: Path) -> None:
    groups = [_group(number, [number // 2, number // 2]) for number in range(4)]
    found = _left_behind(tmp_path, groups, {"next_task": 5, "pending": [4]}, [2, 2])
    assert (found.prompts, found.lost, found.repeated, found.old_versions) == (4, 0, 0, 0)
    assert (found.steps, found.trained, found.reward) == (2, 4, 1.5)
    assert found.faults == {"engine lost": 2}


@pytest.mark.parametrize(
    ("numbers", "next_task", "taken", "lost", "repeated"),
    [
        ([0, 1, 3], 4, [2, 2], 1, 0),  # a number was skipped
        ([0, 1, 2, 3], 4, [2, 1], 1, 0),  # logged, but never trained on
        ([0, 1, 2, 3], 4, [2, 3], 0, 1),  # trained on twice
        ([0, 1], 2, [2], 1, 0),  # a step was not taken
    ],
)
def test_the_audit_finds_what_is_lost_or_repeated(
    numbers: list[int], next_task: int, taken: list[int], lost: int, repeated: int, tmp_path: Path
) -> None:
    groups = [_group(number, [0, 0]) for number in numbers]
    found = _left_behind(tmp_path, groups, {"next_task": next_task, "pending": []}, taken)
    assert (found.lost, found.repeated) == (lost, repeated)


def test_the_audit_finds_missing_members_and_prompts_that_come_again(tmp_path: Path) -> None:
    groups = [_group(0, [0, 0], size=1), _group(1, [0, 0], "task-7"), _group(2, [0, 0], "task-7")]
    found = _left_behind(tmp_path, groups, {"next_task": 3, "pending": []}, [1, 2])
    assert (found.lost, found.repeated) == (1, 1)


def test_tokens_of_a_version_that_is_past_are_found() -> None:
    forth, back = _group(0, [1, 2]), _group(1, [2, 1])
    assert count_old_versions([forth], in_turns=False) == 0
    assert count_old_versions([back], in_turns=False) == 2
    assert count_old_versions([_group(0, [3, 3]), _group(1, [2, 2])], in_turns=False) == 0
    assert count_old_versions([_group(1, [2, 2]), _group(0, [3, 3])], in_turns=True) == 1


@given(st.integers(0, 100), st.integers(0, 10_000))
def test_kills_are_spread_over_all_kinds(kills: int, seed: int) -> None:
    disturbance = Disturbance(kills, random.Random(seed), 1.0)
    while not disturbance.is_over:
        disturbance.killed[disturbance.choose()] += 1
    counts = [disturbance.killed[kind] for kind in KINDS]
    assert sum(counts) == kills
    assert max(counts) - min(counts) <= 2


# ---- servers ------------------------------------------------------------------------------------


def test_a_store_keeps_what_it_has_acknowledged_and_creates_a_name_once(tmp_path: Path) -> None:
    objects = Objects(tmp_path)
    assert objects.write("bucket/a/b", b"1", new_only=True)
    assert not objects.write("bucket/a/b", b"2", new_only=True)
    assert objects.write("bucket/a/c", b"3", new_only=False)
    assert objects.write("bucket/a/c", b"34", new_only=False)
    assert Objects(tmp_path).list("bucket/a") == [("bucket/a/b", 1), ("bucket/a/c", 2)]
    assert Objects(tmp_path).read("bucket/a/b") == b"1"
    objects.delete("bucket/a/b")
    objects.delete("bucket/a/b")
    assert objects.read("bucket/a/b") is None
    assert [path.name for path in (tmp_path / "bucket" / "a").iterdir()] == ["c"], "nothing temporary stays"
    with pytest.raises(ValueError, match="secret"):
        objects.read("../secret")


def test_what_a_client_had_sent_when_it_was_killed_is_not_stored(tmp_path: Path) -> None:
    handler = type("StoreHandler", (Handler,), {"objects": Objects(tmp_path)})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            with socket.create_connection(server.server_address[:2]) as client:
                client.sendall(b"PUT /bucket/a HTTP/1.1\r\ncontent-length: 10\r\n\r\nhalf")
                client.shutdown(socket.SHUT_WR)
                assert client.recv(100) == b"", "it is not answered"
        finally:
            server.shutdown()
            thread.join()
    assert Objects(tmp_path).list("bucket") == []


def test_a_server_that_was_killed_comes_back_at_its_address(tmp_path: Path) -> None:
    port = free_port()
    script = Path(__file__).parents[2] / "benchmarks" / "chaos_store.py"
    command = [sys.executable, str(script), "--root", str(tmp_path), "--port", str(port)]
    server = Server("store", command, port, tmp_path / "log")
    server.wait_until_up()
    try:
        first = server.process
        server.kill(random.Random(0))
        assert not server.is_up
        deadline = time.monotonic() + 60.0
        while not server.is_up:
            server.restart_if_due()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert server.process is not first
        assert server.process is not None
        server.process.kill()
        server.process.wait()
        with pytest.raises(SystemExit, match="ended by itself"):
            server.restart_if_due()
    finally:
        server.stop()


# ---- victims ------------------------------------------------------------------------------------


@pytest.fixture
def family() -> Iterator[subprocess.Popen[bytes]]:
    """A process with a recognisable child process."""
    child = "import time; time.sleep(600)"
    code = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}]).wait()"
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        yield process
        for pid in chaos_run.descendants(process.pid):
            chaos_run.kill(pid)
        process.kill()


def test_victims_are_found_by_what_they_are(family: subprocess.Popen[bytes]) -> None:
    while not chaos_run.descendants(family.pid):
        assert family.poll() is None
    (child,) = chaos_run.descendants(family.pid)
    assert chaos_run.find_victims(family.pid, "driver") == [family.pid]
    assert chaos_run.find_victims(family.pid, "trainer") == []
    assert chaos_run.find_victims(family.pid, "sandbox") == [child]
    chaos_run.kill(child)
    family.wait(60.0)
    chaos_run.kill(child)
