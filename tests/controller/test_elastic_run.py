"""Training runs that borrow a replica from its users, and give it back, in real processes."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from etude.config import RunConfig
from etude.inference.router import HealthConfig
from etude.inference.router.pools import Lender, LendingByLoad
from etude.observe import RunDirectory, read_metrics
from etude.records import Trajectory
from etude.store.trajectories import TrajectoryLog
from tests.controller.learning import CONFIG, learned
from tests.controller.running import num_rl_steps, run_elsewhere, wait_until
from tests.inference.router.threads import in_thread, routing
from tests.inference.server.checkpoint import ServeProcess, serve_process

pytestmark = pytest.mark.slow
TOKEN = "administrator"


def routed(replicas: Sequence[ServeProcess], lender: Lender | None = None) -> AbstractContextManager[str]:
    """The address of a router that lends these."""
    urls = [replica.url for replica in replicas]
    health = HealthConfig(interval_s=0.2, timeout_s=30.0)
    return in_thread(routing(urls, health=health, replica_token=TOKEN, lender=lender))


@dataclass
class Users:
    """Ask all the time, each for a few tokens; note who answered with which weights."""

    url: str
    answers: list[tuple[int, str, str]] = field(default_factory=list[tuple[int, str, str]])

    @contextlib.contextmanager
    def asking(self, num: int = 1, max_tokens: int = 4, pause_s: float = 0.1) -> Iterator[None]:
        stopped = threading.Event()

        def ask() -> None:
            body = {"prompt": "def ", "max_tokens": max_tokens}
            with httpx.Client(base_url=self.url, timeout=120.0, trust_env=False) as http:
                while not stopped.wait(pause_s):
                    answer = http.post("/v1/completions", json=body)
                    replica = answer.headers.get("x-etude-replica", "")
                    version = answer.json().get("system_fingerprint", "")
                    self.answers.append((answer.status_code, replica, version))

        threads = [threading.Thread(target=ask) for _ in range(num)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            stopped.set()
            for thread in threads:
                thread.join(120.0)

    def check(self) -> None:
        """Every one was answered, with the weights that users get."""
        assert {(status, version) for status, _, version in self.answers} == {(200, "served@0")}


def config(directory: Path, router: str, executor: str, **sections: dict[str, Any]) -> RunConfig:
    tree: dict[str, Any] = CONFIG.model_dump(mode="json")
    tree |= {"runs_directory": str(directory), "initial_checkpoint": str(learned()), "executor": executor}
    own: dict[str, Any] = {
        "rl": {"num_steps": 6, "groups_per_step": 3, "group_size": 4, "level_weights": [1.0, 0.0, 0.0]},
        "evaluation": {"num_tasks": 4},
        "weights": {"url": str(directory / "weights")},
        "elastic": {"router": router, "poll_s": 0.2, "lease_s": 10.0},
        "cluster": {"trainer": {"cpus": 0.5}, "engine": {"cpus": 0.5}},
    }
    for name, values in sections.items():
        own[name] = own.get(name, {}) | values
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


def test_a_run_borrows_a_replica_and_gives_it_back_and_users_notice_nothing(
    tmp_path: Path, token: tuple[str, ...]
) -> None:
    pytest.importorskip("ray")
    with (
        serve_process(learned(), *token) as first,
        serve_process(learned(), *token) as second,
        routed([first, second]) as router,
    ):
        users, run_config = Users(router), config(tmp_path, router, "ray", elastic={"lease_s": 60.0})
        name = second.url.removeprefix("http://")
        with run_elsewhere(run_config) as process, users.asking():
            wait_until(process, lambda: num_rl_steps(run_config) >= 1, 300.0)
            httpx.post(
                f"{router}/router/replicas/{name}/lend",
                json={"pool": "rollout"},
                timeout=60.0,
                trust_env=False,
            )
            wait_until(process, lambda: "joined" in events_of(tmp_path), 120.0)
            before, begun = decoded(second.url), len(users.answers)
            step = num_rl_steps(run_config)
            wait_until(process, lambda: num_rl_steps(run_config) >= step + 2, 300.0)
            assert decoded(second.url) > before, "it samples for the run"
            assert {replica for _, replica, _ in users.answers[begun + 1 :]} == {
                first.url.removeprefix("http://")
            }
            answer = httpx.post(f"{router}/router/replicas/{name}/recall", timeout=60.0, trust_env=False)
            assert (answer.json()["state"], answer.json()["version"]) == ("ready", "served@0")
            wait_until(process, lambda: "left" in events_of(tmp_path), 60.0)
            output = process.communicate(timeout=400)[0]
            assert process.returncode == 0, output
    users.check()
    run = RunDirectory.open(tmp_path / CONFIG.name)
    assert (run.read_json(run.report_file) or {})["faults"] == {}
    members_of(run)


def test_a_run_of_one_process_borrows_by_load_and_users_have_their_replica_back_whenever_they_come(
    tmp_path: Path, token: tuple[str, ...]
) -> None:
    by_load = LendingByLoad("serve", "rollout", busy_tokens=300.0, idle_tokens=20.0)
    with (
        serve_process(learned(), *token) as first,
        serve_process(learned(), *token) as second,
        routed([first, second], Lender(by_load=[by_load], hold_s=1.0)) as router,
    ):
        own = {"rl": {"num_steps": 10_000, "group_size": 8, "max_staleness": 2}}
        users, run_config = Users(router), config(tmp_path, router, "local", **own)

        def num_home() -> int:
            rows = httpx.get(f"{router}/router/replicas", timeout=60.0, trust_env=False).json()["replicas"]
            return sum((row["state"], row["version"]) == ("ready", "served@0") for row in rows)

        with run_elsewhere(run_config) as process, users.asking():
            wait_until(process, lambda: "joined" in events_of(tmp_path), 300.0)
            num_left = events_of(tmp_path).count("left")
            with users.asking(num=12, max_tokens=200, pause_s=0.0):
                wait_until(process, lambda: events_of(tmp_path).count("left") > num_left, 120.0)
                wait_until(process, lambda: num_home() == 2, 120.0)
                num_joined = events_of(tmp_path).count("joined")
            step = num_rl_steps(run_config)
            wait_until(process, lambda: num_rl_steps(run_config) > step, 120.0)
            wait_until(process, lambda: events_of(tmp_path).count("joined") > num_joined, 120.0)
            process.kill()
            end_s = time.monotonic() + 120.0
            while num_home() < 2:
                assert time.monotonic() < end_s, "its lease has ended long ago"
                time.sleep(0.1)
    users.check()
    run = RunDirectory.open(tmp_path / CONFIG.name)
    assert (run.read_json(run.report_file) or {}).get("faults", {}) == {}
    assert len(members_of(run)) >= 8 * 3
