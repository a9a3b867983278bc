"""Composed: several bugs at once, each in a function and a file of its own.

    part      one broken file among others        mid-training data
    pair      two broken files                    tasks for reinforcement learning
    triple    three broken files                  held out only

The instruction names no test: a test run shows which one fails, and once that function is fixed, the next run
shows the other. Each pair and triple of bug kinds belongs to one split, so that held-out ones are new
combinations of known parts (arXiv 2509.25123: reinforcement learning on f(g(x)) generalises to those, while
rejection fine-tuning on the same data does not). Functions, too, belong to one split.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from random import Random

from etude.errors import TaskError
from etude.records import Task
from etude_quickstart.cases import Cases, test_file
from etude_quickstart.functions import NAMES, FunctionSpec
from etude_quickstart.generator import (
    ALLOWED_PATHS,
    FUNCTION_SPLITS,
    HIDDEN_TESTS,
    VISIBLE_TESTS,
    BrokenFunction,
    FunctionSplit,
    TaskGenerator,
)
from etude_quickstart.mutations import BUG_KINDS, BugKind

Combination = tuple[BugKind, ...]
DIRECTORY = "lib"
"""Directory of all files, so that a test's name gives the path of the tested function."""
INSTRUCTIONS = ("tests fail", "fix the tests", "make the tests pass")

_NUM_CLASSES = 6
_MAX_CHARACTERS = 150
"""Most characters of a function's source, unless its bug needs a longer one; keeps sessions short."""
_LONG_KINDS: tuple[BugKind, ...] = ("range_end", "augmented", "negation", "logical", "missing_return")
_NUM_FILES = 3


def combinations_of(split: FunctionSplit, size: int) -> list[Combination]:
    """The combinations of `size` bug kinds in tasks of the split. `train` has no triples."""
    return [kinds for kinds in combinations(BUG_KINDS, size) if _split_of(kinds) == split]


def _split_of(kinds: Combination) -> FunctionSplit:
    """About two thirds of the pairs are `train`, a sixth `heldout`; five sixths of triples are `heldout`."""
    number = sum(map(BUG_KINDS.index, kinds)) % _NUM_CLASSES
    if number == 0:
        return "validation"
    return "train" if len(kinds) == 2 and number != 3 else "heldout"


class ComposedGenerator:
    """Tasks by index, each a pure function of (seed, split, index). Raises TaskError for an unknown split."""

    def __init__(self, seed: int, split: FunctionSplit = "train") -> None:
        if split not in FUNCTION_SPLITS:
            fix = f"one of {', '.join(FUNCTION_SPLITS)}"
            raise TaskError("unknown split", field="split", received=split, fix=fix)
        self.seed = seed
        self.split: FunctionSplit = split
        self._long = TaskGenerator(seed, split)
        self._short = TaskGenerator(seed, split, max_characters=_MAX_CHARACTERS)
        self._sizes = (2,) if split == "train" else (2, 3)

    def task(self, index: int) -> Task:
        """The task with this index; deterministic. Outside of `train`, pairs and triples alternate."""
        rng = Random(f"composed/{self.seed}/{self.split}/{index}")
        kinds = rng.choice(combinations_of(self.split, self._sizes[index % len(self._sizes)]))
        return self.build(f"composed-{self.split}-{self.seed}-{index}", kinds, rng)

    def part(self, index: int) -> Task:
        """The part with this index: a task with one bug."""
        rng = Random(f"part/{self.seed}/{self.split}/{index}")
        return self.build(f"part-{self.split}-{self.seed}-{index}", (rng.choice(BUG_KINDS),), rng)

    def build(self, task_id: str, kinds: Combination, rng: Random) -> Task:
        """A task of three files, with a bug of each kind in a file of its own."""
        names = rng.sample(NAMES, _NUM_FILES)
        broken = [self._broken(kind, name, rng) for kind, name in zip(kinds, names, strict=False)]
        whole = [_moved(*self._short.whole(name, rng)) for name in names[len(kinds) :]]
        return self._assemble(task_id, broken, whole, rng)

    def _broken(self, kind: BugKind, name: str, rng: Random) -> BrokenFunction:
        generator = self._long if kind in _LONG_KINDS else self._short
        broken = generator.broken(kind, [name], 1, rng)
        return replace(broken, spec=replace(broken.spec, directory=DIRECTORY))

    def _assemble(
        self,
        task_id: str,
        broken: Sequence[BrokenFunction],
        whole: Sequence[tuple[FunctionSpec, Cases]],
        rng: Random,
    ) -> Task:
        tested = [*whole, *((one.spec, one.cases) for one in broken)]
        rng.shuffle(tested)
        files = {spec.path: spec.source for spec, _ in whole} | {one.spec.path: one.source for one in broken}
        files[VISIBLE_TESTS] = test_file([(spec, cases.visible) for spec, cases in tested])
        kinds = "+".join(one.bug.kind for one in broken)
        return Task(
            id=task_id,
            instruction=rng.choice(INSTRUCTIONS),
            files=dict(sorted(files.items())),
            hidden_files={HIDDEN_TESTS: test_file([(spec, cases.hidden) for spec, cases in tested])},
            solution_files={one.spec.path: one.spec.source for one in broken},
            allowed_paths=ALLOWED_PATHS,
            test_paths=(VISIBLE_TESTS,),
            hidden_test_paths=(HIDDEN_TESTS,),
            metadata={
                "level": len(broken),
                "family": f"composed_{kinds}",
                "bug_kind": kinds,
                "split": self.split,
            },
        )


def _moved(spec: FunctionSpec, cases: Cases) -> tuple[FunctionSpec, Cases]:
    return replace(spec, directory=DIRECTORY), cases
