"""Exams of a task: runs of its tests, some with changed tests, and how each test must end in them.

Code of the agent's that test.sh runs can write whatever it likes about how the tests ended, but not know
what would be right: in the first exam the tests are as they are and must pass; in the others some expect
something else and must fail. Who judges holds the lists of which; the sandbox has the changed tests alone.

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
    """Path below `/tests` -> text, in place of what the archive or the set's `files` have there; of hidden
    tests, path in the workspace."""
    passing: tuple[str, ...]
    """Tests that must pass."""
    failing: tuple[str, ...] = ()
    """Tests that must fail: they were changed to expect something else."""

    def judge(self, outcomes: Mapping[str, object], without: Collection[str] = ()) -> str | None:
        """Why what is said of a run does not do; None if it does. `without`: tests that do not count."""
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
    """What a task is graded by."""

    exams: tuple[Exam, ...] = ()
    """In order; a run after one that does not do is spared."""
    open_tests: Mapping[str, str] = field(default_factory=dict[str, str])
    """Test that must fail before a solution and pass after it, and that no exam guards -> why."""
    files: Mapping[str, str] = field(default_factory=dict[str, str])
    """Path below `/tests` -> text in all exams, but for those that have another: so that what is laid there
    does not tell what is changed."""

    def files_of(self, exam: Exam) -> dict[str, str]:
        """What is laid over `/tests` in one of them."""
        return {**self.files, **exam.files}

    def to_text(self) -> str:
        """What `read_exams` reads."""
        return json.dumps(asdict(self), indent=1) + "\n"


_EXAM_SET = TypeAdapter(ExamSet)


@lru_cache(256)
def read_exams(text: str) -> ExamSet:
    """Reads `tests/exams.json`. Raises TaskError."""
    try:
        found = _EXAM_SET.validate_json(text)
    except ValidationError as error:
        raise TaskError(
            f"is not what it should be: {error.errors()[0]['msg']}", field=f"tests/{EXAMS}",
            received=text[:80], fix="write it as `etude tasks make` does",
        ) from error  # fmt: skip
    if not any(exam.passing for exam in found.exams):
        raise TaskError("asks for no test that passes", field=f"tests/{EXAMS}", received=text[:80])
    return found


def read_outcomes(data: bytes) -> Mapping[str, object] | None:
    """How tests ended, by what the agent's code may have written; None for what is no such thing."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
