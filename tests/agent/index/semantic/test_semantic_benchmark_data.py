"""The benchmark's labelled set: no answer may contain its question."""

from __future__ import annotations

import ast

import pytest
from benchmarks.code_index_semantic_data import MIN_WORDS, make_set


@pytest.mark.slow
def test_questions_are_gone_from_the_files_and_point_at_their_functions() -> None:
    labelled = make_set(300, 200, seed=3)
    assert labelled.num_functions >= 300 and len(labelled.questions) > 50
    assert len({question.text for question in labelled.questions}) == len(labelled.questions)
    for question in labelled.questions:
        source = labelled.files[question.path].decode()
        assert len(question.text.split()) >= MIN_WORDS
        node = next(
            node
            for node in ast.walk(ast.parse(source))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            and (node.lineno, node.end_lineno) == (question.first_line, question.last_line)
        )
        assert node.name == question.symbol.rpartition(".")[2]
        assert ast.get_docstring(node) is None


@pytest.mark.slow
def test_a_seed_gives_one_set_whose_halves_share_no_file() -> None:
    labelled, again = make_set(300, 200, seed=4), make_set(300, 200, seed=4)
    assert labelled == again
    halves = [{q.path for q in labelled.questions if q.development is half} for half in (True, False)]
    assert all(halves) and halves[0].isdisjoint(halves[1])
