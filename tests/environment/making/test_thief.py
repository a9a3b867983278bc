"""A thief looks for the solution of each made task in its sandbox, and earns nothing."""

from __future__ import annotations

import asyncio
import importlib.util
import io
import marshal
import subprocess
import zipfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from etude.environment.grading import allowed_changes
from etude.environment.origins import task_resources, task_template
from etude.environment.scripts import AgentDiff
from etude.environment.verdicts import Grader
from etude.records import Task, TaskImage
from etude.sandbox.interface import SandboxBackend
from etude.sandbox.types import Resources
from etude.tasks.harbor import find_directories, read_harbor
from tests.environment.making.scene import PROJECT, Making
from tests.sandbox.images.image_builders import file_member, tar_bytes

THIEF = Path(__file__).with_name("thief.py")
FOLDER, NAME, VERSION = "src", "prices", "1.2"


def rewards_of_thief(making: Making, tasks: Sequence[Task]) -> list[float | None]:
    """What each task pays to the thief."""

    async def play() -> list[float | None]:
        backend = making.open_backend()
        try:
            return [await _steal(task, backend) for task in tasks]
        finally:
            await backend.close()

    return asyncio.run(play())


async def _steal(task: Task, backend: SandboxBackend) -> float | None:
    sandbox = await backend.create(task_template(task), task_resources(task, Resources()))
    try:
        ran = await sandbox.commands.run(
            f"python3 - {FOLDER} {NAME} {VERSION}", 120.0, stdin=THIEF.read_text()
        )
        assert ran.exit_code == 0, ran.stderr
        changes = allowed_changes(task, await sandbox.final_diff())
    finally:
        await sandbox.kill()
    return (await Grader(backend).judge(task, AgentDiff(changes))).reward


def read_made(making: Making, layer: str | None = None) -> list[Task]:
    """The tasks as a run plays them. `layer`: one more in their image."""
    found = making.store.load(making.image)
    layers = (*found.layers, layer) if layer else found.layers
    env = {**found.env, "PYTHONPATH": "/workspace/src", "PYTHONDONTWRITEBYTECODE": "1"}
    image = TaskImage(found.name, layers, env, "/workspace", found.user)
    tasks = [read_harbor(path) for path in find_directories(making.out, "out")]
    return [
        replace(task, files=workspace_of(path), machine=replace(task.machine, image=image))
        for task, path in zip(tasks, find_directories(making.out, "out"), strict=True)
        if task.machine is not None
    ]


def workspace_of(path: Path) -> dict[str, str]:
    top = path / "environment/workspace"
    return {file.relative_to(top).as_posix(): file.read_text() for file in top.rglob("*") if file.is_file()}


def hidden_copies(folder: Path) -> dict[str, dict[str, bytes]]:
    """Ways in which an image could hold the solution: files of a layer."""
    sources = {path: text for path, text in PROJECT.items() if path.startswith("src/prices/")}
    modules = {path.removeprefix("src/"): text.encode() for path, text in sources.items()}
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for name, data in modules.items():
            archive.writestr(name, data)
    compiled: dict[str, bytes] = {}
    repository = folder / "repository"
    for name, data in modules.items():
        path = repository / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        code = compile(data, name, "exec")
        text = importlib.util.MAGIC_NUMBER + bytes(12) + marshal.dumps(code)
        compiled[f"var/cache/prices/{path.stem}.cpython-311.pyc"] = text
    for words in (["init", "-q"], ["add", "-A"]):
        subprocess.run(["git", *words], cwd=repository, check=True, capture_output=True)
    objects = [path for path in (repository / ".git/objects").rglob("*") if path.is_file()]
    return {
        "copy": {f"opt/old/{name}": data for name, data in modules.items()},
        "archive": {"root/.cache/prices-1.2-py3-none-any.whl": packed.getvalue()},
        "bytecode": compiled,
        "git": {f"srv/{path.relative_to(repository).as_posix()}": path.read_bytes() for path in objects},
    }


@pytest.mark.slow
def test_a_thief_earns_nothing_unless_the_image_holds_the_solution(making: Making, tmp_path: Path) -> None:
    making.make()
    tasks = read_made(making)
    assert len(tasks) == 2
    assert rewards_of_thief(making, tasks) == [0.0] * 2
    for how, files in hidden_copies(tmp_path).items():
        rows = [file_member(name, data) for name, data in files.items()]
        layer = making.store.layers.add_tar(io.BytesIO(tar_bytes(*rows)))
        assert rewards_of_thief(making, read_made(making, layer)[:1]) == [1.0], how
