"""How words and vectors make one ranking."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from etude.agent.index.semantic.index import best, fuse_scores


@given(st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), max_size=30), st.integers(1, 8))
def test_best_are_the_highest_in_order(values: list[float], num: int) -> None:
    scores = np.array(values, dtype=np.float32)
    expected = sorted(range(len(values)), key=lambda index: (-values[index], index))[:num]
    assert best(scores, num).tolist() == expected


def test_a_chunk_without_a_vector_is_ranked_by_its_words() -> None:
    scores = fuse_scores(np.array([0.4, np.nan, np.nan], np.float32), np.array([0, 9, 3], np.float32))
    assert best(scores, 3).tolist() == [1, 0, 2]


def test_without_any_known_word_vectors_decide() -> None:
    scores = fuse_scores(np.array([0.1, 0.3], np.float32), np.zeros(2, np.float32))
    assert best(scores, 1).tolist() == [1]
