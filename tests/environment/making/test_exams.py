"""Exams of a made task: code that forges test outcomes earns 0, and the solution 1."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from etude.environment.checking import check_tasks
from etude.environment.grading import Verdict
from etude.environment.making import twinning
from etude.environment.making.changing import TestChanger
from etude.environment.making.images import ProjectImage
from etude.environment.making.projects import read_project
from etude.environment.making.suites import Baseline, Coverage, Suite
from etude.environment.making.twinning import find_project_twins
from etude.environment.making.writing import MadeTask, task_files
from etude.environment.scripts import AgentDiff
from etude.environment.verdicts import Grader
from etude.records import Task, TaskImage
from etude.sandbox.interface import Sandbox, SandboxBackend
from etude.sandbox.local.backend import LocalBackend
from etude.sandbox.template import Template
from etude.tasks.exams import read_exams
from etude.tasks.harbor import write_files
from etude.tasks.making.changes import Change, Place, TestFailure, Verified
from tests.environment.making.cheats import CHEATS
from tests.environment.making.scene import read_made_task
from tests.sandbox.images.image_builders import write_tree

PRICES = """\
def total(amounts, rate=0):
    if rate > 1:
        raise ValueError("rate")
    result = 0
    for amount in amounts:
        result = result + amount
    return result - result * rate


def label(name):
    return name.upper()
"""
BROKEN = PRICES.replace("result + amount", "result + amount + amount")
TESTS = """\
import pytest
from prices import total

# Amounts without a currency.


@pytest.fixture
def amounts():
    return [1, 2, 3]


def test_total(amounts):
    assert total(amounts) == 6


class TestRates:
    @pytest.mark.parametrize(("rate", "wanted"), [(0.5, 3.0), (0.25, 4.5)])
    def test_discount(self, amounts, rate, wanted):
        assert total(amounts, rate) == wanted


def test_wrong_rate():
    with pytest.raises(ValueError, match="rate"):
        total([], 2)
"""
LABELS = """\
from prices import label

# In capitals.


def test_label():
    assert label("tea") == "TEA"
    assert label("") == ""
"""
PATH = "tests/test_prices.py"
FAILING = [
    f"{PATH}::test_total",
    f"{PATH}::TestRates::test_discount[0.5-3.0]",
    f"{PATH}::TestRates::test_discount[0.25-4.5]",
]
PASSING = [f"{PATH}::test_wrong_rate", "tests/test_labels.py::test_label"]


@dataclass(frozen=True)
class Scene:
    """A task made from a project of one module, on the programs of this machine."""

    run: Callable[[Coroutine[Any, Any, Any]], Any]
    backend: SandboxBackend
    task: Task

    def judge(self, text: str) -> Verdict:
        """The verdict on a text of the module."""
        return self.run(Grader(self.backend).judge(self.task, AgentDiff({"prices.py": text.encode()})))


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """The task, with exams from four rounds of changed tests."""
    folder = tmp_path_factory.mktemp("exams")
    with asyncio.Runner() as runner:
        backend = LocalBackend(folder / "state")
        if problems := backend.doctor():
            pytest.skip(problems[0])
        try:
            task = runner.run(make_task(folder, backend))
            yield Scene(runner.run, backend, task)
        finally:
            runner.run(backend.close())


async def make_task(folder: Path, backend: SandboxBackend) -> Task:
    files = {"pyproject.toml": '[project]\nname = "prices"\n', "prices.py": PRICES, PATH: TESTS}
    files["tests/test_labels.py"] = LABELS
    project = read_project(write_tree(folder / "repo", {**files, "tests/conftest.py": "import prices\n"}))
    suite = Suite(project, backend, 60.0, Template(project.files, project.name))
    changer = TestChanger(project, seed=0)
    baseline = Baseline((*FAILING, *PASSING), {}, Coverage((), {}), 1.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(twinning, "ROUNDS", 4)
        twins = await find_project_twins(suite, baseline, changer, at_once=2)
    exams = twins.write_exams(FAILING, PASSING, changer, "seed")
    change = Change("planted_bug", "operator", {"prices.py": BROKEN}, (Place("prices.py", "total", 6, 6),))
    failures = tuple(TestFailure(test, "assert") for test in FAILING)
    verified = Verified(change, {"prices.py": PRICES}, failures, "total is wrong", passing=tuple(PASSING))
    image = ProjectImage(TaskImage("host"), "FROM host\n")
    made = MadeTask(project, image, verified, exams, 60.0)
    write_files(task_files(made), folder / "task")
    task = read_made_task(folder / "task", image.image)
    assert task.machine is not None and task.verifier is not None
    verifier = replace(task.verifier, env={"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"})
    return replace(task, machine=replace(task.machine, docker_image="host"), verifier=verifier)


@pytest.mark.slow
def test_every_test_that_must_fail_before_the_solution_is_changed_in_some_exams_and_not_in_all(
    scene: Scene,
) -> None:
    assert scene.task.verifier is not None
    exams = read_exams(scene.task.verifier.exams)
    assert (len(exams.exams), exams.open_tests) == (5, {})
    assert set(exams.exams[0].passing) == {*FAILING, *PASSING}
    for name in ("test_total", "test_discount[0."):
        assert 1 <= sum(any(name in test for test in exam.failing) for exam in exams.exams[1:]) <= 3
    laid = [{path for path in exams.files_of(exam) if "hidden" in path} for exam in exams.exams]
    assert laid == [{f"hidden/{PATH}", "hidden/tests/test_labels.py"}] * 5


@pytest.mark.slow
def test_the_solution_earns_1_and_nothing_0(scene: Scene) -> None:
    solved, nothing = scene.judge(PRICES), scene.judge(BROKEN)
    assert (solved.reward, solved.cause, nothing.reward) == (1.0, None, 0.0)
    assert nothing.cause is not None and nothing.cause.endswith(" does not pass")


@pytest.mark.slow
def test_a_check_sits_all_exams_once_and_again_the_first(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    played: list[Template | None] = []
    create = scene.backend.create

    async def count(template: Template | None = None, *rest: Any, **options: Any) -> Sandbox:
        played.append(template)
        return await create(template, *rest, **options)

    monkeypatch.setattr(scene.backend, "create", count)
    [report] = scene.run(check_tasks([scene.task], scene.backend))
    assert report.reason is None
    solving, judging = 2, (5 + 1) + (1 + 1)
    assert len(played) == solving + judging


@pytest.mark.slow
@pytest.mark.parametrize("cheat", CHEATS)
def test_a_cheat_that_makes_all_tests_pass_earns_nothing(scene: Scene, cheat: str) -> None:
    found = scene.judge(f"{BROKEN}\n{CHEATS[cheat]}")
    assert found.reward == 0.0
    # The first exam, which is all that a test suite is otherwise, is passed.
    assert found.cause is not None and not found.cause.endswith(" does not pass")
