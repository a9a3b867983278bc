"""Code that works and that ruff finds fault with becomes tasks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from etude.environment.making import planning
from etude.tasks.making.changes import Change
from tests.environment.making.scene import Making


@pytest.mark.slow
def test_smells_become_tasks_whose_solution_earns_1_and_nothing_0(
    making: Making, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nothing(*given: object) -> Iterator[Change]:
        return iter(())

    for name in ("plan_bugs", "plan_deletions", "plan_undone"):
        monkeypatch.setattr(planning, name, nothing)
    report = making.make(num_runs=2)
    assert (len(report.written), report.reverified) == (2, 1.0)
    assert report.kinds == {"planted_smell": 2}
    assert report.left_out["planted_bug"] == "no such change was tried"
