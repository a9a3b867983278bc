"""Training data of next-token training: token documents with a loss weight per token, drawn step by step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class Document:
    """Tokens with a loss weight each; 0 masks a token. Documents do not attend to each other."""

    tokens: NDArray[np.int32]
    """[T]"""
    weights: NDArray[np.float32]
    """[T] entry 0 is ignored: the first token has no context."""
    agent: NDArray[np.bool_]
    """[T] True for tokens that the agent wrote: the loss on these is reported separately."""

    @staticmethod
    def plain(tokens: NDArray[np.int32]) -> Document:
        """A text: all weights are 1, and no token is an agent's."""
        return Document(tokens, np.ones(len(tokens), dtype=np.float32), np.zeros(len(tokens), dtype=np.bool_))


class Batches(Protocol):
    """Draws the documents of each step, deterministically and resumably at every step."""

    @property
    def exhausted(self) -> bool:
        """Whether no documents are left to draw."""
        ...

    def draw(self) -> list[Document]:
        """The documents of the next step; empty once exhausted."""
        ...

    def figures(self) -> Mapping[str, float]:
        """Metrics of the batches, for those of a step."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Plain values from which `load_state_dict` resumes."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resumes from `state`. Raises CheckpointError if the documents differ."""
        ...


class ShuffledDocuments:
    """Draws documents without replacement, in another random order each epoch. Implements Batches."""

    def __init__(self, documents: Sequence[Document], tokens_per_step: int, seed: int) -> None:
        """A step has the fewest documents with at least `tokens_per_step` tokens."""
        self._documents = documents
        self._tokens_per_step = tokens_per_step
        self._seed = seed
        self._epoch = 0
        self._cursor = 0
        self._order = self._shuffle()

    @property
    def exhausted(self) -> bool:
        """See Batches: only if there are no documents."""
        return not len(self._documents)

    def draw(self) -> list[Document]:
        chosen: list[Document] = []
        num_tokens = 0
        while num_tokens < self._tokens_per_step and not self.exhausted:
            if self._cursor == len(self._order):
                self._epoch, self._cursor = self._epoch + 1, 0
                self._order = self._shuffle()
            document = self._documents[self._order[self._cursor]]
            self._cursor += 1
            chosen.append(document)
            num_tokens += len(document.tokens)
        return chosen

    def figures(self) -> Mapping[str, float]:
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "cursor": self._cursor}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._epoch, self._cursor = state["epoch"], state["cursor"]
        self._order = self._shuffle()

    def _shuffle(self) -> NDArray[np.int64]:
        return np.random.default_rng((self._seed, self._epoch)).permutation(len(self._documents))
