"""The families of tasks that can only be solved by running the tests, and their mixture with other tasks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random
from typing import Literal, get_args

from etude.records import Task
from etude_quickstart.composed import ComposedGenerator
from etude_quickstart.generator import FUNCTION_SPLITS, FunctionSplit
from etude_quickstart.observed import ObservedGenerator

ActingFamily = Literal["observed", "composed"]
ACTING_FAMILIES: tuple[ActingFamily, ...] = get_args(ActingFamily)
ACTING_SUITES: tuple[str, ...] = tuple(
    f"{family}_{split}" for family in ACTING_FAMILIES for split in FUNCTION_SPLITS
)
"""Names of the suites of their frozen evaluation tasks."""


def acting_source(seed: int, family: ActingFamily, split: FunctionSplit = "train") -> Callable[[int], Task]:
    """Tasks of a family by index."""
    kinds = {"observed": ObservedGenerator, "composed": ComposedGenerator}
    return kinds[family](seed, split).task


class MixedSource:
    """Training tasks by index, a share of them from these families."""

    def __init__(
        self, seed: int, others: Callable[[int], Task], shares: Mapping[ActingFamily, float]
    ) -> None:
        """`shares`: share of each family; the other tasks come from `others`."""
        self._seed, self._others, self._shares = seed, others, dict(shares)
        self._sources = {name: acting_source(seed, name) for name in ACTING_FAMILIES}

    def __call__(self, index: int) -> Task:
        """The task with this index: always the same."""
        draw = Random(f"mixed/{self._seed}/{index}").random()
        for family, share in self._shares.items():
            if draw < share:
                return self._sources[family](index)
            draw -= share
        return self._others(index)
