"""Changes of a sandbox that a tree did not accept: never overwritten, never lost silently."""

import subprocess
from pathlib import Path

import pytest

from etude.controller.agent import trees
from etude.controller.agent.mirror import CHANGED_MEANWHILE, EXISTS, IGNORED, Mirror
from etude.controller.agent.trees import DirectoryTree
from etude.errors import ConfigError, ToolArgumentError
from etude.sandbox.template import Template
from etude_quickstart.memory_backend import MemoryBackend, MemorySandbox
from tests.controller.agent_builders import run


async def mirrored(root: Path) -> tuple[Mirror, MemorySandbox]:
    """A mirror of a directory, in use."""
    mirror = Mirror(DirectoryTree(root))
    await mirror.load()
    sandbox = await MemoryBackend().create(Template(dict(mirror.box), "repository"))
    mirror.mount(sandbox)
    return mirror, sandbox


async def settle(mirror: Mirror) -> dict[str, str]:
    return await mirror.apply(await mirror.changes())


def test_a_large_file_that_was_left_out_is_never_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trees, "MAX_FILE_BYTES", 10)
    (tmp_path / "data.bin").write_bytes(b"m" * 11)

    async def go() -> None:
        mirror, sandbox = await mirrored(tmp_path)
        await sandbox.files.write("data.bin", "theirs")
        assert await settle(mirror) == {"data.bin": EXISTS}
        assert mirror.kept_back == {"data.bin": EXISTS}

    run(go())
    assert (tmp_path / "data.bin").read_bytes() == b"m" * 11


def test_a_file_that_was_ignored_later_is_kept_back_for_that_reason(tmp_path: Path) -> None:
    subprocess.run(("git", "init", "-q"), cwd=tmp_path, check=True)

    async def go() -> None:
        mirror, sandbox = await mirrored(tmp_path)
        mirror.writes = False
        await sandbox.files.write("notes.txt", "theirs")
        assert await settle(mirror) == {}
        (tmp_path / ".gitignore").write_text("notes.txt\n")
        (tmp_path / "notes.txt").write_text("mine")
        assert await mirror.write("notes.txt", b"theirs") == IGNORED

    run(go())
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_directory_that_the_repository_around_it_ignores_is_copied_and_written_as_a_whole(
    tmp_path: Path,
) -> None:
    subprocess.run(("git", "init", "-q"), cwd=tmp_path, check=True)
    (tmp_path / ".gitignore").write_text("/tasks/\n")
    project = tmp_path / "tasks" / "one"
    project.mkdir(parents=True)
    (project / "a").write_text("one")

    async def go() -> None:
        mirror, sandbox = await mirrored(project)
        assert set(mirror.box) == {"a"}
        await sandbox.files.write("b", "two")
        assert await settle(mirror) == {}

    run(go())
    assert (project / "b").read_text() == "two"


def test_what_was_kept_back_is_forgotten_once_it_is_written(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("one")

    async def go() -> None:
        mirror, sandbox = await mirrored(tmp_path)
        (tmp_path / "a").write_text("mine")
        await sandbox.files.write("a", "theirs")
        await settle(mirror)
        assert mirror.kept_back == {"a": CHANGED_MEANWHILE}
        (tmp_path / "a").write_text("one")
        assert await mirror.write("a", b"theirs") == ""
        assert mirror.kept_back == {}

    run(go())


def test_who_does_the_same_as_the_person_is_not_kept_back(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_text("one")

    async def go() -> None:
        mirror, sandbox = await mirrored(tmp_path)
        (tmp_path / "a").write_text("same")
        (tmp_path / "b").unlink()
        await sandbox.files.write("a", "same")
        await sandbox.files.remove("b")
        assert await settle(mirror) == {}
        assert mirror.kept_back == {}
        assert await mirror.pull() == []

    run(go())


def test_names_that_are_no_text_are_told(tmp_path: Path) -> None:
    async def go() -> None:
        mirror, sandbox = await mirrored(tmp_path)
        await sandbox.files.write("a\nb", "x")
        await sandbox.files.write("c", "x")
        assert await settle(mirror) == {}
        assert list(mirror.kept_back) == ["a\\nb"]

    run(go())
    assert (tmp_path / "c").exists()


def test_a_persons_change_replaces_a_file_that_the_agent_locked(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("one")

    class Locked:
        """Files of which one may be removed and not written."""

        def __init__(self, files) -> None:
            self.files, self.locked = files, True

        async def write(self, path, data) -> None:
            if self.locked:
                raise ToolArgumentError("permission denied", field="path", received=path)
            await self.files.write(path, data)

        async def remove(self, path) -> None:
            self.locked = False
            await self.files.remove(path)

    async def go() -> bytes:
        mirror, sandbox = await mirrored(tmp_path)
        plain = sandbox.files
        sandbox.files = Locked(plain)  # pyright: ignore[reportAttributeAccessIssue]
        (tmp_path / "a").write_text("mine")
        assert await mirror.pull() == ["a"]
        return await plain.read("a")

    assert run(go()) == b"mine"


@pytest.mark.parametrize(("is_git", "advice"), [(True, "have git ignore"), (False, "one project")])
def test_advice_about_too_much_fits_the_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_git: bool, advice: str
) -> None:
    monkeypatch.setattr(trees, "MAX_BYTES", 10)
    (tmp_path / "a").write_text("x" * 11)
    if is_git:
        subprocess.run(("git", "init", "-q"), cwd=tmp_path, check=True)

    with pytest.raises(ConfigError) as caught:
        run(DirectoryTree(tmp_path).scan())
    assert advice in (caught.value.fix or "")


def test_the_whole_machine_is_no_directory_to_work_on() -> None:
    with pytest.raises(ConfigError, match="root directory"):
        DirectoryTree(Path("/"))
