"""Refactorings become tasks whose smell is looked for before anything of the agent's runs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from etude.environment.making import planning
from etude.environment.making.projects import read_project
from etude.environment.making.writing import WORKSPACE
from etude.environment.verdicts import Grader
from etude.records import Task
from etude.tasks.making.changes import Change
from tests.environment.making.scene import QUOTAS, Making

assert WORKSPACE


@pytest.mark.slow
def test_smells_become_tasks_that_no_trick_passes(making: Making, monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(*given: object) -> Iterator[Change]:
        return iter(())

    for name in ("plan_bugs", "plan_deletions", "plan_undone"):
        monkeypatch.setattr(planning, name, nothing)
    from dataclasses import replace

    report = making.make(quotas=replace(QUOTAS, most_tasks=6))
    print(report.to_document())
    for name in report.written:
        folder = making.out / name
        print(name, (folder / "instruction.md").read_text(), (folder / "task.toml").read_text())
        print((folder / "tests/structure.json").read_text(), (folder / "tests/test.sh").read_text())
    assert report.written and report.reverified == 1.0
    assert report.kinds["planted_smell"]
