import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.agent.globs import compile_glob, compile_globs
from etude.errors import ToolArgumentError

PATHS = ["a.py", "lib/a.py", "lib/sub/b.py", "lib/x.txt", "tests/test_a.py", "docs/lib/c.pyi", "we[ir]d/*.md"]


def matching(pattern):
    fits = compile_glob(pattern)
    return [path for path in PATHS if fits(path)]


@pytest.mark.parametrize(
    ("pattern", "paths"),
    [
        ("*.py", ["a.py", "lib/a.py", "lib/sub/b.py", "tests/test_a.py"]),
        ("**/*.py", ["a.py", "lib/a.py", "lib/sub/b.py", "tests/test_a.py"]),
        ("lib/*.py", ["lib/a.py"]),
        ("./lib/*.py", ["lib/a.py"]),
        ("/lib/*.py", ["lib/a.py"]),
        ("lib/**", ["lib/a.py", "lib/sub/b.py", "lib/x.txt"]),
        ("lib/", ["lib/a.py", "lib/sub/b.py", "lib/x.txt", "docs/lib/c.pyi"]),
        ("lib/**/*.py", ["lib/a.py", "lib/sub/b.py"]),
        ("**/lib/**/*.py*", ["lib/a.py", "lib/sub/b.py", "docs/lib/c.pyi"]),
        ("*.{txt,pyi}", ["lib/x.txt", "docs/lib/c.pyi"]),
        ("{lib,tests}/{test_,}a.py", ["lib/a.py", "tests/test_a.py"]),
        ("[ab].py", ["a.py", "lib/a.py", "lib/sub/b.py"]),
        ("[!a].py", ["lib/sub/b.py"]),
        ("[^a].py", ["lib/sub/b.py"]),
        ("?.txt", ["lib/x.txt"]),
        (r"we\[ir\]d/\*.md", ["we[ir]d/*.md"]),
        ("nothing", []),
        ("**", PATHS),
    ],
)
def test_patterns_match_as_in_ripgrep(pattern, paths):
    assert matching(pattern) == paths


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        (" ", "pattern is empty"),
        ("a" * 300, "pattern too long"),
        ("{a,b", "unclosed {"),
        ("{a,b}" * 10, "more than 64 alternatives"),
    ],
)
def test_patterns_that_make_no_sense_are_refused(pattern, message):
    with pytest.raises(ToolArgumentError, match=message):
        compile_glob(pattern)


def test_matching_does_not_explode():
    start = time.process_time()
    assert not compile_glob("*a" * 60 + "b")("a" * 4000)
    assert not compile_glob("**/a/" * 40 + "b")("/".join(["a"] * 400))
    assert time.process_time() - start < 2


parts = st.text(alphabet="ab[]{}*?!\\,-", min_size=1, max_size=6)


@given(
    st.lists(parts, min_size=1, max_size=4).map("/".join),
    st.lists(parts, min_size=1, max_size=4).map("/".join),
)
@settings(deadline=None)
def test_any_pattern_is_refused_or_matches_in_silence(pattern, path):
    try:
        fits = compile_glob(pattern)
    except ToolArgumentError:
        return
    assert fits(path) in (True, False)


RIPGREP = shutil.which("rg", path=f"{Path(sys.executable).parent}") or shutil.which("rg")
NAMES = ["a.py", "b.txt", "src/a.py", "src/b.c", "src/deep/a.py", "src/deep/[x].py", "test/src/a.c", "x/y/z"]
WHOLE = st.sampled_from(["a.py", "*.py", "src", "deep", "*", "?.c", "[ab].py", "[!a].py", "*.{py,c}", "*a*"])
GLOBS = st.tuples(
    st.sampled_from(["", "!"]),
    st.sampled_from(["", "/", "**/"]),
    st.lists(st.one_of(WHOLE, st.just("**")), max_size=3),
    st.sampled_from(["a.py", "*.py", "?.c", "[ab].*", "[!a].py", "*.{py,c}", "[[]*", "**"]),
).map(lambda words: words[0] + words[1] + "/".join([*words[2], words[3]]))


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    root = tmp_path_factory.mktemp("globs")
    for name in NAMES:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("x\n")
    return root


@pytest.mark.skipif(RIPGREP is None, reason="ripgrep is not installed")
@given(GLOBS)
@settings(deadline=None)
def test_globs_choose_the_files_that_ripgrep_chooses(tree, glob):
    listing = [RIPGREP, "--no-config", "--no-ignore", "--files", f"--glob={glob}"]
    listed = subprocess.run(listing, cwd=tree, capture_output=True, text=True, check=False).stdout
    fits = compile_globs((glob,))
    assert {name for name in NAMES if fits(name)} == set(listed.splitlines())


def test_all_of_several_globs_hold():
    fits = compile_globs(("lib/**", "!*.txt"))
    assert [path for path in PATHS if fits(path)] == ["lib/a.py", "lib/sub/b.py"]
    assert compile_globs(())("any/thing")


names = st.text(alphabet="ab[*?]\\{},!-", min_size=1, max_size=5)


@given(st.lists(names, min_size=2, max_size=3).map("/".join))
@settings(deadline=None)
def test_an_escaped_path_matches_itself(path):
    escaped = "".join("\\" + character if character in "[]*?{},\\!-" else character for character in path)
    assert compile_glob(escaped)(path)
