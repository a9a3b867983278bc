"""The index on disk: complete or refused, rebuilt only for changed files, written atomically."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from grep_builders import judged, make_tree

from etude.agent.index.grep import GrepIndex, GrepQuery
from etude.agent.index.grep import builder as building
from etude.errors import ConfigError, ResourceError, StoreError
from etude.kit.durable import DRAFTS


def many(tree: Path, count: int = 60) -> Path:
    return make_tree(
        tree, {f"d{n % 7}/f{n}.py": f"def name_{n}():\n    return {n}\n".encode() * 50 for n in range(count)}
    )


def check(index: GrepIndex, *patterns: str) -> None:
    for pattern in patterns or ("name_1", "return", r"name_\d\("):
        query = GrepQuery(pattern)
        assert asyncio.run(index.search(query)).matches == judged(index.root, query)


@pytest.fixture
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "SEGMENT_BYTES", 8000)


def test_an_opened_index_finds_what_the_built_one_does(tmp_path: Path) -> None:
    asyncio.run(GrepIndex.build(many(tmp_path / "tree"), tmp_path / "index", key="commit-1"))
    check(GrepIndex.open(tmp_path / "index", key="commit-1"))


@pytest.mark.usefixtures("small_segments")
def test_many_segments_find_the_same(tmp_path: Path) -> None:
    index = asyncio.run(GrepIndex.build(many(tmp_path / "tree"), tmp_path / "index"))
    check(index)
    assert len(list((tmp_path / "index").glob("segment-*"))) > 3


def test_an_empty_tree_has_an_index(tmp_path: Path) -> None:
    check(asyncio.run(GrepIndex.build(make_tree(tmp_path / "tree", {}), tmp_path / "index")))


def test_no_index_another_tree_and_no_tree_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no index"):
        GrepIndex.open(tmp_path / "nothing")
    asyncio.run(GrepIndex.build(many(tmp_path / "tree"), tmp_path / "index", key="commit-1"))
    with pytest.raises(StoreError, match="another tree"):
        GrepIndex.open(tmp_path / "index", key="commit-2")
    with pytest.raises(ConfigError):
        asyncio.run(GrepIndex.build(tmp_path / "no tree", tmp_path / "other"))


@pytest.mark.parametrize(
    "damage", [lambda content: content[:-70], lambda _: b"", lambda _: b"PK" * 999, None]
)
@pytest.mark.parametrize("kind", ["*/flags.npy", "*/paths.npy", "*/postings.npy", "manifest.json"])
def test_a_damaged_file_is_refused(
    tmp_path: Path, kind: str, damage: Callable[[bytes], bytes] | None
) -> None:
    asyncio.run(GrepIndex.build(many(tmp_path / "tree"), tmp_path / "index"))
    (path,) = (tmp_path / "index").glob(kind)
    if damage is None:
        path.unlink()
    else:
        path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(StoreError):
        GrepIndex.open(tmp_path / "index")


def test_an_index_takes_the_place_of_another_and_of_nothing_else(tmp_path: Path) -> None:
    tree = many(tmp_path / "tree")
    for name in ("segment-0123456789abcdef", f"{DRAFTS}killed", "lock"):  # of a build that was killed
        (tmp_path / "index" / name).mkdir(parents=True)
    before = asyncio.run(GrepIndex.build(tree, tmp_path / "index"))
    make_tree(tree, {"more.py": b"def name_1(): ...\n"})
    asyncio.run(GrepIndex.build(tree, tmp_path / "index"))
    check(GrepIndex.open(tmp_path / "index"))
    assert before.num_files == 60
    assert len(asyncio.run(before.search(GrepQuery(r"name_1\("))).matches) == 50, "what was open goes on"
    assert len(list((tmp_path / "index").iterdir())) == 2
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").write_text("mine")
    with pytest.raises(ConfigError, match="not of an index: notes"):
        asyncio.run(GrepIndex.build(tree, tmp_path / "mine"))
    assert (tmp_path / "mine" / "notes").read_text() == "mine"


def test_several_that_build_at_once_leave_one_whole_index(tmp_path: Path) -> None:
    tree, into = many(tmp_path / "tree"), tmp_path / "index"

    async def build() -> list[GrepIndex]:
        return await asyncio.gather(*(GrepIndex.build(tree, into) for _ in range(4)))

    built = asyncio.run(build())
    for index in (*built, GrepIndex.open(into)):
        check(index, "name_1")
    assert len(list(into.iterdir())) == 2
    assert {path.name for path in tmp_path.iterdir()} == {"tree", "index"}


@pytest.mark.usefixtures("small_segments")
def test_a_cancelled_build_leaves_a_whole_index_and_goes_on_behind_nobody(tmp_path: Path) -> None:
    tree = many(tmp_path / "tree")

    async def cancelled() -> None:
        build = asyncio.create_task(GrepIndex.build(tree, tmp_path / "index"))
        await asyncio.sleep(0)
        build.cancel()
        with pytest.raises(asyncio.CancelledError):
            await build
        left.extend(await asyncio.to_thread(lambda: sorted(path.name for path in tmp_path.iterdir())))

    left: list[str] = []
    asyncio.run(cancelled())
    assert left == ["index", "tree"], "nothing is written behind it"
    check(GrepIndex.open(tmp_path / "index"))


@pytest.mark.slow
def test_a_killed_build_leaves_the_old_index(tmp_path: Path) -> None:
    tree = many(tmp_path / "tree", 200)
    asyncio.run(GrepIndex.build(tree, tmp_path / "index", key="old"))
    code = (
        "import asyncio, sys; from pathlib import Path; from etude.agent.index.grep import GrepIndex\n"
        "import etude.agent.index.grep.builder as b; b.SEGMENT_BYTES = 8000\n"
        "write = b.write_segment\n"
        "b.write_segment = lambda *rest: (write(*rest), print('written', flush=True))\n"
        "tree, into = map(Path, sys.argv[1:])\n"
        "asyncio.run(GrepIndex.build(tree, into, key='new'))\n"
    )
    command = [sys.executable, "-c", code, str(tree), str(tmp_path / "index")]
    for lines in (1, 5, 15):
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            for _ in range(lines):
                process.stdout.readline()
            process.send_signal(signal.SIGKILL)
        check(GrepIndex.open(tmp_path / "index"))
    asyncio.run(GrepIndex.build(tree, tmp_path / "index"))
    assert {path.name for path in tmp_path.iterdir()} == {"tree", "index"}, "what was killed has left nothing"


def test_without_ripgrep_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(ResourceError, match="pip install 'ripgrep"):
        asyncio.run(GrepIndex.build(tmp_path, tmp_path / "index"))


def test_files_too_large_to_index_are_left_to_ripgrep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = many(tmp_path / "tree")
    monkeypatch.setattr(building, "LARGEST_BYTES", 10)
    index = asyncio.run(GrepIndex.build(tree, tmp_path / "index"))
    check(index)
    assert asyncio.run(index.search(GrepQuery("name_1"))).candidates == 60


def test_a_large_file_is_cut_into_pieces_without_losing_what_lies_across(tmp_path: Path) -> None:
    piece = building._PIECE_BYTES
    content = bytearray(b"filler text \n" * (piece // 6))
    for at in (piece, 2 * piece - 3):
        content[at - 9 : at + 9] = b" across_the_piece "
    tree = make_tree(
        tmp_path / "tree", {"large.txt": bytes(content), **{f"{n}.txt": b"x\n" for n in range(20)}}
    )
    index = asyncio.run(GrepIndex.build(tree, tmp_path / "index"))
    found = asyncio.run(index.search(GrepQuery("across_the_piece")))
    assert found.used_index
    assert len(found.matches) == 2
