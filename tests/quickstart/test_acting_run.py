"""A run that also trains on the `acting` families."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from etude.controller.families import open_family
from etude.controller.judging import Judging
from etude.errors import ConfigError
from etude.observe.report.summary import results_comparisons
from etude.store.trajectories import TrajectoryLog
from tests.controller.running import run_here, tiny_config

SECTIONS = {
    "tasks": {"observed_share": 0.5, "composed_share": 0.5},
    "midtrain": {"num_observed_sessions": 6, "num_observed_fixes": 6, "num_part_sessions": 6},
    "evaluation": {"num_tasks": 4, "num_samples": 2, "num_repeated_tasks": 3, "num_acting_tasks": 2},
}


def test_the_report_has_a_section_for_the_families(tmp_path: Path) -> None:
    run, report = run_here(tiny_config(tmp_path, **SECTIONS))
    assert set(report["families"]) == {"observed", "composed"}
    for name, sides in report["families"].items():
        assert set(sides) == {"before", "after"}
        for side in sides.values():
            assert {"greedy", "sampled", "num_tasks", "pass_at_2", "turns"} <= side.keys()
            is_observed = name == "observed"
            assert ({"first_edit_ceiling", "masked_ablation"} <= side.keys()) == is_observed
    labels = [row.label for row in results_comparisons(report)]
    assert "observed tasks, output masked, first edit right (chance 12.5 %)" in labels
    assert "composed tasks, at least one of 2 at temperature 1" in labels
    trained = {group.members[0].id.task.split("-")[0] for group in TrajectoryLog(run.trajectories).read()}
    assert trained <= {"observed", "composed"}, "all of reinforcement learning's tasks"


def test_a_run_that_ended_before_its_families_were_judged_goes_on_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class KilledError(Exception):
        pass

    async def end(*_: object) -> None:
        raise KilledError

    config = tiny_config(tmp_path, **SECTIONS, rl={"num_steps": 1, "groups_per_step": 1})
    with monkeypatch.context() as patched, pytest.raises(KilledError):
        patched.setattr(Judging, "judge_families", end)
        run_here(config)
    _, report = run_here(config, resume=True)
    assert all(set(sides) == {"before", "after"} for sides in report["families"].values())
    assert set(report["families"]) == {"observed", "composed"}


def test_shares_decide_how_tasks_are_drawn(tmp_path: Path) -> None:
    family = open_family(tiny_config(tmp_path, tasks={"observed_share": 0.5, "composed_share": 0.25}))
    source = family.source()
    found = Counter(source(index).id.split("-")[0] for index in range(120))
    assert 40 < found["observed"] < 80
    assert 15 < found["composed"] < 45
    assert found["train"] == 120 - found["observed"] - found["composed"]
    assert source(7) == source(7)


def test_without_shares_tasks_and_evaluation_are_as_before(tmp_path: Path) -> None:
    family = open_family(tiny_config(tmp_path))
    assert family.acting == []
    assert family.source()(3).id == "train-0-3"


def test_their_frozen_tasks_are_suites(tmp_path: Path) -> None:
    family = open_family(tiny_config(tmp_path))
    assert len(family.evaluation_tasks("observed_heldout", 3)) == 3
    with pytest.raises(ConfigError, match="split"):
        family.evaluation_tasks("observed_family", 3)


def test_shares_of_more_than_all_tasks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="observed_share"):
        tiny_config(tmp_path, tasks={"observed_share": 0.7, "composed_share": 0.7})


def test_other_tasks_are_not_mixed(tmp_path: Path) -> None:
    assert open_family(tiny_config(tmp_path, tasks={"family": "trails", "observed_share": 0.5})).acting == ()
