"""Nonsensical input by an agent: each gives a typed error that attributes the failure, or none.

`AgentError`: the agent's doing, an outcome. `SandboxError`: ours, never a reward; an agent that can cause one
chooses which of its attempts count.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from etude.errors import AgentError, SandboxError, ToolArgumentError
from etude.sandbox.errors import DiskFullError, PathOutsideError
from etude.sandbox.inside.faults import Fault
from etude.sandbox.inside.filesystem import Workspace
from etude.sandbox.interface import Sandbox, SandboxBackend
from etude.sandbox.local.backend import LocalBackend
from etude.sandbox.snapshots import SnapshotStore
from etude.sandbox.template import Template
from etude.sandbox.types import CommandResult, Resources
from tests.sandbox.backends import with_backend

Call = Callable[[Sandbox], Awaitable[object]]
TINY = Resources(memory_bytes=128 << 20, disk_bytes=16 << 20)
STRANGE = "\udcff\x1b[31m\n.py"
"""A name that is no UTF-8, colours a terminal and breaks a line."""


def in_sandbox(scenario: Callable[[Sandbox], Awaitable[object]], resources: Resources = TINY) -> object:
    """Runs a scenario, and checks that sandbox and backend still work after it."""

    async def run(backend: SandboxBackend) -> object:
        with tempfile.TemporaryDirectory(prefix="etude-bad-input-") as state:
            assert isinstance(backend, LocalBackend)
            # Not into the state directory of whoever runs this.
            backend.snapshots = SnapshotStore(Path(state))
            return await tried(backend)

    async def tried(backend: SandboxBackend) -> object:
        sandbox = await backend.create(Template({"t.txt": "t"}), resources)
        result = await scenario(sandbox)
        await backend.create(Template({"t.txt": "t"}))
        assert (await sandbox.commands.run("cd /; echo alive")).stdout == "alive\n"
        return result

    return with_backend("local", run)


def python(code: str) -> str:
    """A shell command that runs a program."""
    return f"python3 -S - <<'EOF'\n{code}\nEOF"


COMMANDS: dict[str, tuple[str, dict[str, object], Callable[[CommandResult], bool]]] = {
    "never ends": ("while :; do :; done", {"timeout_s": 0.3}, lambda r: r.timed_out and r.exit_code == -9),
    "prints without end": (
        "yes", {"timeout_s": 0.3, "limit_bytes": 100}, lambda r: r.timed_out and r.truncated,
    ),
    "prints without end, nothing kept": (
        "yes", {"timeout_s": 0.3, "limit_bytes": 0}, lambda r: r.truncated and not r.stdout,
    ),
    "closes its pipes": ("exec <&- >&- 2>&-; sleep 0.1; exit 3", {}, lambda r: r.exit_code == 3),
    "leaves its pipes to another": (
        "sleep 300 & exec sleep 0.1", {"timeout_s": 200.0}, lambda r: r.duration_s < 60,
    ),
    "stops itself": ("kill -STOP $$", {"timeout_s": 0.3}, lambda r: r.timed_out),
    "ends everything it sees": ("kill -9 1; kill -9 -1; exit 4", {}, lambda r: r.exit_code in (4, -9)),
    "prints no text": ("head -c 100 /dev/urandom; printf '\\377'", {}, lambda r: "\ufffd" in r.stdout),
    "is longer than the kernel takes": ("x" * 3_000_000, {}, lambda r: r.exit_code == 127),
    "has an environment too large": ("true", {"env": {"A": "x" * 3_000_000}}, lambda r: r.exit_code == 127),
    "begins nowhere": ("true", {"cwd": "nowhere"}, lambda r: r.exit_code == 126),
    "has no time": ("sleep 30", {"timeout_s": 1e-3}, lambda r: r.timed_out),
    "is no UTF-8": ("echo \udcff", {}, lambda r: r.exit_code == 0),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_a_strange_command_has_a_result(name: str) -> None:
    cmd, named, holds = COMMANDS[name]

    async def scenario(s: Sandbox) -> None:
        result = await s.commands.run(cmd, **named)  # type: ignore[arg-type]
        assert holds(result), result

    in_sandbox(scenario)


REFUSED: dict[str, tuple[Call, type[AgentError]]] = {
    "a path with NUL": (lambda s: s.files.read("x\0"), PathOutsideError),
    "a path that climbs": (lambda s: s.files.write("../x", "x"), PathOutsideError),
    "a name too long": (lambda s: s.files.write("n" * 300, "x"), ToolArgumentError),
    "a path too long": (lambda s: s.files.write("a/" * 3000 + "b", "x"), ToolArgumentError),
    "a directory elsewhere": (lambda s: s.commands.run("true", cwd="/etc"), PathOutsideError),
    "an unfinished pattern": (lambda s: s.files.grep("("), ToolArgumentError),
    "a pattern deeper than the stack": (lambda s: s.files.grep("(a" * 3000), ToolArgumentError),
    "a test file elsewhere": (lambda s: s.run_tests(["../x.py"]), PathOutsideError),
    "a command that is none": (lambda s: s.commands.connect(1), ToolArgumentError),
    "input for pid 1": (lambda s: s.commands.send_stdin(1, "x"), ToolArgumentError),
    "a file larger than the disk": (lambda s: s.files.write("x", bytes(20 << 20)), DiskFullError),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_a_request_without_sense_is_the_agents_mistake(name: str) -> None:
    call, kind = REFUSED[name]

    async def scenario(s: Sandbox) -> None:
        with pytest.raises(kind) as caught:
            await call(s)
        assert "\x1b" not in str(caught.value)

    in_sandbox(scenario)


@pytest.mark.slow
@pytest.mark.parametrize("pid", [1, 0, -1, 10**9])
def test_only_background_commands_can_be_killed_by_their_number(pid: int) -> None:
    async def scenario(s: Sandbox) -> object:
        return await s.commands.kill(pid)

    assert in_sandbox(scenario) is False


@pytest.mark.slow
@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda s: s.commands.run("a\0b"), id="command"),
        pytest.param(lambda s: s.commands.run("true", env={"A": "\0"}), id="value"),
        pytest.param(lambda s: s.commands.run("true", env={"A=": "b"}), id="name"),
    ],
)
def test_what_no_program_can_be_given_is_the_agents_mistake(call: Call) -> None:
    async def scenario(s: Sandbox) -> None:
        with pytest.raises(AgentError):
            await call(s)

    in_sandbox(scenario)


def test_strange_names_cross_whole(tmp_path: Path) -> None:
    async def scenario(s: Sandbox) -> None:
        await s.commands.run(python(f"open({STRANGE!r}, 'w').write('x'); open('n' * 255, 'w').write('y')"))
        names = {entry.path for entry in await s.files.list()}
        assert {STRANGE, "n" * 255} <= names
        assert await s.files.read(STRANGE) == b"x"
        assert set(await s.diff()) == {STRANGE, "n" * 255}
        assert await s.files.download(".", tmp_path / "d") == 3
        assert {path.name for path in (tmp_path / "d").iterdir()} == names
        (copy,) = await s.fork(1)
        assert not isinstance(copy, SandboxError)
        assert await copy.files.read(STRANGE) == b"x"

    in_sandbox(scenario)


def test_a_diff_with_a_strange_name_makes_a_template() -> None:
    async def scenario(s: Sandbox) -> None:
        await s.commands.run(python(f"open({STRANGE!r}, 'w').write('x')"))
        changed = {path: data for path, data in (await s.diff()).items() if data is not None}
        assert Template(changed).digest

    in_sandbox(scenario)


def deep_tree(depth: int) -> str:
    """A command that makes directories inside each other."""
    return python(f"import os\nfor _ in range({depth}):\n    os.mkdir('d')\n    os.chdir('d')")


async def outcomes(calls: list[Awaitable[object]]) -> list[str]:
    """How each call ended: `done`, or the kind of error."""
    said: list[str] = []
    for call in calls:
        try:
            result = await call
            bad = (
                [entry for entry in result if isinstance(entry, SandboxError)]
                if isinstance(result, list)
                else []
            )
            said.append(type(bad[0]).__name__ if bad else "done")
        except (AgentError, SandboxError) as error:
            said.append("agent" if isinstance(error, AgentError) else f"infrastructure: {error.message[:80]}")
    return said


@pytest.mark.slow
@pytest.mark.parametrize("depth", [1500, 12_000])
def test_directories_of_any_depth_are_the_agents_business(depth: int, tmp_path: Path) -> None:
    async def scenario(s: Sandbox) -> list[str]:
        await s.commands.run(deep_tree(depth))
        return await outcomes(
            [
                s.files.list(".", 100_000), s.files.grep("x"), s.files.remove("d"), s.diff(), s.fork(1),
                s.create_snapshot(), s.files.download(".", tmp_path / "d"), s.final_diff(),
            ]
        )  # fmt: skip

    said = in_sandbox(scenario, Resources(memory_bytes=128 << 20, disk_bytes=64 << 20))
    assert isinstance(said, list)
    assert set(said) <= {"done", "agent"}, said


def test_unreadable_directories_are_the_agents_business(tmp_path: Path) -> None:
    async def scenario(s: Sandbox) -> list[str]:
        await s.commands.run("mkdir d; echo x > d/f; chmod 0 d/f d t.txt")
        said = await outcomes(
            [s.files.list(".", 5), s.files.read("d/f"), s.files.remove("d"), s.files.download(".", tmp_path)]
        )
        said += await outcomes([s.diff(), s.fork(1), s.create_snapshot(), s.final_diff()])
        await s.commands.run("chmod 0 /workspace /tmp")
        said += await outcomes([s.commands.run("true"), s.files.write("a", "b"), s.run_tests(["t.py"])])
        return said + await outcomes([s.final_diff(), s.fork(1), s.pause("filesystem"), s.resume()])

    said = in_sandbox(scenario)
    assert isinstance(said, list)
    assert set(said) <= {"done", "agent"}, said


def test_an_emptied_workspace_is_the_agents_business() -> None:
    async def scenario(s: Sandbox) -> object:
        await s.commands.run("rm -rf /workspace /tmp")
        assert dict(await s.diff()) == {"t.txt": None}
        await s.files.write("a/b", "b")
        return dict(await s.final_diff())

    assert in_sandbox(scenario) == {"a/b": b"b", "t.txt": None}


def test_a_link_swapped_between_look_and_open_is_not_followed(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (tmp_path / "outside").mkdir()
    for folder in (root / "d", tmp_path / "outside"):
        folder.mkdir(exist_ok=True)
        (folder / "f").write_text(folder.name)

    class Swapping(Workspace):
        """Whose agent is as quick as can be."""

        def _resolve(self, path: str) -> str:
            full = super()._resolve(path)
            if not (root / "away").exists():
                (root / "d").rename(root / "away")
                (root / "d").symlink_to(tmp_path / "outside")
            return full

    workspace = Swapping(str(root), opened(tmp_path))
    with pytest.raises(Fault):
        workspace.write("d/f", b"written")
    with pytest.raises(Fault):
        workspace.read("d/f", 100)
    assert (tmp_path / "outside" / "f").read_text() == "outside"


def opened(path: Path) -> int:
    """A descriptor of a directory; it is closed with the process."""
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def test_a_slow_agent_does_not_hold_up_its_neighbours() -> None:
    async def scenario(backend: SandboxBackend) -> None:
        slow = await backend.create(Template(), TINY)
        await slow.commands.start("while :; do :; done")
        await slow.commands.start("yes")
        other = await backend.create(Template())
        async with asyncio.timeout(60.0):
            for _ in range(20):
                assert (await other.commands.run("echo fine")).stdout == "fine\n"

    with_backend("local", scenario)
