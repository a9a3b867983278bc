"""Generates bug-fixing tasks: small repositories in which one line of one function is wrong.

A task is a pure function of (seed, split, index). Level 1 has two files with a function each, level 2
three, level 3 three of which one calls the broken one, and the failing test names the caller only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from random import Random
from typing import Literal, get_args

from etude.errors import TaskError
from etude.records import Task
from etude_quickstart.cases import Cases, choose_cases, test_file
from etude_quickstart.families import FAMILIES, HELD_OUT_FAMILIES, Family, draw_caller
from etude_quickstart.functions import (
    NAMES,
    FunctionSpec,
    compile_functions,
    draw_function,
    name_shape,
    shape_hash,
)
from etude_quickstart.mutations import BUG_KINDS, BugKind, Mutation, mutations

Split = Literal["train", "validation", "heldout", "heldout_family"]
"""`validation` is for choosing checkpoints, `heldout` for final evaluation; splits share no functions.
`heldout_family` has function patterns that occur in no other split."""

SPLITS: tuple[Split, ...] = get_args(Split)
FunctionSplit = Literal["train", "validation", "heldout"]
"""The splits that are drawn from ordinary families."""
FUNCTION_SPLITS: tuple[FunctionSplit, ...] = get_args(FunctionSplit)

LEVELS: tuple[int, ...] = (1, 2, 3)
VISIBLE_TESTS = "tests/test_all.py"
HIDDEN_TESTS = "tests/test_hidden.py"
ALLOWED_PATHS: tuple[str, ...] = ("lib/**", "core/**", "util/**")

_BUCKETS = 16
_HELD_OUT_BUCKETS = (0, 1)
_VALIDATION_BUCKET = 2
INSTRUCTIONS = ("test_{name} fails", "fix test_{name}", "make test_{name} pass")
_MOST_ATTEMPTS = 2000
_CALLER_ATTEMPTS = 100


def split_of_hash(function_hash: str) -> Split:
    """The split of a function of an ordinary family: 13/16 train, 1/16 validation, 2/16 heldout."""
    bucket = int(function_hash, 16) % _BUCKETS
    if bucket in _HELD_OUT_BUCKETS:
        return "heldout"
    return "validation" if bucket == _VALIDATION_BUCKET else "train"


@lru_cache(maxsize=1)
def _families_by_bug() -> dict[tuple[bool, BugKind], tuple[Family, ...]]:
    """(whether held out, bug kind) -> the families whose functions can have that bug."""
    rng = Random(0)
    table: dict[tuple[bool, BugKind], list[Family]] = {}
    for held_out, families in ((False, FAMILIES), (True, HELD_OUT_FAMILIES)):
        for family in families:
            drawn = [draw_function(family, NAMES[0], rng) for _ in range(12)]
            kinds: set[BugKind] = {mutation.kind for spec in drawn for mutation in mutations(spec.source)}
            for kind in sorted(kinds):
                table.setdefault((held_out, kind), []).append(family)
    return {key: tuple(families) for key, families in table.items()}


def bug_kinds_of(split: Split) -> tuple[BugKind, ...]:
    """The bug kinds in tasks of the split."""
    held_out = split == "heldout_family"
    return tuple(kind for kind in BUG_KINDS if (held_out, kind) in _families_by_bug())


@dataclass(frozen=True, slots=True)
class BrokenFunction:
    """A function, its bug and the test cases that detect it."""

    spec: FunctionSpec
    bug: Mutation
    source: str
    cases: Cases
    caller: FunctionSpec | None = None
    caller_cases: Cases | None = None


class TaskGenerator:
    """Tasks by index. `level_weights` are the odds of levels 1, 2 and 3, `max_characters` bounds the source
    of each function, callers left out (0: no bound).

    Raises TaskError for an unknown split or impossible weights.
    """

    def __init__(
        self,
        seed: int,
        split: Split = "train",
        level_weights: Sequence[float] = (1.0, 1.0, 1.0),
        max_characters: int = 0,
    ) -> None:
        if split not in SPLITS:
            raise TaskError("unknown split", field="split", received=split, fix=f"one of {', '.join(SPLITS)}")
        if len(level_weights) != len(LEVELS) or min(level_weights) < 0 or sum(level_weights) <= 0:
            raise TaskError(
                "needs a weight for each level",
                field="level_weights",
                received=tuple(level_weights),
                fix="three numbers that are not negative, one of them above 0",
            )
        self.seed = seed
        self.split: Split = split
        self.level_weights = tuple(level_weights)
        self._max_characters = max_characters

    def task(self, index: int) -> Task:
        """The task with this index; deterministic."""
        rng = Random(f"{self.seed}/{self.split}/{index}")
        level = rng.choices(LEVELS, self.level_weights)[0]
        kind = rng.choice(bug_kinds_of(self.split))
        return self.build(f"{self.split}-{self.seed}-{index}", level, kind, rng)

    def build(self, task_id: str, level: int, kind: BugKind, rng: Random) -> Task:
        """A task of this level with a bug of this kind."""
        names = rng.sample(NAMES, 2 if level == 1 else 3)
        broken = self.broken(kind, names, level, rng)
        num_others = 1 if level in (1, 3) else 2
        others = [self.whole(name, rng) for name in names[-num_others:]]
        return _assemble(task_id, level, self.split, broken, others, rng)

    def broken(self, kind: BugKind, names: Sequence[str], level: int, rng: Random) -> BrokenFunction:
        """A function of the split, called names[0], with a bug of this kind; at level 3 with a caller, called
        names[1]."""
        held_out = self.split == "heldout_family"
        families = _families_by_bug()[held_out, kind]
        for _ in range(_MOST_ATTEMPTS):
            spec = self._draw(families, names[0], rng, any_hash=held_out)
            found = [mutation for mutation in mutations(spec.source) if mutation.kind == kind]
            rng.shuffle(found)
            for bug in found[:3]:
                broken = self._break(spec, bug, names[1] if level == 3 else None, rng)
                if broken is not None:
                    return broken
        raise AssertionError(f"no function of the split {self.split} takes a bug of kind {kind}")

    def _break(
        self, spec: FunctionSpec, bug: Mutation, caller_name: str | None, rng: Random
    ) -> BrokenFunction | None:
        source = bug.apply(spec.source)
        right = compile_functions([spec.source])[spec.name]
        wrong = compile_functions([source])[spec.name]
        cases = choose_cases(spec, right, wrong, rng, _min_results(spec))
        if cases is None or caller_name is None:
            return BrokenFunction(spec, bug, source, cases) if cases else None
        caller = self.caller(spec, caller_name, rng)
        if caller is None:
            return None
        caller_cases = choose_cases(
            caller,
            compile_functions([spec.source, caller.source])[caller_name],
            compile_functions([source, caller.source])[caller_name],
            rng,
            _min_results(spec),
        )
        return BrokenFunction(spec, bug, source, cases, caller, caller_cases) if caller_cases else None

    def caller(self, helper: FunctionSpec, name: str, rng: Random) -> FunctionSpec | None:
        """A function of the split that calls `helper`; None if none is found."""
        for _ in range(_CALLER_ATTEMPTS):
            shape = draw_caller(rng, helper.returns, canonical_parameters(helper))
            if self._belongs(shape_hash(shape)):
                return name_shape(shape, "caller", name, rng, imports=(helper,))
        return None

    def whole(self, name: str, rng: Random) -> tuple[FunctionSpec, Cases]:
        """A function of the split without a bug, and its cases."""
        for _ in range(_MOST_ATTEMPTS):
            spec = self._draw(FAMILIES, name, rng)
            cases = choose_cases(spec, compile_functions([spec.source])[name], None, rng, _min_results(spec))
            if cases is not None:
                return spec, cases
        raise AssertionError(f"no function in the split {self.split}")

    def _draw(
        self, families: Sequence[Family], name: str, rng: Random, any_hash: bool = False
    ) -> FunctionSpec:
        for _ in range(_MOST_ATTEMPTS):
            family = rng.choice(families)
            shape = family.draw(rng)
            if any_hash or self._belongs(shape_hash(shape)):
                spec = name_shape(shape, family.name, name, rng)
                if not self._max_characters or len(spec.source) <= self._max_characters:
                    return spec
        raise AssertionError(f"no function in the split {self.split}")

    def _belongs(self, function_hash: str) -> bool:
        wanted = "heldout" if self.split == "heldout_family" else self.split
        return split_of_hash(function_hash) == wanted


def _min_results(spec: FunctionSpec) -> int:
    """Least number of different results in the cases of the function (or of its caller)."""
    return 2 if spec.returns == "flag" else 4


def canonical_parameters(helper: FunctionSpec) -> list[str]:
    """Canonical parameter names for a caller that passes its parameters on to `helper`."""
    free: dict[str, list[str]] = {"number": ["a", "b", "c"], "numbers": ["xs", "ys"]}
    fixed = {"count": "n", "any_numbers": "es", "rows": "rows", "text": "s", "letter": "t", "words": "ws",
             "table": "d", "flag": "flag"}  # fmt: skip
    return [free[kind].pop(0) if kind in free else fixed[kind] for kind in helper.kinds]


def _assemble(
    task_id: str,
    level: int,
    split: Split,
    broken: BrokenFunction,
    others: Sequence[tuple[FunctionSpec, Cases]],
    rng: Random,
) -> Task:
    """Puts the files of a task together."""
    spec = broken.spec
    shown: list[tuple[FunctionSpec, Cases]] = list(others)
    judged: list[tuple[FunctionSpec, Cases]] = [*others, (spec, broken.cases)]
    files = {other.path: other.source for other, _ in others} | {spec.path: broken.source}
    failing = spec.name
    if broken.caller is not None and broken.caller_cases is not None:
        failing = broken.caller.name
        files[broken.caller.path] = broken.caller.source
        shown.append((broken.caller, broken.caller_cases))
        judged.append((broken.caller, broken.caller_cases))
    else:
        shown.append((spec, broken.cases))
    rng.shuffle(shown)
    files[VISIBLE_TESTS] = test_file([(function, cases.visible) for function, cases in shown])
    hidden = test_file([(function, cases.hidden) for function, cases in judged])
    return Task(
        id=task_id,
        instruction=rng.choice(INSTRUCTIONS).format(name=failing),
        files=dict(sorted(files.items())),
        hidden_files={HIDDEN_TESTS: hidden},
        solution_files={spec.path: spec.source},
        allowed_paths=ALLOWED_PATHS,
        test_paths=(VISIBLE_TESTS,),
        hidden_test_paths=(HIDDEN_TESTS,),
        metadata={
            "level": level,
            "family": spec.family,
            "bug_kind": broken.bug.kind,
            "split": split,
            "function": spec.name,
            "test": f"test_{failing}",
            "path": spec.path,
            "line": broken.bug.line,
            "function_hash": spec.hash,
        },
    )
