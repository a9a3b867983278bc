"""No hack earns a reward on any task, and a right solution with harmless additions earns the full reward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from etude.sandbox.local.doctor import find_problems
from tests.adversary.escape.launching import Run, why_not
from tests.adversary.hack_tables import HACKS
from tests.adversary.hack_tasks import tasks_of
from tests.adversary.hacks import Hack
from tests.adversary.stage import Stage

pytestmark = pytest.mark.skipif(bool(find_problems()), reason="; ".join(find_problems()) or "local works")


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    made = Stage()
    yield made
    made.close()


@pytest.mark.slow
@pytest.mark.parametrize("hack", HACKS, ids=lambda hack: hack.name)
def test_a_hack_is_paid_nowhere(stage: Stage, hack: Hack) -> None:
    verdicts = {task.id: stage.grade(task, hack) for task in tasks_of(hack.tasks)}
    assert len(verdicts) >= 3
    assert [name for name, verdict in verdicts.items() if verdict.passed] == []


@pytest.fixture(scope="module")
def plain_run(request: pytest.FixtureRequest) -> Iterator[Run]:
    """The selected hacks, played by a process of a plain user."""
    reason = why_not("plain")
    if reason is not None:
        pytest.skip(reason)
    selected: list[Any] = [
        item.callspec.params["hack"]
        for item in request.session.items
        if isinstance(item, pytest.Function) and "plain_run" in item.fixturenames
    ]
    run = Run("plain", "local", "hacks", [hack.name for hack in selected], "tests.adversary.hack_run")
    yield run
    run.close()


BY_PLAIN = [
    pytest.param(hack, id=hack.name, marks=() if number % 10 == 0 else pytest.mark.repeated)
    for number, hack in enumerate(HACKS)
]
"""The same verdicts as root's sandboxes give: one in ten shows that a plain user's come to them."""


@pytest.mark.slow
@pytest.mark.parametrize("hack", BY_PLAIN)
def test_a_hack_is_paid_nowhere_by_a_plain_users_sandboxes(plain_run: Run, hack: Hack) -> None:
    outcome = plain_run.outcomes().get(hack.name)
    assert outcome is not None, plain_run.log
    assert outcome.verdict == "held", outcome.detail


@pytest.mark.slow
@pytest.mark.parametrize("hack", [hack for hack in HACKS if hack.harmless], ids=lambda hack: hack.name)
def test_the_same_acts_beside_a_right_solution_are_paid(stage: Stage, hack: Hack) -> None:
    verdicts = {task.id: stage.grade(task, hack, is_control=True) for task in tasks_of(hack.tasks)}
    assert {name: verdict.cause for name, verdict in verdicts.items() if not verdict.passed} == {}


@pytest.mark.slow
@pytest.mark.parametrize("hack", [hack for hack in HACKS if hack.fools], ids=lambda hack: hack.name)
def test_a_hack_fools_a_grader_that_judges_in_place(stage: Stage, hack: Hack) -> None:
    assert any(stage.fools(task, hack) for task in tasks_of(hack.tasks))


def test_there_are_eighty_causes_and_half_of_them_are_from_the_docs() -> None:
    assert len(HACKS) == len({hack.name for hack in HACKS}) == len({hack.cause for hack in HACKS}) >= 80
    assert sum(hack.from_docs for hack in HACKS) * 2 >= len(HACKS)
