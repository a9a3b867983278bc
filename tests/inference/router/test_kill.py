"""A replica is killed under load: every request is answered, or its client gets an error."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from benchmarks.load import LogNormal, WorkloadShape, run_load, summarise, synthetic_sessions
from benchmarks.load.http_target import HttpTarget

from etude.config.routing import HealthCheckConfig, RouterConfig
from etude.inference.router import ReplicaState
from etude.inference.router.server import Proxy, ReplicaAddress, build_app
from etude.kit.ports import free_port
from tests.fakes.replica import running_server
from tests.inference.server.checkpoint import write_checkpoint

_START_S = 90.0


def start(kind: str, port: int, checkpoint: Path) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    if kind == "fake":
        module = "tests.fakes.replica"
        command = ["-m", module, "--port", str(port), "--token-s", "0.01"]
    else:
        code = "from etude.cli import main; main()"
        command = ["-c", code, "serve", str(checkpoint), "--name", "fake", "--port", str(port)]
    return subprocess.Popen([sys.executable, *command], env=environment, stderr=subprocess.DEVNULL)


async def up(port: int) -> None:
    end_s = time.monotonic() + _START_S
    async with httpx.AsyncClient(trust_env=False, timeout=30.0) as http:
        while time.monotonic() < end_s:
            try:
                if (await http.get(f"http://127.0.0.1:{port}/ready")).status_code == 200:
                    return
            except httpx.TransportError:
                await asyncio.sleep(0.1)
    raise AssertionError("the replica did not start")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fake", "engine"])
def test_killing_a_replica_under_load_loses_no_request_in_silence(kind: str, tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "model", max_positions=2000) if kind == "engine" else tmp_path
    ports = [free_port(), free_port()]
    processes = {port: start(kind, port, checkpoint) for port in ports}
    shape = WorkloadShape(
        num_sessions=40,
        turns=LogNormal(4, 10),
        prompt_tokens=(20, 50),
        observation_tokens=(5, 20),
        output_tokens=LogNormal(20, 100),
    )
    sessions = synthetic_sessions(shape)

    async def body() -> None:
        for port in ports:
            await up(port)
        proxy = Proxy(RouterConfig(health=HealthCheckConfig(interval_s=0.2, timeout_s=30.0, backoff_s=0.3)))
        app = build_app(proxy, [ReplicaAddress(f"http://127.0.0.1:{port}") for port in ports])
        victim = f"127.0.0.1:{ports[0]}"
        async with running_server(app) as url:
            while sum(r.ready for r in proxy.router.replicas.values()) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            target = HttpTarget(url, "fake")
            await target.calibrate()
            running = asyncio.ensure_future(run_load(target, sessions, concurrency=16))
            await asyncio.sleep(1.0)
            while not proxy.router.replicas[victim].running:  # noqa: ASYNC110 (killed in the middle of work)
                await asyncio.sleep(0.001)
            os.kill(processes[ports[0]].pid, signal.SIGKILL)
            processes[ports[0]].wait()
            while proxy.router.replicas[victim].state is not ReplicaState.EJECTED:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            records = await running

            # Every turn that was sent has an end: an answer of the asked length, or an error that was told.
            for record in records:
                if record.error:
                    assert record.error == "replica_lost"
                elif kind == "fake":
                    session = next(one for one in sessions if one.id == record.session)
                    assert record.output_tokens == session.turns[record.turn].output_tokens
            report = summarise(records)
            assert sum(report.errors.values()) <= 16, "at most those that were running there"
            assert kind == "engine" or report.errors, "an engine may have been between two answers"
            assert proxy.router.num_in_flight == 0
            assert all(r.running == r.work == 0 for r in proxy.router.replicas.values())

            processes[ports[0]] = start(kind, ports[0], checkpoint)
            await up(ports[0])
            while not proxy.router.replicas[victim].ready:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            # New sessions: those from before stay where their prefixes are.
            again = await run_load(target, synthetic_sessions(shape, seed=1)[:8])
            assert summarise(again).errors == {}
            assert len(proxy.router.replicas[victim].sessions) > 0, "it takes load again"
            await target.close()

    try:
        asyncio.run(asyncio.wait_for(body(), 240.0))
    finally:
        for process in processes.values():
            process.kill()
            process.wait()
