"""Audit of a finished run's directory: every prompt, session and step must count exactly once."""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from etude.config import RlConfig
from etude.observe import read_metrics
from etude.records import Group
from etude.store.trajectories import TrajectoryLog
from etude.training.checkpoints import read_state

LAST_STEPS = 5
"""The last steps, whose mean is the reward of a run."""


@dataclass(frozen=True)
class Audit:
    """Counts from the directory of a finished run."""

    prompts: int
    """Prompt numbers that were trained on, or dropped without a training signal."""
    lost: int
    """Prompt numbers missing in the log, sessions missing in their groups, steps not taken, and groups by
    which steps report fewer than the log has."""
    repeated: int
    """Numbers and sessions that are in the log twice, prompts under two numbers, and groups by which steps
    report more than the log has."""
    steps: int
    trained: int
    """Groups trained on."""
    old_versions: int
    """Cases in which an older version sampled after a newer one."""
    failures: int
    """Sessions left out because of infrastructure failures."""
    reward: float
    """Mean of the last `LAST_STEPS` steps."""
    numbers: tuple[int, ...]
    weights: bytes
    faults: dict[str, int]
    """Fault counts of all processes as the run recorded them, by part and event."""


def audit(directory: Path, rl: RlConfig) -> Audit:
    """Audits the run in `directory`."""
    groups = list(TrajectoryLog(directory / "trajectories").read())
    resolved = resolved_numbers(directory)
    rows = {row["step"]: row for row in read_metrics(directory / "metrics.jsonl") if row["kind"] == "rl"}
    taken = sum(_taken_by(row, rl) for row in rows.values())
    logged = Counter(number_of(group) for group in groups)
    sessions = Counter(str(member.id) for group in groups for member in group.members)
    tasks = Counter(group.members[0].id.task for group in groups)
    missing = sum(max(0, rl.group_size - len(group.members)) for group in groups)
    return Audit(
        prompts=len(resolved),
        lost=len(resolved - set(logged)) + missing + rl.num_steps - len(rows) + max(0, len(resolved) - taken),
        repeated=sum(count - 1 for counts in (logged, sessions, tasks) for count in counts.values())
        + max(0, taken - len(resolved)),
        steps=len(rows),
        trained=int(sum(row["trained_groups"] for row in rows.values())),
        old_versions=count_old_versions(groups, in_turns=not rl.max_staleness),
        failures=sum(member.reward is None for group in groups for member in group.members),
        reward=statistics.mean(rows[step]["reward"] for step in sorted(rows)[-LAST_STEPS:]),
        numbers=tuple(sorted(resolved)),
        weights=(directory / "checkpoints" / "final" / "model.safetensors").read_bytes(),
        faults=_faults(directory / "metrics.jsonl"),
    )


def resolved_numbers(directory: Path) -> set[int]:
    """Prompt numbers that the last checkpoint records as trained on or dropped."""
    state = read_state(directory / "checkpoints" / "latest")
    assert state is not None, "a run that has ended has saved its state"
    return set(range(state["loop"]["next_task"])) - set(state["loop"]["pending"])


def number_of(group: Group) -> int:
    """The number of a group's prompt."""
    return int(group.id.rpartition("/g")[2])


def count_old_versions(groups: Sequence[Group], *, in_turns: bool) -> int:
    """Sessions whose tokens go back to an older version; where sampling and training take turns (`in_turns`)
    also groups that are older than the one before them."""
    old, newest = 0, -1
    for group in sorted(groups, key=number_of):
        steps: list[int] = []
        for member in group.members:
            own = [span.version.step for segment in member.segments for span in segment.version_spans]
            old += own != sorted(own)
            steps += own
        if in_turns and steps:
            old += min(steps) < newest
            newest = max(newest, *steps)
    return old


def _taken_by(row: dict[str, Any], rl: RlConfig) -> int:
    """Groups that one step reports as used: trained on, dropped, too old."""
    dropped = row["dropped_all_passed"] + row["dropped_all_failed"]
    return int(row["trained_groups"] + dropped) + round(row.get("stale_trajectories", 0.0) / rl.group_size)


def _faults(metrics: Path) -> dict[str, int]:
    """Sums fault counts over raw metrics rows: counts restart with each process that saved nothing."""
    counts: Counter[str] = Counter()
    for line in metrics.read_text(encoding="utf-8").splitlines():
        if '"kind": "fault"' in line:
            row = json.loads(line)
            counts[f"{row['name'].rstrip('0123456789-')} {row['mode']}"] += 1
    return dict(sorted(counts.items()))
