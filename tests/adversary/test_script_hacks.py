"""No cheat on `tests/test.sh` earns a reward, before or during it, with exams or a separate verifier."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from _pytest.mark import ParameterSet

from etude.sandbox.local.doctor import find_problems
from tests.adversary.hacks import Hack
from tests.adversary.hacks_exams import EXAMS
from tests.adversary.hacks_scripts import IMAGE, READ_ONLY, SEPARATE
from tests.adversary.script_tasks import KINDS, script_task
from tests.adversary.stage import Stage

pytestmark = pytest.mark.skipif(bool(find_problems()), reason="; ".join(find_problems()) or "local works")

SCRIPT_HACKS = (*READ_ONLY, *IMAGE, *SEPARATE, *EXAMS)
NOTHING = Hack("nothing", "")
_DEFAULT = ("answer_by_roundabout_link", "reward_linked_to_graded", "artifact_climbs")
"""Those that `make test` plays; `benchmarks/adversary.py` plays all."""


def cases(hacks: Sequence[Hack]) -> list[ParameterSet]:
    others = (pytest.mark.slow, pytest.mark.repeated)
    return [pytest.param(hack, id=hack.name, marks=() if hack.name in _DEFAULT else others) for hack in hacks]


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """Its images are nobody else's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        script_task.cache_clear()
        script_task("image")  # a backend has images that are there as it opens
        made = Stage()
        yield made
        made.close()
        script_task.cache_clear()


@pytest.mark.parametrize("hack", cases(SCRIPT_HACKS))
def test_a_cheat_on_a_script_is_paid_nowhere(stage: Stage, hack: Hack) -> None:
    verdict = stage.grade(script_task(hack.tasks), hack)
    assert not verdict.passed and not verdict.reward


@pytest.mark.parametrize("hack", cases([hack for hack in SCRIPT_HACKS if hack.harmless]))
def test_the_same_acts_beside_a_solution_are_paid(stage: Stage, hack: Hack) -> None:
    verdict = stage.grade(script_task(hack.tasks), hack, is_control=True)
    assert (verdict.reward, verdict.cause) == (1.0, None)


@pytest.mark.parametrize("hack", cases([hack for hack in SCRIPT_HACKS if hack.fools]))
def test_a_cheat_fools_a_grader_that_runs_the_script_in_place(stage: Stage, hack: Hack) -> None:
    assert stage.fools(script_task(hack.tasks), hack)


@pytest.mark.slow
@pytest.mark.repeated
@pytest.mark.parametrize("name", [*KINDS, "exams"])
def test_a_solution_is_paid_by_the_script_and_nothing_is_not(stage: Stage, name: str) -> None:
    task = script_task(name)
    solved, nothing = stage.grade(task, NOTHING, is_control=True), stage.grade(task, NOTHING)
    assert (solved.reward, solved.cause, nothing.reward) == (1.0, None, 0.0)


def test_there_are_forty_causes_of_cheats_on_scripts() -> None:
    assert len(SCRIPT_HACKS) == len({hack.name for hack in SCRIPT_HACKS}) >= 40
    assert len({hack.cause for hack in SCRIPT_HACKS}) == len(SCRIPT_HACKS)
