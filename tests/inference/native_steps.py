"""Steps of a forward pass over a few sequences, as the tests of the native kernels cut them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from numpy.typing import NDArray

from etude.inference.cache import PAGE_TOKENS, PagedCache, StepRows
from etude.model import LanguageModel
from etude.native import find_compiler

needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="no C compiler")
NUM_PAGES = 48
PAGES_EACH = 9


@dataclass
class Sequences:
    """Some token sequences, their pages scattered over a cache, and how far each is computed."""

    tokens: list[NDArray[np.int64]]
    seed: int = 0
    computed: list[int] = field(default_factory=list[int])

    def __post_init__(self) -> None:
        self.computed = [0] * len(self.tokens)
        pages = np.random.default_rng(self.seed).permutation(NUM_PAGES)[: PAGES_EACH * len(self.tokens)]
        self.tables = pages.astype(np.int32).reshape(len(self.tokens), PAGES_EACH)

    def take(self, counts: dict[int, int]) -> StepRows:
        """The step that computes the next `counts[s]` positions of sequence s."""
        chosen, numbers = list(counts), np.array(list(counts.values()))
        starts = np.array([self.computed[s] for s in chosen])
        runs = [self.tokens[s][self.computed[s] : self.computed[s] + n] for s, n in counts.items()]
        for s, n in counts.items():
            self.computed[s] += n
        widest = -(-int((starts + numbers).max()) // PAGE_TOKENS)
        return StepRows.plan(
            np.concatenate(runs), np.ascontiguousarray(self.tables[chosen, :widest]), numbers, starts
        )


def random_sequences(lengths: Sequence[int], vocab_size: int, seed: int = 0) -> Sequences:
    source = np.random.default_rng(seed)
    return Sequences([source.integers(0, vocab_size, length) for length in lengths], seed)


def cache_for(model: LanguageModel) -> PagedCache:
    """A cache in which unwritten places hold what must never be read."""
    cache = PagedCache(model.config, NUM_PAGES)
    cache.keys.fill_(float("nan"))
    if cache.values is not None:
        cache.values.fill_(float("nan"))
    return cache
