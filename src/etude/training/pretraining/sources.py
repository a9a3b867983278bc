"""Sources of a mixture: documents, and their division into pieces of at most a window for training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from etude.config import MixtureSourceConfig
from etude.training.pretraining.corpora import Corpus
from etude.training.pretraining.documents import Document
from etude.training.pretraining.infilling import RESERVED_TOKENS, Infilling

Pieces = NDArray[np.int64]
"""[pieces, 3] document, first token, end."""


class Source(Protocol):
    """Documents that a mixture draws from. Sources of equal digest have the same pieces."""

    @property
    def name(self) -> str:
        """Name of the domain."""
        ...

    @property
    def config(self) -> MixtureSourceConfig:
        """Its weight, and how often it may be read."""
        ...

    @property
    def digest(self) -> str:
        """Digest of everything that determines its pieces."""
        ...

    @property
    def lengths(self) -> NDArray[np.int64]:
        """[documents] tokens of each, those held out included."""
        ...

    def pieces(self, window: int) -> Pieces:
        """The pieces for training with a window of so many tokens, in order."""
        ...

    def read(self, piece: NDArray[np.int64], window: int, random: np.random.Generator) -> Document:
        """Reads one piece; a function of the arguments."""
        ...


@dataclass(frozen=True, slots=True)
class InfillingShares:
    """How often documents are rearranged for infilling."""

    infilling: Infilling
    rate: float
    spm_share: float


@dataclass(frozen=True, slots=True, eq=False)
class CorpusSource:
    """The documents of a corpus that are not held out; those longer than the window are cut into pieces.

    Neighbouring pieces share one token, the target of one and the context of the other: in one pass every
    token but a document's first is a target exactly once. Implements Source.
    """

    corpus: Corpus
    config: MixtureSourceConfig
    heldout: NDArray[np.bool_]
    """[documents]"""
    end_token: int | None = None
    shares: InfillingShares | None = None

    @property
    def name(self) -> str:
        return self.corpus.name

    @property
    def digest(self) -> str:
        turned = None if self.shares is None else (self.shares.rate, self.shares.spm_share)
        return blake3(repr((self.corpus.digest, turned)).encode() + self.heldout.tobytes()).hexdigest()

    @property
    def lengths(self) -> NDArray[np.int64]:
        return self.corpus.lengths

    def pieces(self, window: int) -> Pieces:
        """See Source. Pieces that may be rearranged leave room for the sentinels."""
        lengths = self.corpus.lengths
        if self.shares is not None:
            window = max(2, window - RESERVED_TOKENS)
        return cut(np.flatnonzero(~self.heldout & (lengths > 1)), lengths, window)

    def read(self, piece: NDArray[np.int64], window: int, random: np.random.Generator) -> Document:
        """See Source: rearranged at random, unless that makes it longer than the window."""
        document, begin, end = (int(value) for value in piece)
        tokens = self.corpus.document(document)[begin:end]
        shares = self.shares
        if shares is not None and self.corpus.is_text and random.random() < shares.rate:
            turned = shares.infilling.rearrange(tokens, self.end_token, shares.spm_share, random)
            if turned is not None and len(turned) <= window:
                tokens = turned
        return Document.plain(tokens)


@dataclass(frozen=True, slots=True, eq=False)
class SessionSource:
    """Whole sessions in memory; those longer than the window are left out. Implements Source."""

    name: str
    config: MixtureSourceConfig
    documents: Sequence[Document]
    digest: str = field(init=False)
    """See Source."""

    def __post_init__(self) -> None:
        hasher = blake3()
        for document in self.documents:
            hasher.update(document.tokens.tobytes())
            hasher.update(document.weights.tobytes())
        object.__setattr__(self, "digest", hasher.hexdigest())

    @property
    def lengths(self) -> NDArray[np.int64]:
        return np.array([len(document.tokens) for document in self.documents], dtype=np.int64)

    def pieces(self, window: int) -> Pieces:
        lengths = self.lengths
        chosen = np.flatnonzero(lengths <= window)
        return np.stack((chosen, np.zeros_like(chosen), lengths[chosen]), axis=1)

    def read(self, piece: NDArray[np.int64], window: int, random: np.random.Generator) -> Document:
        return self.documents[int(piece[0])]


def cut(documents: NDArray[np.int64], lengths: NDArray[np.int64], window: int) -> Pieces:
    """Pieces of `documents` (indices into `lengths`), each of at most `window` >= 2 tokens, sharing one token
    with the next of the same document."""
    stride = window - 1
    counts = np.maximum(1, -(-(lengths[documents] - 1) // stride))
    owners = np.repeat(documents, counts)
    first = np.repeat(np.cumsum(counts) - counts, counts)
    begins = (np.arange(len(owners)) - first) * stride
    return np.stack((owners, begins, np.minimum(begins + window, lengths[owners])), axis=1)
