"""Hidden tests are cut so that nothing expected enters, and judged as Python would judge them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.environment.hidden_tests import Opaque, decode_value, split_tests
from etude.errors import TaskError
from etude.sandbox.inside.testrunner import encode_value, run_probe_files, run_test_files
from etude.sandbox.types import ProbeResult

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text() | st.integers(), inner, max_size=4)
        | st.sets(st.integers() | st.text(), max_size=4)
    ),
    max_leaves=12,
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=12,
)


class OneFile:
    """A workspace of one file."""

    def __init__(self, text: str) -> None:
        self.text = text

    def read(self, path: str) -> str | None:
        return self.text if path == "t.py" else None

    def is_dir(self, path: str) -> bool:
        return False

    def entries(self, path: str) -> list[str]:
        return []


def judge(text: str) -> list[str | None]:
    """Reasons of failure of each test of a file, by probing."""
    file = split_tests("t.py", text, frozenset({"lib"}))
    run = run_probe_files(OneFile(file.probe), ["t.py"])
    found = {
        name: ProbeResult(path, name, tuple(values), error) for path, name, values, error in run["results"]
    }
    return [file.judge(found.get(test.name), test) for test in file.tests]


@given(PLAIN)
def test_plain_values_cross_unchanged(value: object) -> None:
    back = decode_value(encode_value(value))
    assert back == value
    assert type(back) is type(value)


@given(JSON)
def test_hostile_values_never_raise(value: object) -> None:
    decode_value(value)


@pytest.mark.parametrize("value", ["10 ** 5000", "[10 ** 5000]"])
def test_a_number_of_more_digits_than_python_writes_out_fails_as_any_other(value: str) -> None:
    reasons = judge(f"def test_a():\n    assert {value} == 3\ndef test_b():\n    assert 1 == 2\n")
    assert reasons == ["assertion in line 2 does not hold", "1 != 2"]


def test_what_is_no_plain_data_equals_nothing() -> None:
    opaque = decode_value(encode_value(object()))
    assert isinstance(opaque, Opaque)
    assert opaque != opaque


def test_subclasses_cross_as_the_plain_value_they_extend() -> None:
    class Yes(int):
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = int.__hash__

    assert decode_value(encode_value(Yes(3))) == 3
    assert decode_value(encode_value(Yes(3))) != 4


ASKING = "from lib.f import f\ndef test_a():\n"


def test_expected_values_comments_messages_and_docstrings_stay_outside() -> None:
    text = (
        '"""module 9001"""\n' + ASKING + '    """doc 9002"""\n'
        "    assert f(1) == 9003, 'message 9004'  # comment 9005\n"
        "    assert [9006, {'k': -9007}] == f(2)\n"
        "    assert f(3) == (9008, 3)\n"
    )
    file = split_tests("t.py", text, frozenset({"lib"}))
    assert not [n for n in range(9001, 9009) if str(n) in file.probe]
    assert file.keeps_secret(file.tests[0])


@pytest.mark.parametrize(
    ("assertion", "is_secret"),
    [
        ("f(2) == 0", True),  # what anybody could guess is worth no more than an answer that was guessed
        ("f(2).g(x=[1]) is None", True),
        ("same(f, 2, 3) == True", False),  # here it would be worth a whole comparison
        ("f(2) - 3 == 0", False),
        ("f(2) != 3", False),
        ("f(2)", False),
        ("len(f(2)) == 7", True),
    ],
)
def test_what_anybody_would_guess_is_a_secret_only_as_an_answer(assertion: str, is_secret: bool) -> None:
    file = split_tests("t.py", f"{ASKING}    assert {assertion}\n", frozenset({"lib"}))
    assert file.keeps_secret(file.tests[0]) is is_secret


def test_a_module_that_a_hidden_file_replaces_is_not_under_test() -> None:
    file = split_tests(
        "t.py", f"{ASKING}    assert f(2) == True\n", frozenset({"lib"}), frozenset({"lib/f.py"})
    )
    assert not file.keeps_secret(file.tests[0])


ASSERTIONS = [
    ("f(2) == 2", True), ("f(2) == 3", False), ("3 == f(2)", False), ("f(2) != 3", True),
    ("f(2) != 2", False),
    ("f(2) < 3", True), ("3 < f(2)", False), ("f(2) >= 2", True), ("f(None) is None", True),
    ("f(0) is None", False), ("f(0) is not None", True), ("f(True) is True", True), ("f(1) is True", False),
    ("f(2) in [1, 2]", True), ("f(2) not in [1, 2]", False), ("2 in f([1, 2])", True), ("5 in f([1])", False),
    ("f(1)", True), ("f(0)", False), ("not f(0)", True), ("not f(1)", False), ("f(1) == f(1)", True),
    ("f(1) == f(2)", False), ("0 < f(1) < 2", True), ("f(1) == 1 and f(2) == 2", True),
    ("f(1) == 1 and f(2) == 3", False), ("f(0) or f(1)", True), ("f({1: (2, 3)}) == {1: (2, 3)}", True),
    ("f([1]) == (1,)", False), ("f('a') == 'a'", True), ("f(1.5) == 1.5", True), ("f(2) < 'a'", False),
]  # fmt: skip


@pytest.mark.parametrize(("assertion", "holds"), ASSERTIONS)
def test_probing_and_running_agree(assertion: str, holds: bool) -> None:
    text = f"def f(x): return x\n\ndef test_a():\n    assert {assertion}\n"
    assert (judge(text) == [None]) is holds
    assert (run_test_files(OneFile(text), ["t.py"])["passed"] == ["test_a"]) is holds


def test_failed_equalities_read_the_same_both_ways() -> None:
    text = "def test_a():\n    assert 1 + 1 == 3\n"
    assert judge(text) == ["2 != 3"]
    assert run_test_files(OneFile(text), ["t.py"])["failed"] == [["test_a", "2 != 3"]]


def test_a_test_that_ends_before_its_last_assertion_fails() -> None:
    file = split_tests("t.py", "def test_a():\n    for i in range(2):\n        pass\n    assert 1 + 1 == 2\n")
    ended = ProbeResult("t.py", "test_a", (), None)
    assert file.judge(ended, file.tests[0]) == "test_a ended before line 4"
    assert judge("def test_a():\n    assert 1 == 1\n    raise KeyError(4)\n") == ["KeyError: 4"]


def test_assertions_within_other_statements_run_as_they_are() -> None:
    text = (
        "def test_a():\n"
        "    try:\n        int('x')\n        assert False\n    except ValueError:\n        pass\n"
        "    if 1 > 2:\n        assert 1 == 2\n"
        "    assert 1 == 1\n"
        "def test_b():\n"
        "    for i in (1, 2):\n        assert i == 1\n"
        "def test_c():\n"
        "    if 1 < 2:\n        return\n"
        "    assert False\n"
    )
    assert judge(text) == [None, "AssertionError", None]


def test_a_missing_result_or_a_foreign_record_fails() -> None:
    file = split_tests("t.py", "def test_a():\n    assert 1 == 1\n")
    (test,) = file.tests
    assert file.judge(None, test) == "not run"
    for row in (
        [],
        [["int", "7"], ["int", "1"]],
        "x",
        [["int", "-1"], ["int", "1"]],
        [["str", "0"], ["int", "1"]],
    ):
        assert file.judge(ProbeResult("t.py", "test_a", (row,), None), test) is not None


@pytest.mark.parametrize(
    "text",
    [
        "def test_a(:\n",
        "x = 1\n",
        "assert True\n",
        "async def test_a():\n    pass\n",
        "def test_a(): pass\n" * 2,
        "def test_a():\n    assert f() == " + "-" * 20_000 + "1\n",
        "def test_a():\n    assert f() == 0" + " + 1" * 20_000 + "\n",
        "def test_a():\n    assert f() == " + "[" * 150 + "]" * 150 + "\n    x = " + "(" * 300 + ")" * 300,
    ],
)
def test_files_that_cannot_be_graded_are_the_tasks_fault(text: str) -> None:
    with pytest.raises(TaskError):
        split_tests("t.py", text)


@pytest.mark.parametrize("kind", ["set", "dict"])
def test_numbers_that_all_have_one_hash_are_no_plain_data(kind: str) -> None:
    """Agents can choose them; a set of all that fit into a report would take many minutes to make."""

    def encoded(step: int) -> Any:
        numbers = [["int", format(step * number, "x")] for number in range(1, 300)]
        return [kind, numbers if kind == "set" else [[number, ["none", 0]] for number in numbers]]

    assert isinstance(decode_value(encoded(2**61 - 1)), Opaque)
    found = decode_value(encoded(2**61))
    assert isinstance(found, (set, dict)) and set(found) == {2**61 * number for number in range(1, 300)}


def test_a_limit_that_a_value_meets_is_named() -> None:
    nested = "def test_a():\n    x = 7\n    for _ in range(99):\n        x = [x]\n    assert x == [7]\n"
    assert judge(nested) == ["<a value nested deeper than 50 levels> != [7]"]
    alike = "def test_a():\n    x = {n * (2**61 - 1) for n in range(1, 200)}\n    assert x == {7}\n"
    assert judge(alike) == ["<a set of more than 100 items of one hash> != {7}"]


@pytest.mark.parametrize("expected", ["[" * 60 + "]" * 60, "1j", "...", "{n * M for n in S}"])
def test_an_expectation_that_cannot_cross_is_compared_inside(expected: str) -> None:
    """Else a right answer would fail: its value would arrive as none that equals anything."""
    alike = ", ".join(str(n * (2**61 - 1)) for n in range(1, 200))
    expected = expected.replace("{n * M for n in S}", f"{{{alike}}}")
    text = f"def test_a():\n    x = {expected}\n    assert x == {expected}\n    assert {expected} == x\n"
    assert judge(text) == [None]
