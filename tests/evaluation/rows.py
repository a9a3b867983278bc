"""Builders of session rows."""

from __future__ import annotations

from collections.abc import Sequence

from etude.evaluation import SessionRow

VERDICTS = {"+": True, "-": False, "?": None}


def rows_of(verdicts: dict[str, str], clusters: dict[str, str] | None = None) -> list[SessionRow]:
    """Task -> a character for each session: `+` passed, `-` failed, `?` voided."""
    return [
        row(task, VERDICTS[mark], sample, (clusters or {}).get(task, task))
        for task, marks in verdicts.items()
        for sample, mark in enumerate(marks)
    ]


def row(task: str, passed: bool | None, sample: int = 0, cluster: str = "", turns: int = 4) -> SessionRow:
    """One session of four turns, one of which has two calls."""
    return SessionRow(
        task=task,
        cluster=cluster or task,
        sample=sample,
        status="done",
        passed=passed,
        reward=None if passed is None else float(passed),
        tokens=100.0,
        input_tokens=1000.0,
        turns=turns,
        calls=turns + 1,
        parallel_turns=1,
        malformed=0,
        seconds=3.0,
    )


def numbered(marks: Sequence[str]) -> dict[str, str]:
    """Tasks of their own for a list of marks."""
    return {f"task-{number:03d}": mark for number, mark in enumerate(marks)}
