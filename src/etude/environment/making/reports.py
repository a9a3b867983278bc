"""The report of making tasks from a project: counts for each stage, and reasons for rejected changes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, get_args

from etude.environment.making.projects import Project
from etude.environment.making.suites import Baseline
from etude.environment.making.writing import MadeTask
from etude.tasks.making.changes import Change, ChangeKind


@dataclass(slots=True)
class MakeReport:
    """Filled while tasks are made. A reason is a kind, a colon, the details; counts are by kind."""

    project: Project
    baseline: Baseline
    num_twinned: int = 0
    """Tests that exams can change."""
    rejects: list[dict[str, str]] = field(default_factory=list[dict[str, str]])
    """For each: the change's id, kind, operator and place, the stage, the reason."""
    num_tested: int = 0
    num_noticed: int = 0
    num_checked: int = 0
    written: list[str] = field(default_factory=list[str])
    """Names of task directories."""
    operators: Counter[str] = field(default_factory=Counter[str])
    """Operators of the written tasks."""
    kinds: Counter[str] = field(default_factory=Counter[str])
    num_open: int = 0
    """Tasks some of whose failing tests no exam changes."""
    num_naming_every_call: int = 0
    """Tasks whose instruction contains the call of each failing test."""
    missed: str = ""
    """The minimum share that selection could not reach, and the actual one."""
    impossible: dict[str, str] = field(default_factory=dict[str, str])
    """Kinds of changes that could not be searched for -> why."""
    duration_s: float = 0.0

    def reject(self, change: Change, stage: str, reason: str) -> None:
        """Records why a change is rejected."""
        place = f"{change.places[0].path}:{change.places[0].first_line}" if change.places else ""
        row = {"id": change.id, "kind": change.kind, "operator": change.operator, "place": place}
        row |= {"stage": stage, "reason": reason}
        self.rejects.append(row)

    def count_change(self, change: Change, reason: str | None) -> None:
        """Counts a tested change; `reason`: why it is rejected."""
        self.num_tested += 1
        if reason is None:
            self.num_noticed += 1
        else:
            self.reject(change, "changes", reason)

    def count_check(self, made: MadeTask, reason: str | None) -> None:
        """Counts a task that was checked; `reason`: why it is not written."""
        self.num_checked += 1
        if reason is not None:
            self.reject(made.verified.change, "check", f"check: {reason}")
            return
        self.written.append(made.id)
        self.operators[made.verified.change.operator] += 1
        self.kinds[made.verified.change.kind] += 1
        self.num_open += bool(made.exams.open_tests)
        self.num_naming_every_call += made.verified.names_every_call

    @property
    def reasons(self) -> Counter[str]:
        """Number of rejects by kind of reason."""
        return Counter(f"{row['stage']}: {row['reason'].partition(':')[0]}" for row in self.rejects)

    @property
    def left_out(self) -> dict[str, str]:
        """Kinds of changes without a task -> why, or the most common reason for their rejection."""
        found: dict[str, str] = dict.fromkeys(get_args(ChangeKind), "no such change was tried")
        for kind in found:
            mine = Counter(row["reason"].partition(":")[0] for row in self.rejects if row["kind"] == kind)
            found[kind] = next((reason for reason, _ in mine.most_common(1)), found[kind])
        return {kind: why for kind, why in {**found, **self.impossible}.items() if not self.kinds[kind]}

    @property
    def reverified(self) -> float | None:
        """Share of the selected tasks whose solution earned 1 and doing nothing 0, twice; or None."""
        return len(self.written) / self.num_checked if self.num_checked else None

    def to_document(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "project": self.project.name,
            "version": self.project.version,
            "tests": {
                "stable": len(self.baseline.stable),
                "with_twins": self.num_twinned,
                "left_out": dict(self.baseline.unstable),
            },
            "suite_s": round(self.baseline.duration_s, 3),
            "changes_tested": self.num_tested,
            "changes_noticed": self.num_noticed,
            "tasks_checked": self.num_checked,
            "tasks": sorted(self.written),
            "tasks_with_open_tests": self.num_open,
            "tasks_naming_every_call": self.num_naming_every_call,
            "reverified": self.reverified,
            "kinds": dict(self.kinds.most_common()),
            "operators": dict(self.operators.most_common()),
            "kinds_left_out": self.left_out,
            "missed_share": self.missed,
            "rejects_by_reason": dict(self.reasons.most_common()),
            "rejects": self.rejects,
            "duration_s": round(self.duration_s, 1),
        }
