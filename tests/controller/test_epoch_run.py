"""Whole runs on a directory of tasks: epochs, their end, and kills in between."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from etude.config import RunConfig
from etude.controller.families import open_family
from etude.errors import ConfigError, TaskError
from etude.observe import RunDirectory
from etude.observe.metrics import read_metrics
from etude.records import Task
from etude.rollout.epochs import EpochSource
from etude.store.trajectories import TrajectoryLog
from etude.tasks import write_harbor
from etude_quickstart import TaskGenerator
from tests.controller.running import num_stored_parts, run_elsewhere, run_here, tiny_config, wait_until

NUM_TASKS = 7


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tasks")
    for number in range(NUM_TASKS):
        task = TaskGenerator(0, "train").task(number)
        write_harbor(task, directory / task.id)
    return directory


def epoch_config(runs: Path, tasks: Path, **rl: Any) -> RunConfig:
    wanted = {"num_steps": 50, "curriculum": {"epochs": 2}, **rl}
    return tiny_config(runs, tasks={"family": "directory", "directory": str(tasks)}, rl=wanted)


def own_source(config: RunConfig) -> EpochSource:
    source = open_family(config).source()
    assert isinstance(source, EpochSource)
    return source


def played(run: RunDirectory, config: RunConfig) -> Counter[tuple[int, str]]:
    """(epoch, task) -> groups in the log."""
    source, ids = own_source(config), [g.members[0].id for g in TrajectoryLog(run.trajectories).read()]
    assert all(one.epoch == source.epoch_of(one.group) for one in ids)
    return Counter((one.epoch, one.task) for one in ids)


@pytest.mark.slow
@pytest.mark.parametrize("max_staleness", [0, 2])
def test_a_run_ends_with_its_tasks_each_of_which_was_played_once_an_epoch(
    tmp_path: Path, tasks: Path, max_staleness: int
) -> None:
    config = epoch_config(tmp_path, tasks, max_staleness=max_staleness)
    run, report = run_here(config)
    assert report["tasks_exhausted"] and report["rl_steps"] < 50
    assert report["forecast_s"] < 20 * 1 + 10 * 10 + 20, "of the steps and the tasks that there are"
    assert "heldout_family_after" not in report
    judged = {task.id for task in open_family(config).evaluation_tasks("heldout", 100)}
    counts = played(run, config)
    assert set(counts.values()) == {1}
    assert len(counts) == 2 * (NUM_TASKS - len(judged))
    assert judged and not judged & {task for _, task in counts}
    (end,) = [row for row in read_metrics(run.metrics_file) if row["kind"] == "tasks"]
    assert end["numbers"] == len(counts) and end["passed_over"] == 0
    _, again = run_here(config, resume=True)
    assert again["rl_steps"] == report["rl_steps"], "there is nothing left to do"


@pytest.mark.slow
def test_over_kills_no_task_of_an_epoch_is_lost_or_repeated(tmp_path: Path, tasks: Path) -> None:
    config = epoch_config(tmp_path, tasks, max_staleness=2, curriculum={"epochs": 5})
    for number in (2, 6):
        with run_elsewhere(config, resume=number > 2) as process:
            wait_until(process, lambda number=number: num_stored_parts(config) >= number)
            process.kill()
    run, report = run_here(config, resume=True)
    assert report["tasks_exhausted"]
    counts = played(run, config)
    assert set(counts.values()) == {1}
    assert len(counts) == 5 * len(own_source(config))


def test_tasks_are_held_apart_by_their_ids(tmp_path: Path, tasks: Path) -> None:
    family = open_family(epoch_config(tmp_path, tasks))
    source = family.source()
    assert isinstance(source, EpochSource)
    trained = {source(number).id for number in range(len(source))}
    judged = [task.id for task in family.evaluation_tasks("heldout", 100)]
    assert (len(trained), len(judged)) == (5, 2)
    assert not trained & set(judged)
    assert [task.id for task in family.evaluation_tasks("heldout", 1)] == judged[:1]
    with pytest.raises(ConfigError, match="unknown split"):
        family.evaluation_tasks("heldout_family", 1)


def test_a_directory_of_their_own_may_hold_the_tasks_that_are_judged_on(tmp_path: Path, tasks: Path) -> None:
    other: Task = replace(TaskGenerator(0, "heldout").task(0), id="judge")
    write_harbor(other, tmp_path / "judged" / "judge")
    section = {"family": "directory", "directory": str(tasks), "heldout_directory": str(tmp_path / "judged")}
    family = open_family(tiny_config(tmp_path, tasks=section))
    assert [task.id for task in family.evaluation_tasks("heldout", 9)] == ["judge"]
    source = family.source()
    assert isinstance(source, EpochSource)
    assert len(source) == NUM_TASKS
    assert source.end is None, "without a number of epochs tasks come again and again"


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        ("", "no such directory"), ("empty", "holds no task"), ("one", "a single task cannot"),
        ("itself", "is a task itself"),
    ],
)  # fmt: skip
def test_directories_without_enough_tasks_are_refused(tmp_path: Path, made: str, expected: str) -> None:
    directory = tmp_path / "tasks"
    if made in ("empty", "one"):
        directory.mkdir()
    if made in ("one", "itself"):
        write_harbor(TaskGenerator(0, "train").task(0), directory / "one" if made == "one" else directory)
    with pytest.raises(TaskError, match=expected):
        open_family(epoch_config(tmp_path, directory))


@pytest.mark.parametrize("section", ["directory", "heldout_directory"])
def test_two_tasks_of_one_id_end_a_strict_run_before_anything_is_trained(
    tmp_path: Path, tasks: Path, section: str
) -> None:
    for name in ("one", "copy", "other"):
        write_harbor(TaskGenerator(0, "train").task(int(name == "other")), tmp_path / "twice" / name)
    chosen = {"directory": str(tasks), section: str(tmp_path / "twice"), "check": "stop"}
    with pytest.raises(TaskError, match=rf"(?s)tasks.{section}: 1 of 3 tasks .* copy has the same id"):
        open_family(tiny_config(tmp_path, tasks={"family": "directory", **chosen}))


def test_epochs_need_tasks_that_end_and_a_directory_a_family(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="generated tasks never end"):
        tiny_config(tmp_path, rl={"curriculum": {"epochs": 1}})
    for section in ({"family": "directory"}, {"directory": "x"}):
        with pytest.raises(ValueError, match="directory: must be named"):
            tiny_config(tmp_path, tasks=section)
