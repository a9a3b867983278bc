"""The fake engine as the real command line client sees it: what it gets wrong, the client stumbles over."""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path

import pytest

from tests.fakes.docker.engine import FakeEngine
from tests.sandbox.docker.contract import needs_namespaces

pytestmark = [
    needs_namespaces,
    pytest.mark.skipif(shutil.which("docker") is None, reason="no docker command line client here"),
]
IMAGE = "python:3.11-slim"


async def docker(engine: FakeEngine, *words: str, given: bytes | None = None) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of one command."""
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(engine.directory),
        "DOCKER_HOST": f"unix://{engine.socket}",
    }
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        "docker", *words, stdin=pipe, stdout=pipe, stderr=pipe, env=environment
    )
    try:
        async with asyncio.timeout(60.0):
            output, errors = await process.communicate(given)
    except TimeoutError:
        process.kill()
        raise
    return process.returncode or 0, output.decode(), errors.decode()


def test_the_client_takes_the_fake_for_an_engine(tmp_path: Path) -> None:
    async def run() -> None:
        async with FakeEngine(tmp_path) as engine:
            shell = ("sh", "-c", "cat; echo err >&2; exit 3")
            words = ("run", "--rm", "-i", "--network", "none", IMAGE, *shell)
            assert await docker(engine, *words, given=b"hello") == (3, "hello", "err\n")
            assert engine.containers == {}
            code, _, errors = await docker(engine, "run", "--rm", "none")
            assert code == 125 and "manifest unknown" in errors
            assert (await docker(engine, "run", "-d", "--name", "box", IMAGE, "sleep", "60"))[0] == 0
            assert (await docker(engine, "rm", "box"))[0] == 1
            last = (("commit", "box", "x:y"), ("rm", "-f", "box"))
            for words in (("pause", "box"), ("unpause", "box"), *last):
                assert (await docker(engine, *words))[0] == 0
            assert sorted(engine.images.names) == [IMAGE, "x:y"]

    asyncio.run(run())


def test_images_and_files_travel_through_the_client(tmp_path: Path) -> None:
    async def run() -> None:
        async with FakeEngine(tmp_path) as engine:
            (tmp_path / "in").write_text("content")
            assert (await docker(engine, "create", "--name", "box", IMAGE))[0] == 0
            assert (await docker(engine, "cp", str(tmp_path / "in"), "box:/tmp/f"))[0] == 0
            assert (await docker(engine, "cp", "box:/tmp/f", str(tmp_path / "out")))[0] == 0
            assert (tmp_path / "out").read_text() == "content"
            assert (await docker(engine, "tag", IMAGE, "a/b:c"))[0] == 0
            assert (await docker(engine, "save", "-o", str(tmp_path / "s.tar"), "a/b:c"))[0] == 0
            assert (await docker(engine, "rmi", "a/b:c"))[0] == 0
            assert (await docker(engine, "load", "-i", str(tmp_path / "s.tar")))[0] == 0
            assert "a/b:c" in engine.images.names

    asyncio.run(run())
