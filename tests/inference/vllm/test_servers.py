"""The process that vLLM runs in: started, watched and ended with all its children."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from etude.errors import ConfigError, SamplerError
from etude.inference.vllm import ExternalServer, ManagedServer
from etude.inference.vllm.servers import server_arguments

_PROGRAM = """
import http.server, pathlib, subprocess, sys, time
mode, notes = {mode!r}, pathlib.Path({notes!r})
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
notes.write_text(str(child.pid))
if mode == "ends":
    sys.exit("no such model")
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *_): pass
if mode == "hangs":
    time.sleep(600)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


def server_of(folder: Path, mode: str, **options: Any) -> tuple[ManagedServer, Path]:
    notes, program = folder / "child", folder / "program.py"
    program.write_text(_PROGRAM.format(mode=mode, notes=str(notes)))
    return ManagedServer(Path(sys.executable), launcher=program, stop_timeout_s=2.0, **options), notes


async def is_gone(notes: Path) -> bool:
    """Whether the server's child has ended; it may take the kernel a moment."""
    for _ in range(3000):
        if state_of(notes) in ("", "Z"):
            return True
        await asyncio.sleep(0.02)
    return False


@pytest.fixture(autouse=True)
def temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    del tmp_path  # it is made before the place for it changes; itself it is too deep for sockets
    with tempfile.TemporaryDirectory(prefix="etude-") as directory:
        monkeypatch.setattr(tempfile, "tempdir", directory)
        yield


def server_directories() -> Iterator[Path]:
    return Path(tempfile.gettempdir()).glob("etude-vllm-server-*")


def environment_of(server: ManagedServer) -> list[bytes]:
    assert server._process is not None
    return Path(f"/proc/{server._process.pid}/environ").read_bytes().split(b"\0")


def state_of(notes: Path) -> str:
    """The letter of a process's state; empty if there is none."""
    try:
        return Path(f"/proc/{notes.read_text()}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def test_a_server_is_started_and_ended_with_its_children(tmp_path: Path) -> None:
    async def main() -> None:
        server, notes = server_of(tmp_path, "serves")
        url = await server.start(tmp_path)
        assert url.startswith("http://127.0.0.1:")
        external = ExternalServer(url, start_timeout_s=60)
        assert await external.start(tmp_path) == url
        await server.stop()
        assert await is_gone(notes)
        assert not list(server_directories())

    asyncio.run(main())


def test_log_and_sockets_of_a_server_lie_in_one_directory(tmp_path: Path) -> None:
    async def main() -> None:
        server, _ = server_of(tmp_path, "serves")
        await server.start(tmp_path)
        (mine,) = server_directories()
        assert [path.name for path in mine.iterdir()] == ["log"]
        assert b"VLLM_RPC_BASE_PATH=" + os.fsencode(mine) in environment_of(server)
        await server.stop()

    asyncio.run(main())


def test_sockets_whose_paths_would_be_too_long_are_left_where_vllm_puts_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))

    async def main() -> None:
        server, _ = server_of(tmp_path, "serves")
        await server.start(tmp_path)
        assert not [one for one in environment_of(server) if one.startswith(b"VLLM_RPC_BASE_PATH")]
        await server.stop()

    asyncio.run(main())


def test_what_a_killed_starter_left_is_swept_away(tmp_path: Path) -> None:
    left = Path(tempfile.gettempdir()) / "etude-vllm-server-left"
    left.mkdir()
    (left / "log").write_text("old")

    async def main() -> None:
        server, _ = server_of(tmp_path, "serves")
        await server.start(tmp_path)
        assert not left.exists()
        await server.stop()

    asyncio.run(main())


def test_a_server_that_ends_by_itself_is_noticed(tmp_path: Path) -> None:
    async def main() -> None:
        server, notes = server_of(tmp_path, "serves")
        await server.start(tmp_path)
        waiting = asyncio.create_task(server.wait_for_end())
        await asyncio.sleep(0.05)
        assert server._process is not None
        os.kill(server._process.pid, 9)
        assert "ended with -9" in await asyncio.wait_for(waiting, 60)
        await server.stop()
        assert await is_gone(notes)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("mode", "limit_s", "message"), [("ends", 60.0, "no such model"), ("hangs", 1.0, "not ready within")]
)
def test_a_start_that_fails_leaves_nothing(tmp_path: Path, mode: str, limit_s: float, message: str) -> None:
    async def main() -> None:
        server, notes = server_of(tmp_path, mode, start_timeout_s=limit_s)
        with pytest.raises(SamplerError, match=message):
            await server.start(tmp_path)
        assert await is_gone(notes)
        assert not list(server_directories())

    asyncio.run(main())


def test_a_cancelled_start_leaves_nothing(tmp_path: Path) -> None:
    async def main() -> None:
        server, notes = server_of(tmp_path, "hangs")
        starting = asyncio.create_task(server.start(tmp_path))
        while not notes.exists() or not notes.read_text():  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert await is_gone(notes)

    asyncio.run(main())


def test_the_launcher_kills_its_group_when_the_starter_dies(tmp_path: Path) -> None:
    """The starter is killed with -9; the launcher's standard input closes."""
    package = tmp_path / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    for folder in (package.parents[1], package.parents[0], package):
        (folder / "__init__.py").write_text("")
    notes = tmp_path / "child"
    (package / "api_server.py").write_text(
        "import subprocess, sys, time, pathlib\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"pathlib.Path({str(notes)!r}).write_text(str(child.pid))\n"
        "time.sleep(600)\n"
    )
    launcher = ManagedServer(Path(sys.executable)).launcher
    process = subprocess.Popen(
        [sys.executable, launcher],
        stdin=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        start_new_session=True,
    )
    assert process.stdin is not None

    async def main() -> None:
        while not notes.exists() or not notes.read_text():  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        process.stdin.close()  # type: ignore[union-attr]
        assert await is_gone(notes)

    asyncio.run(main())
    assert process.wait(60) == -9


def test_an_interpreter_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"engine\.vllm\.python"):
        asyncio.run(ManagedServer(tmp_path / "python").start(tmp_path))


def test_a_tokenizer_is_used_where_the_snapshot_has_one(tmp_path: Path) -> None:
    assert "--skip-tokenizer-init" in server_arguments(tmp_path, 1)
    (tmp_path / "tokenizer.json").write_text("{}")
    assert "--skip-tokenizer-init" not in server_arguments(tmp_path, 1)


def test_who_has_the_number_of_a_server_that_is_gone_is_left_alone(tmp_path: Path) -> None:
    class Gone:
        """A process that ended long ago."""

        returncode = 0
        stdin = None

        def __init__(self, pid: int) -> None:
            self.pid = pid

        def send_signal(self, number: int) -> None:
            raise ProcessLookupError

        async def wait(self) -> int:
            return 0

    with subprocess.Popen(["sleep", "600"], start_new_session=True) as stranger:
        try:
            server = ManagedServer(Path(sys.executable))
            server._process = cast("Any", Gone(stranger.pid))
            asyncio.run(server.stop())
            with pytest.raises(subprocess.TimeoutExpired):
                stranger.wait(0.5)
        finally:
            stranger.kill()
