"""What a made task changes in a project, and what its tests then say.

plan_bugs, plan_deletions, plan_undone, combine     a project's text -> Change
plan_smells                                         the same, of code that works
(the pipeline runs the tests of each)   Change -> TestFailure
write_instruction                       -> text, or why there is none
find_leaks                              the image's files -> Leak
select                                  Verified -> Selection

Why no task is made of a change is a text: a kind, a colon, the particulars.
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
"""Between the operators of a combined change."""


@dataclass(frozen=True, slots=True)
class Place:
    """Lines of a file, from 1, the last one included, and the function or class that they are in."""

    path: str
    name: str
    """Qualified name of the innermost function, else class, such as `Parser.parse`; empty for a module."""
    first_line: int
    last_line: int

    @property
    def lines(self) -> range:
        """Their numbers."""
        return range(self.first_line, self.last_line + 1)


@dataclass(frozen=True, slots=True)
class Change:
    """A broken, earlier or less tidy state of some files; the project's own text of them is the solution."""

    kind: ChangeKind
    operator: str
    """What was done, such as `inverted condition`; of each part, joined by ` + `, where it is combined."""
    files: Mapping[str, str]
    """Path -> text in the task's workspace; an empty one is missing there."""
    places: tuple[Place, ...]
    """Where the solution edits: lines of the project's *own* text, by which coverage knows them."""
    removed_tests: Mapping[str, str] = field(default_factory=dict[str, str])
    """Test files as they stand in the workspace, without the tests that the change makes fail."""
    parts: tuple[str, ...] = ()
    """Ids of the changes that it combines."""
    smell: str = ""
    """Of code that works: the rule of ruff that finds something in the function of its only place."""
    solution: Mapping[str, str] = field(default_factory=dict[str, str])
    """Path -> text, where the solution is not the project's own: then its own text has the smell."""

    def solved(self, sources: Mapping[str, str]) -> dict[str, str]:
        """Path -> text of the solution, of all files that it edits. `sources`: the project's own texts."""
        return {path: self.solution.get(path, sources[path]) for path in self.files}

    @property
    def id(self) -> str:
        """16 hexadecimal digits of the digest of the files; the tests that are hidden follow from these."""
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
    """Line of the test in the traceback: the statement that failed; 0: not known."""
    innermost: Place | None = None
    """The traceback's last frame in the project (tests included), in the workspace's lines."""
    file: str = ""
    """File that the test is written in, where its class inherits it from another one."""
    function: str = ""
    """`__qualname__` of the function that it is; empty: not known."""
    values: Mapping[str, str] = field(default_factory=dict[str, str])
    """Arguments of the test that are plain values -> as code."""
    indices: Mapping[str, int] = field(default_factory=dict[str, int])
    """Parametrized arguments -> which of their values."""
    fixtures: Mapping[str, Sequence[Any]] = field(default_factory=dict[str, Sequence[Any]])
    """Fixtures that the project defines -> file and first line of the definition."""

    @property
    def path(self) -> str:
        """The file that the test is written in."""
        return self.file or self.test.partition("::")[0]

    @property
    def name(self) -> str:
        """Qualified name of the function in that file, such as `TestB.test_c`; by its id where the function
        is not known, or is another one's under this name."""
        name = self.test.partition("[")[0].partition("::")[2].replace("::", ".")
        is_own = self.function.rpartition(".")[2] == name.rpartition(".")[2]
        return self.function if is_own else name


@dataclass(frozen=True, slots=True)
class Leak:
    """A part of the solution that the image holds."""

    path: str
    """Within the image; inside an archive `ARCHIVE!MEMBER`, a git object `.git!HASH`."""
    how: str
    """`text`, `bytecode`, `importable copy`, `archive`, `git object` or `not read`."""
    found: str
    """The run of tokens, or the module's path."""


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
    """Whether the instruction tells the call of each failing test."""
    passing: tuple[str, ...] = ()
    """Tests that pass each time, with the change and without."""
    difficulty: Difficulty = "easy"
    """As selection finds it, beside the other tasks."""

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
        """Whether it is of two files or two bugs."""
        return len(self.change.files) > 1 or len(self.change.parts) > 1


@dataclass(frozen=True, slots=True)
class Quotas:
    """What a set of tasks must be like. Shares are of the tasks kept."""

    most_tasks: int = 1000
    most_per_function: int = 3
    most_per_operator: float = 0.15
    least_compound: float = 0.25
    """Share with two files or two bugs."""
    most_named_lines: float = 0.30
    """Share where the innermost frame of a failing test's traceback names an edited line."""


def in_turn(plans: Iterable[Iterable[Item]]) -> Iterator[Item]:
    """One of each plan in turn, until all have ended. An iterator that is there twice has two turns."""
    going = [iter(plan) for plan in plans]
    while going:
        for plan in list(going):
            try:
                yield next(plan)
            except StopIteration:
                going.remove(plan)


def each_once(changes: Iterable[Change | None]) -> Iterator[Change]:
    """The changes that there are, of the same files once."""
    seen = set[str]()
    for change in changes:
        if change is not None and change.id not in seen:
            seen.add(change.id)
            yield change


def split_of(path: str) -> Split:
    """The split of a module: 13/16 train, 1/16 validation, 2/16 held out, by the hash of its path."""
    bucket = hashlib.sha256(path.encode("utf-8", "surrogateescape")).digest()[0] % 16
    return "heldout" if bucket < 2 else "validation" if bucket < 3 else "train"
