"""Exams of a task: runs of its tests, some with changed tests, and the required outcome of each test.

The agent's code, which test.sh runs, can forge the outcomes of tests, but cannot know the right ones: in the
first exam the tests are unchanged and must pass; in the others some were changed to expect something else,
and must fail. Only the judge has the lists of these; the sandbox sees only the changed tests.

    tests/exams.json      the exams; never enters a sandbox
    OUTCOMES              what test.sh writes: test -> passed, failed, skipped
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from functools import lru_cache

from pydantic import TypeAdapter, ValidationError

from etude.errors import TaskError

EXAMS = "exams.json"
OUTCOMES = "outcomes.json"
MAX_OUTCOME_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Exam:
    """One run of test.sh, or of hidden tests that are graded by their values."""

    files: Mapping[str, str]
    """Path below `/tests` -> text, overriding the archive and the set's `files`; for hidden tests, path in
    the workspace."""
    passing: tuple[str, ...]
    """Tests that must pass."""
    failing: tuple[str, ...] = ()
    """Tests that must fail, as they were changed to expect something else."""

    def judge(self, outcomes: Mapping[str, object], without: Collection[str] = ()) -> str | None:
        """Why the outcomes of a run fail the exam; None if they pass. `without`: tests that do not count."""
        what = "passes at one time and fails at another" if self.failing else "does not pass"
        for test in self.passing:
            if test not in without and outcomes.get(test) != "passed":
                return f"{test} {what}"
        for test in self.failing:
            if test not in without and outcomes.get(test) != "failed":
                return f"{test} was changed to expect something else, and does not fail: it is forged"
        return None


@dataclass(frozen=True, slots=True)
class ExamSet:
    """All exams of a task."""

    exams: tuple[Exam, ...] = ()
    """In the order in which they are run; the first failed one ends the grading."""
    open_tests: Mapping[str, str] = field(default_factory=dict[str, str])
    """Test that must fail before a solution and pass after it, and that no exam guards -> the reason."""
    files: Mapping[str, str] = field(default_factory=dict[str, str])
    """Path below `/tests` -> text in all exams that do not override it, so that the set of files does not
    reveal which tests are changed."""

    def files_of(self, exam: Exam) -> dict[str, str]:
        """The files that are written over `/tests` in one exam."""
        return {**self.files, **exam.files}

    def to_text(self) -> str:
        """The JSON text for `read_exams`."""
        return json.dumps(asdict(self), indent=1) + "\n"


_EXAM_SET = TypeAdapter(ExamSet)


@lru_cache(256)
def read_exams(text: str) -> ExamSet:
    """Parses `tests/exams.json`. Raises TaskError."""
    try:
        found = _EXAM_SET.validate_json(text)
    except ValidationError as error:
        raise TaskError(
            f"is invalid: {error.errors()[0]['msg']}", field=f"tests/{EXAMS}",
            received=text[:80], fix="write it as `etude tasks make` does",
        ) from error  # fmt: skip
    if not any(exam.passing for exam in found.exams):
        raise TaskError("names no test that must pass", field=f"tests/{EXAMS}", received=text[:80])
    return found


def read_outcomes(data: bytes) -> Mapping[str, object] | None:
    """Parses the outcomes of tests, which the agent's code may have forged; None if they are invalid."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
