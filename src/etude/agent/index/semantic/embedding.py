"""The embedder interface, and the text of a chunk that is embedded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from etude.agent.index.semantic.words import split_words

Vectors = NDArray[np.float32]
"""[texts, dimension], each row of length 1 (or 0: nothing was in the text)."""

EMBEDDING_TEXT_VERSION = 1
"""Incremented whenever `embedding_text` gives other text."""
MAX_EMBEDDED_CHARACTERS = 1000
"""Per chunk: about twice what the default model reads. An edit beyond this needs no new vector."""


class Embedder(Protocol):
    """Text to vectors. Both methods block, and may be called by several threads."""

    @property
    def key(self) -> str:
        """Identifies the model and all that changes its vectors: vectors of two keys are never compared."""
        ...

    @property
    def dimension(self) -> int: ...

    def embed(self, texts: Sequence[str]) -> Vectors:
        """One row per text (as `embedding_text` returns them). A text's row must not depend on the others."""
        ...

    def embed_question(self, question: str) -> NDArray[np.float32]:
        """[dimension]: vector of a question, which some models treat differently from documents."""
        ...


def embedding_text(symbol: str, text: str) -> str:
    """The text of a chunk that is embedded: the words of its name, then its lines without indentation.

    The name split into words is what helps a model of English most; punctuation does it no harm. Figures
    for this and for the alternatives tried are in docs/code-index.md. The path stays out: a renamed file
    keeps its vectors, and so does a function that is indented differently.
    """
    lines = "\n".join(stripped for line in text.split("\n") if (stripped := line.strip()))
    return f"{' '.join(split_words(symbol))}\n{lines}"[:MAX_EMBEDDED_CHARACTERS]


def normalised(rows: NDArray[np.float32]) -> Vectors:
    """Rows of length 1; rows of zeros stay so."""
    lengths = np.linalg.norm(rows, axis=-1, keepdims=True)
    return (rows / np.where(lengths == 0, 1, lengths)).astype(np.float32)
