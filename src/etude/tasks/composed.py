"""Composed: several bugs at once, one in each function of a file.

    part      one bug in a file of one to three functions     what mid-training reads
    pair      two functions, a bug in each, of two kinds      what reinforcement learning trains on
    triple    three functions, three kinds                    held out only

Each pair and each triple of bug kinds belongs to one split, so that the held-out ones are new combinations of
parts that are known (arXiv 2509.25123: reinforcement learning carries over to those, rejection fine-tuning on
the same data does not). Functions, too, are of their split.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from random import Random
from typing import Literal, get_args

from etude.errors import TaskError
from etude.records import Task
from etude.tasks.cases import Cases, test_file
from etude.tasks.functions import NAMES, FunctionSpec
from etude.tasks.generator import ALLOWED_PATHS, HIDDEN_TESTS, VISIBLE_TESTS, TaskGenerator
from etude.tasks.mutations import BUG_KINDS, BugKind

ComposedSplit = Literal["train", "validation", "heldout"]
COMPOSED_SPLITS: tuple[ComposedSplit, ...] = get_args(ComposedSplit)
Combination = tuple[BugKind, ...]

_NUM_CLASSES = 6
_MAX_CHARACTERS = 160
"""Of a function: sessions stay short."""
_MOST_FUNCTIONS = 3


def combinations_of(split: ComposedSplit, size: int) -> list[Combination]:
    """The combinations of `size` bug kinds that tasks of the split have. No triple is of `train`."""
    found = combinations(range(len(BUG_KINDS)), size)
    return [tuple(BUG_KINDS[i] for i in chosen) for chosen in found if _split_of(chosen) == split]


def _split_of(chosen: Sequence[int]) -> ComposedSplit:
    """Of pairs two thirds are trained on and a sixth judges; of triples five sixths judge."""
    number = sum(chosen) % _NUM_CLASSES
    if number == 0:
        return "validation"
    return "train" if len(chosen) == 2 and number != 3 else "heldout"


class ComposedGenerator:
    """Tasks by index, each a pure function of (seed, split, index). Raises TaskError for an unknown split."""

    def __init__(self, seed: int, split: ComposedSplit = "train") -> None:
        if split not in COMPOSED_SPLITS:
            fix = f"one of {', '.join(COMPOSED_SPLITS)}"
            raise TaskError("unknown split", field="split", received=split, fix=fix)
        self.seed, self.split = seed, split
        self._functions = TaskGenerator(seed, split, max_characters=_MAX_CHARACTERS)
        self._sizes = (2,) if split == "train" else (2, 3)

    def task(self, index: int) -> Task:
        """The task with this index: always the same. Outside of `train`, pairs and triples take turns."""
        rng = Random(f"composed/{self.seed}/{self.split}/{index}")
        size = self._sizes[index % len(self._sizes)]
        kinds = rng.choice(combinations_of(self.split, size))
        return self.build(f"composed-{self.split}-{self.seed}-{index}", kinds, size, rng)

    def part(self, index: int) -> Task:
        """A task with one bug, in a file of one to three functions."""
        rng = Random(f"part/{self.seed}/{self.split}/{index}")
        num_functions = rng.randint(1, _MOST_FUNCTIONS)
        return self.build(
            f"part-{self.split}-{self.seed}-{index}", (rng.choice(BUG_KINDS),), num_functions, rng
        )

    def build(self, task_id: str, kinds: Combination, num_functions: int, rng: Random) -> Task:
        """A file of so many functions, with a bug of each kind in one of its own."""
        names = rng.sample(NAMES, num_functions)
        functions: list[tuple[FunctionSpec, Cases, str]] = []
        for name, kind in zip(names, kinds, strict=False):
            broken = self._functions.broken(kind, (name,), 1, rng)
            functions.append((broken.spec, broken.cases, broken.source))
        for name in names[len(kinds) :]:
            spec, cases = self._functions.whole(name, rng)
            functions.append((spec, cases, spec.source))
        rng.shuffle(functions)
        first = functions[0][0]
        files = {first.path: "\n".join(source for _, _, source in functions)}
        files[VISIBLE_TESTS] = test_file(
            [(spec, cases.visible) for spec, cases, _ in functions], first.module
        )
        hidden = test_file([(spec, cases.hidden) for spec, cases, _ in functions], first.module)
        return Task(
            id=task_id,
            instruction=f"fix {first.path}",
            files=dict(sorted(files.items())),
            hidden_files={HIDDEN_TESTS: hidden},
            solution_files={first.path: "\n".join(spec.source for spec, _, _ in functions)},
            allowed_paths=ALLOWED_PATHS,
            test_paths=(VISIBLE_TESTS,),
            hidden_test_paths=(HIDDEN_TESTS,),
            metadata={
                "level": len(kinds),
                "family": "composed",
                "bug_kind": "+".join(sorted(kinds)),
                "split": self.split,
                "path": first.path,
            },
        )
