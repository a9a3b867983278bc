"""An instruction tells the symptom, names what tests need, and shares no code with the fix."""

from __future__ import annotations

import pytest

from etude.tasks.making.changes import Change, ChangeKind, Place, TestFailure
from etude.tasks.making.instructions import RUN_LENGTH, Instruction, find_refusal, write_instruction
from etude.tasks.making.tokens import code_tokens, runs

OWN = '''def clamp(value, low, high):
    """Keep a value within limits."""
    if low > high:
        raise ValueError("limits are reversed")
    return max(low, min(value, high))
'''
TEST = """import pytest
from lib.a import clamp


def test_low():
    limit = 3
    assert clamp(1, limit, 5) == 3


def test_truth():
    assert clamp(1, 3, 5)


def test_reversed():
    with pytest.raises(ValueError, match="limits are reversed"):
        clamp(1, 5, 3)


def test_fixture(given):
    assert clamp(given, 3, 5) == 3
"""
BROKEN = OWN.replace("max(low", "min(low")


def change(text: str, kind: str = "planted_bug", own: str = OWN) -> Change:
    return Change(kind, "wrong method", {"lib/a.py": text}, (Place("lib/a.py", "clamp", 1, 5),))  # pyright: ignore


def failure(name: str, line: int, message: str) -> TestFailure:
    return TestFailure(f"tests/test_a.py::{name}", message, line)


def write(
    text: str, *failures: TestFailure, seed: int = 0, kind: str = "planted_bug", test: str = TEST, **more
):
    sources = {"lib/a.py": OWN}
    return write_instruction(change(text, kind), sources, {"tests/test_a.py": TEST}, failures, seed, **more)


def said(text: str, *failures: TestFailure, kind: ChangeKind = "planted_bug", seed: int = 0) -> str:
    found = write(text, *failures, kind=kind, seed=seed)
    assert isinstance(found, Instruction)
    return found.text


LOW = failure("test_low", 7, "AssertionError: assert 1 == 3\n +  where 1 = clamp(1, 3, 5)")


def test_a_wrong_value_is_told_with_the_call_and_its_locals_filled_in() -> None:
    text = said(BROKEN, LOW)
    assert "`clamp(1, 3, 5)`" in text and "`1`" in text and "`3`" in text


def test_instructions_vary_with_the_seed_and_repeat_with_it() -> None:
    texts = [write(BROKEN, LOW, seed=seed) for seed in range(20)]
    assert len({str(text) for text in texts}) >= 8
    assert texts == [write(BROKEN, LOW, seed=seed) for seed in range(20)]


def test_truth_is_told_by_the_value_seen() -> None:
    message = "assert 0\n +  where 0 = clamp(1, 3, 5)"
    assert "a true value" in said(BROKEN, failure("test_truth", 11, message))


def test_an_exception_is_told_by_kind_and_message() -> None:
    text = said(BROKEN, failure("test_low", 7, "TypeError: '<' not supported"))
    assert "`TypeError` ('<' not supported)" in text and "`clamp(1, 3, 5)`" in text


def test_paths_and_private_names_of_a_message_are_left_out() -> None:
    text = said(BROKEN, failure("test_low", 7, "TypeError: _inner() of /opt/project/a.py"))
    assert "TypeError" in text and "_inner" not in text and "/opt" not in text


def test_a_missing_exception_is_told_with_the_message_that_tests_match() -> None:
    text = said(
        OWN.replace('    if low > high:\n        raise ValueError("limits are reversed")\n', ""),
        failure("test_reversed", 16, "Failed: DID NOT RAISE <class 'ValueError'>"),
    )
    assert "`clamp(1, 5, 3)`" in text and "`ValueError`" in text and "limits are reversed" in text


@pytest.mark.parametrize(
    ("name", "line", "message"),
    [
        ("test_fixture", 20, "assert 1 == 3\n +  where 1 = clamp(1, 3, 5)"),
        ("test_low", 7, ""),
        ("test_low", 0, "assert 1 == 3"),
        ("test_gone", 7, "assert 1 == 3"),
    ],
)
def test_a_symptom_that_nobody_could_repeat_is_underspecified(name: str, line: int, message: str) -> None:
    found = write(BROKEN, failure(name, line, message))
    assert isinstance(found, str) and found.startswith("underspecified")


def test_a_value_that_is_not_the_same_each_time_is_not_told() -> None:
    text = said(BROKEN, failure("test_low", 7, "assert <A at 0x7f0012345678> == 3"))
    assert "`clamp(1, 3, 5) == 3`" in text and "0x7f" not in text


def test_each_part_of_a_combined_change_needs_a_symptom() -> None:
    other = failure("test_fixture", 20, "assert 1 == 3")
    groups = [{LOW.test}, {other.test}]
    assert isinstance(write(BROKEN, LOW, other, groups=groups), str)
    assert isinstance(write(BROKEN, LOW, other), Instruction)


def failing(*asserted: str) -> tuple[str, list[TestFailure]]:
    """A test file in which each test makes one assertion, and how they fail."""
    bodies = [f"def test_{n}():\n    assert {one}\n\n\n" for n, one in enumerate(asserted)]
    text = "from lib.a import clamp, other, third\n\n\n" + "".join(bodies)
    rows = [failure(f"test_{n}", 5 + 4 * n, "assert 1 == 3") for n in range(len(asserted))]
    return text, rows


def told(kind: ChangeKind, *asserted: str, groups: list[set[str]] | None = None) -> Instruction:
    test, failures = failing(*asserted)
    found = write_instruction(
        change(BROKEN, kind), {"lib/a.py": OWN}, {"tests/test_a.py": test}, failures, 0, groups or ()
    )
    assert isinstance(found, Instruction)
    return found


@pytest.mark.parametrize(
    ("asserted", "num_told"),
    [
        (["clamp(1, 3, 5) == 3", "other(2) == 3"], 1),
        (["clamp(1, 3, 5) == 3", "other(2) == 3", "third(2) == 3"], 2),
        (["clamp(1, 3, 5) == 3", "other(2) == 3", "third(2) == 3", "clamp(2, 3, 5) == 3"], 3),
        (["clamp(1, 3, 5) == 3", "clamp(1, 3, 5) in (3, 4)", "clamp(2, 3, 5) == 3"], 1),
    ],
)
def test_one_failing_call_at_least_is_not_told(asserted: list[str], num_told: int) -> None:
    found = told("planted_bug", *asserted)
    calls = dict.fromkeys(one.partition(" ==")[0].partition(" in")[0] for one in asserted)
    assert sum(call in found.text for call in calls) == num_told < len(calls)
    assert not found.names_every_call


@pytest.mark.parametrize(
    "asserted",
    [
        ["clamp(1, 3, 5) == 3"],
        [
            "clamp(1, 3, 5) == 3",
            "clamp(1, 3, 5) > 2",
            "not len(clamp(1, 3, 5)) == 1",
            "clamp(1, 3, 5).x == 3",
        ],
    ],
)
def test_a_bug_with_one_failing_call_names_every_call_and_says_so(asserted: list[str]) -> None:
    found = told("planted_bug", *asserted)
    assert "clamp(1, 3, 5)" in found.text and found.names_every_call


def test_a_combined_change_names_every_call_where_each_failing_call_of_its_parts_is() -> None:
    tests = [f"tests/test_a.py::test_{n}" for n in range(3)]
    both = told("combined", "clamp(1, 3, 5) == 3", "other(2) == 3", groups=[{tests[0]}, {tests[1]}])
    assert both.names_every_call
    more = "clamp(1, 3, 5) == 3", "other(2) == 3", "other(4) == 3"
    assert not told("combined", *more, groups=[{tests[0]}, {*tests[1:]}]).names_every_call


def test_the_only_failing_call_of_a_deleted_feature_is_not_told() -> None:
    test, failures = failing("clamp(1, 3, 5) == 3")
    gone = change("X = 1\n", "deleted_feature")
    found = write_instruction(gone, {"lib/a.py": OWN}, {"tests/test_a.py": test}, failures, 0)
    assert isinstance(found, Instruction) and "`clamp`" in found.text
    assert "clamp(1, 3, 5)" not in found.text and not found.names_every_call


def test_a_private_name_that_tests_need_is_underspecified() -> None:
    own = OWN.replace("clamp", "_clamp")
    broken = own.replace("def _clamp", "def other")
    test = TEST.replace("clamp", "_clamp")
    found = write_instruction(change(broken), {"lib/a.py": own}, {"tests/test_a.py": test}, [LOW], 0)
    assert found == "underspecified: tests use the private name _clamp"


def test_a_deleted_function_is_named_with_its_parameters_and_first_paragraph() -> None:
    text = said("X = 1\n", failure("test_low", 2, "ImportError: x"), kind="deleted_feature")
    assert "`clamp`" in text and "value and low and high" in text and "Keep a value within limits." in text
    assert "`def`" not in text


def test_an_emptied_function_needs_a_docstring() -> None:
    head, _, _ = OWN.partition("    if")
    text = said(f"{head}    raise NotImplementedError\n", LOW, kind="deleted_feature")
    assert "`clamp`" in text
    bare = OWN.replace('    """Keep a value within limits."""\n', "")
    found = write_instruction(
        change("def clamp(value, low, high):\n    raise NotImplementedError\n", "deleted_feature"),
        {"lib/a.py": bare},
        {"tests/test_a.py": TEST},
        [LOW],
        0,
    )
    assert found == "underspecified: what is gone has no docstring"
    gone = change("def clamp(value, low, high):\n    raise NotImplementedError\n", "deleted_feature")
    assert find_refusal(gone, {"lib/a.py": bare}) == found  # before any test is run
    assert find_refusal(change(BROKEN), {"lib/a.py": bare}) is None


def test_no_run_of_five_tokens_is_shared_with_the_reference() -> None:
    own = OWN.replace("return max(low, min(value, high))", "return CASES[clamp(1, 3, 5)]")
    found = write_instruction(change(BROKEN), {"lib/a.py": own}, {"tests/test_a.py": TEST}, [LOW], 0)
    assert isinstance(found, str)
    for seed in range(20):
        text = said(BROKEN, LOW, seed=seed)
        shared = set(runs(code_tokens(text), RUN_LENGTH)) & set(runs(code_tokens(OWN), RUN_LENGTH))
        assert not shared


def test_an_emptied_class_names_its_public_methods_alone() -> None:
    own = (
        "class A:\n    def b(self):\n        'Gives one.'\n        return 1\n\n"
        "    def _c(self):\n        return 2\n"
    )
    broken = own.replace("return 1", "raise NotImplementedError").replace(
        "return 2", "raise NotImplementedError"
    )
    tests = {"tests/test_a.py": TEST}
    said = write_instruction(change(broken, "deleted_feature"), {"lib/a.py": own}, tests, [LOW], 0)
    assert isinstance(said, Instruction) and "`A.b`" in said.text and "_c" not in said.text
    found = write_instruction(
        change(own.replace("return 2", "raise NotImplementedError"), "deleted_feature"),
        {"lib/a.py": own}, tests, [LOW], 0,
    )  # fmt: skip
    assert found == "underspecified: nothing public is gone"


def test_of_a_past_change_the_symptoms_are_told_and_what_is_missing_is_described() -> None:
    text = said(BROKEN, LOW, kind="past_change")
    assert "`clamp(1, 3, 5)`" in text and "implement" not in text.lower()
    gone = said(
        "LIMITS = ()\n", failure("test_low", 7, "ImportError: cannot import name"), kind="past_change"
    )
    assert "`clamp` takes value and low and high: Keep a value within limits." in gone
    silent = failure("test_low", 7, "")
    assert isinstance(write(BROKEN, silent, kind="past_change"), str)
