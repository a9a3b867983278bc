"""Past changes are reverted in the current text, hunk by hunk, where it has not changed since."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from etude.tasks.making.changes import Change, split_of
from etude.tasks.making.undoing import PastChange, plan_undone

BEFORE = '''"""Sums."""
import math


def total(values):
    result = 0
    for value in values:
        result += value
    return result


def mean(values):
    return total(values) / len(values)


def spread(values):
    return max(values) - min(values)
'''
AFTER = (
    BEFORE.replace("result += value", "if value > 0:\n            result += value")
    .replace("    return total", "    if not values:\n        return 0\n    return total")
    .replace("def spread(values):", "def spread(values: list[int]) -> int:")
    .replace("import math\n", "import math\nimport os\n")
)


def undone(before: str, after: str, present: str, path: str = "lib/sums.py") -> list[Change]:
    return list(plan_undone({path: present}, [PastChange({path: before}, {path: after})]))


def test_a_change_is_undone_as_a_whole_and_in_each_hunk_that_runs() -> None:
    whole, first, second = undone(BEFORE, AFTER, AFTER)
    assert whole.files == {"lib/sums.py": BEFORE}
    assert (whole.kind, whole.operator) == ("past_change", "undone change")
    assert [place.name for place in whole.places] == ["", "total", "mean", "spread"]
    assert first.files["lib/sums.py"] == AFTER.replace("if value > 0:\n            result", "result")
    assert second.files["lib/sums.py"] == AFTER.replace("    if not values:\n        return 0\n", "")
    assert {first.operator, second.operator} == {"dropped hunk"}
    lines = AFTER.split("\n")
    assert [lines[place.first_line - 1].strip() for place in (*first.places, *second.places)] == [
        "if value > 0:",
        "if not values:",
    ]


def test_what_changed_elsewhere_since_stays_and_a_hunk_that_was_changed_again_is_left_out() -> None:
    present = '"""Sums and more."""\nX = 1\n' + AFTER.removeprefix('"""Sums."""\n').replace("> 0", "> 1")
    changes = undone(BEFORE, AFTER, present)
    hunks = [one for one in changes if one.operator == "dropped hunk"]
    assert [one.places[0].name for one in hunks] == ["mean"]
    assert hunks[0].files["lib/sums.py"] == present.replace("    if not values:\n        return 0\n", "")
    assert all("> 1" in one.files["lib/sums.py"] for one in changes)


def test_a_module_that_a_change_added_is_missing_without_it() -> None:
    sources = {"lib/sums.py": AFTER}
    [change] = plan_undone(sources, [PastChange({}, sources)])
    assert change.files == {"lib/sums.py": ""}
    assert list(plan_undone({"lib/sums.py": BEFORE}, [PastChange({}, sources)])) == []


def test_a_change_over_two_splits_is_undone_in_one_at_a_time() -> None:
    paths = ["lib/m0.py", "lib/m1.py", "lib/m2.py", "lib/m4.py"]
    assert len({split_of(path) for path in paths}) > 1
    past = PastChange(dict.fromkeys(paths, BEFORE), dict.fromkeys(paths, AFTER))
    changes = list(plan_undone(dict.fromkeys(paths, AFTER), [past]))
    assert all(len({split_of(path) for path in one.files}) == 1 for one in changes)
    assert {path for one in changes for path in one.files} == set(paths)
    assert len({one.id for one in changes}) == len(changes)


def test_tests_texts_alone_and_what_is_no_python_make_no_changes() -> None:
    assert undone(BEFORE, AFTER, AFTER, "tests/test_sums.py") == []
    assert undone('"""A."""\nx = 1\n', '"""B."""\nx = 1\n', '"""B."""\nx = 1\n') == []
    assert undone("def f(:\n", "x = 1\n", "x = 1\n") == []


TEXTS = st.lists(st.integers(0, 3), max_size=12).map(
    lambda rows: "".join(f"x{row} = {row}\n" for row in rows)
)


@settings(max_examples=60, deadline=None)
@given(TEXTS, TEXTS, st.integers(0, 12))
def test_undoing_a_whole_change_gives_what_was_before_and_keeps_lines_that_came_since(
    before: str, after: str, at: int
) -> None:
    past = [PastChange({"a.py": before}, {"a.py": after})]
    found = {one.files["a.py"] for one in plan_undone({"a.py": after}, past)}
    assert after == before or after == "" or before in found or len(found) == 0
    lines = after.split("\n")[:-1]
    later = "\n".join([*lines[:at], "later = 1", *lines[at:], ""])
    for change in plan_undone({"a.py": later}, past):
        assert "later = 1\n" in change.files["a.py"]
