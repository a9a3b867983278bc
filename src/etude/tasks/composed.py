"""Composed: several bugs at once, each in a file of its own. The instruction names the files.

    part      one to three files, a bug in one of them     what mid-training reads
    pair      two files, a bug in each, of two kinds       what reinforcement learning trains on
    triple    three files, three kinds                     held out only

Each pair and each triple of bug kinds belongs to one split, so that the held-out ones are new combinations of
parts that are known (arXiv 2509.25123: reinforcement learning carries over to those, rejection fine-tuning on
the same data does not). Functions, too, are of their split.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from random import Random

from etude.errors import TaskError
from etude.records import Task
from etude.tasks.cases import Cases, test_file
from etude.tasks.functions import NAMES, FunctionSpec
from etude.tasks.generator import (
    ALLOWED_PATHS,
    FUNCTION_SPLITS,
    HIDDEN_TESTS,
    VISIBLE_TESTS,
    FunctionSplit,
    TaskGenerator,
)
from etude.tasks.mutations import BUG_KINDS, BugKind

Combination = tuple[BugKind, ...]

_NUM_CLASSES = 6
_MAX_CHARACTERS = 160
"""Of a function: sessions stay short."""
_MOST_FILES = 3
_DIRECTORY = "lib"
"""Of all files: what a small model has to copy from the instruction is a name."""


def combinations_of(split: FunctionSplit, size: int) -> list[Combination]:
    """The combinations of `size` bug kinds that tasks of the split have. No triple is of `train`."""
    found = combinations(range(len(BUG_KINDS)), size)
    return [tuple(BUG_KINDS[i] for i in chosen) for chosen in found if _split_of(chosen) == split]


def _split_of(chosen: Sequence[int]) -> FunctionSplit:
    """Of pairs two thirds are trained on and a sixth judges; of triples five sixths judge."""
    number = sum(chosen) % _NUM_CLASSES
    if number == 0:
        return "validation"
    return "train" if len(chosen) == 2 and number != 3 else "heldout"


class ComposedGenerator:
    """Tasks by index, each a pure function of (seed, split, index). Raises TaskError for an unknown split."""

    def __init__(self, seed: int, split: FunctionSplit = "train") -> None:
        if split not in FUNCTION_SPLITS:
            fix = f"one of {', '.join(FUNCTION_SPLITS)}"
            raise TaskError("unknown split", field="split", received=split, fix=fix)
        self.seed = seed
        self.split: FunctionSplit = split
        self._functions = TaskGenerator(seed, split, max_characters=_MAX_CHARACTERS)
        self._sizes = (2,) if split == "train" else (2, 3)

    def task(self, index: int) -> Task:
        """The task with this index: always the same. Outside of `train`, pairs and triples take turns."""
        rng = Random(f"composed/{self.seed}/{self.split}/{index}")
        size = self._sizes[index % len(self._sizes)]
        kinds = rng.choice(combinations_of(self.split, size))
        return self.build(f"composed-{self.split}-{self.seed}-{index}", kinds, size, rng)

    def part(self, index: int) -> Task:
        """A task that names one to three files, with a bug in one of them."""
        rng = Random(f"part/{self.seed}/{self.split}/{index}")
        num_files = rng.randint(1, _MOST_FILES)
        return self.build(f"part-{self.split}-{self.seed}-{index}", (rng.choice(BUG_KINDS),), num_files, rng)

    def build(self, task_id: str, kinds: Combination, num_files: int, rng: Random) -> Task:
        """A task that names so many files, with a bug of each kind in one of its own."""
        names = rng.sample(NAMES, num_files)
        functions: list[tuple[FunctionSpec, Cases]] = []
        files: dict[str, str] = {}
        for name, kind in zip(names, kinds, strict=False):
            broken = self._functions.broken(kind, (name,), 1, rng)
            spec = replace(broken.spec, directory=_DIRECTORY)
            functions.append((spec, broken.cases))
            files[spec.path] = broken.source
        fixed = {spec.path: spec.source for spec, _ in functions}
        for name in names[len(kinds) :]:
            spec, cases = self._functions.whole(name, rng)
            spec = replace(spec, directory=_DIRECTORY)
            functions.append((spec, cases))
            files[spec.path] = spec.source
        rng.shuffle(functions)
        instruction = f"fix {' '.join(spec.path for spec, _ in functions)}"
        files[VISIBLE_TESTS] = test_file([(spec, cases.visible) for spec, cases in functions])
        hidden = test_file([(spec, cases.hidden) for spec, cases in functions])
        return Task(
            id=task_id,
            instruction=instruction,
            files=dict(sorted(files.items())),
            hidden_files={HIDDEN_TESTS: hidden},
            solution_files=fixed,
            allowed_paths=ALLOWED_PATHS,
            test_paths=(VISIBLE_TESTS,),
            hidden_test_paths=(HIDDEN_TESTS,),
            metadata={
                "level": len(kinds),
                "family": "composed",
                "bug_kind": "+".join(sorted(kinds)),
                "split": self.split,
            },
        )
