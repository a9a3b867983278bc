"""The order of changes follows the quotas, so that few candidates are in vain."""

from __future__ import annotations

from collections import Counter

from etude.environment.making.planning import Planner
from etude.environment.making.verifying import Noticed
from etude.tasks.making.changes import Quotas, TestFailure
from etude.tasks.making.undoing import PastChange

FUNCTIONS = 12
MODULE = "".join(
    f"def f{at}(a, b):\n    'Adds.'\n    if a < b and b:\n        a = a + b * {at}\n    return a - {at}\n\n\n"
    for at in range(FUNCTIONS)
)
TEST = "from lib import a\n\n" + "".join(
    f"def test_{at}():\n    assert a.g{at}(1) == 2\n\n" for at in range(60)
)


def search(planner: Planner, failures: dict[str, tuple[TestFailure, ...]], at_once: int = 1) -> None:
    """Has tests notice all that the planner gives, each by its own test, combinations by their parts'."""
    while batch := [one for _ in range(at_once) if (one := planner.next_change()) is not None]:
        for change in batch:
            at = len(failures)
            message = f"assert 1 == 2\n +  where 1 = a.g{at}(1)"
            own = (TestFailure(f"tests/test_a.py::test_{at}", message, 3 * at + 4),)
            failures[change.id] = sum((failures[part] for part in change.parts), ()) or own
            assert planner.add(change, Noticed(failures[change.id], (), 1)) is None


def test_candidates_come_with_their_share_of_combinations_and_no_function_has_too_many() -> None:
    past = PastChange({"lib/a.py": MODULE.replace("a < b and b", "a < b")}, {"lib/a.py": MODULE})
    quotas = Quotas(16, most_per_operator=0.3)
    planner = Planner({"lib/a.py": MODULE}, {"tests/test_a.py": TEST}, 0, quotas, [past])
    search(planner, {})
    assert 16 <= planner.num_found <= 22
    kept = planner.select()
    assert len(kept) >= 14 and not planner.selection.missed
    assert sum(one.is_compound for one in kept) * 4 >= len(kept)
    functions = Counter((place.path, place.name) for one in kept for place in one.change.places)
    assert max(functions.values()) <= quotas.most_per_function
    assert {"planted_bug", "past_change", "combined"} <= {one.change.kind for one in kept}


def test_single_bugs_do_not_take_the_places_of_combinations() -> None:
    planner = Planner({"lib/a.py": MODULE}, {"tests/test_a.py": TEST}, 0, Quotas(24, most_per_operator=1.0))
    search(planner, {}, at_once=6)  # so that more is found than the functions have places for
    kept = planner.select()
    assert len(kept) == 24 and sum(one.is_compound for one in kept) == 6


def test_what_turns_out_to_be_no_task_is_made_up_for() -> None:
    planner = Planner({"lib/a.py": MODULE}, {"tests/test_a.py": TEST}, 0, Quotas(8, most_per_operator=1.0))
    failures: dict[str, tuple[TestFailure, ...]] = {}
    search(planner, failures)
    first, num_tested = [one.change.id for one in planner.select()], len(failures)
    assert planner.reject(first[:3])
    search(planner, failures)
    second = [one.change.id for one in planner.select()]
    assert 3 <= len(failures) - num_tested <= 6
    assert not {*first[:3]} & {*second}
    assert len(second) >= len(first) == 8
    assert not planner.reject(())
    assert planner.next_change() is None, "there are enough"


def test_combinations_that_turn_out_to_be_no_tasks_are_made_up_for_by_combinations() -> None:
    planner = Planner({"lib/a.py": MODULE}, {"tests/test_a.py": TEST}, 0, Quotas(8, most_per_operator=1.0))
    failures: dict[str, tuple[TestFailure, ...]] = {}
    search(planner, failures)
    first = [one.change.id for one in planner.select() if one.is_compound]
    assert len(first) >= 2 and planner.reject(first)
    search(planner, failures)
    second = [one.change.id for one in planner.select() if one.is_compound]
    assert len(second) >= 2 and not {*first} & {*second}
    assert not planner.reject(())
