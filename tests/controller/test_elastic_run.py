"""A training run over Ray that borrows a replica from its users, and gives it back, in real processes."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from etude.config import RunConfig
from etude.inference.router import HealthConfig
from etude.inference.router.server import Proxy, ReplicaAddress, build_app
from etude.inference.router.server.fake_replica import running_server
from etude.observe import RunDirectory, read_metrics
from etude.store.trajectories import TrajectoryLog
from tests.controller.learning import CONFIG, learned
from tests.controller.running import num_rl_steps, run_elsewhere, wait_until
from tests.inference.server.checkpoint import serve_process

pytestmark = pytest.mark.slow
TOKEN = "administrator"


@contextlib.contextmanager
def routed(replicas: list[str]) -> Iterator[str]:
    """The address of a router that lends these; it runs in a thread of its own."""
    started, ended = threading.Event(), threading.Event()
    found: list[str] = []

    async def work() -> None:
        proxy = Proxy(health=HealthConfig(interval_s=0.2), replica_token=TOKEN)
        app = build_app(proxy, [ReplicaAddress(url) for url in replicas])
        async with running_server(app) as url:
            while not all(one.ready for one in proxy.router.replicas.values()):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            found.append(url)
            started.set()
            await asyncio.to_thread(ended.wait)

    thread = threading.Thread(target=lambda: asyncio.run(work()))
    thread.start()
    try:
        assert started.wait(60.0)
        yield found[0]
    finally:
        ended.set()
        thread.join(30.0)


@dataclass
class Users:
    """Ask all the time, each for a few tokens; note who answered with which weights."""

    url: str
    answers: list[tuple[int, str, str]] = field(default_factory=list[tuple[int, str, str]])
    stopped: threading.Event = field(default_factory=threading.Event)

    @contextlib.contextmanager
    def asking(self) -> Iterator[None]:
        thread = threading.Thread(target=self._ask)
        thread.start()
        try:
            yield
        finally:
            self.stopped.set()
            thread.join(60.0)

    def _ask(self) -> None:
        with httpx.Client(base_url=self.url, timeout=60.0, trust_env=False) as http:
            while not self.stopped.wait(0.1):
                answer = http.post("/v1/completions", json={"prompt": "def ", "max_tokens": 4})
                replica = answer.headers.get("x-etude-replica", "")
                self.answers.append(
                    (answer.status_code, replica, answer.json().get("system_fingerprint", ""))
                )


def config(directory: Path, router: str) -> RunConfig:
    tree: dict[str, Any] = CONFIG.model_dump(mode="json")
    tree |= {"runs_directory": str(directory), "initial_checkpoint": str(learned()), "executor": "ray"}
    own: dict[str, Any] = {
        "rl": {"num_steps": 6, "groups_per_step": 3, "group_size": 4, "level_weights": [1.0, 0.0, 0.0]},
        "evaluation": {"num_tasks": 4},
        "weights": {"url": str(directory / "weights")},
        "elastic": {"router": router, "poll_s": 0.2, "lease_s": 10.0},
        "cluster": {"trainer": {"cpus": 0.5}, "engine": {"cpus": 0.5}},
    }
    return RunConfig.model_validate(tree | {name: {**tree[name], **values} for name, values in own.items()})


def decoded(url: str) -> float:
    lines = httpx.get(f"{url}/metrics", trust_env=False).text.splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith("etude_engine_decode_tokens "))


def test_a_run_borrows_a_replica_and_gives_it_back_and_users_notice_nothing(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    token = tmp_path / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    options = ("--name", "served", "--admin-token-file", str(token), "--num-sessions", "16")
    with (
        serve_process(learned(), *options) as first,
        serve_process(learned(), *options) as second,
        routed([first.url, second.url]) as router,
    ):
        users, run_config = Users(router), config(tmp_path, router)
        name = second.url.removeprefix("http://")

        def events() -> list[str]:
            rows = read_metrics(tmp_path / CONFIG.name / "metrics.jsonl")
            return [row["mode"] for row in rows if row["kind"] == "elastic"]

        with run_elsewhere(run_config) as process, users.asking():
            wait_until(process, lambda: num_rl_steps(run_config) >= 1, 300.0)
            httpx.post(f"{router}/router/replicas/{name}/lend", json={"pool": "rollout"}, trust_env=False)
            wait_until(process, lambda: "joined" in events(), 120.0)
            before, begun = decoded(second.url), len(users.answers)
            step = num_rl_steps(run_config)
            wait_until(process, lambda: num_rl_steps(run_config) >= step + 2, 300.0)
            assert decoded(second.url) > before, "it samples for the run"
            assert {replica for _, replica, _ in users.answers[begun + 1 :]} == {
                first.url.removeprefix("http://")
            }
            answer = httpx.post(f"{router}/router/replicas/{name}/recall", timeout=60.0, trust_env=False)
            assert (answer.json()["state"], answer.json()["version"]) == ("ready", "served@0")
            wait_until(process, lambda: "left" in events(), 60.0)
            output = process.communicate(timeout=400)[0]
            assert process.returncode == 0, output
    assert {(status, version) for status, _, version in users.answers} == {(200, "served@0")}
    run = RunDirectory.open(tmp_path / CONFIG.name)
    assert (run.read_json(run.report_file) or {})["faults"] == {}
    members = [one for group in TrajectoryLog(run.trajectories).read() for one in group.members]
    spans = [span for one in members for segment in one.segments for span in segment.version_spans]
    assert {span.version.lineage for span in spans} == {CONFIG.name}, "nobody trains on the users' weights"
