""".dockerignore patterns."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from etude.sandbox.errors import TemplateError
from etude.sandbox.images.ignore import IgnoreRules


@pytest.mark.parametrize(
    ("rules", "ignored", "kept"),
    [
        ("*.pyc", ["a.pyc"], ["d/a.pyc", "a.py"]),
        ("**/*.pyc", ["a.pyc", "d/a.pyc", "d/e/a.pyc"], ["a.py"]),
        ("build", ["build", "build/x", "build/x/y"], ["d/build", "builder"]),
        ("/build/", ["build", "build/x"], ["d/build"]),
        ("*\n!keep", ["other", "d/x"], ["keep", "keep/x"]),
        ("d\n!d/keep\nd/keep/not", ["d/x", "d/keep/not"], ["d/keep", "d/keep/yes"]),
        ("a/**/z", ["a/z", "a/b/z", "a/b/c/z"], ["a/b", "z"]),
        ("# comment\n\n  x  \n", ["x"], ["# comment"]),
        ("[a-c]?", ["bx"], ["dx", "b"]),
        ("[^a]", ["b"], ["a"]),
        ("./x", ["x"], ["y"]),
        ("[", ["["], ["x"]),
    ],
)
def test_patterns(rules: str, ignored: list[str], kept: list[str]) -> None:
    parsed = IgnoreRules(rules)
    assert [path for path in ignored if not parsed.ignores(path)] == []
    assert [path for path in kept if parsed.ignores(path)] == []


@pytest.mark.parametrize("rules", ["../x", "a/../../b", "x" * 2000, "x\n" * 1001])
def test_patterns_that_make_no_sense_are_refused_with_their_line(rules: str) -> None:
    with pytest.raises(TemplateError, match="line"):
        IgnoreRules(rules)


@given(st.text(alphabet="ab*?[]^!/.\\#-\n", max_size=60), st.text(alphabet="ab./", min_size=1, max_size=20))
def test_any_rules_answer_or_are_a_typed_error(rules: str, path: str) -> None:
    try:
        parsed = IgnoreRules(rules)
    except TemplateError:
        return
    assert parsed.ignores(path) in (True, False)


def test_many_stars_are_no_trap() -> None:
    rules = IgnoreRules("**/a/" * 40 + "b\n" + "*a" * 100 + "b")
    start = time.process_time()
    assert not rules.ignores("/".join(["a"] * 200))
    assert not rules.ignores("a" * 250)
    assert time.process_time() - start < 2
