"""Runs whose sessions are played by clusters, and an audit of finished ones."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen
from typing import Any

from etude.config import RunConfig
from etude.observe import RunDirectory
from etude.observe.metrics import MemorySink, read_metrics
from etude.observe.observer import SilentObserver
from etude.store.trajectories import TrajectoryLog
from etude.training.checkpoints import find_resumable, read_state
from tests.controller.learning import CONFIG, learned


def config(
    directory: Path,
    listen: str,
    token: Path,
    checkpoint: Path | None = None,
    base: RunConfig = CONFIG,
    **sections: Any,
) -> RunConfig:
    """A few steps of RL whose sessions clusters play; `sections` are merged over `base` and its own.

    `checkpoint`: what it begins with, the model of `learned` unless named.
    """
    tree = base.model_dump(mode="json")
    tree |= {"runs_directory": str(directory), "initial_checkpoint": str(checkpoint or learned())}
    own: dict[str, Any] = {
        "rl": {
            "num_steps": 4,
            "groups_per_step": 4,
            "group_size": 4,
            "level_weights": [1.0, 0.0, 0.0],
            "max_staleness": 2,
        },
        "evaluation": {"num_tasks": 4, "num_samples": 1},
        "checkpoint": {"every_s": 0.001, "curve_every_steps": 0},
        "weights": {"url": str(directory / "weights"), "dtype": "bfloat16"},
        "clusters": {"listen": listen, "token": f"file:{token}", "lease_s": 2.0},
    }
    for over in (own, sections):
        for name, values in over.items():
            tree[name] = {**tree[name], **values} if isinstance(values, dict) else values
    return RunConfig.model_validate(tree)


def make_token(path: Path) -> Path:
    """A file with a token."""
    path.write_text("a-token-of-this-test\n")
    path.chmod(0o600)
    return path


def sample_options(control: str, relay: str, token: Path, name: str) -> list[str]:
    """`etude sample` and its options."""
    return [
        "sample",
        *("--control", control, "--token", f"file:{token}", "--name", name, "--relay", relay),
        *("--set", f"weights.token=file:{token}", "--set", "engine.num_slots=16"),
    ]


def wait_for(log: Path, words: str, process: Popen[bytes], timeout_s: float = 120.0) -> str:
    """The line of a log that holds these words. Fails with the log if the process ends before."""
    end_s = time.monotonic() + timeout_s
    while time.monotonic() < end_s:
        for line in log.read_text().splitlines():
            if words in line:
                return line
        assert process.poll() is None, log.read_text()
        time.sleep(0.05)
    raise AssertionError(f"{words!r} was not said: {log.read_text()}")


@dataclass(frozen=True, slots=True)
class Audit:
    """What a run that has ended left behind."""

    steps: int
    prompts: int
    """Whose groups are in the trajectory log."""
    lost: int
    """Prompts that were given out, and are neither in the log nor to be begun again."""
    repeated: int
    """Sessions that steps took more than once."""
    sessions: int
    """In the log."""
    by_cluster: dict[str, int]
    max_lag: float
    """Most versions between a token and the step that it trained."""


def audit(run: RunDirectory) -> Audit:
    """Counts prompts and sessions by the log, the books and the metrics, which know nothing of each other."""
    members: dict[str, str] = {}
    groups: dict[int, int] = {}
    for group in TrajectoryLog(run.trajectories).read():
        for member in group.members:
            members[str(member.id)] = member.cluster
            groups[member.id.group] = groups.get(member.id.group, 0) + 1
    newest = find_resumable(run.checkpoints / "latest", MemorySink(), SilentObserver())
    assert newest is not None
    loop = (read_state(newest) or {})["loop"]
    pending = set(loop["pending"])
    given_out = set(range(loop["next_task"])) - pending
    rows = [row for row in read_metrics(run.metrics_file) if row["kind"] == "rl"]
    taken = sum(row["episodes"] + row["infrastructure_failures"] for row in rows)
    resolved = sum(count for number, count in groups.items() if number in given_out)
    clusters = list(members.values())
    return Audit(
        steps=len({row["step"] for row in rows}),
        prompts=len(groups),
        lost=len(given_out - set(groups)),
        repeated=int(taken) - resolved,
        sessions=len(members),
        by_cluster={name: clusters.count(name) for name in sorted(set(clusters))},
        max_lag=max(row["version_lag_max"] for row in rows),
    )
