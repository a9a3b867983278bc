"""Sandboxes in containers of a real podman: the contract, refusals, and cleanup."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from etude.errors import SandboxError
from etude.kit.leftovers import owner_tag
from etude.sandbox.backends import open_backend
from etude.sandbox.containers.backend import ContainerBackend
from etude.sandbox.containers.engine import HOST_LABEL, OWNER_LABEL
from etude.sandbox.errors import (
    SandboxKilledByAgentError,
    SandboxMissingError,
    SnapshotError,
    TemplateError,
    Unsupported,
)
from etude.sandbox.template import Image, Template
from etude.sandbox.types import Resources
from tests.sandbox.containers import contract
from tests.sandbox.containers.contract import FILES
from tests.sandbox.containers.python_image import IMAGE, ensure_image, podman

pytestmark = [pytest.mark.slow, pytest.mark.foreign]
Scenario = Callable[[ContainerBackend], Awaitable[None]]


@pytest.fixture(scope="module", autouse=True)
def image(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Debian with its Python."""
    return ensure_image(tmp_path_factory.mktemp("podman"))


def play(state: Path, scenario: Scenario, image: str = IMAGE) -> None:
    """Runs a scenario; afterwards no container and no image of a snapshot may be left."""

    async def run() -> None:
        backend = ContainerBackend("podman", image, state)
        try:
            await scenario(backend)
        finally:
            await backend.close()

    asyncio.run(run())
    assert containers() == [] and snapshot_images() == []


def containers(owner: str | None = None) -> list[str]:
    """Names of the containers of a process, this one by default: other tests use the same podman."""
    return podman("ps", "--all", *_label(owner or owner_tag()), "--format", "{{.Names}}").split()


def snapshot_images() -> list[str]:
    return podman("images", "--quiet", *_label(owner_tag())).split()


def _label(owner: str) -> tuple[str, str]:
    return "--filter", f"label={OWNER_LABEL}={owner}"


def build(directory: Path, tag: str, *lines: str) -> str:
    """The name of an image above IMAGE."""
    (directory / "Dockerfile").write_text("\n".join((f"FROM {IMAGE}", *lines, "")))
    limits = ("--ulimit", "nofile=1024:4096", "--ulimit", "nproc=1024:4096")
    name = f"localhost/etude-tests:{tag}"
    podman("build", "--isolation=chroot", *limits, "--quiet", "--tag", name, str(directory))
    return name


def test_the_contract_holds(tmp_path: Path) -> None:
    async def scenario(backend: ContainerBackend) -> None:
        assert await asyncio.to_thread(backend.doctor) == []
        s = await backend.create(Template(FILES))
        await contract.files_behave(s, tmp_path)
        await contract.commands_behave(s)
        await contract.tests_run(s)
        await contract.agents_can_change_what_the_tools_wrote(s)

    play(tmp_path, scenario)


def test_podman_leaves_no_temporary_file_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))

    async def scenario(backend: ContainerBackend) -> None:
        await (await backend.create(Template(FILES))).kill()

    play(tmp_path / "state", scenario)
    assert list(temporary.iterdir()) == []


def test_it_is_locked_down(tmp_path: Path) -> None:
    async def scenario(backend: ContainerBackend) -> None:
        resources = Resources(memory_bytes=96 << 20, num_processes=20)
        s = await backend.create(Template(FILES), resources)
        (shown,) = json.loads(podman("inspect", f"etude-{s.id}"))
        host = shown["HostConfig"]
        assert (host["Memory"], host["NetworkMode"], host["Privileged"]) == (96 << 20, "none", False)
        assert host["Binds"] == [] and 20 < host["PidsLimit"] < 40
        seen = (await s.commands.run("cat /proc/self/status; id -u; ls /sys/class/net")).stdout
        for line in (
            "CapEff:\t0000000000000000",
            "CapPrm:\t0000000000000000",
            "NoNewPrivs:\t1",
            "\n1000\nlo\n",
        ):
            assert line in seen
        # A fork bomb and a memory hog fail by themselves; the sandbox goes on.
        await s.commands.run("i=0; while [ $i -lt 60 ]; do sleep 5 & i=$((i+1)); done; wait", timeout_s=20)
        hog = await s.commands.run("python3 -c 'x = bytearray(300 << 20); print(len(x))'", timeout_s=30)
        assert hog.exit_code != 0 and hog.stdout == ""
        assert (await s.commands.run("echo on")).stdout == "on\n"

    play(tmp_path, scenario)


def test_sleeping_three_times_loses_nothing(tmp_path: Path) -> None:
    async def scenario(backend: ContainerBackend) -> None:
        s = await backend.create(Template(FILES))
        await contract.three_sleeps_lose_nothing(s, "filesystem")
        assert containers() == [f"etude-{s.id}"]

    play(tmp_path, scenario)


def test_copies_are_apart_and_their_image_goes_with_the_last(tmp_path: Path) -> None:
    async def scenario(backend: ContainerBackend) -> None:
        await contract.copies_are_apart(await backend.create(Template(FILES)))

    play(tmp_path, scenario)


def test_snapshots_are_restored_exported_and_deleted(tmp_path: Path) -> None:
    async def scenario(backend: ContainerBackend) -> None:
        s = await backend.create(Template(FILES))
        await s.commands.run("echo more > more; echo outside > /tmp/outside")
        info = await s.create_snapshot(name="mine")
        assert (info.kind, [row.id for row in await backend.list_snapshots()]) == ("filesystem", [info.id])
        await backend.export_snapshot(info.id, tmp_path / "export.tar")
        await s.kill()
        assert len(snapshot_images()) == 1
        await backend.delete_snapshot(info.id)
        assert snapshot_images() == []
        assert (await backend.import_snapshot(tmp_path / "export.tar")).id == info.id
        again = await backend.create(snapshot=info.id)
        assert (await again.commands.run("cat more /tmp/outside")).stdout == "more\noutside\n"
        assert dict(await again.diff()) == {"more": b"more\n"}
        await again.kill()
        podman("rmi", f"etude-snapshot:{info.id}")
        with pytest.raises(SnapshotError, match="no longer has its image"):
            await backend.create(snapshot=info.id)
        (tmp_path / "torn.tar").write_bytes(b"x" * 2000)
        with pytest.raises(SnapshotError):
            await backend.import_snapshot(tmp_path / "torn.tar")

    play(tmp_path, scenario)


def test_memory_is_refused_with_the_name_of_a_backend_that_can(tmp_path: Path) -> None:
    async def scenario(backend: ContainerBackend) -> None:
        s = await backend.create(Template(FILES))
        for call in (s.pause("full"), s.create_snapshot("full")):
            with pytest.raises(Unsupported, match="vm or gvisor"):
                await call

    play(tmp_path, scenario)


@pytest.mark.parametrize("after_s", [0.05, 0.4, 0.8])
def test_a_start_that_is_cancelled_leaves_nothing(tmp_path: Path, after_s: float) -> None:
    async def scenario(backend: ContainerBackend) -> None:
        starting = asyncio.create_task(backend.create(Template(FILES)))
        await asyncio.sleep(after_s)
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)

    play(tmp_path, scenario)


def test_a_container_that_dies_is_lost_until_killed(tmp_path: Path) -> None:
    async def scenario(backend: ContainerBackend) -> None:
        s = await backend.create(Template(FILES))
        running = asyncio.create_task(s.commands.run("touch begun; sleep 30"))
        while (await s.commands.run("test -e begun")).exit_code:
            assert not running.done()
        await asyncio.to_thread(podman, "kill", f"etude-{s.id}")
        with pytest.raises(SandboxKilledByAgentError):
            await running
        assert (await s.get_info()).state == "lost"
        await s.kill()
        with pytest.raises(SandboxMissingError):
            await backend.connect(s.id)

    play(tmp_path, scenario)


def test_an_owner_that_is_killed_takes_its_container_along(tmp_path: Path) -> None:
    program = (
        "import asyncio, sys\nfrom pathlib import Path\nfrom etude.kit.leftovers import owner_tag\n"
        "from etude.sandbox.containers.backend import ContainerBackend\n"
        "async def run():\n"
        f"    backend = ContainerBackend('podman', {IMAGE!r}, Path({str(tmp_path)!r}))\n"
        "    await backend.create()\n    print(owner_tag(), flush=True)\n    await asyncio.sleep(600)\n"
        "asyncio.run(run())\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    tag = owner.stdout.readline().strip()
    assert len(containers(tag)) == 1
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    end_s = time.monotonic() + 60.0
    while containers(tag):
        assert time.monotonic() < end_s
        time.sleep(0.2)


def test_containers_of_dead_owners_are_swept_on_this_boot_only(tmp_path: Path) -> None:
    boot, dead = Path("/proc/sys/kernel/random/boot_id").read_text().strip(), "4194305-1"
    for name, host in (("dead", boot), ("elsewhere", "other-boot")):
        labels = ("--label", f"{HOST_LABEL}={host}", "--label", f"{OWNER_LABEL}={dead}")
        podman("create", "--name", name, "--network=none", *labels, IMAGE, "true")

    async def scenario(backend: ContainerBackend) -> None:
        s = await backend.create(Template(FILES))
        assert (containers(dead), containers()) == (["elsewhere"], [f"etude-{s.id}"])
        podman("rm", "--force", "elsewhere")

    play(tmp_path, scenario)


def test_an_image_that_is_not_there_or_has_no_python_is_the_users_error(tmp_path: Path) -> None:
    async def scenario(backend: ContainerBackend) -> None:
        with pytest.raises(TemplateError, match="no such image"):
            await backend.create(Template(FILES, image=Image("localhost/other:1", ())))
        with pytest.raises(TemplateError, match="executable file"):
            await backend.create(Template(FILES))

    bare = build(tmp_path, "bare", "RUN rm /usr/bin/python3")
    play(tmp_path, scenario, bare)
    podman("rmi", bare)


def test_an_engine_s_image_brings_its_environment_and_directory(tmp_path: Path) -> None:
    own = build(tmp_path, "own", "ENV COLOUR=green", "WORKDIR /project", "COPY Dockerfile kept")

    async def scenario(backend: ContainerBackend) -> None:
        image = await backend.image(own)
        shown = podman("image", "inspect", "--format={{.Id}}", own)
        assert image.name == shown.strip()
        s = await backend.create(Template(FILES, image=replace(image, env={**image.env, "MORE": "1"})))
        assert (await s.commands.run("pwd; echo $COLOUR $MORE")).stdout == "/project\ngreen 1\n"
        assert await s.diff() == {}, "what the image has in its directory stays, and is no change"
        await s.commands.run("rm kept; mkdir -p /tests && echo new > made")
        assert await s.diff() == {"kept": None, "made": b"new\n"}

    play(tmp_path, scenario)
    podman("rmi", own)


def test_a_backend_is_named_with_its_image(tmp_path: Path) -> None:
    async def run() -> None:
        backend = open_backend(f"podman:{IMAGE}", tmp_path)
        s = await backend.create(Template(FILES))
        assert (await s.commands.run("cat lib/tally.py")).stdout == FILES["lib/tally.py"]
        await backend.close()

    asyncio.run(run())


def test_an_engine_that_fails_is_an_infrastructure_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(backend: ContainerBackend) -> None:
        monkeypatch.setenv("CONTAINERS_CONF", str(tmp_path / "broken.conf"))
        (tmp_path / "broken.conf").write_text('[engine]\nruntime = "none"\n')
        with pytest.raises(SandboxError, match="podman"):
            await backend.create(Template(FILES))
        monkeypatch.undo()

    play(tmp_path, scenario)
