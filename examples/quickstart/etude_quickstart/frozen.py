"""The evaluation tasks: generated, and frozen by committed digests.

Levels and bug kinds are equally frequent, so figures of different runs, commits and machines can be compared.
A change of a family or of the generator that changes these tasks changes their digest, and a test fails: then
old figures are no longer comparable, which the changelog must state.
"""

from __future__ import annotations

from functools import lru_cache
from random import Random

from etude.records import Task
from etude_quickstart.acting import ActingFamily
from etude_quickstart.composed import ComposedGenerator, combinations_of
from etude_quickstart.generator import LEVELS, FunctionSplit, Split, TaskGenerator, bug_kinds_of
from etude_quickstart.observed import NUM_RULES, OBSERVED_KINDS, ObservedGenerator

FROZEN_SEED = 1_018
FROZEN_COUNT = 240
"""Number of tasks covered by each committed digest."""


def evaluation_tasks(split: Split, count: int = FROZEN_COUNT) -> list[Task]:
    """The first `count` evaluation tasks of the split; beyond 240 the pattern continues.

    Bug kinds alternate; each round of them starts at the next level. With the 12 kinds of the ordinary
    splits, 240 tasks have each kind 20 times and each level 80 times. Raises TaskError for an unknown
    split.
    """
    generator = TaskGenerator(FROZEN_SEED, split)
    kinds = bug_kinds_of(split)
    tasks: list[Task] = []
    for index in range(count):
        turn, place = divmod(index, len(kinds))
        level = LEVELS[(turn + place) % len(LEVELS)]
        rng = Random(f"frozen/{FROZEN_SEED}/{split}/{index}")
        tasks.append(generator.build(f"eval-{split}-{index:04d}", level, kinds[place], rng))
    return tasks


def acting_tasks(family: ActingFamily, split: FunctionSplit, count: int = FROZEN_COUNT) -> list[Task]:
    """The first `count` evaluation tasks of a family of `acting`.

    `observed`: kinds and rules alternate: 24 tasks have each rule of each kind once. `composed`: pairs and,
    outside of `train`, triples alternate; all pairs are equally frequent.
    """
    tasks: list[Task] = []
    for index in range(count):
        rng, name = Random(f"frozen/{family}/{split}/{index}"), f"eval-{family}_{split}-{index:04d}"
        if family == "observed":
            turn, place = divmod(index, len(OBSERVED_KINDS))
            tasks.append(_observed(split).build(name, OBSERVED_KINDS[place], turn % NUM_RULES, rng))
        else:
            size = 2 + (index % 2 if split != "train" else 0)
            kinds = combinations_of(split, size)
            chosen = kinds[index // 2 % len(kinds)] if size == 2 else rng.choice(kinds)
            tasks.append(_composed(split).build(name, chosen, rng))
    return tasks


@lru_cache(maxsize=3)
def _observed(split: FunctionSplit) -> ObservedGenerator:
    return ObservedGenerator(FROZEN_SEED, split)


@lru_cache(maxsize=3)
def _composed(split: FunctionSplit) -> ComposedGenerator:
    return ComposedGenerator(FROZEN_SEED, split)
