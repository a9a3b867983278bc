"""Exams: which of a run's outcomes count, and their form in a task directory."""

from __future__ import annotations

import asyncio
import io
import json
import tarfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import pytest

from etude.environment.making.changing import TestChanger, TwinKind
from etude.environment.making.pipeline import seed_exams
from etude.environment.making.projects import read_project
from etude.environment.making.suites import Baseline, Coverage, Suite, SuiteRun
from etude.environment.making.twinning import ProjectTwins, Twin, find_project_twins
from etude.environment.wire import task_document, task_of
from etude.errors import TaskError
from etude.tasks.exams import EXAMS, Exam, ExamSet, read_exams, read_outcomes
from etude.tasks.harbor import read_harbor
from etude.tasks.making.changes import Change, Place, Verified
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
        ("{", "is invalid"),
        ('{"exams": [{"files": {}}]}', "is invalid"),
        ('{"exams": []}', "names no test that must pass"),
        (json.dumps({"exams": [{"files": {}, "passing": [], "failing": ["a"]}]}), "names no test that"),
    ],
)
def test_exams_that_could_pay_nothing_or_everything_are_refused(
    tmp_path: Path, text: str, message: str
) -> None:
    with pytest.raises(TaskError, match=message):
        read_harbor(directory(tmp_path, text))


def test_a_separate_verifier_has_no_exams(tmp_path: Path) -> None:
    toml = f'{TASK_TOML}[verifier]\nenvironment_mode = "separate"\n'
    with pytest.raises(TaskError, match="cannot be used with exams"):
        read_harbor(directory(tmp_path, EXAM_SET.to_text(), toml))


def changed_lines(changer: TestChanger, number: int) -> set[str]:
    before, _ = changer.change_all(None)
    after, _ = changer.change_all(number)
    path = "tests/test_prices.py"
    return set(after[path].splitlines()) - set(before[path].splitlines())


def changer_of(tmp_path: Path, tests: str) -> TestChanger:
    files = {"pyproject.toml": "", "prices.py": "total = str\n", "tests/test_prices.py": tests}
    files["tests/__init__.py"] = ""
    return TestChanger(read_project(write_tree(tmp_path, files)), seed=0)


def test_a_round_changes_what_tests_judge_by_or_the_rows_of_a_parametrization(tmp_path: Path) -> None:
    changer = changer_of(tmp_path, TESTS)
    rounds = [changed_lines(changer, number) for number in range(8)]
    assert all(rounds) and set(changer.change_all(0)[0]) == {"tests/test_prices.py"}
    text = "\n".join(line for lines in rounds for line in lines)
    assert "id='five'" in text and "given" not in text and '"""' not in text and "helpe" not in text
    assert "assertNotEqual" in text and "total(9)" in text and "total(18)" not in text  # inputs stay
    for lines in rounds[1::2]:
        assert any("parametrize(('rate', 'wanted')" in line for line in lines)


@pytest.mark.parametrize(
    ("line", "changed"),
    [
        ("assert total(a) == b", {"assert total(a) != b"}),
        ("assert a not in total(b)", {"assert a in total(b)"}),
        ("assert not total(a)", {"assert total(a)"}),
        ("assert isinstance(total(a), str)", {"assert not isinstance(total(a), str)"}),
        ("assert total(a) < b", {"assert total(a) >= b"}),
        ("assert total(a) is None", {f"assert total(a) is {end}" for end in ("not None", "True", "False")}),
        ("assert total(a) < b < a", set[str]()),
        ("assert total(a) or b", set[str]()),
        (
            "assert total(a) == 'red tea'",
            {f"assert total(a) {end}" for end in ("!= 'red tea'", "== 'red red'")},
        ),
        (
            "with pytest.raises(ValueError): total(a)",
            {"with pytest.raises(KeyError):"},
        ),
        ("with pytest.raises(total.Error, match=b): total(a)", {"with pytest.raises(ValueError, match=b):"}),
        ("with pytest.raises(Wrong): total(a)", {"with pytest.raises(ValueError):"}),
        ("total(a).check(7)", set[str]()),
    ],
)
def test_a_changed_line_is_one_that_people_write(tmp_path: Path, line: str, changed: set[str]) -> None:
    changer = changer_of(
        tmp_path, f"import pytest\nfrom prices import total\n\ndef test_a(a, b):\n    {line}\n"
    )
    found = set[str]().union(*(changed_lines(changer, number) for number in range(8)))
    assert {one.strip() for one in found} == changed


def test_a_test_that_only_an_opposite_turns_is_open(tmp_path: Path) -> None:
    changer, name = changer_of(tmp_path, TESTS), "tests/test_prices.py::TestPrices.test_equal"
    test = "tests/test_prices.py::TestPrices::test_equal"
    opposite, value = (
        Twin(n, kind, (), (test,), (test,)) for n, kind in enumerate((TwinKind.OPPOSITE, TwinKind.VALUE))
    )
    for twins, guarded in (((opposite,), False), ((opposite, value), True)):
        known = ProjectTwins({name: (test,)}, {name: twins}, ())
        assert known.turned == ({test} if guarded else set())
        for seed in range(20):
            assert bool(known.write_exams([test], [], changer, str(seed)).open_tests) is not guarded


def test_exams_are_drawn_by_what_the_workspace_lacks(tmp_path: Path) -> None:
    broken = {"prices.py": "total = int\n"}
    change = Change("planted_bug", "a", broken, (Place("prices.py", "", 1, 1),), {"tests/test_prices.py": ""})
    seeds: set[str] = set()
    for number, (source, tests) in enumerate([("str", TESTS), ("bool", TESTS), ("str", f"{TESTS}\n")]):
        files = {"pyproject.toml": "", "prices.py": f"total = {source}\n", "tests/test_prices.py": tests}
        verified = Verified(change, {"prices.py": files["prices.py"]}, ())
        seeds.add(seed_exams(read_project(write_tree(tmp_path / str(number), files)), verified))
    assert len(seeds) == 3


@dataclass
class Hanging:
    """A suite whose runs give no result, or all but the first."""

    runs: list[SuiteRun]
    timeout_s: float = 1.0

    async def run(self, files: dict[str, str]) -> SuiteRun:
        return self.runs.pop(0) if self.runs else SuiteRun({}, problem="hangs: 20 s")


@pytest.mark.parametrize("runs", [(), (SuiteRun({}),)])
def test_a_project_whose_tests_hang_as_they_are_changed_is_an_error(
    tmp_path: Path, runs: tuple[SuiteRun, ...]
) -> None:
    baseline = Baseline((), {}, Coverage((), {}), 1.0)
    looking = find_project_twins(
        cast(Suite, Hanging(list(runs))), baseline, changer_of(tmp_path, TESTS), at_once=1
    )
    with pytest.raises(TaskError, match="hangs: 20 s"):
        asyncio.run(looking)


def test_each_function_is_changed_in_some_exams_and_not_in_all_and_tests_without_a_change_are_open(
    tmp_path: Path,
) -> None:
    changer, path = changer_of(tmp_path, TESTS), "tests/test_prices.py"
    rows = [f"{path}::test_rows[{row}]" for row in ("1-two", "five")]
    other = f"{path}::TestPrices::test_equal"
    third, changed_row = f"{path}::test_rows[4-a]", f"{path}::test_rows[1-twp]"
    twin = Twin(1, TwinKind.VALUE, (rows[1],), (changed_row,), (rows[0],), (third,))
    twins = ProjectTwins(
        {f"{path}::test_rows": (*rows, third), f"{path}::TestPrices.test_equal": (other,)},
        {f"{path}::test_rows": (twin,)},
        (path,),
    )
    patterns: set[tuple[bool, ...]] = set()
    for seed in range(200):
        found = twins.write_exams(rows, [other], changer, str(seed))
        assert set(found.exams[0].passing) == {*rows, other} and not found.exams[0].failing
        changed = tuple(exam.failing == twin.failing for exam in found.exams[1:])
        assert changed == tuple(not set(rows) <= set(exam.passing) for exam in found.exams[1:])
        assert all(next(iter(found.files_of(exam))) == f"hidden/{path}" for exam in found.exams)
        assert all(len(json.loads(exam.files["expected.json"])["ids"]) == 3 for exam in found.exams[1:])
        assert list(found.open_tests) == [rows[1]]
        patterns.add(changed)
    assert len(patterns) == 14 and {(True,) * 4, (False,) * 4}.isdisjoint(patterns)
