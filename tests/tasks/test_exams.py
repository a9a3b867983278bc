"""Exams: what of a run's outcomes counts, and how a task directory holds them."""

from __future__ import annotations

import io
import json
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

from etude.environment.making.projects import read_project
from etude.environment.making.twinning import ProjectTwins, TestChanger, Twin
from etude.environment.wire import task_document, task_of
from etude.errors import TaskError
from etude.tasks.exams import EXAMS, Exam, ExamSet, read_exams, read_outcomes
from etude.tasks.harbor import read_harbor
from tests.sandbox.images.image_builders import write_tree

TASK_TOML = """\
schema_version = "1.4"
[task]
name = "etude/a"
[metadata.etude]
grading = "exams"
[environment]
docker_image = "host"
"""
EXAM_SET = ExamSet((Exam({}, ("a", "b")), Exam({"hidden/t.py": "changed"}, ("a",), ("b",))))
TESTS = '''\
import pytest
from unittest import TestCase
from prices import total


@pytest.mark.parametrize(("rate", "wanted"), [(1, "two"), pytest.param(3, "four", id="five")])
def test_rows(rate, wanted):
    """Six."""
    given = 7
    assert total(8, rate) == wanted


class TestPrices(TestCase):
    def test_equal(self):
        self.assertEqual(total(9), "ten")

    def helper(self):
        assert total() == "helped"
'''


def directory(tmp_path: Path, exams: str, toml: str = TASK_TOML) -> Path:
    files = {"instruction.md": "do", "task.toml": toml, "tests/test.sh": "", f"tests/{EXAMS}": exams}
    return write_tree(tmp_path, files)


@pytest.mark.parametrize(
    ("outcomes", "reason"),
    [
        ({"a": "passed", "b": "failed"}, None),
        ({"a": "passed", "b": "failed", "c": "passed"}, None),
        ({"a": "passed", "b": "passed"}, "b was changed to expect something else, and does not fail"),
        ({"a": "passed"}, "b was changed to expect something else, and does not fail"),
        ({"a": "failed", "b": "failed"}, "a passes at one time and fails at another"),
        ({"b": "failed"}, "a passes at one time and fails at another"),
        ({"a": ["passed"], "b": "failed"}, "a passes at one time and fails at another"),
        ({}, "a passes at one time and fails at another"),
    ],
)
def test_a_run_must_pass_and_fail_exactly_what_is_right(
    outcomes: dict[str, object], reason: str | None
) -> None:
    found = EXAM_SET.exams[1].judge(outcomes)
    assert found is None if reason is None else found is not None and found.startswith(reason)


@pytest.mark.parametrize("data", [b"", b"[]", b'"passed"', b"[" * 100_000, b"\xff", b"9" * 10_000])
def test_what_tells_of_no_outcomes_is_none(data: bytes) -> None:
    assert read_outcomes(data) is None


def test_exams_stay_outside_of_what_is_unpacked_at_tests(tmp_path: Path) -> None:
    task = read_harbor(directory(tmp_path, EXAM_SET.to_text()))
    assert task.verifier is not None and read_exams(task.verifier.exams) == EXAM_SET
    with tarfile.open(fileobj=io.BytesIO(task.verifier.archive)) as archive:
        assert archive.getnames() == ["test.sh"]
    assert task_of(task_document(task)) == replace(task, directory=None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not what it should be"),
        ('{"exams": [{"files": {}}]}', "is not what it should be"),
        ('{"exams": []}', "asks for no test that passes"),
        (json.dumps({"exams": [{"files": {}, "passing": [], "failing": ["a"]}]}), "asks for no test that"),
    ],
)
def test_exams_that_could_pay_nothing_or_everything_are_refused(
    tmp_path: Path, text: str, message: str
) -> None:
    with pytest.raises(TaskError, match=message):
        read_harbor(directory(tmp_path, text))


def test_a_separate_verifier_has_no_exams(tmp_path: Path) -> None:
    toml = f'{TASK_TOML}[verifier]\nenvironment_mode = "separate"\n'
    with pytest.raises(TaskError, match="has no exams"):
        read_harbor(directory(tmp_path, EXAM_SET.to_text(), toml))


def changed_lines(changer: TestChanger, number: int) -> set[str]:
    before, _ = changer.change_all(None)
    after, _ = changer.change_all(number)
    path = "tests/test_prices.py"
    return set(after[path].splitlines()) - set(before[path].splitlines())


def test_a_round_changes_what_tests_judge_by_or_the_rows_of_a_parametrization(tmp_path: Path) -> None:
    files = {"pyproject.toml": "", "prices.py": "total = str\n", "tests/test_prices.py": TESTS}
    files["tests/__init__.py"] = ""
    project = read_project(write_tree(tmp_path, files))
    changer = TestChanger(project, seed=0)
    rounds = [changed_lines(changer, number) for number in range(8)]
    assert all(rounds) and set(changer.change_all(0)[0]) == {"tests/test_prices.py"}
    text = "\n".join(line for lines in rounds for line in lines)
    assert "id='five'" in text and "given" not in text and '"""' not in text and "helpe" not in text
    assert "assertNotEqual" in text and "total(9)" in text and "total(18)" not in text  # inputs stay
    for lines in rounds[1::2]:
        assert any("parametrize(('rate', 'wanted')" in line for line in lines)


def test_each_function_is_changed_in_two_exams_of_four_and_tests_without_a_change_are_open(
    tmp_path: Path,
) -> None:
    files = {"pyproject.toml": "", "prices.py": "total = str\n", "tests/test_prices.py": TESTS}
    changer = TestChanger(read_project(write_tree(tmp_path, files)), seed=0)
    path = "tests/test_prices.py"
    rows = [f"{path}::test_rows[{row}]" for row in ("1-two", "five")]
    other = f"{path}::TestPrices::test_equal"
    twin = Twin(1, 0, (rows[1],), (f"{path}::test_rows[1-twp]",), (rows[0],))
    twins = ProjectTwins(
        {f"{path}::test_rows": tuple(rows), f"{path}::TestPrices.test_equal": (other,)},
        {f"{path}::test_rows": (twin,)},
    )
    found = twins.write_exams(rows, [other], changer, "seed")
    assert set(found.exams[0].passing) == {*rows, other} and not found.exams[0].failing
    assert [exam.failing for exam in found.exams[1:]].count(twin.failing) == 2
    assert sum(set(rows) <= set(exam.passing) for exam in found.exams[1:]) == 2
    assert list(found.open_tests) == [rows[1]]
    assert ProjectTwins.from_document(json.loads(json.dumps(twins.to_document()))) == twins
