"""Search end to end: building, updating, editing."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from semantic_builders import (
    FILES,
    FailingEmbedder,
    TellingEmbedder,
    built,
    digests,
    in_loop,
    many_files,
    name,
    places,
    write,
)
from tests.fakes.embedder import HashingEmbedder

from etude.agent.index.semantic import SemanticIndex, building, store
from etude.agent.tools.ports import CodeHits
from etude.errors import ConfigError, ResourceError, StoreError, ToolArgumentError
from etude.kit.locks import locked

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
    assert result.complete
    assert len((await index.search("cart", 100)).hits) == 7
    await index.close()


@in_loop
async def test_without_an_embedder_words_decide(tmp_path: Path) -> None:
    index = await SemanticIndex.open(tmp_path, write(tmp_path / "tree", FILES))
    await index.update()
    result = await index.search("counting zebras", 5)
    assert [hit.symbol for hit in result.hits] == ["count_zebras"]
    assert result.complete
    assert (await index.search("nothing like that", 5)).hits == ()
    await index.close()


@in_loop
async def test_a_path_confines_a_search(tmp_path: Path) -> None:
    index = await built(tmp_path, FILES)
    for path in ("shop", "./shop/", "shop/cart.py"):
        found = {hit.path for hit in (await index.search("animals", 9, path.removeprefix("./"))).hits}
        assert found == {file for file in FILES if file.startswith(path.strip("./"))}
    assert (await index.search("animals", 9, "nowhere")).hits == ()
    await index.close()


@pytest.mark.parametrize(("question", "k"), [(" ", 1), ("x", 0)])
@in_loop
async def test_senseless_questions_are_the_agents_mistake(tmp_path: Path, question: str, k: int) -> None:
    index = await built(tmp_path, FILES)
    with pytest.raises(ToolArgumentError):
        await index.search(question, k)
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
async def test_only_changed_chunks_are_embedded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, embedder, read = many_files(20), HashingEmbedder(), list[Path]()
    index = await built(tmp_path, files, embedder)
    first, before, tree = embedder.num_embedded, digests(index), tmp_path / "tree"
    changed = b"# a line above\n" + files["pkg0/mod0.py"].replace(b"* 0 + 1", b"* 0 + 77")
    write(tree, {"pkg0/mod0.py": changed})
    (tree / "pkg1/mod1.py").rename(tree / "renamed.py")
    (tree / "pkg2/mod2.py").unlink()
    read_file = building._read_file

    def reading(path: Path) -> object:
        read.append(path)
        return read_file(path)

    monkeypatch.setattr(building, "_read_file", reading)
    await index.update()
    after = digests(index)
    differing = {path for path in before | after if before.get(path) != after.get(path)}
    assert differing == {"renamed.py", "pkg0/mod0.py", "pkg1/mod1.py", "pkg2/mod2.py"}
    assert after.keys() - before.keys() == {"renamed.py"} and "pkg0/mod0.py" in after
    assert embedder.num_embedded - first == 2, "the changed function, and the first one with its new comment"
    names = {str(path.relative_to(tree)) for path in read}
    assert {"renamed.py", "pkg0/mod0.py"} <= names, names
    hit = (await index.search(name(0, 1), 1)).hits[0]
    assert (hit.first_line, "77" in hit.text) == (5, True)
    assert {hit.path for hit in (await index.search(name(1, 2), 1)).hits} == {"renamed.py"}
    assert "pkg2/mod2.py" not in {hit.path for hit in (await index.search("task", 999)).hits}
    await index.close()


@in_loop
async def test_an_updated_index_ranks_like_one_built_anew(tmp_path: Path) -> None:
    files = many_files(12)
    index = await built(tmp_path / "a", files)
    added = {"pkg3/mod3.py": b"def other(): return 3\n", "new.py": b"def task_new(): pass\n"}
    write(tmp_path / "a" / "tree", added)
    (tmp_path / "a" / "tree" / "pkg5/mod5.py").unlink()
    await index.update()
    kept = {path: content for path, content in files.items() if path != "pkg5/mod5.py"}
    fresh = await built(tmp_path / "b", kept | added)
    for question in (name(4, 2), "other", "new task"):
        assert await index.search(question, 8) == await fresh.search(question, 8)
    assert digests(index) == digests(fresh)
    await index.close()
    await fresh.close()


@in_loop
async def test_a_second_checkout_embeds_nothing_and_what_was_known_is_known_again(tmp_path: Path) -> None:
    files = many_files(8)
    index = await built(tmp_path, files)
    expected = await index.search(name(3, 1), 3)
    await index.close()
    embedder = HashingEmbedder()
    again = await SemanticIndex.open(tmp_path, tmp_path / "tree", embedder)
    assert await again.search(name(3, 1), 3) == expected
    second = await SemanticIndex.open(tmp_path, write(tmp_path / "second", files), embedder)
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
    index = await SemanticIndex.open(tmp_path, write(tmp_path / "tree", files), failing)
    with pytest.raises(RuntimeError, match="run away"):
        await index.update()
    assert failing.num_embedded == 256
    result = await index.search(name(99, 3), 1)
    assert [hit.symbol for hit in result.hits] == [name(99, 3)] and not result.complete
    await index.close()
    embedder = HashingEmbedder()
    index = await SemanticIndex.open(tmp_path, write(tmp_path / "tree", files), embedder)
    await index.update()
    assert embedder.num_embedded == 400 - 256
    assert (await index.search(name(99, 3), 1)).complete
    await index.close()


@in_loop
async def test_a_search_during_a_build_answers_from_what_is_there(tmp_path: Path) -> None:
    searches: list[asyncio.Task[CodeHits]] = []

    def on_batch() -> None:
        searches.append(asyncio.ensure_future(index.search(name(99, 3), 1)))

    embedder = TellingEmbedder(on_batch)
    index = await SemanticIndex.open(tmp_path, write(tmp_path / "tree", many_files(100)), embedder)
    await index.update()
    result = await searches[0]
    assert result.hits[0].symbol == name(99, 3) and not result.complete
    assert (await index.search(name(99, 3), 1)).complete
    await asyncio.gather(*searches)
    await index.close()


@in_loop
async def test_a_cancelled_build_keeps_what_it_did(tmp_path: Path) -> None:
    embedder = TellingEmbedder(lambda: task.cancel())
    index = await SemanticIndex.open(tmp_path, write(tmp_path / "tree", many_files(100)), embedder)
    task = asyncio.ensure_future(index.update())
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
    overlay.remove("zoo")
    assert "zoo/again.py" not in {hit.path for hit in (await overlay.search("count", 99)).hits}
    overlay.write("zoo/last.py", b"def count_lions(): pass\n")
    assert [hit.symbol for hit in (await overlay.search("count", 9, "zoo")).hits] == ["count_lions"]
    await index.close()


@pytest.mark.parametrize("path", [".secret.py", "shop/.hidden/more.py", "./.venv/lib/more.py"])
@in_loop
async def test_hidden_files_that_are_written_are_not_found(tmp_path: Path, path: str) -> None:
    index = await built(tmp_path, FILES)
    overlay = index.overlay()
    overlay.write(path, b"def count_unicorns(): pass\n")
    assert "count_unicorns" not in {hit.symbol for hit in (await overlay.search("count unicorns", 99)).hits}
    await index.close()


@pytest.mark.parametrize("question", ["count zebras", "item", "feed the animals in a shop", "zoo"])
@in_loop
async def test_edits_over_nothing_score_as_an_index_of_them_does(tmp_path: Path, question: str) -> None:
    index, fresh = await built(tmp_path / "empty", {}), await built(tmp_path / "full", FILES)
    overlay = index.overlay()
    for path, content in sorted(FILES.items()):
        overlay.write(path, content)
    ours, theirs = await overlay.search(question, 99), await fresh.search(question, 99)
    scores = {(hit.path, hit.first_line): hit.score for hit in theirs.hits}
    assert {(hit.path, hit.first_line): hit.score for hit in ours.hits} == pytest.approx(scores, abs=1e-3)
    await index.close()
    await fresh.close()


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
                assert hit.score == pytest.approx(scores[hit.path, hit.first_line], abs=0.3), question
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


@in_loop
async def test_a_directory_is_indexed_without_hidden_linked_and_huge_files(tmp_path: Path) -> None:
    root = tmp_path / "tree"
    odd = {".hidden/a.py": b"x = 1\n", "data.json": b"1" * ((1 << 20) + 1), "logo.png": b"\x89PNG\0"}
    write(root, FILES | odd)
    (root / "link.py").symlink_to("shop/cart.py")
    os.mkfifo(root / "pipe.py")
    index = await SemanticIndex.open(tmp_path / "store", root, HashingEmbedder())
    await index.update()
    assert {hit.path for hit in (await index.search("x", 99)).hits} == set(FILES)
    await index.close()


@in_loop
async def test_a_file_rewritten_within_a_tick_of_its_time_stamp_is_read_again(tmp_path: Path) -> None:
    root = tmp_path / "tree"
    write(root, {"a.py": b"def old_name(): pass\n"}, age_s=0)
    index = await SemanticIndex.open(tmp_path / "store", root, HashingEmbedder())
    await index.update()
    stat = (root / "a.py").stat()
    (root / "a.py").write_bytes(b"def new_name(): pass\n")
    os.utime(root / "a.py", ns=(stat.st_atime_ns, stat.st_mtime_ns))
    await index.update()
    assert [hit.symbol for hit in (await index.search("name", 9)).hits] == ["new_name"]
    await index.close()


@in_loop
async def test_a_directory_that_is_none_is_refused(tmp_path: Path) -> None:
    index = await SemanticIndex.open(tmp_path / "store", tmp_path / "missing")
    with pytest.raises(ConfigError, match="not a directory"):
        await index.update()
    await index.close()


@in_loop
async def test_an_update_without_changes_reads_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(building, "_RACY_NS", -100_000_000_000)
    index = await built(tmp_path, many_files(5))
    monkeypatch.setattr(building, "_read_file", None)
    before = digests(index)
    await index.update()
    assert digests(index) == before
    assert (await index.search(name(1, 1), 1)).complete
    await index.close()


@in_loop
async def test_names_that_are_not_utf_8_are_indexed(tmp_path: Path) -> None:
    index = await built(tmp_path, {"odd\udcffname.py": b"def zebra(): pass\n"})
    assert [hit.path for hit in (await index.search("zebra", 1)).hits] == ["odd\udcffname.py"]
    await index.close()


@in_loop
async def test_what_another_process_embeds_is_seen(tmp_path: Path) -> None:
    root = write(tmp_path / "tree", many_files(5))
    index = await SemanticIndex.open(tmp_path, root, HashingEmbedder())
    assert (await index.search("task", 1)).hits == ()
    other = await built(tmp_path, many_files(5))
    assert (await index.search(name(1, 1), 1)).complete
    await other.close()
    await index.close()


@in_loop
async def test_vectors_that_another_build_was_faster_with_are_seen(tmp_path: Path) -> None:
    index = await SemanticIndex.open(tmp_path, write(tmp_path / "tree", FILES), HashingEmbedder())
    second = write(tmp_path / "second", FILES)
    embedding_texts = index._store.embedding_texts

    async def build() -> None:
        other = await SemanticIndex.open(tmp_path, second, HashingEmbedder())
        await other.update()
        await other.close()

    def slowly(chunks: list[int]) -> dict[bytes, str]:
        index._current()  # a search has looked at what is there
        asyncio.run(build())
        return embedding_texts(chunks)

    index._store.embedding_texts = slowly  # type: ignore[method-assign]
    await index.update()
    assert (await index.search("zebra", 1)).complete
    await index.close()


@pytest.mark.parametrize("damage", [b"", b"no database at all" * 1000])
@in_loop
async def test_a_damaged_store_is_refused(tmp_path: Path, damage: bytes) -> None:
    index = await built(tmp_path, FILES)
    await index.close()
    path = tmp_path / "index.sqlite"
    path.write_bytes(path.read_bytes()[:4096] + damage)
    with pytest.raises(StoreError, match="cannot be read"):
        index = await SemanticIndex.open(tmp_path, tmp_path / "tree", HashingEmbedder())
        await index.search("zebra", 1)


@in_loop
async def test_a_store_of_another_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    await (await built(tmp_path, FILES)).close()
    monkeypatch.setattr(store, "STORE_VERSION", 99)
    with pytest.raises(StoreError, match="another version"):
        await SemanticIndex.open(tmp_path, tmp_path / "tree", HashingEmbedder())


@in_loop
async def test_sqlite_without_full_text_search_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "_FULL_TEXT", "fts99")
    with pytest.raises(ResourceError, match="FTS5"):
        await SemanticIndex.open(tmp_path, tmp_path, HashingEmbedder())


def test_a_store_is_made_by_one_at_a_time(tmp_path: Path) -> None:
    """SQLite does not wait for another that changes the journal's mode."""
    opened: list[store.SemanticStore] = []
    other = threading.Thread(target=lambda: opened.append(store.SemanticStore(tmp_path)))
    with locked(tmp_path):
        other.start()
        other.join(0.5)
        assert not opened
    other.join(60)
    opened.pop().close()


BUILDER = """
import asyncio, sys
from pathlib import Path
from tests.fakes.embedder import HashingEmbedder
from etude.agent.index.semantic import SemanticIndex

class Telling(HashingEmbedder):
    def embed(self, texts):
        rows = super().embed(texts)
        print(self.num_embedded, flush=True)
        return rows

async def build(folder):
    index = await SemanticIndex.open(folder, folder / "tree", Telling())
    await index.update()
    print("built", flush=True)
    await index.close()

asyncio.run(build(Path(sys.argv[1])))
"""


@pytest.mark.slow
def test_a_killed_build_goes_on_where_it_stopped(tmp_path: Path) -> None:
    write(tmp_path / "tree", many_files(200))
    with subprocess.Popen([sys.executable, "-c", BUILDER, tmp_path], stdout=subprocess.PIPE) as builder:
        assert builder.stdout is not None
        lines = [builder.stdout.readline() for _ in range(3)]
        builder.kill()
    embedder = HashingEmbedder()

    async def go_on() -> None:
        index = await SemanticIndex.open(tmp_path, tmp_path / "tree", embedder)
        await index.update()
        assert (await index.search(name(150, 1), 1)).complete
        await index.close()

    asyncio.run(go_on())
    assert embedder.num_embedded <= 800 - int(lines[1]), "all but the batch in work were kept"


@pytest.mark.slow
def test_two_processes_build_into_one_store(tmp_path: Path) -> None:
    write(tmp_path / "tree", many_files(60))
    command = [sys.executable, "-c", BUILDER, tmp_path]
    builders = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(2)]
    assert all(b"built" in builder.communicate(timeout=120)[0] for builder in builders)

    async def search() -> CodeHits:
        index = await SemanticIndex.open(tmp_path, tmp_path / "tree", HashingEmbedder())
        result = await index.search("task", 999)
        await index.close()
        return result

    result = asyncio.run(search())
    assert len(result.hits) == 240 and result.complete


@in_loop
async def test_files_that_are_cut_are_found_while_others_are_still_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = await SemanticIndex.open(tmp_path, write(tmp_path / "tree", many_files(100)), HashingEmbedder())
    searches: list[asyncio.Task[CodeHits]] = []

    loop, replace = asyncio.get_running_loop(), store.SemanticStore.replace

    def search() -> None:
        searches.append(asyncio.ensure_future(index.search("task", 999)))

    def replace_and_search(*arguments: Any) -> None:
        replace(*arguments)
        loop.call_soon_threadsafe(search)

    monkeypatch.setattr(store.SemanticStore, "replace", replace_and_search)
    await index.update()
    found = [len((await search).hits) for search in searches]
    assert len(found) == 4 and 0 < found[0] < 400 == found[-1]
    await index.close()
