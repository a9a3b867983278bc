"""A fake embedder without a model."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import xxhash
from numpy.typing import NDArray

from etude.agent.index.semantic.embedding import Vectors, normalised
from etude.agent.index.semantic.words import stems


class HashingEmbedder:
    """Sums a pseudo-random vector per word stem: deterministic, without semantics."""

    def __init__(self, dimension: int = 64) -> None:
        self._dimension = dimension
        self.num_embedded = 0
        """Number of texts embedded so far, without questions."""

    @property
    def key(self) -> str:
        return f"hashing/1/{self._dimension}"

    @property
    def dimension(self) -> int:
        return self._dimension

    def embed(self, texts: Sequence[str]) -> Vectors:
        self.num_embedded += len(texts)
        rows = np.zeros((len(texts), self._dimension), dtype=np.float32)
        for index, text in enumerate(texts):
            rows[index] = self._sum(text)
        return normalised(rows)

    def embed_question(self, question: str) -> NDArray[np.float32]:
        return normalised(self._sum(question))

    def _sum(self, text: str) -> NDArray[np.float32]:
        total = np.zeros(self._dimension, dtype=np.float32)
        for word in stems(text):
            total += _direction(word, self._dimension)
        return total


@lru_cache(4096)
def _direction(word: str, dimension: int) -> NDArray[np.float32]:
    seed = xxhash.xxh32_intdigest(word.encode())
    return np.random.Generator(np.random.PCG64(seed)).standard_normal(dimension, dtype=np.float32)
