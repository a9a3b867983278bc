"""Composed: several bugs at once, along a chain of calls, each in a file of its own.

    part      a chain of two or three files, one of them broken     what mid-training reads
    pair      a function and its caller, both broken                what reinforcement learning trains on
    triple    a function, its caller and that one's caller          held out only

The failing test calls the end of the chain, and passes only if every bug is fixed. Each pair and each triple
of bug kinds belongs to one split, so that the held-out ones are new combinations of parts that are known
(arXiv 2509.25123: reinforcement learning on f(g(x)) carries over to those, rejection fine-tuning on the same
data does not). Functions, too, are of their split.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from random import Random

from etude.errors import TaskError
from etude.records import Task
from etude.tasks.cases import Case, choose_cases, test_file
from etude.tasks.functions import NAMES, FunctionSpec, compile_functions
from etude.tasks.generator import (
    ALLOWED_PATHS,
    FUNCTION_SPLITS,
    HIDDEN_TESTS,
    INSTRUCTIONS,
    VISIBLE_TESTS,
    FunctionSplit,
    TaskGenerator,
)
from etude.tasks.mutations import BUG_KINDS, BugKind, mutations

Combination = tuple[BugKind, ...]
CALLER_KINDS: tuple[BugKind, ...] = (
    "operator",
    "comparison",
    "off_by_one",
    "variable",
    "negation",
    "builtin",
    "swapped",
    "missing_return",
)
"""The kinds of bugs that callers can have; the last only at the end of the chain: it gives itself away."""
INNER_KINDS: tuple[BugKind, ...] = tuple(
    kind for kind in BUG_KINDS if kind not in ("logical", "boolean", "missing_return")
)
"""Those of the innermost function: callers of what returns True or False take too few kinds."""

_NUM_CLASSES = 6
_MAX_CHARACTERS = 130
"""Of the function at the end of the chain, unless its bug needs a longer one: sessions stay short."""
_LONG_KINDS = ("range_end", "augmented", "negation")
_MOST_ATTEMPTS = 2000


def combinations_of(split: FunctionSplit, size: int) -> list[Combination]:
    """The combinations of `size` bug kinds that tasks of the split have: of the innermost function, then of
    its callers. No triple is of `train`."""
    return [
        (kind, *callers)
        for callers in combinations(CALLER_KINDS, size - 1)
        for kind in INNER_KINDS
        if kind not in callers and _split_of((kind, *callers)) == split
    ]


def _split_of(kinds: Combination) -> FunctionSplit:
    """Whatever their order: of pairs about two thirds are trained on and a sixth judges; of triples five
    sixths judge."""
    number = sum(map(BUG_KINDS.index, kinds)) % _NUM_CLASSES
    if number == 0:
        return "validation"
    return "train" if len(kinds) == 2 and number != 3 else "heldout"


class ComposedGenerator:
    """Tasks by index, each a pure function of (seed, split, index). Raises TaskError for an unknown
    split."""

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
        """The task with this index: always the same. Outside of `train`, pairs and triples take turns."""
        rng = Random(f"composed/{self.seed}/{self.split}/{index}")
        kinds = rng.choice(combinations_of(self.split, self._sizes[index % len(self._sizes)]))
        return self.build(f"composed-{self.split}-{self.seed}-{index}", kinds, rng)

    def part(self, index: int) -> Task:
        """A task with one bug anywhere in a chain of two or three."""
        rng = Random(f"part/{self.seed}/{self.split}/{index}")
        size = rng.randint(2, 3)
        only = rng.randrange(size)
        for _ in range(_MOST_ATTEMPTS):
            callers = sorted(rng.sample(CALLER_KINDS, size - 1), key=CALLER_KINDS.index)
            kinds = (rng.choice(INNER_KINDS), *callers)
            task = self._try(f"part-{self.split}-{self.seed}-{index}", kinds, rng, only)
            if task is not None:
                return task
        raise AssertionError(f"no chain in the split {self.split}")

    def build(self, task_id: str, kinds: Combination, rng: Random) -> Task:
        """A chain with a bug of each kind, the innermost function's first."""
        for _ in range(_MOST_ATTEMPTS):
            task = self._try(task_id, kinds, rng)
            if task is not None:
                return task
        raise AssertionError(f"no chain of the split {self.split} takes bugs of the kinds {kinds}")

    def _try(self, task_id: str, kinds: Combination, rng: Random, only: int | None = None) -> Task | None:
        """With the bug at `only` alone, if given; None where the functions drawn do not take the bugs."""
        chain = self._draw_chain(kinds, rng.sample(NAMES, len(kinds)), rng)
        cases = chain and _choose_cases(*chain, rng)
        return self._assemble(task_id, kinds, *chain, *cases, rng, only) if chain and cases else None

    def _draw_chain(
        self, kinds: Combination, names: Sequence[str], rng: Random
    ) -> tuple[list[FunctionSpec], list[str]] | None:
        """Right functions, innermost first, and their broken sources; None where a bug finds no place."""
        generator = self._long if kinds[0] in _LONG_KINDS else self._short
        inner = generator.broken(kinds[0], names[:1], 1, rng)
        specs, broken = [inner.spec], [inner.source]
        for kind, name in zip(kinds[1:], names[1:], strict=True):
            caller = generator.caller(specs[-1], name, rng)
            bugs = [bug for bug in mutations(caller.source) if bug.kind == kind] if caller else []
            if caller is None or not bugs:
                return None
            specs.append(caller)
            broken.append(rng.choice(bugs).apply(caller.source))
        return specs, broken

    def _assemble(
        self,
        task_id: str,
        kinds: Combination,
        specs: Sequence[FunctionSpec],
        broken: Sequence[str],
        visible: Sequence[Case],
        hidden: Sequence[Case],
        rng: Random,
        only: int | None,
    ) -> Task:
        wrong = range(len(specs)) if only is None else (only,)
        files = {spec.path: spec.source for spec in specs} | {specs[n].path: broken[n] for n in wrong}
        top = specs[-1]
        return Task(
            id=task_id,
            instruction=rng.choice(INSTRUCTIONS).format(name=top.name),
            files=dict(sorted({**files, VISIBLE_TESTS: test_file([(top, visible)])}.items())),
            hidden_files={HIDDEN_TESTS: test_file([(top, hidden)])},
            solution_files={specs[n].path: specs[n].source for n in wrong},
            allowed_paths=ALLOWED_PATHS,
            test_paths=(VISIBLE_TESTS,),
            hidden_test_paths=(HIDDEN_TESTS,),
            metadata={
                "level": len(wrong),
                "family": "composed",
                "bug_kind": "+".join(kinds[n] for n in wrong),
                "split": self.split,
            },
        )


def _choose_cases(
    specs: Sequence[FunctionSpec], broken: Sequence[str], rng: Random
) -> tuple[list[Case], list[Case]] | None:
    """Visible and hidden cases of the end of the chain: both fail while any one bug is left, and with all."""
    sources, top = [spec.source for spec in specs], specs[-1]
    right = compile_functions(sources)[top.name]
    visible: list[Case] = []
    hidden: list[Case] = []
    for left in [*((n,) for n in range(len(specs))), tuple(range(len(specs)))]:
        mixed = [broken[n] if n in left else source for n, source in enumerate(sources)]
        cases = choose_cases(top, right, compile_functions(mixed)[top.name], rng, 2)
        if cases is None:
            return None
        visible += [case for case in cases.visible if case not in visible]
        hidden += [case for case in cases.hidden if case not in hidden]
    return visible, [case for case in hidden if case not in visible]
