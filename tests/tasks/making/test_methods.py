"""Attributes of its class that a test method uses become plain names."""

from __future__ import annotations

import ast

import pytest

from etude.tasks.making.changes import TestFailure
from etude.tasks.making.symptoms import Symptom, find_symptom

TEST = """import unittest
from lib import Box, clamp

limit = 1


class Base:
    SIZE = 2

    def _make(self, *names, **more):
        return Box(*names, size=self.SIZE, **more)


class TestBox(Base, unittest.TestCase):
    low, high = 1, 2

    def setUp(self):
        super().setUp()
        self.box = self._make("a")
        self.other = self._make("b")

    @staticmethod
    def twice(value):
        return 2 * value

    @property
    def first(self):
        return self.box.first()

    def limit(self):
        return 3

    def _again(self, count):
        return self._again(count - 1) if count else self.box

    def _fill(self):
        self.box = self._make("d")
        return self.box

    def _named(self, other):
        return clamp(other, self.other)

    def test_fill(self):
        assert self._fill().first() == 1

    def test_named(self):
        assert self._named(2) == 1

    def test_helper(self):
        made = self._make("c", depth=1)
        self.assertEqual(made.first(), 2)

    def test_setup(self):
        self.box.put(self.twice(3))
        self.assertEqual(self.box.first(), 6)

    def test_recursive(self):
        assert self._again(1).first() == 6

    def test_low(self):
        assert clamp(self.low) == 1

    def test_first(self):
        assert clamp(self.first) == 1

    def test_limit(self):
        assert clamp(self.limit()) == limit

    def test_elsewhere(self):
        assert clamp(self.port) == 1
"""


def find(name: str, at: str, message: str = "AssertionError: assert 3 == 2") -> Symptom | None:
    """The symptom of a failure in the line of a method that begins with `at`."""
    lines = TEST.split("\n")
    start = next(n for n, line in enumerate(lines) if f"def {name}(" in line)
    line = next(n for n in range(start, len(lines)) if lines[n].strip().startswith(at)) + 1
    return find_symptom(TestFailure(f"t.py::TestBox::{name}", message, line, None, "t.py"), {"t.py": TEST})


def run(found: Symptom) -> list[str]:
    """What a script builds, in its own words: it runs beside a box that notes how it was made."""
    made: list[str] = []

    class Box:
        def __init__(self, *names: str, **more: int) -> None:
            made.append(f"{names} {more}")

        def put(self, value: int) -> None:
            made.append(f"put {value}")

        def first(self) -> int:
            return 3

    script = "\n".join(line for line in found.script.split("\n") if "from lib" not in line)
    exec(compile(f"{script}\n{found.call}", "script", "exec"), {"Box": Box})
    return made


def test_a_helper_of_the_class_becomes_a_function_with_what_it_uses_itself() -> None:
    found = find("test_helper", "self.assertEqual")
    assert found is not None and (found.call, found.wanted) == ("made.first()", "`2`")
    assert "self" not in found.script and "_make" not in found.script
    assert run(found)[-1] == "('c',) {'size': 2, 'depth': 1}"


def test_what_runs_before_each_test_runs_first_as_far_as_it_matters() -> None:
    found = find("test_setup", "self.assertEqual", "AssertionError: 3 != 6")
    assert found is not None and found.call == "box.first()"
    assert run(found)[-1] == "put 6" and "('a',) {'size': 2}" in run(found)
    ast.parse(found.script)


def test_helpers_may_call_themselves() -> None:
    found = find("test_recursive", "assert")
    assert found is not None and found.call == "again(1).first()" and run(found)


@pytest.mark.parametrize(
    "name", ["test_low", "test_first", "test_limit", "test_elsewhere", "test_fill", "test_named"]
)
def test_what_is_not_known_or_rebound_or_whose_name_is_taken_is_no_symptom(name: str) -> None:
    assert find(name, "assert") is None
