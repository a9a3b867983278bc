"""The Merkle tree, path patterns and ranking."""

from __future__ import annotations

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from etude.agent.index.semantic.index import best, fuse_scores
from etude.agent.index.semantic.merkle import MerkleTree
from etude.agent.index.semantic.paths import path_filter
from etude.errors import ToolArgumentError

PATHS = st.lists(st.sampled_from("abc"), min_size=1, max_size=3).map(lambda names: "/".join(names) + ".py")
FILES = st.dictionaries(
    PATHS, st.sampled_from([b"1", b"2"]).map(lambda text: blake3(text).digest()), max_size=8
)


@given(FILES, FILES)
def test_changes_are_what_differs(old: dict[str, bytes], new: dict[str, bytes]) -> None:
    before, after = MerkleTree(old), MerkleTree(new)
    changes = after.changes_since(before)
    assert changes.added == tuple(sorted(new.keys() - old.keys()))
    assert changes.removed == tuple(sorted(old.keys() - new.keys()))
    both = sorted(old.keys() & new.keys())
    assert changes.changed == tuple(path for path in both if old[path] != new[path])
    assert (before.root == after.root) == (old == new) == (changes.num == 0)


@given(FILES)
def test_order_of_files_does_not_matter_and_each_has_its_digest(files: dict[str, bytes]) -> None:
    tree = MerkleTree(files)
    assert tree.root == MerkleTree(dict(reversed(files.items()))).root
    assert all(tree.digest(path) == digest for path, digest in files.items())
    assert tree.digest("nowhere/at/all") is None


def test_a_file_and_a_folder_of_one_content_differ() -> None:
    inner = MerkleTree({"b": b"x" * 32})
    assert MerkleTree({"a": inner.root}).root != MerkleTree({"a/b": b"x" * 32}).root


def test_equal_folders_have_one_digest_wherever_they_lie() -> None:
    tree = MerkleTree({"one/x": b"1" * 32, "two/deep/x": b"1" * 32})
    assert tree.digest("one") == tree.digest("two/deep")


def test_a_path_that_is_file_and_folder_is_refused() -> None:
    with pytest.raises(ValueError, match="is a file"):
        MerkleTree({"a": b"1", "a/b": b"2"})


@pytest.mark.parametrize(
    ("patterns", "wanted", "unwanted"),
    [
        (["src"], ["src", "src/a.py", "src/b/c.py"], ["srcs/a.py", "a/src/b.py"]),
        (["./src/"], ["src/a.py"], ["a.py"]),
        (["."], ["a.py", "b/c"], []),
        (["*.py"], ["a.py", "b/c/d.py"], ["a.pyi", "py"]),
        (["src/*.py"], ["src/a.py"], ["src/b/a.py", "a.py"]),
        (["src/**/t_?.py"], ["src/t_1.py", "src/a/b/t_2.py"], ["src/t_12.py", "t_1.py"]),
        (["**/x[0-9].c"], ["x1.c", "a/x2.c"], ["a/xx.c"]),
        (["[!a]*"], ["b.py", "c/d"], ["a.py", "c/a"]),
        (["!*.md"], ["a.py"], ["b/README.md"]),
        (["src", "!src/gen"], ["src/a"], ["src/gen/b", "c"]),
        (["a[b.py"], ["a[b.py"], ["ab.py"]),
        (["a.py", "b.py"], ["a.py", "b.py"], ["aXpy"]),
    ],
)
def test_path_patterns(patterns: list[str], wanted: list[str], unwanted: list[str]) -> None:
    test = path_filter(patterns)
    assert [path for path in wanted if not test(path)] == []
    assert [path for path in unwanted if test(path)] == []


@given(st.text(alphabet="ab*?[]!-/.\\z^&~|", max_size=8))
def test_any_pattern_works_or_is_the_agents_mistake(pattern: str) -> None:
    try:
        path_filter([pattern])("a/b.py")
    except ToolArgumentError as error:
        assert error.field == "paths"


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
