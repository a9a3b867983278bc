"""Nothing is left behind: by a kill, a close, a cancelled caller, a failed start or a killed owner."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from etude.errors import ConfigError, ResourceError, SandboxError
from etude.sandbox.backends import open_backend
from etude.sandbox.errors import SandboxKilledByAgentError
from etude.sandbox.interface import Sandbox, SandboxBackend
from etude.sandbox.local.backend import LocalBackend
from etude.sandbox.local.unisolated import UnisolatedBackend
from etude.sandbox.template import Template
from tests.sandbox.backends import with_backend, with_sandbox
from tests.sandbox.scenes import becomes_true, unchecked_template

FILES: dict[str, bytes | str] = {"t.py": "def test_a():\n    pass\n"}
LINGER = "sleep 987654 >/dev/null 2>&1 &"
OWNER = """
import asyncio, sys, warnings
warnings.simplefilter("ignore")
from etude.sandbox.backends import open_backend
from etude.sandbox.template import Template

async def main():
    backend = open_backend(sys.argv[1])
    for _ in range(3):
        sandbox = await backend.create(Template({"a": "a"}))
        await sandbox.commands.run("sleep " + sys.argv[2] + " >/dev/null 2>&1 &")
    print("ready", flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


PLAIN_USER = """
import asyncio, sys
from etude.sandbox.local.backend import LocalBackend
from etude.sandbox.template import Template

async def main():
    backend = LocalBackend()
    sandbox = await backend.create(Template({"t.py": "def test_a(): pass"}))
    shell = await sandbox.commands.run("hostname; id -u")
    host = await sandbox.commands.run("ls /home /root/. /var")
    report = await sandbox.run_tests(["t.py"], 60.0)
    print(shell.exit_code, *shell.stdout.split(), report.passed, int(host.exit_code != 0))
    await backend.close()

asyncio.run(main())
"""


def running(word: str) -> list[int]:
    """Processes of this machine with `word` in their command line."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if word.encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def eventually(holds: Callable[[], bool], timeout_s: float = 60.0) -> bool:
    end_s = time.monotonic() + timeout_s
    while time.monotonic() < end_s:
        if holds():
            return True
        time.sleep(0.02)
    return holds()


@pytest.mark.parametrize("name", ["local", "unisolated"])
def test_kill_and_close_leave_no_process(name: str) -> None:
    word = f"{os.getpid():08}1111" + ("1" if name == "local" else "2")

    async def scenario(backend: SandboxBackend) -> None:
        one, two = [await backend.create(Template(FILES)) for _ in range(2)]
        for sandbox in (one, two):
            await sandbox.commands.run(f"setsid sleep {word} >/dev/null 2>&1 &")
        assert eventually(lambda: len(running(f"sleep\0{word}")) == 2)
        await one.kill()
        await one.kill()
        assert eventually(lambda: len(running(word)) == 1)
        with pytest.raises(SandboxError, match="killed"):
            await one.files.read("t.py")

    with_backend(name, scenario)
    assert eventually(lambda: not running(word))


@pytest.mark.parametrize("name", ["local", "unisolated"])
def test_an_owner_that_is_killed_leaves_no_process_mount_or_folder(name: str, tmp_path: Path) -> None:
    word = f"{os.getpid():08}2222" + ("1" if name == "local" else "2")
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", OWNER, name, word]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=env) as owner:
        assert owner.stdout is not None
        try:
            if owner.stdout.readline() != b"ready\n":
                pytest.skip("no namespaces here")
            assert eventually(lambda: len(running(f"sleep\0{word}")) == 3)
        finally:
            owner.send_signal(signal.SIGKILL)
            owner.wait()
    assert eventually(lambda: not running(word))
    assert eventually(lambda: not list(tmp_path.iterdir()))
    assert "templates_ro" not in Path("/proc/self/mounts").read_text()


def test_a_cancelled_command_is_ended_and_the_sandbox_goes_on() -> None:
    word = f"{os.getpid():08}3333"

    async def scenario(s: Sandbox) -> None:
        task = asyncio.create_task(s.commands.run(f"sleep {word}", 300.0))
        assert await becomes_true(lambda: bool(running(f"sleep\0{word}")))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await s.run_tests(["t.py"])).passed == ("test_a",)
        assert await becomes_true(lambda: not running(f"sleep\0{word}"))

    with_sandbox("local", FILES, scenario)


def test_files_can_be_read_while_a_command_runs() -> None:
    async def scenario(s: Sandbox) -> None:
        task = asyncio.create_task(s.commands.run("until [ -e go ]; do sleep 0.02; done"))
        await asyncio.sleep(0)
        await asyncio.gather(*(s.files.read("t.py") for _ in range(20)))
        assert not task.done()
        await s.files.write("go", "")
        assert not (await task).timed_out

    with_sandbox("local", FILES, scenario)


def test_commands_run_side_by_side_and_a_cancelled_one_ends() -> None:
    async def scenario(s: Sandbox) -> str:
        wait = "until [ -e go ]; do sleep 0.02; done"
        first, second = [asyncio.create_task(s.commands.run(f"{wait}; echo {n} >> log")) for n in (1, 2)]
        await s.commands.run("echo 3 >> log")
        second.cancel()
        await asyncio.gather(second, return_exceptions=True)
        await s.files.write("go", "")
        await first
        return (await s.files.read("log")).decode()

    assert with_sandbox("local", FILES, scenario) == "3\n1\n"


@pytest.mark.slow
def test_many_sandboxes_live_at_once() -> None:
    async def scenario(backend: SandboxBackend) -> int:
        template = Template(FILES)
        sandboxes = await asyncio.gather(*(backend.create(template) for _ in range(40)))
        reports = await asyncio.gather(*(sandbox.run_tests(["t.py"], 60.0) for sandbox in sandboxes))
        await asyncio.gather(*(sandbox.kill() for sandbox in sandboxes))
        return sum(report.passed == ("test_a",) for report in reports)

    assert with_backend("local", scenario) == 40


def test_templates_are_forgotten_when_long_unused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("etude.sandbox.local.templates.MAX_IDLE_TEMPLATES", 2)

    async def scenario(backend: SandboxBackend) -> list[bytes]:
        contents: list[bytes] = []
        for number in [0, 1, 2, 3, 0, 1]:
            sandbox = await backend.create(Template({"n": str(number)}))
            contents.append(await sandbox.files.read("n"))
            await sandbox.kill()
        return contents

    assert with_backend("local", scenario) == [b"0", b"1", b"2", b"3", b"0", b"1"]


def test_large_templates_and_files_cross_whole() -> None:
    files: dict[str, bytes | str] = {f"d{i % 10}/f{i}": os.urandom(10_000) for i in range(300)}

    async def scenario(s: Sandbox) -> None:
        assert len(await s.files.list(".", 2)) == 310
        big = os.urandom(8 << 20)
        await s.files.write("big", big)
        assert await s.files.read("big", 16 << 20) == big
        assert await s.diff() == {"big": big}

    with_sandbox("local", files, scenario)


def test_a_sandbox_that_cannot_be_made_raises_and_the_next_one_works() -> None:
    async def scenario(backend: SandboxBackend) -> None:
        with pytest.raises(SandboxError):
            await backend.create(unchecked_template({"x" * 300: b"a name too long for any file system"}))
        assert (await (await backend.create(Template(FILES))).run_tests(["t.py"])).passed

    with_backend("local", scenario)


def test_a_fork_server_that_dies_is_an_infrastructure_failure() -> None:
    async def scenario(backend: SandboxBackend) -> None:
        assert isinstance(backend, LocalBackend)
        sandbox = await backend.create(Template(FILES))
        assert backend.launcher_pid is not None
        os.kill(backend.launcher_pid, signal.SIGKILL)
        with pytest.raises(SandboxError, match="died"):
            await sandbox.commands.run("sleep 300", 300.0)
        made: list[Sandbox] = []
        for _ in range(3):
            # Whoever is the first to ask the dead one hears of it: a start, or a spare that nobody waits for.
            with contextlib.suppress(SandboxError):
                made.append(await backend.create(Template(FILES)))
        assert made, "the backend does not come back"
        assert (await made[-1].commands.run("echo on")).stdout == "on\n"

    with_backend("local", scenario)


def test_an_unisolated_agent_that_kills_its_server_is_told_from_a_failure() -> None:
    async def scenario(s: Sandbox) -> None:
        with pytest.raises(SandboxKilledByAgentError):
            await s.commands.run("kill -9 $PPID; sleep 300", 300.0)

    with_sandbox("unisolated", FILES, scenario)


def test_unisolated_sandboxes_remove_their_folders() -> None:
    async def scenario(backend: SandboxBackend) -> Path:
        sandbox = await backend.create(Template(FILES))
        folder = Path((await sandbox.commands.run("pwd")).stdout.strip())
        assert (folder / "t.py").exists()
        await sandbox.kill()
        assert eventually(lambda: not folder.exists())
        return folder.parent

    assert not with_backend("unisolated", scenario).exists()


def test_the_unisolated_backend_warns() -> None:
    with pytest.warns(UserWarning, match="isolates nothing"):
        UnisolatedBackend()


def test_a_closed_backend_makes_nothing() -> None:
    async def scenario() -> None:
        backend = LocalBackend()
        await backend.close()
        await backend.close()
        with pytest.raises(SandboxError, match="closed"):
            await backend.create(Template(FILES))

    asyncio.run(scenario())


def test_unknown_backends_are_refused_with_the_choices() -> None:
    with pytest.raises(ConfigError, match="docker, podman"):
        open_backend("lxc")


@pytest.mark.skipif(os.geteuid() != 0, reason="every other test runs as a plain user already")
def test_a_plain_user_has_isolated_sandboxes_too() -> None:
    interpreter, source = "/usr/bin/python3", Path(__file__).parents[2] / "src"
    modern = subprocess.run([interpreter, "-c", "import tomllib"], capture_output=True, check=False)
    if modern.returncode != 0 or not _open_to_all(source):
        pytest.skip("no Python 3.11 or no sources that a plain user may read")
    result = subprocess.run(
        [interpreter, "-B", "-c", PLAIN_USER],
        env={"PYTHONPATH": f"{source}:{sysconfig.get_path('purelib')}", "HOME": "/nonexistent"},
        user=65534,
        group=65534,
        extra_groups=[],
        cwd="/",
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.stdout == "0 sandbox 1000 ('test_a',) 1\n", result.stderr


def _open_to_all(path: Path) -> bool:
    return all(folder.stat().st_mode & 0o005 == 0o005 for folder in (path, *path.parents))


class MissingInterpreter(LocalBackend):
    """A backend whose fork server ends before it serves."""

    def _interpreter(self) -> str:
        return "/bin/false"


def test_a_fork_server_that_does_not_start_is_explained() -> None:
    async def scenario() -> None:
        with pytest.raises(ResourceError, match="did not start"):
            await MissingInterpreter().create(Template(FILES))

    asyncio.run(scenario())
