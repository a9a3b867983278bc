"""A training run that borrows a replica from its users, and gives it back, in real processes."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from etude.config import RunConfig
from etude.config.routing import HealthCheckConfig
from etude.observe import RunDirectory, read_metrics
from etude.records import Trajectory
from etude.store.trajectories import TrajectoryLog
from tests.controller.learning import CONFIG, learned
from tests.controller.running import num_rl_steps, run_elsewhere, wait_until
from tests.controller.test_ray import processes
from tests.inference.router.threads import in_thread, routing
from tests.inference.server.checkpoint import ServeProcess, serve_process
from tests.sandbox.test_lifecycle import eventually

pytestmark = pytest.mark.slow
TOKEN = "administrator"


def routed(replicas: Sequence[ServeProcess]) -> AbstractContextManager[str]:
    """The address of a router that lends these."""
    urls = [replica.url for replica in replicas]
    health = HealthCheckConfig(interval_s=0.2, timeout_s=30.0)
    return in_thread(routing(urls, health=health, replica_token=TOKEN))


@dataclass
class Users:
    """One of them asks all the time for a few tokens, and notes who answered with which weights."""

    url: str
    answers: list[tuple[int, str, str]] = field(default_factory=list[tuple[int, str, str]])

    @contextlib.contextmanager
    def asking(self) -> Iterator[None]:
        stopped = threading.Event()

        def ask() -> None:
            body = {"prompt": "def ", "max_tokens": 4}
            with httpx.Client(base_url=self.url, timeout=120.0, trust_env=False) as http:
                while not stopped.wait(0.1):
                    answer = http.post("/v1/completions", json=body)
                    replica = answer.headers.get("x-etude-replica", "")
                    version = answer.json().get("system_fingerprint", "")
                    self.answers.append((answer.status_code, replica, version))

        thread = threading.Thread(target=ask)
        thread.start()
        try:
            yield
        finally:
            stopped.set()
            thread.join(120.0)

    def check(self) -> None:
        """Every one was answered, with the weights that users get."""
        assert {(status, version) for status, _, version in self.answers} == {(200, "served@0")}


def config(directory: Path, router: str) -> RunConfig:
    tree: dict[str, Any] = CONFIG.model_dump(mode="json")
    tree |= {"runs_directory": str(directory), "initial_checkpoint": str(learned()), "executor": "ray"}
    own: dict[str, Any] = {
        "rl": {"num_steps": 10_000, "groups_per_step": 3, "group_size": 4, "level_weights": [1.0, 0.0, 0.0]},
        "evaluation": {"num_tasks": 4, "num_samples": 1},
        "weights": {"url": str(directory / "weights")},
        "elastic": {"router": router, "poll_s": 0.2, "lease_s": 20.0},
        "cluster": {"trainer": {"cpus": 0.5}, "engine": {"cpus": 0.5}},
    }
    return RunConfig.model_validate(tree | {name: {**tree[name], **values} for name, values in own.items()})


def events_of(directory: Path) -> list[str]:
    """What became of borrowed replicas, in order."""
    rows = read_metrics(directory / CONFIG.name / "metrics.jsonl")
    return [row["mode"] for row in rows if row["kind"] == "elastic"]


def members_of(run: RunDirectory) -> list[Trajectory]:
    """Every stored session; none twice, and none of other weights than the run's own."""
    members = [one for group in TrajectoryLog(run.trajectories).read() for one in group.members]
    assert max(Counter(str(one.id) for one in members).values()) == 1
    spans = [span for one in members for segment in one.segments for span in segment.version_spans]
    assert {span.version.lineage for span in spans} == {CONFIG.name}, "nobody trains on the users' weights"
    return members


@pytest.fixture
def token(tmp_path: Path) -> tuple[str, ...]:
    """Options of replicas that may be lent."""
    file = tmp_path / "token"
    file.write_text(TOKEN)
    file.chmod(0o600)
    return ("--name", "served", "--admin-token-file", str(file), "--num-sessions", "16")


def decoded(url: str) -> float:
    lines = httpx.get(f"{url}/metrics", timeout=60.0, trust_env=False).text.splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith("etude_engine_decode_tokens "))


def test_a_run_borrows_a_replica_and_gives_it_back_even_when_it_is_killed_and_users_notice_nothing(
    tmp_path: Path, token: tuple[str, ...]
) -> None:
    with (
        serve_process(learned(), *token) as first,
        serve_process(learned(), *token) as second,
        routed([first, second]) as router,
    ):
        users, run_config = Users(router), config(tmp_path, router)
        first_name, name = (one.url.removeprefix("http://") for one in (first, second))

        def ask_router(what: str, **body: str) -> dict[str, Any]:
            url = f"{router}/router/replicas/{name}/{what}"
            return httpx.post(url, json=body, timeout=60.0, trust_env=False).json()

        def is_home() -> bool:
            rows = httpx.get(f"{router}/router/replicas", timeout=60.0, trust_env=False).json()["replicas"]
            return all((row["state"], row["version"]) == ("ready", "served@0") for row in rows)

        with run_elsewhere(run_config) as process, users.asking():
            wait_until(process, lambda: num_rl_steps(run_config) >= 1)
            ask_router("lend", pool="rollout")
            wait_until(process, lambda: "joined" in events_of(tmp_path))
            before, begun = decoded(second.url), len(users.answers)
            step = num_rl_steps(run_config)
            wait_until(process, lambda: num_rl_steps(run_config) >= step + 2)
            assert decoded(second.url) > before, "it samples for the run"
            assert {replica for _, replica, _ in users.answers[begun + 1 :]} == {first_name}
            answer = ask_router("recall")
            assert (answer["state"], answer["version"]) == ("ready", "served@0")
            wait_until(process, lambda: "left" in events_of(tmp_path))
            ask_router("lend", pool="rollout")
            wait_until(process, lambda: events_of(tmp_path).count("joined") == 2)
            process.kill()
            assert eventually(is_home, 120.0), "its lease has ended long ago"
        assert eventually(lambda: not processes(""), 60.0), "parts outlive the run"
    users.check()
    run = RunDirectory.open(tmp_path / CONFIG.name)
    assert [row for row in read_metrics(run.metrics_file) if row["kind"] == "fault"] == []
    assert len(members_of(run)) >= 3 * 4
