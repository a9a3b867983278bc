"""Code that works and that ruff finds fault with becomes tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import pytest

from etude.environment.checking import judge_solution
from etude.environment.making import planning
from etude.environment.verdicts import Grader
from etude.sandbox.types import Resources
from etude.tasks.harbor import read_harbor
from etude.tasks.making.changes import Change
from tests.environment.making.scene import QUOTAS, Making


@pytest.mark.slow
def test_smells_become_tasks(making: Making, monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(*given: object) -> Iterator[Change]:
        return iter(())

    for name in ("plan_bugs", "plan_deletions", "plan_undone"):
        monkeypatch.setattr(planning, name, nothing)
    report = making.make(quotas=replace(QUOTAS, most_tasks=2))
    print(report.to_document())
    assert report.written and report.reverified == 1.0
