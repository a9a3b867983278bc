"""Files and directories that the agent locked away from itself: they hide nothing, and stay locked."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from etude.sandbox.inside.filesystem import open_unlocked
from etude.sandbox.interface import Sandbox
from tests.sandbox.backends import with_sandbox

FILES: dict[str, bytes | str] = {"a.txt": b"a\n", "b.txt": b"b\n", "sub/c.txt": b"c\n", "sub/d/e.txt": b"e\n"}
LOCKS: list[tuple[str, Mapping[str, bytes | None]]] = [
    ("echo n > a.txt; echo m > b.txt; chmod 000 a.txt", {"a.txt": b"n\n", "b.txt": b"m\n"}),
    ("chmod 000 a.txt; echo m > b.txt", {"b.txt": b"m\n"}),
    ("echo n > new; echo m > b.txt; chmod 200 new", {"b.txt": b"m\n", "new": b"n\n"}),
    ("echo m > b.txt; echo n > sub/c.txt; chmod 000 sub", {"b.txt": b"m\n", "sub/c.txt": b"n\n"}),
    ("echo n > sub/d/e.txt; chmod 400 sub/d; chmod 000 sub", {"sub/d/e.txt": b"n\n"}),
    ("mkdir n; echo n > n/n; chmod 000 n/n; chmod 100 n; echo m > b.txt", {"b.txt": b"m\n", "n/n": b"n\n"}),
    ("rm a.txt; echo m > b.txt; sleep 0.1; chmod 000 .", {"a.txt": None, "b.txt": b"m\n"}),
    ("rm sub/c.txt; chmod 300 sub", {"sub/c.txt": None}),
]
PLAIN_USER = """
import sys
from tests.sandbox.test_locked_files import LOCKS, observe
for command, changes in LOCKS:
    assert observe(sys.argv[1], command) == changes, command
print("all seen")
"""
backends = pytest.mark.parametrize("backend", ["local", "unisolated"])


def observe(backend: str, command: str) -> Mapping[str, bytes | None]:
    """What the diffs see after `command`."""

    async def scenario(sandbox: Sandbox) -> Mapping[str, bytes | None]:
        done = await sandbox.commands.run(command)
        assert done.exit_code == 0, done.stderr
        changes = await sandbox.diff()
        assert await sandbox.final_diff() == changes
        return changes

    return with_sandbox(backend, FILES, scenario)


@pytest.mark.slow
@backends
def test_what_is_locked_is_seen_and_hides_nothing(backend: str) -> None:
    for command, changes in LOCKS:
        assert observe(backend, command) == changes, command


def test_locks_are_put_back() -> None:
    async def scenario(sandbox: Sandbox) -> str:
        await sandbox.commands.run("echo n > sub/c.txt; chmod 000 sub/c.txt sub; chmod 000 a.txt")
        await sandbox.diff()
        shown = "stat -c %a a.txt sub; cat a.txt sub/c.txt; chmod 700 sub; stat -c %a sub/c.txt"
        return (await sandbox.commands.run(shown)).stdout

    assert with_sandbox("local", FILES, scenario) == "0\n0\n0\n"


def test_a_locked_file_hides_nothing_from_a_search() -> None:
    async def scenario(sandbox: Sandbox) -> tuple[list[str], list[str]]:
        await sandbox.commands.run("chmod 000 a.txt sub/d")
        found = await sandbox.files.grep(".")
        listed = await sandbox.files.list(depth=9)
        return [match.path for match in found], [one.path for one in listed]

    found, listed = with_sandbox("local", FILES, scenario)
    assert found == ["b.txt", "sub/c.txt"]
    assert listed == ["a.txt", "b.txt", "sub", "sub/c.txt", "sub/d"]


def test_files_that_come_and_go_hide_nothing() -> None:
    churn = "while :; do mkdir -p t/u; touch t/u/1 t/2 3; rm -r t 3; done"

    async def scenario(sandbox: Sandbox) -> set[bytes | None]:
        await sandbox.commands.run("echo m > b.txt")
        await sandbox.commands.start(churn)
        return {(await sandbox.diff()).get("b.txt") for _ in range(100)}

    assert with_sandbox("local", FILES, scenario) == {b"m\n"}


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="every other test runs as a plain user already")
@backends
def test_a_plain_users_sandboxes_see_it_too(backend: str, tmp_path: Path) -> None:
    interpreter, root = "/usr/bin/python3", Path(__file__).parents[2]
    paths = [
        root / "src",
        root,
        root / "examples/quickstart",
        *(Path(path) for path in sys.path if path.endswith("site-packages")),
    ]
    if not Path(interpreter).exists() or not all(_open_to_all(path) for path in paths):
        pytest.skip("no Python or no sources that a plain user may read")
    env = {"PYTHONPATH": ":".join(map(str, paths)), "PATH": "/usr/bin:/bin", "HOME": "/nonexistent"}
    plain = {
        "env": env,
        "user": 65534,
        "group": 65534,
        "extra_groups": [],
        "cwd": "/",
        "capture_output": True,
    }
    probe = subprocess.run([interpreter, "-c", "import blake3, pydantic, pytest"], **plain, check=False)
    if probe.returncode != 0:
        pytest.skip("the system's Python cannot use this environment's libraries")
    command = [interpreter, "-B", "-c", PLAIN_USER, backend]
    done = subprocess.run(command, **plain, text=True, timeout=600, check=False)
    assert done.stdout == "all seen\n", done.stderr


def test_a_file_that_is_removed_while_it_is_unlocked_is_read_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("one")
    folder = os.open(tmp_path, os.O_PATH | os.O_DIRECTORY)
    calls = iter([False, True])

    def opening() -> int:
        if not next(calls):
            raise PermissionError
        descriptor = os.open(tmp_path / "a", os.O_RDONLY)
        (tmp_path / "a").unlink()
        return descriptor

    try:
        with os.fdopen(open_unlocked("a", folder, opening)) as file:
            assert file.read() == "one"
    finally:
        os.close(folder)


def _open_to_all(path: Path) -> bool:
    return all(folder.stat().st_mode & 0o005 == 0o005 for folder in (path, *path.parents))
