"""Joins what the words say with what the vectors say."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["best", "fuse_ranks", "fuse_scores"]

Scores = NDArray[np.float32]

VECTOR_SHARE = 0.7
"""Of a score; the rest is BM25's. Chosen on the development half (docs/code-index.md)."""
_UNSEEN_COSINE = 0.5
"""What a chunk without a vector is given for its cosine, times its share of the best BM25 score."""


def fuse_scores(cosines: Scores, words: Scores, share: float = VECTOR_SHARE) -> Scores:
    """`share` * cosine + (1 - `share`) * BM25 as a part of its best.

    Cosines of one model have one scale for all questions, BM25 has none. `cosines`: NaN for chunks that have
    no vector yet; these are ranked by their words.
    """
    best_words = float(words.max(initial=0))
    relative = words / best_words if best_words > 0 else np.zeros_like(words)
    known = np.where(np.isnan(cosines), relative * _UNSEEN_COSINE, cosines)
    return (share * known + (1 - share) * relative).astype(np.float32)


def fuse_ranks(cosines: Scores, words: Scores, share: float = 0.5, constant: float = 10.0) -> Scores:
    """Reciprocal rank fusion (SIGIR 2009); here for comparison."""
    return (share / (constant + _ranks(cosines)) + (1 - share) / (constant + _ranks(words))).astype(
        np.float32
    )


def best(scores: Scores, num: int) -> NDArray[np.int64]:
    """Indices of the `num` highest, highest first, earlier ones first among equals."""
    num = min(num, len(scores))
    if num < len(scores):
        # All that reach the lowest score that gets in, so that equal scores do not depend on the partition.
        least = np.partition(scores, len(scores) - num)[len(scores) - num]
        candidates = np.flatnonzero(scores >= least)
    else:
        candidates = np.arange(len(scores))
    return candidates[np.argsort(-scores[candidates], kind="stable")][:num]


def _ranks(scores: Scores) -> NDArray[np.int64]:
    ranks = np.empty(len(scores), dtype=np.int64)
    ranks[np.argsort(-np.nan_to_num(scores, nan=-np.inf), kind="stable")] = np.arange(1, len(scores) + 1)
    return ranks
