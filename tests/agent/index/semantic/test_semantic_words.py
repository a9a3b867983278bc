"""Words and BM25."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.agent.index.semantic.lexical import K1, B, Lexicon, TermCounts
from etude.agent.index.semantic.words import count_terms, question_terms, split_words, stem, term_id

DOCUMENTS = st.lists(st.dictionaries(st.integers(0, 12), st.integers(1, 9), max_size=6), max_size=12)
NOTHING = np.zeros(0, np.int32)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("parseHTTPHeader", ["parse", "http", "header"]),
        ("read_file2 = XMLParser(3)", ["read", "file", "2", "xml", "parser", "3"]),
        ("__init__", ["init"]),
        ("größe naïve", ["gr", "öß", "e", "na", "ï", "ve"]),
        ("x" * 41, []),
    ],
)
def test_identifiers_are_split(text: str, words: list[str]) -> None:
    assert split_words(text) == words


@pytest.mark.parametrize(
    "words",
    [
        ("parse", "parses", "parsed", "parsing"),
        ("copy", "copies"),
        ("stop", "stops", "stopped", "stopping"),
        ("match", "matches", "matching"),
    ],
)
def test_forms_of_one_word_have_one_stem(words: tuple[str, ...]) -> None:
    assert len({stem(word) for word in words}) == 1


@pytest.mark.parametrize("word", ["class", "status", "this", "bed", "red", "string"])
def test_stems_are_not_cut_too_far(word: str) -> None:
    assert len(stem(word)) >= 3


def test_a_question_of_stop_words_alone_is_asked_all_the_same() -> None:
    assert question_terms("what is it") != {}
    assert question_terms("what is the parser") == {term_id(stem("parser")): 1}


def test_counts_are_capped() -> None:
    assert set(count_terms([("word " * 300, 1)]).values()) == {255}


def naive(documents: list[dict[int, int]], question: dict[int, int]) -> list[float]:
    """BM25 as the book has it."""
    if not documents:
        return []
    average = max(sum(sum(d.values()) for d in documents) / len(documents), 1e-6)
    scores: list[float] = []
    for document in documents:
        total = 0.0
        for term, times in question.items():
            frequency = sum(term in other for other in documents)
            number = document.get(term, 0)
            weight = math.log(1 + (len(documents) - frequency + 0.5) / (frequency + 0.5))
            norm = K1 * (1 - B + B * sum(document.values()) / average)
            total += times * weight * number * (K1 + 1) / (number + norm) if number else 0
        scores.append(total)
    return scores


@given(DOCUMENTS, DOCUMENTS, st.sets(st.integers(0, 11)), st.lists(st.integers(0, 12), max_size=5))
def test_scores_with_edits_are_those_of_a_lexicon_made_anew(
    base: list[dict[int, int]], more: list[dict[int, int]], gone: set[int], asked: list[int]
) -> None:
    question = dict(Counter(asked))
    without = np.array(sorted(number for number in gone if number < len(base)), dtype=np.int32)
    scores = Lexicon.build(TermCounts.of(base)).score(question, TermCounts.of(more), without)
    kept = [number for number in range(len(base)) if number not in gone]
    expected = naive([base[number] for number in kept] + more, question)
    assert scores[[*kept, *range(len(base), len(base) + len(more))]] == pytest.approx(
        expected, rel=1e-4, abs=1e-5
    )


@given(DOCUMENTS, st.data())
def test_a_lexicon_moves_documents_without_their_texts(
    documents: list[dict[int, int]], data: st.DataObject
) -> None:
    places = data.draw(st.permutations(range(len(documents))))
    kept = [place if place % 3 else -1 for place in places]
    numbers = np.array(kept, dtype=np.int32)
    entries = Lexicon.build(TermCounts.of(documents)).entries()
    moved = Lexicon.build(entries.renumbered(numbers, len(documents)))
    expected: list[dict[int, int]] = [{} for _ in documents]
    for document, place in zip(documents, kept, strict=True):
        if place >= 0:
            expected[place] = document
    fresh = Lexicon.build(TermCounts.of(expected))
    for name in ("terms", "starts", "docs", "counts", "lengths"):
        np.testing.assert_array_equal(getattr(moved, name), getattr(fresh, name))


def test_two_entries_of_one_word_are_joined() -> None:
    terms, counts = np.array([5, 5], np.uint32), np.array([200, 100], np.uint8)
    entries = TermCounts(1, np.array([0, 0], np.int32), terms, counts)
    assert Lexicon.build(entries).counts.tolist() == [255]
