"""Data types of task generation: changes of a project, failing tests, leaks and quotas.

plan_bugs, plan_deletions, plan_undone, combine     a project's text -> Change
plan_smells                                         the same, of code that works
(the pipeline runs the tests of each)   Change -> TestFailure
write_instruction                       -> text, or why there is none
find_leaks                              the image's files -> Leak
select                                  Verified -> Selection

The reason why a change does not become a task is a text: a kind, a colon, details.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, TypeVar

from etude.tasks.making.tokens import changed_lines

ChangeKind = Literal[
    "planted_bug", "deleted_feature", "past_change", "combined", "planted_smell", "found_smell"
]  # fmt: skip
Split = Literal["train", "validation", "heldout"]
Difficulty = Literal["easy", "medium", "hard"]

Item = TypeVar("Item")
OPERATOR_JOIN = " + "
"""Joins the operators of a combined change."""


@dataclass(frozen=True, slots=True)
class Place:
    """A range of lines of a file, counted from 1, the last one included, and its function or class."""

    path: str
    name: str
    """Qualified name of the innermost function, else class, such as `Parser.parse`; empty for a module."""
    first_line: int
    last_line: int

    @property
    def lines(self) -> range:
        """The line numbers."""
        return range(self.first_line, self.last_line + 1)


@dataclass(frozen=True, slots=True)
class Change:
    """A broken, earlier or less tidy state of some files; the project's own text of these is the solution."""

    kind: ChangeKind
    operator: str
    """Name of the operator, such as `inverted condition`; those of combined parts are joined by ` + `."""
    files: Mapping[str, str]
    """Path -> text in the task's workspace; empty for a missing file."""
    places: tuple[Place, ...]
    """The places that the solution edits, in lines of the project's *own* text, as in coverage data."""
    removed_tests: Mapping[str, str] = field(default_factory=dict[str, str])
    """Path -> text of test files in the workspace, without the tests that the change makes fail."""
    parts: tuple[str, ...] = ()
    """Ids of the changes that it combines."""
    smell: str = ""
    """For refactorings: the ruff rule that is violated in the function of the only place."""
    solution: Mapping[str, str] = field(default_factory=dict[str, str])
    """Path -> text, if the solution is not the project's own text, which then has the smell."""

    def solved(self, sources: Mapping[str, str]) -> dict[str, str]:
        """Path -> text of the solution, for all files that it edits. `sources`: the project's own texts."""
        return {path: self.solution.get(path, sources[path]) for path in self.files}

    @property
    def id(self) -> str:
        """16 hexadecimal digits of the digest of the files, which also determine the hidden tests."""
        digest = hashlib.sha256()
        for path, text in [*sorted(self.files.items()), *sorted(self.solution.items())]:
            digest.update(f"{len(path)}:{path}{len(text)}:{text}".encode("utf-8", "surrogateescape"))
        return digest.hexdigest()[:16]

    @property
    def functions(self) -> set[tuple[str, str]]:
        """Path and name of each function that the solution edits."""
        return {(place.path, place.name) for place in self.places}

    @property
    def operators(self) -> tuple[str, ...]:
        """The operator of each part."""
        return tuple(self.operator.split(OPERATOR_JOIN))


@dataclass(frozen=True, slots=True)
class TestFailure:
    """A test that fails in the workspace and passes with the project's own text."""

    __test__ = False

    test: str
    """Its id: `tests/test_a.py::TestB::test_c[d]`."""
    message: str
    """The exception as pytest shows it: kind and text, or the `assert` with the values it saw."""
    test_line: int = 0
    """Line of the failed statement of the test, from the traceback; 0: not known."""
    innermost: Place | None = None
    """The traceback's last frame in the project (tests included), in the workspace's lines."""
    file: str = ""
    """File that defines the test, if its class inherits it from another file."""
    function: str = ""
    """`__qualname__` of the test function; empty: not known."""
    values: Mapping[str, str] = field(default_factory=dict[str, str])
    """Argument of the test with a plain value -> the value as code."""
    indices: Mapping[str, int] = field(default_factory=dict[str, int])
    """Parametrized argument -> index of its value."""
    fixtures: Mapping[str, Sequence[Any]] = field(default_factory=dict[str, Sequence[Any]])
    """Fixture that the project defines -> file and first line of the definition."""

    @property
    def path(self) -> str:
        """The file that defines the test."""
        return self.file or self.test.partition("::")[0]

    @property
    def name(self) -> str:
        """Qualified name of the function in that file, such as `TestB.test_c`; derived from the test's id if
        the function is not known or has another name."""
        name = self.test.partition("[")[0].partition("::")[2].replace("::", ".")
        is_own = self.function.rpartition(".")[2] == name.rpartition(".")[2]
        return self.function if is_own else name


@dataclass(frozen=True, slots=True)
class Leak:
    """A part of the solution that the image contains."""

    path: str
    """Path in the image; `ARCHIVE!MEMBER` inside an archive, `.git!HASH` for a git object."""
    how: str
    """`text`, `bytecode`, `importable copy`, `archive`, `git object` or `not read`."""
    found: str
    """The token n-gram, or the module's path."""


@dataclass(frozen=True)
class Verified:
    """A change whose tests were run: they fail in the workspace, and pass with the project's own text."""

    change: Change
    reference: Mapping[str, str]
    """The project's own text of the files that the change touches."""
    failures: tuple[TestFailure, ...]
    instruction: str = ""
    num_suspect_lines: int = 0
    """Coverage distance: lines of the project that every failing test runs."""
    names_every_call: bool = False
    """Whether the instruction contains the call of each failing test."""
    passing: tuple[str, ...] = ()
    """Tests that always pass, with the change and without."""
    difficulty: Difficulty = "easy"
    """Relative to the other selected tasks."""

    @cached_property
    def names_edited_line(self) -> bool:
        """Whether the last frame of a failing test's traceback is on a line that the change wrote."""
        edited = {
            (path, line)
            for path, broken in self.change.files.items()
            for (first, last), _ in changed_lines(broken, self.reference[path])
            for line in range(first + 1, max(last, first + 1) + 1)
        }
        frames = [failure.innermost for failure in self.failures if failure.innermost is not None]
        return any((frame.path, frame.first_line) in edited for frame in frames)

    @property
    def is_compound(self) -> bool:
        """Whether it has more than one file or more than one bug."""
        return len(self.change.files) > 1 or len(self.change.parts) > 1


@dataclass(frozen=True, slots=True)
class Quotas:
    """Requirements for a set of tasks. Shares are of the tasks kept."""

    most_tasks: int = 1000
    most_per_function: int = 3
    most_per_operator: float = 0.15
    least_compound: float = 0.25
    """Least share with several files or bugs."""
    most_named_lines: float = 0.30
    """Most share where the innermost frame of a failing test's traceback is on an edited line."""


def round_robin(plans: Iterable[Iterable[Item]]) -> Iterator[Item]:
    """One item of each plan in turn, until all are exhausted. An iterator listed twice has two turns."""
    active = [iter(plan) for plan in plans]
    while active:
        for plan in list(active):
            try:
                yield next(plan)
            except StopIteration:
                active.remove(plan)


def unique_changes(changes: Iterable[Change | None]) -> Iterator[Change]:
    """The changes without None and without duplicates."""
    seen = set[str]()
    for change in changes:
        if change is not None and change.id not in seen:
            seen.add(change.id)
            yield change


def split_of(path: str) -> Split:
    """The split of a module: 13/16 train, 1/16 validation, 2/16 held out, by the hash of its path."""
    bucket = hashlib.sha256(path.encode("utf-8", "surrogateescape")).digest()[0] % 16
    return "heldout" if bucket < 2 else "validation" if bucket < 3 else "train"
