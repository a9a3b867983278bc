"""What turns text into vectors, and what text is given to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from etude.agent.index.semantic.words import split_words
from etude.errors import ConfigError

__all__ = ["Embedder", "EmbedderMissingError", "Vectors", "feed", "normalised"]

Vectors = NDArray[np.float32]
"""[texts, dimension], each row of length 1 (or 0: nothing was in the text)."""

FEED_VERSION = 1
"""Goes up whenever `feed` gives other text."""
MAX_FEED_CHARACTERS = 1000
"""Of one chunk: about twice what the default model looks at. An edit behind them costs no new vector."""


class EmbedderMissingError(ConfigError):
    """The model of an embedder is not there; the lexical half of search works without it."""


@runtime_checkable
class Embedder(Protocol):
    """Text to vectors. Both methods block, and may be called by several threads."""

    @property
    def key(self) -> str:
        """Names the model and all that changes its vectors: vectors of two keys are never compared."""
        ...

    @property
    def dimension(self) -> int: ...

    def embed(self, texts: Sequence[str]) -> Vectors:
        """One row for each text of a chunk (what `feed` gave). A text's row must not depend on the others."""
        ...

    def embed_question(self, question: str) -> NDArray[np.float32]:
        """[dimension]: of what is searched for, where a model treats questions differently."""
        ...


def feed(symbol: str, text: str) -> str:
    """What is embedded of a chunk: the words of its name, then its lines without indentation.

    The name split into words is what helps a model of English most; punctuation does it no harm. Figures
    for this and for what was tried beside it stand in docs/code-index.md. The path stays out: a renamed file
    keeps its vectors, and so does a function that is indented differently.
    """
    lines = "\n".join(stripped for line in text.split("\n") if (stripped := line.strip()))
    return f"{' '.join(split_words(symbol))}\n{lines}"[:MAX_FEED_CHARACTERS]


def normalised(rows: NDArray[np.float32]) -> Vectors:
    """Rows of length 1; rows of zeros stay so."""
    lengths = np.linalg.norm(rows, axis=-1, keepdims=True)
    return (rows / np.where(lengths == 0, 1, lengths)).astype(np.float32)
