"""Plans which changes are tested, in which order, and which of those that tests notice become tasks.

past changes, bugs, deletions, smells ──in turn──> singles ──noticed──> combinations of bugs, a share of all
                                                      └───────────────────────┴──> selection by quotas
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from etude.environment.making.verifying import Noticed
from etude.tasks.making.bugs import combine, plan_bugs
from etude.tasks.making.changes import Change, Quotas, Verified, round_robin
from etude.tasks.making.deletions import hide_tests, plan_deletions
from etude.tasks.making.instructions import write_instruction
from etude.tasks.making.selection import Selection, grade_tasks, select
from etude.tasks.making.undoing import PastChange, plan_undone

_SPARE = 1.1
"""Candidates per wanted task: more than one, as selection rejects some."""
_COMPOUND_SPARE = 1.4
"""The same for tasks with two files or bugs."""
_FEW = 10
"""Fewest candidates for which shares are considered."""


class Planner:
    """Yields changes one after another; their order depends on the seed and on the results of tests."""

    def __init__(
        self,
        sources: Mapping[str, str],
        tests: Mapping[str, str],
        seed: int,
        quotas: Quotas,
        past: Iterable[PastChange] = (),
        refactorings: Iterable[Change] = (),
    ) -> None:
        self._sources, self._tests, self._seed = sources, tests, seed
        self._quotas = quotas
        self._given: dict[str, None] = {}
        """Ids of changes, in the order in which they were planned."""
        bugs = plan_bugs(sources, seed)
        deletions = plan_deletions(sources, seed)
        self._singles = round_robin([plan_undone(sources, past), bugs, deletions, bugs, refactorings])
        self._pairs: Iterator[Change] = iter(())
        self._num_paired = 0
        """Number of bugs when combinations were planned last."""
        self._functions: Counter[tuple[str, str]] = Counter()
        self._operators: Counter[str] = Counter()
        self._found: dict[str, Verified] = {}
        self._num_compound = self._num_named = 0
        self._dropped: set[str] = set()
        """Ids of candidates that were rejected later."""
        self._num_wanted = _SPARE * quotas.most_tasks
        """Candidates to find."""
        self._num_compound_wanted = 0.0
        """Compound candidates to find; set when a selection had too few."""
        self.selection = Selection((), ())
        """Result of the last `select`."""

    @property
    def num_found(self) -> int:
        """Number of changes that became candidates."""
        return len(self._found) - len(self._dropped)

    @property
    def _num_usable(self) -> float:
        rest = max(1e-9, 1 - self._quotas.most_named_lines)
        return min(self.num_found, (self.num_found - self._num_named) / rest)

    def next_change(self) -> Change | None:
        """The next change to be tested; None if there are enough candidates, or no further changes."""
        if self._num_usable >= self._num_wanted:
            return self._next_pair() if self._num_compound < self._num_compound_wanted else None
        wanted = _COMPOUND_SPARE * self._quotas.least_compound * self.num_found
        if self._num_compound < wanted:
            return self._next_pair() or self._next_single()
        return self._next_single() or self._next_pair()

    def _next_single(self) -> Change | None:
        return next(filter(self._may_be_tested, self._singles), None)

    def _next_pair(self) -> Change | None:
        """The next combination of noticed bugs and hunks; replanned when there are more."""
        while True:
            if (change := next(filter(self._may_be_tested, self._pairs), None)) is not None:
                return change
            found = [one.change for one in self._candidates() if len(one.change.places) == 1]
            bugs = [change for change in found if change.kind in ("planted_bug", "past_change")]
            if len(bugs) == self._num_paired:
                return None
            self._num_paired = len(bugs)
            bugs = sorted(filter(self._has_room, bugs), key=lambda change: change.id)
            self._pairs = combine(bugs, self._sources, self._seed) if len(bugs) > 1 else iter(())

    def add(self, change: Change, noticed: Noticed) -> str | None:
        """Adds a change that tests notice as a candidate; returns why it is rejected, or None."""
        groups = [{one.test for one in self._found[part].failures} for part in change.parts]
        failures = noticed.failures
        instruction = write_instruction(change, self._sources, self._tests, failures, self._seed, groups)
        if isinstance(instruction, str):
            return instruction
        hidden = hide_tests(self._tests, failures)
        if hidden is None:
            return "not hidden: a failing test cannot be taken out of its file"
        verified = Verified(
            replace(change, removed_tests=hidden), change.solved(self._sources), failures, instruction.text,
            noticed.num_suspect_lines, instruction.names_every_call, noticed.passing,
        )  # fmt: skip
        self._found[change.id] = verified
        self._count(verified, 1)
        return None

    def reject(self, ids: Iterable[str]) -> bool:
        """Removes selected candidates that were rejected. Returns whether tasks, or compound ones, are
        missing now: then `next_change` plans more."""
        for one in ids:
            self._dropped.add(one)
            self._count(self._found[one], -1)
        kept = [one for one in self.selection.kept if one.change.id not in self._dropped]
        least = self._quotas.least_compound * self._quotas.most_tasks
        missing = max(0.0, self._quotas.most_tasks - len(kept))
        missing_compound = max(0.0, least - sum(one.is_compound for one in kept))
        self._num_wanted = self._num_usable + _SPARE * missing
        self._num_compound_wanted = self._num_compound + _SPARE * missing_compound
        return missing > 0 or missing_compound > 0

    def _count(self, verified: Verified, sign: int) -> None:
        self._num_named += sign * verified.names_edited_line
        self._num_compound += sign * verified.is_compound
        for function in verified.change.functions:
            self._functions[function] += sign
        for operator in verified.change.operators:
            self._operators[operator] += sign

    def _candidates(self) -> list[Verified]:
        """The candidates in the order of planning."""
        return [self._found[one] for one in self._given if one in self._found and one not in self._dropped]

    def select(self) -> list[Verified]:
        """Selects the candidates that become tasks, in the order of planning, so that it does not matter
        which tests ended first. Combinations are selected first, as many as are wanted: they need slots of
        two functions, which single bugs would use up."""
        asked = self._candidates()
        singles = [one for one in asked if not one.change.parts]
        compound = [one for one in asked if one.change.parts]
        first = math.ceil(_SPARE * self._quotas.least_compound * self._quotas.most_tasks)
        self.selection = select([*compound[:first], *singles, *compound[first:]], self._quotas)
        kept = self.selection.kept
        return [replace(one, difficulty=level) for one, level in zip(kept, grade_tasks(kept), strict=True)]

    def _may_be_tested(self, change: Change) -> bool:
        """Whether it is new, and the quotas allow it."""
        is_new = change.id not in self._given
        self._given[change.id] = None
        return is_new and self._has_room(change)

    def _has_room(self, change: Change) -> bool:
        """Whether the quotas allow another task of this kind: otherwise a test run is saved. Deleted code
        fails where it was, so its traceback names that line."""
        named = self._quotas.most_named_lines * max(_FEW, self.num_found)
        if change.kind == "deleted_feature" and self._num_named >= named:
            return False
        most = math.ceil(self._quotas.most_per_operator * self._quotas.most_tasks)
        return all(self._operators[one] < most for one in change.operators) and all(
            self._functions[one] < self._quotas.most_per_function for one in change.functions
        )
