"""Search end to end: building, updating, editing."""

from __future__ import annotations

import asyncio
import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from semantic_builders import FILES, FailingEmbedder, built, in_loop, many_files, name, places

from etude.agent.index.semantic import (
    BuildProgress,
    Changes,
    DirectoryTree,
    HashingEmbedder,
    MappingTree,
    SemanticIndex,
    SemanticStore,
    building,
)
from etude.agent.index.semantic.building import Pace
from etude.errors import ResourceError, StoreError, ToolArgumentError

EDITS = st.lists(
    st.tuples(
        st.sampled_from(["shop/cart.py", "shop/mail.py", "zoo/new.py", "zoo", "shop", "README.md"]),
        st.sampled_from(
            [
                None,
                b"def paint_fence(colour):\n    return colour\n",
                b"\n\n\ndef count_zebras(herd):\n    return sum(animal.striped for animal in herd)\n",
                b"",
                b"\0binary",
            ]
        ),
    ),
    max_size=6,
)


@in_loop
async def test_a_question_finds_its_function(tmp_path: Path) -> None:
    index = await built(tmp_path, FILES)
    result = await index.search("counting zebras of a herd", 2)
    assert places(result)[0] == ("zoo/animals.py", 5, 6, "count_zebras")
    assert result.hits[0].text.startswith("def count_zebras(herd):\n")
    assert result.complete and result.semantic
    assert len((await index.search("cart", 100)).hits) == index.num_chunks
    await index.close()


@in_loop
async def test_without_an_embedder_words_decide(tmp_path: Path) -> None:
    index = await SemanticIndex.open(tmp_path, MappingTree("t", FILES))
    await index.update()
    result = await index.search("counting zebras", 5)
    assert [hit.symbol for hit in result.hits] == ["count_zebras"]
    assert result.complete and not result.semantic
    assert (await index.search("nothing like that", 5)).hits == ()
    await index.close()


@in_loop
async def test_paths_confine_a_search(tmp_path: Path) -> None:
    index = await built(tmp_path, FILES)
    assert {hit.path for hit in (await index.search("animals", 9, ["shop", "*.md"])).hits} == {
        "shop/cart.py",
        "shop/mail.py",
        "README.md",
    }
    assert (await index.search("animals", 9, ["nowhere"])).hits == ()
    await index.close()


@pytest.mark.parametrize(("question", "k", "paths"), [(" ", 1, None), ("x", 0, None), ("x", 1, ["a[z-a]"])])
@in_loop
async def test_senseless_questions_are_the_agents_mistake(
    tmp_path: Path, question: str, k: int, paths: list[str] | None
) -> None:
    index = await built(tmp_path, FILES)
    with pytest.raises(ToolArgumentError):
        await index.search(question, k, paths)
    await index.close()


@in_loop
async def test_an_empty_tree_has_no_answers(tmp_path: Path) -> None:
    index = await built(tmp_path, {})
    result = await index.search("anything", 3)
    assert result.hits == () and result.complete
    overlay = index.overlay()
    overlay.write("a.py", b"def anything(): pass\n")
    assert [hit.symbol for hit in (await overlay.search("anything", 3)).hits] == ["anything"]
    await index.close()


@in_loop
async def test_only_changed_chunks_are_embedded_again(tmp_path: Path) -> None:
    files = many_files(20)
    tree, embedder = MappingTree("t", files), HashingEmbedder()
    index = await SemanticIndex.open(tmp_path, tree, embedder)
    await index.update()
    first, root = embedder.num_embedded, index.root
    tree.files["pkg0/mod0.py"] = b"# a line above\n" + files["pkg0/mod0.py"].replace(b"* 0 + 1", b"* 0 + 77")
    tree.files["renamed.py"] = tree.files.pop("pkg1/mod1.py")
    del tree.files["pkg2/mod2.py"]
    tree.num_reads = 0
    changes = await index.update()
    assert changes == Changes(("renamed.py",), ("pkg0/mod0.py",), ("pkg1/mod1.py", "pkg2/mod2.py"))
    assert embedder.num_embedded - first == 2, "the changed function, and the first one with its new comment"
    assert tree.num_reads == 2, "what stat calls unchanged is not read"
    assert index.root != root
    hit = (await index.search(name(0, 1), 1)).hits[0]
    assert (hit.first_line, "77" in hit.text) == (5, True)
    assert {hit.path for hit in (await index.search(name(1, 2), 1)).hits} == {"renamed.py"}
    assert "pkg2/mod2.py" not in {hit.path for hit in (await index.search("task", 999)).hits}
    await index.close()


@in_loop
async def test_an_updated_index_ranks_like_one_built_anew(tmp_path: Path) -> None:
    files = many_files(12)
    tree = MappingTree("t", files)
    index = await SemanticIndex.open(tmp_path / "a", tree, HashingEmbedder())
    await index.update()
    tree.files |= {"pkg3/mod3.py": b"def other(): return 3\n", "new.py": b"def task_new(): pass\n"}
    del tree.files["pkg5/mod5.py"]
    await index.update()
    fresh = await built(tmp_path / "b", tree.files)
    for question in (name(4, 2), "other", "new task"):
        assert await index.search(question, 8) == await fresh.search(question, 8)
    await index.close()
    await fresh.close()


@in_loop
async def test_a_second_checkout_embeds_nothing_and_what_was_known_is_known_again(tmp_path: Path) -> None:
    files = many_files(8)
    index = await built(tmp_path, files)
    expected = await index.search(name(3, 1), 3)
    await index.close()
    embedder = HashingEmbedder()
    again = await SemanticIndex.open(tmp_path, MappingTree("t", files), embedder)
    assert await again.search(name(3, 1), 3) == expected
    second = await SemanticIndex.open(tmp_path, MappingTree("second", files), embedder)
    assert not (await second.search("task", 3)).complete
    await second.update()
    assert await second.search(name(3, 1), 3) == expected
    assert embedder.num_embedded == 0
    await again.close()
    await second.close()


@in_loop
async def test_a_build_that_failed_answers_by_words_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    files = many_files(100)
    failing = FailingEmbedder(limit=300)
    index = await SemanticIndex.open(tmp_path, MappingTree("t", files), failing)
    with pytest.raises(RuntimeError, match="run away"):
        await index.update()
    assert failing.num_embedded == 256
    result = await index.search(name(99, 3), 1)
    assert [hit.symbol for hit in result.hits] == [name(99, 3)] and not result.complete
    await index.close()
    embedder = HashingEmbedder()
    index = await SemanticIndex.open(tmp_path, MappingTree("t", files), embedder)
    await index.update()
    assert embedder.num_embedded == 400 - 256
    assert (await index.search(name(99, 3), 1)).complete
    await index.close()


@in_loop
async def test_a_search_during_a_build_answers_from_what_is_there(tmp_path: Path) -> None:
    index = await SemanticIndex.open(tmp_path, MappingTree("t", many_files(100)), HashingEmbedder())
    seen: list[BuildProgress] = []
    searches: list[asyncio.Task[object]] = []

    def progress(now: BuildProgress) -> None:
        seen.append(now)
        if now.stage == "embed" and not searches:
            searches.append(asyncio.ensure_future(index.search(name(99, 3), 1)))

    await index.update(progress)
    result = await searches[0]
    assert result.hits[0].symbol == name(99, 3) and not result.complete  # type: ignore[attr-defined]
    assert (await index.search(name(99, 3), 1)).complete
    for stage, total in (("cut", 100), ("embed", 400)):
        done = [now.done for now in seen if now.stage == stage]
        assert done == sorted(done) and done[-1] == total
    assert seen[-1].num_bytes == sum(map(len, many_files(100).values()))
    await index.close()


@in_loop
async def test_a_cancelled_build_keeps_what_it_did(tmp_path: Path) -> None:
    embedder = HashingEmbedder()
    index = await SemanticIndex.open(tmp_path, MappingTree("t", many_files(100)), embedder)

    def progress(now: BuildProgress) -> None:
        if now.stage == "embed":
            task.cancel()

    task = asyncio.ensure_future(index.update(progress))
    with pytest.raises(asyncio.CancelledError):
        await task
    done = embedder.num_embedded
    assert 0 < done < 400
    await asyncio.sleep(0.05)
    assert embedder.num_embedded == done, "nothing goes on behind the caller"
    await index.update()
    assert embedder.num_embedded == 400
    await index.close()


@in_loop
async def test_a_throttled_build_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    rests: list[float] = []

    async def sleep(delay_s: float) -> None:
        rests.append(delay_s)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    await Pace(0.25).rest(2.0)
    await Pace(1.0).rest(2.0)
    assert rests == [6.0, 0.0]


@pytest.mark.parametrize("share", [0.0, 1.5])
@in_loop
async def test_a_senseless_share_is_refused(tmp_path: Path, share: float) -> None:
    index = await built(tmp_path, {})
    with pytest.raises(ValueError, match="share"):
        await index.update(share=share)
    await index.close()


@in_loop
async def test_an_edit_is_found_at_once_with_its_new_lines(tmp_path: Path) -> None:
    embedder = HashingEmbedder()
    index = await built(tmp_path, FILES, embedder)
    before = embedder.num_embedded
    overlay, other = index.overlay(), index.overlay()
    added = b"\n\ndef wash_tiger():\n    pass\n"
    overlay.write("zoo/animals.py", b"import herds\n\n\n" + FILES["zoo/animals.py"] + added)
    result = await overlay.search("count zebras", 1)
    assert places(result) == [("zoo/animals.py", 8, 9, "count_zebras")] and result.complete
    assert embedder.num_embedded - before == 2, "the imports and the new function"
    assert places(await overlay.search("wash a tiger", 1)) == [("zoo/animals.py", 12, 13, "wash_tiger")]
    assert embedder.num_embedded - before == 2
    assert places(await other.search("count zebras", 1)) == [("zoo/animals.py", 5, 6, "count_zebras")]
    await index.close()


@in_loop
async def test_removed_files_and_folders_are_hidden(tmp_path: Path) -> None:
    near = {"zoo.py": b"def count_all(): pass\n", "zoo0/x.py": b"def count_none(): pass\n"}
    index = await built(tmp_path, FILES | near)
    overlay = index.overlay()
    overlay.remove("zoo/")
    overlay.write("./zoo//again.py", b"def count_lions(): pass\n")
    found = {hit.path for hit in (await overlay.search("count", 99)).hits}
    assert "zoo/animals.py" not in found and {"zoo/again.py", "zoo.py", "zoo0/x.py"} <= found
    fork = overlay.fork()
    fork.remove("zoo")
    assert "zoo/again.py" not in {hit.path for hit in (await fork.search("count", 99)).hits}
    assert "zoo/again.py" in {hit.path for hit in (await overlay.search("count", 99)).hits}
    assert (await overlay.search("count", 9, ["zoo"])).hits[0].symbol == "count_lions"
    await index.close()


@pytest.mark.slow
@given(EDITS)
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_edits_rank_like_an_index_of_the_edited_tree(
    tmp_path_factory: pytest.TempPathFactory, edits: list[tuple[str, bytes | None]]
) -> None:
    async def compare() -> None:
        index = await built(tmp_path_factory.mktemp("base"), FILES)
        overlay, files = index.overlay(), dict(FILES)
        for path, content in edits:
            if content is None:
                overlay.remove(path)
                files = {
                    name: old
                    for name, old in files.items()
                    if name != path and not name.startswith(path + "/")
                }
            elif "." in path:
                overlay.write(path, content)
                files[path] = content
        fresh = await built(tmp_path_factory.mktemp("fresh"), files)
        for question in ("count the zebras", "paint a fence", "shop"):
            ours, theirs = await overlay.search(question, 99), await fresh.search(question, 99)
            assert sorted(places(ours)) == sorted(places(theirs))
            scores = {(hit.path, hit.first_line): hit.score for hit in theirs.hits}
            for hit in ours.hits:
                assert hit.score == pytest.approx(scores[hit.path, hit.first_line], abs=0.02)
        await index.close()
        await fresh.close()

    asyncio.run(compare())


@in_loop
async def test_more_edits_than_one_search_embeds_are_ranked_by_words_until_then(tmp_path: Path) -> None:
    index = await built(tmp_path, {})
    overlay = index.overlay()
    for path, content in many_files(50).items():
        overlay.write(path, content)
    first = await overlay.search(name(0, 0), 1)
    assert first.hits[0].symbol == name(0, 0) and not first.complete
    assert (await overlay.search(name(0, 0), 1)).complete
    await index.close()


def write(root: Path, files: dict[str, bytes], age_s: float = 100) -> None:
    for path, content in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(content)
        found = (root / path).stat()
        os.utime(root / path, (found.st_atime - age_s, found.st_mtime - age_s))


@in_loop
async def test_a_directory_is_indexed_without_hidden_linked_and_huge_files(tmp_path: Path) -> None:
    root = tmp_path / "tree"
    odd = {".hidden/a.py": b"x = 1\n", "data.json": b"1" * ((1 << 20) + 1), "logo.png": b"\x89PNG\0"}
    write(root, FILES | odd)
    (root / "link.py").symlink_to("shop/cart.py")
    os.mkfifo(root / "pipe.py")
    index = await SemanticIndex.open(tmp_path / "store", DirectoryTree(root), HashingEmbedder())
    await index.update()
    assert {hit.path for hit in (await index.search("x", 99)).hits} == set(FILES)
    await index.close()


@in_loop
async def test_a_file_rewritten_within_a_tick_of_its_time_stamp_is_read_again(tmp_path: Path) -> None:
    root = tmp_path / "tree"
    write(root, {"a.py": b"def old_name(): pass\n"}, age_s=0)
    index = await SemanticIndex.open(tmp_path / "store", DirectoryTree(root), HashingEmbedder())
    await index.update()
    stat = (root / "a.py").stat()
    (root / "a.py").write_bytes(b"def new_name(): pass\n")
    os.utime(root / "a.py", ns=(stat.st_atime_ns, stat.st_mtime_ns))
    await index.update()
    assert [hit.symbol for hit in (await index.search("name", 9)).hits] == ["new_name"]
    await index.close()


def test_git_decides_what_is_indexed_in_a_work_tree(tmp_path: Path) -> None:
    files = {"a.py": b"x = 1\n", "out/b.py": b"y = 2\n", ".gitignore": b"out\n", "c d.py": b"z = 3\n"}
    write(tmp_path / "tree", files)
    subprocess.run(["git", "init", "-q", tmp_path / "tree"], check=True, timeout=60)
    tree = DirectoryTree(tmp_path / "tree")
    assert {path for path, _ in tree.scan()} == {"a.py", ".gitignore", "c d.py"}
    named = DirectoryTree(tmp_path / "tree", files=lambda: ["out/b.py", "gone"])
    assert [path for path, _ in named.scan()] == ["out/b.py"]


def test_a_directory_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ResourceError):
        DirectoryTree(tmp_path / "missing")


def test_a_broken_repository_is_told(tmp_path: Path) -> None:
    (tmp_path / ".git").write_text("gitdir: nowhere\n")
    with pytest.raises(ResourceError, match="git"):
        list(DirectoryTree(tmp_path).scan())


@in_loop
async def test_an_index_survives_pruning_by_somebody_else(tmp_path: Path) -> None:
    tree = MappingTree("t", many_files(6))
    index = await SemanticIndex.open(tmp_path, tree, HashingEmbedder())
    await index.update()
    other = await SemanticIndex.open(tmp_path, MappingTree("o", FILES), HashingEmbedder())
    await other.update()
    store = SemanticStore(tmp_path)
    store.forget("mapping:o")
    store.prune()
    store.close()
    before = await index.search(name(2, 1), 3)
    tree.files["new.py"] = b"def zebra(): pass\n"
    await index.update()
    assert (await index.search("zebra", 1)).hits[0].symbol == "zebra"
    assert before.hits[0].symbol == name(2, 1) and (await index.search(name(2, 1), 1)).complete
    await index.close()
    await other.close()


@in_loop
async def test_an_update_without_changes_reads_and_writes_nothing(tmp_path: Path) -> None:
    tree = MappingTree("t", many_files(5))
    index = await SemanticIndex.open(tmp_path, tree, HashingEmbedder())
    await index.update()
    states, reads = sorted((tmp_path / "states").iterdir()), tree.num_reads
    assert (await index.update()).num == 0
    assert (sorted((tmp_path / "states").iterdir()), tree.num_reads) == (states, reads)
    assert (await index.search(name(1, 1), 1)).complete
    await index.close()


@in_loop
async def test_a_damaged_store_is_told(tmp_path: Path) -> None:
    index = await built(tmp_path, FILES)
    await index.close()
    for path in (tmp_path / "states").glob("*/rows.npy"):
        path.write_bytes(b"")
    with pytest.raises(StoreError, match="damaged"):
        await SemanticIndex.open(tmp_path, MappingTree("t", FILES), HashingEmbedder())


@in_loop
async def test_files_that_are_cut_are_found_while_others_are_still_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(building, "_PUBLISH_EVERY_S", 0.0)
    index = await SemanticIndex.open(tmp_path, MappingTree("t", many_files(100)), HashingEmbedder())
    seen: list[int] = []
    await index.update(lambda now: seen.append(index.num_chunks) if now.stage == "cut" else None)
    assert len(seen) == 4 and 0 < seen[-1] < 400 and seen == sorted(seen)
    assert index.num_chunks == 400
    await index.close()
