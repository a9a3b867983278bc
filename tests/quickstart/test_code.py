"""Code documents come from the train split only and are deterministic."""

from __future__ import annotations

import re

from etude_quickstart.code import REWRITE_MARK, code_documents, rewrite_documents
from etude_quickstart.functions import function_hash
from etude_quickstart.generator import split_of_hash


def plain(document: str) -> str:
    return re.sub(r"^\d+\t", "", document, flags=re.MULTILINE)


def test_documents_are_train_functions_with_docstrings() -> None:
    documents = list(code_documents(0, 300))
    assert len(documents) == 300
    for document in documents:
        source = plain(document)
        assert split_of_hash(function_hash(source)) == "train"
        assert '"""' in source
    numbered = sum(document != plain(document) for document in documents)
    assert 100 < numbered < 200
    assert 10 < sum("import" in document for document in documents) < 60


def test_documents_are_reproducible_and_a_longer_run_starts_the_same() -> None:
    assert list(code_documents(1, 20)) == list(code_documents(1, 40))[:20]
    assert list(code_documents(1, 20)) != list(code_documents(2, 20))


def test_rewrites_show_a_broken_file_and_the_body_that_its_docstring_states() -> None:
    for document in rewrite_documents(0, 200):
        numbered, mark, rewrite = document.partition(REWRITE_MARK)
        assert mark
        span, _, body = rewrite.partition("\n")
        first, last = map(int, span.split("-"))
        broken, mended = plain(numbered).split("\n"), body.split("\n")
        assert last == len(broken)
        assert len(mended) == last - first + 1
        assert broken[first - 2].endswith('"""')
        assert 1 <= sum(a != b for a, b in zip(broken[first - 1 :], mended, strict=True)) <= 3
        source = "\n".join([*broken[: first - 1], *mended])
        assert split_of_hash(function_hash(source)) == "train"
    assert list(rewrite_documents(1, 20)) == list(rewrite_documents(1, 40))[:20]
