"""An index finds what ripgrep finds: the same files, lines and order, whatever the pattern."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from code_index_patterns import PatternMaker
from grep_builders import CODE, judged, make_tree
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from etude.agent.index.grep import GrepIndex, GrepQuery
from etude.errors import ConfigError, ToolArgumentError
from etude.sandbox.types import GrepMatch

QUERIES = [
    GrepQuery("rename_"),
    GrepQuery("rename_(window|file)"),
    GrepQuery("RENAME_window", ignore_case=True),
    GrepQuery("kelvin", ignore_case=True),
    GrepQuery("(?i)kelvin ."),
    GrepQuery("sum", ignore_case=True),
    GrepQuery("rename_wide"),
    GrepQuery("ütf"),
    GrepQuery("größe", ignore_case=True),
    GrepQuery("rename_line here$"),
    GrepQuery("rename_line here\\r$"),
    GrepQuery("rename_late"),
    GrepQuery("rename_binary"),
    GrepQuery("os.path", fixed=True),
    GrepQuery("rename", word=True),
    GrepQuery("^class \\w+\\(Exception\\)"),
    GrepQuery(""),
    GrepQuery("^"),
    GrepQuery("e"),
    GrepQuery("rename_[^w]+"),
    GrepQuery("rename_nowhere"),
    GrepQuery("-dash"),
    GrepQuery("(?-u)\\xff\\xfe"),
    GrepQuery("rename_", path="src"),
    GrepQuery("rename_", path="src/main.py"),
    GrepQuery("rename_", path="build"),
    GrepQuery("rename_", path=".hidden"),
    GrepQuery("rename_", path="a"),
    GrepQuery("rename_", path="nowhere"),
    GrepQuery("rename_", globs=("*.py",)),
    GrepQuery("rename_", globs=("*.log",)),
    GrepQuery("rename_", globs=("!*.py",)),
    GrepQuery("rename_", globs=("!src/",)),
    GrepQuery("rename_", globs=("src/**", "!*.txt")),
    GrepQuery("rename_", globs=("*.{md,txt}",)),
    GrepQuery("rename_", globs=("/a/**/*.py",)),
    GrepQuery("rename_", globs=("x.p[xyz]",), path="a"),
    GrepQuery("rename_", globs=("!b",), path="a/b"),
]


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> GrepIndex:
    where = tmp_path_factory.mktemp("grep")
    return asyncio.run(GrepIndex.build(make_tree(where / "tree"), where / "index"))


@pytest.mark.parametrize(
    "query", QUERIES, ids=lambda query: f"{query.pattern}|{query.path}|{','.join(query.globs)}"
)
def test_finds_what_ripgrep_finds(code: GrepIndex, query: GrepQuery) -> None:
    assert asyncio.run(code.search(query)).matches == judged(code.root, query)


def test_a_binary_file_by_name_shows_no_lines_as_on_ripgreps_command_line(code: GrepIndex) -> None:
    assert asyncio.run(code.search(GrepQuery("rename_", path="data/binary.dat"))).matches == []
    early = asyncio.run(code.search(GrepQuery("rename_", path="data/late.dat")))
    assert early.matches == [GrepMatch("data/late.dat", 1, "rename_early line")]


def test_a_glob_brings_back_no_hidden_file(code: GrepIndex) -> None:
    assert asyncio.run(code.search(GrepQuery("rename_", globs=("secret.*",)))).matches == []


def test_order_is_by_path_name_by_name_then_by_line(code: GrepIndex) -> None:
    found = asyncio.run(code.search(GrepQuery("rename_order")))
    assert [(match.path, match.line_number) for match in found.matches] == [
        ("a/b/x.py", 1),
        ("a/b.py", 1),
        ("a/b.py", 2),
        ("a.b/x.py", 1),
    ]


def test_few_candidates_where_the_pattern_says_much(code: GrepIndex) -> None:
    found = asyncio.run(code.search(GrepQuery("rename_window")))
    assert found.used_index
    assert found.candidates <= 4
    assert {match.path for match in found.matches} == {"docs/guide.md", "src/main.py"}


def test_the_whole_tree_where_the_pattern_says_nothing(code: GrepIndex) -> None:
    assert not asyncio.run(code.search(GrepQuery("\\w+"))).used_index


@pytest.mark.parametrize("pattern", ["rename_", "\\w+", "e", "rename_order"])
@pytest.mark.parametrize("limit", [1, 3, 1000])
def test_a_limit_keeps_the_first_in_order(code: GrepIndex, pattern: str, limit: int) -> None:
    found = asyncio.run(code.search(GrepQuery(pattern, limit=limit)))
    expected = judged(code.root, GrepQuery(pattern))
    assert found.matches == expected[:limit]
    assert found.truncated == (len(expected) > limit)


@pytest.mark.parametrize(
    "pattern", ["(", "[a", "a{2", "*a", "(?P<n", "\\p{Nonsense}", "x\\ny", "(?<=a)b", "rename\\q"]
)
def test_a_bad_pattern_is_refused_in_ripgreps_words(code: GrepIndex, pattern: str) -> None:
    with pytest.raises(ToolArgumentError) as caught:
        asyncio.run(code.search(GrepQuery(pattern)))
    assert caught.value.field == "pattern"
    assert caught.value.message


def test_a_pattern_is_refused_even_where_the_index_knows_that_nothing_can_match(code: GrepIndex) -> None:
    with pytest.raises(ToolArgumentError):
        asyncio.run(code.search(GrepQuery("no_such_text_anywhere(a{1,100000}){1000}")))


@pytest.mark.parametrize("path", ["/etc", "../up", "a/../../b"])
def test_a_path_outside_is_refused(path: str) -> None:
    with pytest.raises(ConfigError):
        GrepQuery("x", path=path)


def test_output_is_bounded(code: GrepIndex) -> None:
    found = asyncio.run(code.search(GrepQuery("filler", max_bytes=2000)))
    assert found.truncated
    assert 0 < len(found.matches) < 5000
    assert all(match.line == "filler line of text" for match in found.matches)


def test_a_search_that_takes_too_long_is_the_patterns_fault(code: GrepIndex) -> None:
    with pytest.raises(ToolArgumentError, match="took longer"):
        asyncio.run(code.search(GrepQuery("rename", deadline_s=0.0)))


def test_files_that_vanish_are_passed_over(tmp_path: Path) -> None:
    tree = make_tree(tmp_path / "tree")
    index = asyncio.run(GrepIndex.build(tree, tmp_path / "index"))
    (tree / "src/main.py").unlink()
    found = asyncio.run(index.search(GrepQuery("rename_window")))
    assert [match.path for match in found.matches] == ["docs/guide.md"]


def test_huge_lines_come_whole(tmp_path: Path) -> None:
    line = b"x" * 3_000_000 + b"needle_in_it" + b"y" * 3_000_000
    tree = make_tree(tmp_path / "tree", {"one.txt": line, "two.txt": b"nothing\n"})
    index = asyncio.run(GrepIndex.build(tree, tmp_path / "index"))
    found = asyncio.run(index.search(GrepQuery("needle_in_it")))
    assert found.matches == [GrepMatch("one.txt", 1, line.decode())]


@pytest.mark.slow
def test_a_cancelled_search_leaves_no_process(tmp_path: Path) -> None:
    tree = make_tree(
        tmp_path / "tree", {f"{number}.txt": b"aaaaaaaaaaaaaaaa\n" * 100_000 for number in range(40)}
    )

    async def cancelled() -> None:
        index = await GrepIndex.build(tree, tmp_path / "index")
        search = asyncio.create_task(index.search(GrepQuery("(a+)+(a|aa)+[^a]$")))
        await asyncio.sleep(0.02)
        search.cancel()
        with pytest.raises(asyncio.CancelledError):
            await search

    asyncio.run(cancelled())
    running = [path for path in Path("/proc").glob("[0-9]*/cwd") if _target(path) == tree]
    assert running == []


def _target(link: Path) -> Path | None:
    try:
        return link.readlink()
    except OSError:
        return None


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_generated_patterns_find_what_ripgrep_finds(code: GrepIndex, seed: int) -> None:
    lines = [line for text in CODE.values() for line in text.decode("utf-8", "replace").splitlines()]
    maker = PatternMaker(lines, seed)
    for number in range(10):
        query = maker.selective() if number % 2 else maker.broad()
        assert asyncio.run(code.search(query)).matches == judged(code.root, query), query


PIECES = st.sampled_from(
    [
        "foo",
        "foo_bar",
        "Bar",
        "baz\n",
        "\n",
        " ",
        "k",
        "K",
        "\u212a",
        "\u017f",
        "é",
        "E\u0301",
        "\t",
        "\r\n",
        "\0",
        "λx",
        "xx",
        "foo\n",
    ]
)
TREES = st.dictionaries(
    st.sampled_from(["a", "b.py", "d/a.py", "d/e/f", "d.e/g", ".h/i", "n.log", "d/.ignore", ".gitignore"]),
    st.lists(PIECES, max_size=12).map(lambda pieces: "".join(pieces).encode()),
    max_size=6,
)
ATOMS = st.sampled_from(
    [
        "foo",
        "Foo",
        "bar",
        "_",
        "k",
        "s",
        "é",
        "λ",
        ".",
        r"\w",
        "[ab]",
        "[^f]",
        "x+",
        "o*",
        "o?",
        "^",
        "$",
        r"\b",
        "(?i)",
        "[k-m]",
    ]
)
PATTERNS = st.recursive(
    st.lists(ATOMS, min_size=1, max_size=4).map("".join),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map(lambda pair: f"({pair[0]}|{pair[1]})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2}", "{0,2}"])).map(
            lambda pair: f"(?:{pair[0]}){pair[1]}"
        ),
        st.tuples(inner, inner).map("".join),
    ),
    max_leaves=5,
)


@pytest.mark.slow
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(files=TREES, pattern=PATTERNS, ignore_case=st.booleans(), word=st.booleans())
def test_any_tree_and_pattern_agree_with_ripgrep(
    tmp_path_factory: pytest.TempPathFactory,
    files: dict[str, bytes],
    pattern: str,
    ignore_case: bool,
    word: bool,
) -> None:
    where = tmp_path_factory.mktemp("any")
    tree = make_tree(where / "tree", files)
    query = GrepQuery(pattern, ignore_case=ignore_case, word=word)

    async def search() -> list[GrepMatch]:
        index = await GrepIndex.build(tree, where / "index")
        return (await index.search(query)).matches

    assert asyncio.run(search()) == judged(tree, query)
