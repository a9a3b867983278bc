"""Globs choose the files that ripgrep's globs choose, or leave it to ripgrep."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from grep_builders import make_tree
from hypothesis import given
from hypothesis import strategies as st

from etude.agent.index.grep.globs import Globs
from etude.agent.index.grep.query import Unsure
from etude.agent.index.grep.ripgrep import Ripgrep

NAMES = [
    "a.py",
    "b.txt",
    "src/a.py",
    "src/b.c",
    "src/deep/a.py",
    "src/deep/[x].py",
    "test/src/a.c",
    "lib.d/a.py",
    "x/y/z",
]
PARTS = st.sampled_from(
    ["a", "b", "src", "deep", "*", "**", "?", ".py", ".c", "/", "/", "[ab]", "{py,c}", ".", "x", "*.*"]
)
GLOBS = st.tuples(
    st.sampled_from(["", "", "!", "/"]), st.lists(PARTS, min_size=1, max_size=5).map("".join)
).map("".join)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tree(tmp_path_factory.mktemp("globs") / "tree", dict.fromkeys(NAMES, b"x\n"))


@given(globs=st.lists(GLOBS, min_size=1, max_size=3))
def test_globs_agree_with_ripgrep_or_are_left_to_it(tree: Path, globs: list[str]) -> None:
    try:
        ours = Globs(globs)
    except Unsure:
        return
    flags = [flag for glob in globs for flag in ("--glob", glob)]
    command = [Ripgrep().program, "--no-config", "--no-messages", "--files", *flags]
    listed = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False).stdout
    assert {name for name in NAMES if ours.keeps(name.encode())} == set(listed.splitlines())


@pytest.mark.parametrize("glob", ["", "#x", "*.{a,{b,c}}", "[!a]", "a**b", " x", "é*", "!", "\\*x"])
def test_doubtful_globs_are_left_to_ripgrep(glob: str) -> None:
    with pytest.raises(Unsure):
        Globs([glob])


def test_a_glob_may_bring_back_what_is_ignored() -> None:
    assert Globs(["*.log"]).brings_back(b"logs/run.log")
    assert not Globs(["!*.log"]).brings_back(b"logs/run.log")
