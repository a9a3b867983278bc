"""Words of code and questions."""

from __future__ import annotations

import pytest

from etude.agent.index.semantic.words import question_stems, split_words, stem


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
    assert question_stems("what is it") != []
    assert question_stems("what is the parser of a parser") == [stem("parser")]
