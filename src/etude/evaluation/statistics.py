"""Statistics of one model on one suite (pass rates by arXiv 2107.03374 and 2411.00640)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from etude.evaluation.intervals import clustered_interval
from etude.evaluation.sessions import SessionRow, cluster_of
from etude.observe import cause_of, shares_by_cause
from etude.records import Task, Trajectory


@dataclass(frozen=True, slots=True)
class Prices:
    """Prices of a model's tokens, in money per million tokens."""

    input_tokens: float = 0.0
    tokens: float = 0.0

    def of(self, row: SessionRow) -> float:
        """The price of a session, as if no input were cached."""
        return (self.input_tokens * row.input_tokens + self.tokens * row.tokens) / 1e6


def pass_at_k(n: int, num_passed: int, k: int) -> float:
    """The unbiased estimate, from `n` sessions of a task, of the chance that one of `k` passes.

    It is the share of all subsets of `k` of them that contain one that passed (arXiv 2107.03374). Raises
    ValueError for k > n.
    """
    if not 1 <= k <= n:
        raise ValueError(f"pass@k: k must be in 1..{n}, received {k}")
    return 1.0 - math.comb(n - num_passed, k) / math.comb(n, k)


def verdicts_by_task(rows: Sequence[SessionRow], voided_failed: bool = False) -> dict[str, list[bool]]:
    """Task -> verdicts of its sessions. Voided sessions are left out, with tasks that have no others; with
    `voided_failed` they count as failures."""
    found: dict[str, list[bool]] = {}
    for row in rows:
        if row.passed is not None or voided_failed:
            found.setdefault(row.task, []).append(bool(row.passed))
    return found


def pass_rates(verdicts: Mapping[str, Sequence[bool]], k: int = 1) -> dict[str, float]:
    """pass@k of each task that has at least `k` sessions."""
    return {task: pass_at_k(len(v), sum(v), k) for task, v in verdicts.items() if len(v) >= k}


def session_figures(rows: Sequence[SessionRow], prices: Prices | None = None) -> dict[str, Any]:
    """Statistics of the sessions of one model at one temperature.

    Keys: `tasks`, `sessions`, `voided` (sessions of which the infrastructure failed every attempt) and
    `voided_by_cause` (their share by the class of the error); `pass_rate` (pass@1, the
    mean over tasks) with `ci95` (see `clustered_interval`), and `pass_rate_voided_failed`, the same with
    voided sessions as failures; `pass_at`: k -> pass@k for powers of two and the most samples (None where
    too many were voided); means per session of `reward`, `tokens`, `input_tokens`, `turns`, `calls`,
    `malformed` and `seconds`; `parallel_share` of the turns; `seconds_per_solved`, `tokens_per_solved` and,
    with `prices`, `cost_per_solved`: of all sessions over those that passed (None without any).
    """
    graded = [row for row in rows if row.passed is not None]
    clusters = {row.task: row.cluster for row in rows}
    verdicts, all_verdicts = verdicts_by_task(rows), verdicts_by_task(rows, voided_failed=True)
    rates = pass_rates(verdicts)
    most = max((len(found) for found in all_verdicts.values()), default=0)
    sizes = sorted({1 << power for power in range(most.bit_length())} | {most} - {0})
    num_solved, num_turns = sum(bool(row.passed) for row in graded), sum(row.turns for row in graded)

    def per_solved(value: Callable[[SessionRow], float]) -> float | None:
        return math.fsum(map(value, graded)) / num_solved if num_solved else None

    figures: dict[str, Any] = {
        "tasks": len(all_verdicts),
        "sessions": len(rows),
        "voided": len(rows) - len(graded),
        "voided_by_cause": _voided_by_cause([row.cause for row in rows if row.passed is None], len(rows)),
        "pass_rate": mean(list(rates.values())),
        "ci95": _interval(rates, clusters),
        "pass_rate_voided_failed": mean(list(pass_rates(all_verdicts).values())),
        "pass_at": {str(k): _mean_or_none(pass_rates(verdicts, k).values()) for k in sizes},
        **{name: mean([float(getattr(row, name) or 0) for row in graded]) for name in MEANS},
        "parallel_share": sum(row.parallel_turns for row in graded) / num_turns if num_turns else 0.0,
        "seconds_per_solved": per_solved(lambda row: row.seconds),
        "tokens_per_solved": per_solved(lambda row: row.tokens),
    }
    if prices is not None:
        figures["cost_per_solved"] = per_solved(prices.of)
    return figures


MEANS = ("reward", "tokens", "input_tokens", "turns", "calls", "malformed", "seconds")
"""Fields of a row whose means per session are reported."""


def summarize(tasks: Sequence[Task], trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    """Pass rate with its interval, by level and by bug kind; `trajectories[i]` is of `tasks[i]`.

    A task may occur several times. The interval is that of `session_figures`. Sessions of which the
    infrastructure failed every attempt count in `infrastructure_failures`, in `voided_by_cause` (their share
    by the class of the error) and, as failures, in `pass_rate_voided_failed`.
    """
    graded = [(task, t) for task, t in zip(tasks, trajectories, strict=True) if t.reward is not None]
    verdicts = [(task, bool(trajectory.facts["passed"])) for task, trajectory in graded]
    passed = sum(verdict for _, verdict in verdicts)
    by_task: dict[str, list[bool]] = {}
    for task, verdict in verdicts:
        by_task.setdefault(task.id, []).append(verdict)
    return {
        "pass_rate": passed / len(verdicts) if verdicts else 0.0,
        "ci95": _interval(pass_rates(by_task), {task.id: cluster_of(task) for task in tasks}),
        "pass_rate_voided_failed": passed / len(trajectories) if trajectories else 0.0,
        "n": len(verdicts),
        "first_edit_right": mean([bool(t.facts["first_edit_right"]) for _, t in graded]),
        "by_level": _share_by("level", verdicts),
        "by_bug": _share_by("bug_kind", verdicts),
        "infrastructure_failures": len(trajectories) - len(graded),
        "voided_by_cause": shares_by_cause(trajectories),
    }


def mean(values: Sequence[float]) -> float:
    """The mean; 0 without values."""
    return math.fsum(values) / len(values) if values else 0.0


def _interval(rates: Mapping[str, float], clusters: Mapping[str, str]) -> list[float]:
    """Interval of the mean over tasks, with those of one repository or family as a cluster."""
    return list(clustered_interval(list(rates.values()), [clusters[task] for task in rates]))


def _voided_by_cause(causes: Sequence[str], num_sessions: int) -> dict[str, float]:
    counts = Counter(map(cause_of, causes))
    return {cause: count / num_sessions for cause, count in sorted(counts.items())}


def _mean_or_none(values: Collection[float]) -> float | None:
    return mean(list(values)) if values else None


def _share_by(key: str, verdicts: Sequence[tuple[Task, bool]]) -> dict[str, float]:
    values = sorted({str(task.metadata[key]) for task, _ in verdicts if key in task.metadata})
    return {
        value: mean([verdict for task, verdict in verdicts if str(task.metadata.get(key)) == value])
        for value in values
    }
