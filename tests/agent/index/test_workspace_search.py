import asyncio
import threading
from pathlib import Path

import pytest
from tests.fakes.embedder import HashingEmbedder
from tests.fakes.indexes import until_built

from etude.agent.index import templates
from etude.agent.index.opening import new_indexes, run_indexes
from etude.agent.index.semantic import store
from etude.agent.index.templates import TemplateIndexes, lay_out
from etude.agent.index.workspace import WorkspaceSearch
from etude.agent.tools.grep import find
from etude.agent.tools.interface import ToolContext
from etude.agent.tools.ports import GrepRequest
from etude.errors import ConfigError, InfrastructureError, ResourceError, SandboxError, ToolArgumentError
from etude.sandbox.errors import DiffTooLargeError
from etude.sandbox.template import Image, Template
from etude_quickstart.memory_backend import MemoryBackend

FILES = {
    "lib/tally.py": "def tally(xs):\n    return sum(xs)\n",
    "lib/tags.py": "def tags(text):\n    return text.split(',')\n",
    "README.md": "tally counts\n",
}


def with_search(tmp_path: Path, use, embedder=None):
    """Runs `use(sandbox, search)` on a sandbox and the built index of its template."""
    template = Template(FILES)

    async def run():
        sandbox = await MemoryBackend().create(template)
        indexes = TemplateIndexes(tmp_path / "state", embedder or HashingEmbedder())
        await until_built(indexes, template)
        search = indexes.search(template, sandbox)
        try:
            return await use(sandbox, search)
        finally:
            search.close()
            await indexes.close()
            await indexes.close()

    return asyncio.run(run())


def found(matches):
    return [(match.path, match.line_number) for match in matches]


async def grep(sandbox, search, request):
    """As the tool finds them, with the search or without it."""
    return found(await find(request, ToolContext(sandbox, {}, search=search)))


@pytest.mark.parametrize("told", ["tool", "command"])
def test_searches_see_edits_at_once(tmp_path, told):
    async def use(sandbox, search):
        assert found(await search.grep(GrepRequest("tally"))) == [("README.md", 1), ("lib/tally.py", 1)]
        await sandbox.files.write("lib/more.py", "import tally\n")
        await sandbox.files.write("lib/tally.py", "# gone\n\ndef count(xs):\n    return len(xs)\n")
        await sandbox.files.remove("README.md")
        if told == "command":
            search.changed_somewhere()
        else:
            for path in ("lib/more.py", "lib/tally.py", "README.md"):
                search.changed(path)
        assert found(await search.grep(GrepRequest("tally"))) == [("lib/more.py", 1)]
        assert found(await search.grep(GrepRequest("def \\w+", path="lib"))) == [
            ("lib/tags.py", 1),
            ("lib/tally.py", 3),
        ]
        hits = await search.semantic("count", 3, "lib")
        assert ("lib/tally.py", 3) in [(hit.path, hit.first_line) for hit in hits.hits]

    with_search(tmp_path, use)


def test_what_is_put_back_is_found_again(tmp_path):
    async def use(sandbox, search):
        search.changed_somewhere()
        await sandbox.files.write("lib/tally.py", "x = 1\n")
        assert found(await search.grep(GrepRequest("def tally"))) == []
        await sandbox.files.write("lib/tally.py", FILES["lib/tally.py"])
        assert found(await search.grep(GrepRequest("def tally"))) == [("lib/tally.py", 1)]

    with_search(tmp_path, use)


def test_the_harness_s_own_files_are_not_indexed(tmp_path):
    async def use(sandbox, search):
        await sandbox.files.write(".etude/history/001.md", "tally of old\n")
        search.changed_somewhere()
        assert found(await search.grep(GrepRequest("of old"))) == []

    with_search(tmp_path, use)


@pytest.mark.parametrize("failure", [SandboxError("the line broke"), asyncio.CancelledError()])
def test_an_edit_that_could_not_be_read_at_once_is_read_by_the_next_search(tmp_path, failure):
    async def use(sandbox, search):
        read = sandbox.files.read

        async def breaks(path, limit):
            sandbox.files.read = read
            raise failure

        await sandbox.files.write("lib/tally.py", "tally = 1\n")
        search.changed("lib/tally.py")
        sandbox.files.read = breaks
        with pytest.raises(type(failure)):
            await search.grep(GrepRequest("tally = 1"))
        assert found(await search.grep(GrepRequest("tally = 1"))) == [("lib/tally.py", 1)]

    with_search(tmp_path, use)


def test_what_was_put_back_before_an_index_came_is_put_back_in_the_other_one(tmp_path):
    async def use(sandbox, search):
        is_built = False
        late = WorkspaceSearch(
            sandbox, lambda: search._grep_overlay() if is_built else None, search._semantic_overlay
        )
        late.changed_somewhere()
        await sandbox.files.write("lib/tags.py", "marmalade = 1\n")
        assert "marmalade" in (await late.semantic("marmalade", 1)).hits[0].text
        await sandbox.files.write("lib/tags.py", FILES["lib/tags.py"])
        is_built = True
        assert found(await late.grep(GrepRequest("marmalade"))) == []
        assert not any("marmalade" in hit.text for hit in (await late.semantic("marmalade", 9)).hits)
        late.close()

    with_search(tmp_path, use)


def test_too_many_changes_leave_the_search_to_the_sandbox(tmp_path):
    async def use(sandbox, search):
        async def too_large(without):
            raise DiffTooLargeError("the changes are too large")

        sandbox.diff = too_large
        await sandbox.files.write("lib/more.py", "import tally\n")
        search.changed_somewhere()
        assert await search.grep(GrepRequest("tally")) is None
        assert ("lib/more.py", 1) in await grep(sandbox, search, GrepRequest("tally", limit=10))
        assert not (await search.semantic("tally", 3)).complete

    with_search(tmp_path, use)


def test_without_an_index_the_sandbox_searches_and_meaning_is_refused():
    async def use():
        sandbox = await MemoryBackend().create(Template(FILES))
        search = WorkspaceSearch(sandbox, lambda: None, lambda: None)
        assert await grep(sandbox, search, GrepRequest("TAGS", ignore_case=True)) == [("lib/tags.py", 1)]
        with pytest.raises(ToolArgumentError, match="use grep"):
            await search.semantic("tags", 3)

    asyncio.run(use())


def test_without_an_index_a_pattern_of_files_is_no_reason_for_fewer_matches():
    async def use():
        sandbox = await MemoryBackend().create(
            Template({**{f"a{n}.txt": "tally\n" for n in range(9)}, **FILES})
        )
        search = WorkspaceSearch(sandbox, lambda: None, lambda: None)
        request = GrepRequest("tally", globs=("*.py",), limit=2)
        assert await grep(sandbox, search, request) == [("lib/tally.py", 1)]

    asyncio.run(use())


def test_an_index_that_comes_later_knows_what_was_edited_before(tmp_path):
    (tmp_path / "lib").mkdir()
    template = Template(FILES)

    async def run():
        sandbox = await MemoryBackend().create(template)
        indexes = TemplateIndexes(tmp_path / "state", HashingEmbedder())
        search = indexes.search(template, sandbox)
        await sandbox.files.write("lib/tally.py", "import tally\n")
        search.changed("lib/tally.py")
        early = await grep(sandbox, search, GrepRequest("tally"))
        await until_built(indexes, template)
        late = found(await search.grep(GrepRequest("tally")))
        hits = await search.semantic("import", 1)
        again = indexes.search(template, sandbox)
        assert found(await again.grep(GrepRequest("tags"))) == [("lib/tags.py", 1)]
        search.close()
        again.close()
        await indexes.close()
        return early, late, hits.hits[0].path

    assert asyncio.run(run()) == ([("README.md", 1), ("lib/tally.py", 1)],) * 2 + ("lib/tally.py",)


def test_an_index_is_built_once(tmp_path):
    class Counting(HashingEmbedder):
        texts = 0

        def embed(self, texts):
            Counting.texts += len(texts)
            return super().embed(texts)

    async def use(sandbox, search):
        return (await search.semantic("tally", 1)).hits[0].path

    first = with_search(tmp_path, use, Counting())
    embedded = Counting.texts
    assert first == with_search(tmp_path, use, Counting())
    assert Counting.texts - embedded <= 2  # the questions alone


def test_indexes_that_no_session_uses_are_closed_and_opened_again(tmp_path, monkeypatch):
    monkeypatch.setattr(templates, "_MOST_IDLE", 1)
    all_templates = [Template({"a.py": f"tally = {number}\n"}) for number in range(5)]

    async def tallied(indexes, template):
        sandbox = await MemoryBackend().create(template)
        search = indexes.search(template, sandbox)
        await until_built(indexes, template)
        assert found(await search.grep(GrepRequest("tally"))) == [("a.py", 1)]
        assert (await search.semantic("tally", 1)).hits[0].text in template.contents["a.py"].decode()
        return search

    async def use():
        indexes = TemplateIndexes(tmp_path, HashingEmbedder())
        used = await tallied(indexes, all_templates[0])
        for template in all_templates[1:]:
            search = await tallied(indexes, template)
            search.close()
            search.close()
            assert len(indexes._trees) <= 2, "that which is in use, and the last one"
        assert found(await used.grep(GrepRequest("tally"))) == [("a.py", 1)]
        again = await tallied(indexes, all_templates[1])
        used.close()
        again.close()
        assert len(indexes._trees) == 1
        await indexes.close()

    asyncio.run(use())


def test_a_build_that_fails_on_its_way_is_told_once_and_the_sandbox_searches(tmp_path):
    class Full(HashingEmbedder):
        def embed(self, texts):
            raise OSError("no room")

    template = Template(FILES)

    async def use():
        told = asyncio.Queue()
        indexes = TemplateIndexes(tmp_path, Full(), told.put_nowait)
        sandbox = await MemoryBackend().create(template)
        search = indexes.search(template, sandbox)
        words = await asyncio.wait_for(told.get(), 60)
        with pytest.raises(OSError, match="no room"):
            await until_built(indexes, template)
        again = indexes.search(template, sandbox)
        found_then = found(await again.grep(GrepRequest("tags")))
        search.close()
        again.close()
        await indexes.close()
        return words, told.empty(), found_then

    assert asyncio.run(use()) == ("no complete code index: no room", True, [("lib/tags.py", 1)])


def test_without_full_text_search_there_is_still_the_index_of_grep(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "_FULL_TEXT", "fts99")

    async def use():
        told = []
        indexes = TemplateIndexes(tmp_path, HashingEmbedder(), told.append)
        with pytest.raises(ResourceError, match="FTS5"):
            await until_built(indexes, Template(FILES))
        await indexes.close()
        return told

    (words,) = asyncio.run(use())
    assert words.startswith("no complete code index: ")


def test_a_tree_that_two_processes_lay_out_at_once_is_whole(tmp_path):
    plain = Template(FILES)
    other = threading.Thread(target=lay_out, args=(plain, tmp_path))

    class Slow:
        digest = plain.digest

        @property
        def contents(self):
            return self

        def items(self):
            for number, item in enumerate(plain.contents.items()):
                if number == 1:
                    other.start()
                    other.join(0.5)  # waits for us, as it should; the draft is in its way otherwise
                yield item

    tree = lay_out(Slow(), tmp_path)  # pyright: ignore[reportArgumentType]
    other.join()
    assert {str(path.relative_to(tree)) for path in tree.rglob("*") if path.is_file()} == set(FILES)


def test_kinds_of_indexes_have_names(tmp_path):
    assert new_indexes("none") is None
    words = new_indexes("words", tmp_path)
    assert words is not None
    with pytest.raises(ConfigError, match="no such index"):
        new_indexes("everything")


def test_a_run_waits_for_its_index_and_leaves_nothing_on_disk(monkeypatch):
    async def use():
        indexes = run_indexes("words")
        assert indexes is not None
        template = Template(FILES)
        search = indexes.search(template, await MemoryBackend().create(template))
        hits = (await search.semantic("tally", 3)).hits  # nobody waited before
        search.close()
        folder = indexes.state
        assert (folder / "trees" / template.digest).is_dir()
        monkeypatch.setattr(templates, "_MOST_IDLE", 0)
        indexes.search(template, await MemoryBackend().create(template)).close()
        await asyncio.gather(*indexes.closing)
        assert not any((folder / "trees").iterdir()) and not any((folder / "grep").iterdir())
        again = indexes.search(template, await MemoryBackend().create(template))
        assert (await again.semantic("tally", 3)).hits == hits
        await indexes.close()
        return hits, folder

    hits, folder = asyncio.run(use())
    assert [hit.path for hit in hits][:1] == ["lib/tally.py"] and not folder.exists()


def test_a_run_that_ends_in_the_middle_of_a_build_leaves_nothing_on_disk(monkeypatch):
    may_go_on = threading.Event()

    def slow(template, directory):
        may_go_on.wait()
        return lay_out(template, directory)

    async def use():
        indexes = run_indexes("grep")
        assert indexes is not None
        template = Template(FILES)
        indexes.search(template, await MemoryBackend().create(template)).close()
        await asyncio.sleep(0)
        closing = asyncio.create_task(indexes.close())
        await asyncio.sleep(0.05)
        may_go_on.set()
        await closing
        return indexes.state

    monkeypatch.setattr(templates, "lay_out", slow)
    state = asyncio.run(use())
    assert not state.exists()


def test_a_run_whose_index_cannot_be_built_fails_its_searches_until_one_can(monkeypatch):
    async def use():
        indexes = run_indexes("words")
        assert indexes is not None
        template = Template(FILES)
        sandbox = await MemoryBackend().create(template)

        def fail(template, directory):
            raise OSError("disk full")

        with monkeypatch.context() as patch:
            patch.setattr(templates, "lay_out", fail)
            with pytest.raises(InfrastructureError, match="disk full"):
                await indexes.search(template, sandbox).semantic("tally", 3)
        assert (await indexes.search(template, sandbox).semantic("tally", 3)).hits
        await indexes.close()

    asyncio.run(use())


def test_the_files_of_an_image_come_out_of_a_sandbox(tmp_path):
    image = Image("base", ("layer",), workdir="/repo")

    async def use():
        backend = MemoryBackend()
        indexes = TemplateIndexes(tmp_path, None, waits=True)
        made = []

        async def make():
            made.append(await backend.create(Template({**FILES, ".git/config": "hidden"})))
            return made[-1]

        template = Template({}, image=image)
        sandbox = await make()
        search = indexes.search(template, sandbox, make)
        await sandbox.files.write("lib/more.py", "def more():\n    pass\n")
        search.changed("lib/more.py")
        hits = (await search.semantic("tally more", 5)).hits
        await indexes.close()
        return {hit.path for hit in hits}, len(made)

    found_paths, num_made = asyncio.run(use())
    assert found_paths >= {"lib/tally.py", "lib/more.py"} and ".git/config" not in found_paths
    assert num_made == 2
