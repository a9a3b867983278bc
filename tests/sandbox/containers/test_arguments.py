"""The command line of a container engine, without an engine."""

from __future__ import annotations

import asyncio
import io
import tarfile
from pathlib import Path

import pytest

from etude.errors import ConfigError, SandboxError
from etude.sandbox.backends import open_backend
from etude.sandbox.containers.backend import ContainerBackend
from etude.sandbox.containers.engine import COMMAND_UID, Engine, EngineError, create_arguments, pack_upload
from etude.sandbox.errors import TemplateError
from etude.sandbox.template import Image, Template
from etude.sandbox.types import Resources


def test_containers_are_locked_down() -> None:
    resources = Resources(memory_bytes=1 << 28, num_processes=10, cpus=0.5, open_files=100)
    words = create_arguments("box", "image", COMMAND_UID, "/workspace", resources, {"a": "b"})
    for word in ("--network=none", "--cap-drop=ALL", "--security-opt=no-new-privileges", "--pull=never"):
        assert word in words
    assert {"--memory=268435456", "--memory-swap=268435456", "--cpus=0.5", "--label=a=b"} <= set(words)
    added = {word.partition("=")[2] for word in words if word.startswith("--cap-add")}
    assert added and not {"SYS_ADMIN", "NET_ADMIN", "NET_RAW", "SYS_PTRACE", "MKNOD"} & added
    assert not any(word.startswith(("--volume", "--mount", "--privileged", "--device")) for word in words)
    as_root = create_arguments("box", "image", None, "/workspace", resources, {"a": "b"})
    assert set(words) - set(as_root) == {"--uid", str(COMMAND_UID)} and not set(as_root) - set(words)


def test_what_is_copied_ends_at_the_archives_end_mark() -> None:
    """An engine that reads on would fail; one that stops there fails to be given the rest."""
    packed = pack_upload("/workspace", 1000)
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        last = archive.getmembers()[-1]
    assert len(packed) == last.offset_data + -(-last.size // 512) * 512 + 1024
    assert packed.endswith(bytes(1024))


@pytest.mark.parametrize("name", ["podman:", "docker:", "podmann", "vm:image"])
def test_an_unknown_backend_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="docker:IMAGE"):
        open_backend(name)


def test_an_engine_that_is_not_installed_is_a_finding() -> None:
    assert "not installed" in ContainerBackend("no-such-engine").doctor()[0]


def write_engine(directory: Path, script: str) -> str:
    program = directory / "engine"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return str(program)


def test_what_an_engine_says_is_in_the_error(tmp_path: Path) -> None:
    program = write_engine(tmp_path, "echo 'cannot connect to the daemon' >&2; exit 125")
    with pytest.raises(EngineError, match="cannot connect"):
        asyncio.run(Engine(program).run("ps"))
    assert "cannot connect" in ContainerBackend(program).doctor()[0]


def test_a_runtime_that_refuses_the_hosts_control_groups_is_answered_with_its_replacement(
    tmp_path: Path,
) -> None:
    says = "crun: cgroups in hybrid mode not supported, drop all controllers from cgroupv2"
    program = write_engine(
        tmp_path, f'case "$1" in start) echo "{says}" >&2; exit 126;; image) echo [{{}}];; esac'
    )

    async def run() -> None:
        backend = ContainerBackend(program, state=tmp_path / "state")
        with pytest.raises(SandboxError, match="hybrid mode") as caught:
            await backend.create(Template({}))
        assert 'runtime = "runc"' in str(caught.value)
        await backend.close()

    asyncio.run(run())


def test_an_engine_that_does_not_answer_is_given_up(tmp_path: Path) -> None:
    program = write_engine(tmp_path, "exec sleep 60")
    with pytest.raises(EngineError, match="no answer within"):
        asyncio.run(Engine(program).run("ps", deadline_s=0.2))


@pytest.mark.parametrize(
    "said", ["Error: No such image: x", "Error: inspecting object: x: image not known", "no such object: x"]
)
def test_a_missing_image_is_the_users_error(tmp_path: Path, said: str) -> None:
    program = write_engine(tmp_path, f"echo '{said}' >&2; exit 125")
    with pytest.raises(TemplateError, match="no such image"):
        asyncio.run(Engine(program).image("x"))


@pytest.mark.parametrize("said", ["Error: No such object: gone", "Error: no such container gone"])
def test_a_container_that_ends_while_containers_are_listed_is_left_out(tmp_path: Path, said: str) -> None:
    script = f'case "$*" in ps*) echo one gone;; *gone) echo "{said}" >&2; exit 1;; *) echo value;; esac'
    assert asyncio.run(Engine(write_engine(tmp_path, script)).labels("key=x", "key")) == {"one": "value"}
    broken = Engine(write_engine(tmp_path, f"{script.replace(said, 'permission denied')}"))
    with pytest.raises(EngineError, match="permission denied"):
        asyncio.run(broken.labels("key=x", "key"))


def test_layers_of_ours_are_refused(tmp_path: Path) -> None:
    async def run() -> None:
        backend = ContainerBackend(write_engine(tmp_path, "exit 0"), state=tmp_path / "state")
        with pytest.raises(TemplateError, match="images of the layer store"):
            await backend.create(Template({}, image=Image("x", ("abc",))))
        await backend.close()

    asyncio.run(run())
