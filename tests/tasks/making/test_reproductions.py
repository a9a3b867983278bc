"""Symptoms are described by self-contained scripts with the values of the failing test."""

from __future__ import annotations

import ast
import textwrap

import pytest

from etude.tasks.making.changes import TestFailure
from etude.tasks.making.deletions import hide_tests
from etude.tasks.making.symptoms import Symptom, find_symptom

TEST = """import io
from functools import partial

import pytest
from lib import Box, clamp

LIMIT = 3


def double(value):
    return 2 * value


@pytest.fixture
def make_box():
    return partial(Box, size=2)


@pytest.fixture
def box(make_box):
    return make_box(name="a")


@pytest.fixture(params=["x", "y"])
def named(request):
    return Box(request.param, 1)


@pytest.fixture(autouse=True)
def quiet():
    with io.StringIO() as out:
        yield out


@pytest.fixture
def odd(tmp_path):
    yield tmp_path
    tmp_path.rmdir()


@pytest.mark.parametrize(("low", "make"), [(1, list), pytest.param(2, lambda: [7], id="b")])
def test_rows(low, make):
    assert clamp(low, make()) != 4


class TestBox:
    def test_put(self, box):
        box.put(1)
        unused = clamp(0, 1)
        assert unused == 1
        box.put(LIMIT)
        assert box.first() == 1

    def test_full(self, box):
        box.put(1)
        with pytest.raises(ValueError):
            box.put(2)
            box.put(double(3))

    def test_named(self, named):
        assert "x" in named.names()

    def test_own(self):
        assert self.box.first()

    def test_odd(self, odd):
        assert clamp(odd, 1)

    def test_loop(self):
        for value in (1, 2):
            assert clamp(value, 3) < 2


    def test_set(self, box):
        box.limit = 3
        box.rest = box.take(1)

    def test_return(self, box):
        if not box.first():
            return
        assert box.first() == 2


class TestOld:
    def test_equal(self):
        box = Box("a", 1)
        self.assertEqual(box.first(), None)
"""
MAKE_BOX, BOX, NAMED, QUIET = (
    TEST[: TEST.index(f"def {name}(")].count("\n") for name in ("make_box", "box", "named", "quiet")
)
FIXTURES = {"make_box": ("t.py", MAKE_BOX), "box": ("t.py", BOX), "named": ("t.py", NAMED)}


def find(name: str, at: str, message: str, **more: object) -> Symptom | None:
    """The symptom of a failure in the line that begins with `at`."""
    lines, function = TEST.split("\n"), name.rpartition("::")[2].partition("[")[0]
    start = next(n for n, line in enumerate(lines) if f"def {function}(" in line)
    line = next(n for n in range(start, len(lines)) if lines[n].strip().startswith(at)) + 1
    failure = TestFailure(f"t.py::{name}", message, line, None, "t.py", **{"fixtures": FIXTURES, **more})  # type: ignore
    return find_symptom(failure, {"t.py": TEST})


def test_fixtures_are_written_by_their_bodies_and_only_what_matters_runs_first() -> None:
    found = find("TestBox::test_put", "assert box", "assert 3 == 1\n +  where 3 = first()")
    assert found is not None
    assert (found.kind, found.call, found.seen, found.wanted) == ("wrong value", "box.first()", "`3`", "`1`")
    assert (
        found.script.split("\n")
        == [
            "from functools import partial",
            "from lib import Box",
            "LIMIT = 3",
            "make_box = partial(Box, size=2)",
            "box = make_box(name='a')",
            "box.put(1)",
            "box.put(LIMIT)",
        ]
        or "unused" not in found.script
    )
    ast.parse(f"{found.script}\n{found.call}")


def test_parametrized_arguments_have_the_values_of_the_failing_test() -> None:
    found = find(
        "test_rows[b]", "assert", "assert 4 != 4", values={"low": "2"}, indices={"low": 1, "make": 1}
    )
    assert found is not None
    assert (found.kind, found.call) == ("untrue", "clamp(2, (lambda: [7])()) != 4")
    assert found.script == ""


def test_a_fixture_with_parameters_has_the_one_of_the_failing_test() -> None:
    found = find("TestBox::test_named[x]", "assert", "assert 'x' in []", indices={"named": 0})
    assert found is not None and found.call == "'x' in Box('x', 1).names()"


def test_of_an_exception_that_is_missing_the_last_call_is_told_and_the_others_run_first() -> None:
    found = find("TestBox::test_full", "box.put(double", "Failed: DID NOT RAISE <class 'ValueError'>")
    assert found is not None and (found.kind, found.call) == ("not raised", "box.put(double(3))")
    assert found.script.split("\n")[-2:] == ["box.put(1)", "box.put(2)"] and "def double" in found.script


def test_a_fixture_that_is_always_at_work_is_part_of_the_script() -> None:
    fixtures = {**FIXTURES, "quiet": ("t.py", QUIET)}
    found = find("TestBox::test_put", "assert box", "assert 3 == 1", fixtures=fixtures)
    assert found is not None and found.is_statement
    assert found.call.split("\n")[0] == "with io.StringIO() as out:"
    assert found.call.split("\n")[-1] == "    assert box.first() == 1"
    ast.parse(textwrap.dedent(f"{found.script}\n{found.call}"))


def test_what_fails_in_a_loop_is_told_as_a_whole() -> None:
    found = find("TestBox::test_loop", "assert", "assert 2 < 2")
    assert found is not None and found.is_statement and found.call.startswith("for value in (1, 2):")


@pytest.mark.parametrize(
    ("at", "call"), [("box.limit", "box.limit = 3"), ("box.rest", "box.take(1)")], ids=["setter", "call"]
)
def test_of_an_assignment_that_raises_its_call_is_told_or_all_of_it(at: str, call: str) -> None:
    found = find("TestBox::test_set", at, "ValueError: too low")
    assert found is not None and (found.kind, found.call) == ("raises", call)
    assert "box = make_box(name='a')" in found.script


def test_assertions_of_unittest_are_read_like_others() -> None:
    found = find("TestOld::test_equal", "self.assertEqual", "AssertionError: 1 != None")
    assert found is not None and (found.call, found.seen, found.wanted) == (
        "Box('a', 1).first()",
        "`1`",
        "`None`",
    )


@pytest.mark.parametrize(
    ("name", "at"),
    [("TestBox::test_own", "assert"), ("TestBox::test_odd", "assert"), ("TestBox::test_return", "assert")],
)
def test_what_only_the_test_knows_is_no_symptom(name: str, at: str) -> None:
    assert find(name, at, "assert 0\n +  where 0 = f()") is None


def test_failing_tests_are_taken_out_and_all_else_stays() -> None:
    ids = ["t.py::test_rows[b]", "t.py::TestBox::test_put", "t.py::TestOld::test_equal"]
    hidden = hide_tests({"t.py": TEST}, [TestFailure(one, "") for one in ids])
    assert hidden is not None
    text = hidden["t.py"]
    ast.parse(text)
    assert not any(name in text for name in ("test_rows", "test_put", "test_equal", "parametrize"))
    assert (
        text.startswith(TEST.partition("LIMIT")[0])
        and "def test_full" in text
        and "class TestOld:\n    pass" in text
    )
    assert hide_tests({"t.py": TEST}, [TestFailure("t.py::test_gone", "")]) is None


def test_a_failing_test_is_taken_out_of_every_branch_that_defines_it() -> None:
    branches = "import sys\nif sys.argv:\n    def test_a(): assert 1\nelse:\n    def test_a(): assert 2\n"
    hidden = hide_tests({"t.py": branches}, [TestFailure("t.py::test_a", "")])
    assert hidden is not None
    assert hidden["t.py"] == "import sys\nif sys.argv:\n    pass\nelse:\n    pass\n"


TWICE = """class Base:
    def test_same(self):
        assert self.box


class TestOne(Base):
    def test_first(self):
        assert 1

    def test_same(self):
        assert 2


class TestTwo(Base):
    def test_other(self):
        assert 3


def test_same():
    assert 4


test_alias = test_same
"""


@pytest.mark.parametrize(
    ("test", "function", "gone"),
    [
        ("TestOne::test_same[a::b]", "TestOne.test_same", "assert 2"),
        ("TestOne::test_same", "", "assert 2"),
        ("TestTwo::test_same", "Base.test_same", "assert self.box"),
        ("test_same", "test_same", "assert 4"),
    ],
)
def test_tests_of_the_same_name_in_other_classes_stay(test: str, function: str, gone: str) -> None:
    hidden = hide_tests({"t.py": TWICE}, [TestFailure(f"t.py::{test}", "", function=function)])
    assert hidden is not None
    lines = [line.strip() for line in TWICE.split("\n") if "assert" in line]
    assert [line for line in lines if line not in hidden["t.py"]] == [gone]


@pytest.mark.parametrize("function", ["test_same", "make.<locals>.test_alias"])
def test_a_test_that_is_another_function_under_its_name_is_not_taken_out(function: str) -> None:
    assert hide_tests({"t.py": TWICE}, [TestFailure("t.py::test_alias", "", function=function)]) is None
