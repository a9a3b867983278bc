"""A script keeps every earlier call that could have changed what failed, also those in assertions."""

from __future__ import annotations

import textwrap

import pytest

from etude.tasks.making.changes import TestFailure
from etude.tasks.making.symptoms import Symptom, find_symptom

HEAD = "import pytest\nfrom lib import Cache, Names, clamp, counter\n\n\n"


def find(body: str, message: str = "assert 2 == 1", head: str = "def test_it():") -> Symptom | None:
    """The symptom of a test that fails in its last line."""
    text = f"{HEAD}{head}\n{textwrap.indent(body, '    ')}"
    line = text.count("\n") + 1
    name = head.partition("def ")[2].partition("(")[0]
    return find_symptom(TestFailure(f"t.py::{name}", message, line), {"t.py": text})


@pytest.mark.parametrize(
    ("body", "before", "call"),
    [
        (
            'cache = Cache()\nassert cache.put("a", 1) is None\nassert cache.get("a") == 1',
            ["cache = Cache()", "cache.put('a', 1)"],
            "cache.get('a')",
        ),
        (
            "names = Names()\nassert names.sort() is None\nassert names.first() == 1",
            ["names = Names()", "names.sort()"],
            "names.first()",
        ),
        (
            'c = Cache()\nassert c.set("k", 5)\nassert c.value("k") == 1',
            ["c = Cache()", "c.set('k', 5)"],
            "c.value('k')",
        ),
        (
            "names = []\nassert clamp(names, 3) == 3\nassert clamp(1, 2) == 2\nassert len(names) == 1",
            ["names = []", "clamp(names, 3)"],
            "len(names)",
        ),
        (
            "c = Cache()\nwas = c.put(1)\nassert c.get(1) == 1",
            ["c = Cache()", "was = c.put(1)"],
            "c.get(1)",
        ),
        (
            "c = Cache()\nnames = c.names\nassert names.sort() is None\nassert c.get(1) == 1",
            ["c = Cache()", "names = c.names", "names.sort()"],
            "c.get(1)",
        ),
        (
            "count = counter()\nassert count() == 1\nassert count() == 1",
            ["count = counter()", "count()"],
            "count()",
        ),
        (
            "c = Cache()\nassert c.one() and c.two()\nassert 1 < c.pop() < 3\nassert c.get() == 1",
            ["c = Cache()", "c.one() and c.two()", "1 < c.pop() < 3"],
            "c.get()",
        ),
        (
            "c = Cache()\nwith pytest.raises(KeyError):\n    c.drop(1)\nassert c.get() == 1",
            ["c = Cache()", "with pytest.raises(KeyError):", "    c.drop(1)"],
            "c.get()",
        ),
    ],
)
def test_what_may_have_changed_it_runs_first(body: str, before: list[str], call: str) -> None:
    found = find(body)
    assert found is not None and (found.call, found.seen, found.wanted) == (call, "`2`", "`1`")
    assert [line for line in found.script.split("\n") if " import " not in f" {line}"] == before


def test_calls_of_a_unittest_assertion_run_first_and_its_other_assertions_are_kept_from_a_script() -> None:
    head = "class TestIt:\n  def test_it(self):"
    found = find("c = Cache()\nself.assertEqual(c.put(1), None)\nassert c.get(1) == 1", head=head)
    assert found is not None and found.script.endswith("c = Cache()\nc.put(1)")
    # What calls something of the test's own, or must raise, cannot be told without the test.
    for row in ("self.assertRaises(KeyError, c.drop, 1)", "self.assertFull(c)"):
        assert find(f"c = Cache()\n{row}\nassert c.get(1) == 1", head=head) is None


def test_what_has_no_part_in_it_is_left_out() -> None:
    found = find("assert clamp(0, 1) == 1\nother = Cache()\nassert other.get()\nassert clamp(1, 2) == 1")
    assert found is not None and (found.script, found.call) == ("", "clamp(1, 2)")


def test_too_long_a_script_is_no_symptom() -> None:
    calls = "".join(f"assert c.put({number}) is None\n" for number in range(20))
    assert find(f"c = Cache()\n{calls}assert c.get(1) == 1") is None


def test_an_exception_is_told_of_both_sides_where_either_may_have_raised_it() -> None:
    found = find("assert len([1]) == clamp(1)", "TypeError: missing")
    assert found is not None and found.call == "assert len([1]) == clamp(1)"
