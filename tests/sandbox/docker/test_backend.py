"""The container backend against the fake engine: the contract, refusals, and what it leaves behind."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from etude.errors import ConfigError, SandboxError
from etude.sandbox.docker.api import Engine, EngineError
from etude.sandbox.docker.backend import DockerBackend, PodmanBackend
from etude.sandbox.docker.container import HOST_LABEL, OWNER_LABEL, Setup, container_config
from etude.sandbox.errors import (
    SandboxKilledByAgentError,
    SandboxMissingError,
    SnapshotError,
    TemplateError,
    Unsupported,
)
from etude.sandbox.template import Image, Template
from etude.sandbox.types import Resources
from tests.fakes.docker.engine import FakeEngine, Fault
from tests.sandbox.docker import contract
from tests.sandbox.docker.contract import COMMAND_UID, FILES, needs_namespaces

pytestmark = needs_namespaces
SETUP = Setup(command_uid=COMMAND_UID)
Scenario = Callable[[FakeEngine, DockerBackend], Awaitable[None]]


def play(tmp_path: Path, scenario: Scenario, setup: Setup = SETUP, api_version: str = "1.47") -> None:
    """Runs a scenario; afterwards no container, and no image but named ones, may be left."""

    async def run() -> None:
        async with FakeEngine(tmp_path, api_version) as engine:
            backend = DockerBackend(engine.socket, setup, tmp_path / "state")
            try:
                await scenario(engine, backend)
            finally:
                await backend.close()
            assert engine.containers == {}

    asyncio.run(run())


def test_the_contract_holds(tmp_path: Path) -> None:
    async def scenario(engine: FakeEngine, backend: DockerBackend) -> None:
        s = await backend.create(Template(FILES))
        await contract.files_behave(s, tmp_path)
        await contract.commands_behave(s)
        await contract.sessions_behave(s)
        await contract.tests_run(s)

    play(tmp_path, scenario)


def test_agents_can_change_what_the_tools_wrote(tmp_path: Path) -> None:
    async def scenario(engine: FakeEngine, backend: DockerBackend) -> None:
        await contract.agents_can_change_what_the_tools_wrote(await backend.create(Template(FILES)))

    play(tmp_path, scenario)


@pytest.mark.slow
def test_sleeping_three_times_loses_nothing(tmp_path: Path) -> None:
    async def scenario(engine: FakeEngine, backend: DockerBackend) -> None:
        s = await backend.create(Template(FILES))
        await contract.three_sleeps_lose_nothing(s, "filesystem")
        assert len(engine.containers) == 1
        await s.kill()
        assert list(engine.images.names) == ["python:3.11-slim"]

    play(tmp_path, scenario)


def test_copies_are_apart_and_their_image_goes_with_the_last(tmp_path: Path) -> None:
    async def scenario(engine: FakeEngine, backend: DockerBackend) -> None:
        await contract.copies_are_apart(await backend.create(Template(FILES)))
        assert list(engine.images.names) == ["python:3.11-slim"]

    play(tmp_path, scenario)


def test_snapshots_are_restored_exported_and_deleted(tmp_path: Path) -> None:
    async def scenario(engine: FakeEngine, backend: DockerBackend) -> None:
        s = await backend.create(Template(FILES))
        await s.commands.run("echo more > more; echo outside > /tmp/outside")
        info = await s.create_snapshot(name="mine")
        assert (info.kind, [row.id for row in await backend.list_snapshots()]) == ("filesystem", [info.id])
        await backend.export_snapshot(info.id, tmp_path / "export.tar")
        await s.kill()
        await backend.delete_snapshot(info.id)
        assert list(engine.images.names) == ["python:3.11-slim"]
        assert (await backend.import_snapshot(tmp_path / "export.tar")).id == info.id
        again = await backend.create(snapshot=info.id)
        assert (await again.commands.run("cat more /tmp/outside")).stdout == "more\noutside\n"
        assert dict(await again.diff()) == {"more": b"more\n"}

    play(tmp_path, scenario)


def test_what_is_no_export_is_refused(tmp_path: Path) -> None:
    async def scenario(engine: FakeEngine, backend: DockerBackend) -> None:
        (tmp_path / "torn.tar").write_bytes(b"x" * 2000)
        with pytest.raises(SnapshotError):
            await backend.import_snapshot(tmp_path / "torn.tar")

    play(tmp_path, scenario)


def test_a_snapshot_whose_image_is_gone_is_refused(tmp_path: Path) -> None:
    async def scenario(engine: FakeEngine, backend: DockerBackend) -> None:
        s = await backend.create(Template(FILES))
        info = await s.create_snapshot()
        engine.images.remove(f"etude-snapshot:{info.id}")
        with pytest.raises(SnapshotError, match="no longer has its image"):
            await backend.create(snapshot=info.id)

    play(tmp_path, scenario)


@pytest.mark.slow
def test_a_sandbox_moves_to_another_engine(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()

    async def scenario(engine: FakeEngine, backend: DockerBackend) -> None:
        async with FakeEngine(tmp_path / "other") as there:
            target = DockerBackend(there.socket, SETUP, tmp_path / "other/state")
            s = await backend.create(Template(FILES))
            await s.files.write("taken", "along")
            moved = await s.migrate(target)
            assert await moved.files.read("taken") == b"along"
            assert len(engine.containers) == 0 and len(there.containers) == 1
            await target.close()
            assert list(there.images.names) == ["python:3.11-slim"]

    play(tmp_path, scenario)


def test_memory_is_refused_with_the_name_of_a_backend_that_can(tmp_path: Path) -> None:
    async def scenario(engine: FakeEngine, backend: DockerBackend) -> None:
        s = await backend.create(Template(FILES))
        for call in (s.pause("full"), s.create_snapshot("full")):
            with pytest.raises(Unsupported, match="vm or gvisor"):
                await call
        assert (await s.commands.run("echo on")).stdout == "on\n"

    play(tmp_path, scenario)


FAILING = ["POST /containers/create", "PUT .*/archive", "POST .*/attach", "POST .*/start"]


@pytest.mark.parametrize("pattern", FAILING)
@pytest.mark.parametrize("after", [False, True])
def test_a_start_that_fails_leaves_nothing(tmp_path: Path, pattern: str, after: bool) -> None:
    if after and pattern.endswith("attach"):
        pytest.skip("an attachment that succeeded is no longer HTTP")

    async def scenario(engine: FakeEngine, backend: DockerBackend) -> None:
        engine.faults.append(Fault(pattern, 500, "no space left on device", after=after))
        with pytest.raises(SandboxError, match="no space left on device"):
            await backend.create(Template(FILES))
        assert engine.containers == {} and await backend.list() == []

    play(tmp_path, scenario)


@pytest.mark.parametrize("pattern", FAILING)
def test_a_start_that_is_cancelled_leaves_nothing(tmp_path: Path, pattern: str) -> None:
    async def scenario(engine: FakeEngine, backend: DockerBackend) -> None:
        engine.faults.append(Fault(pattern, None, after=not pattern.endswith("attach")))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.6):
                await backend.create(Template(FILES))
        assert engine.containers == {} and await backend.list() == []

    play(tmp_path, scenario)


def test_a_pause_that_fails_leaves_the_sandbox_running(tmp_path: Path) -> None:
    async def scenario(engine: FakeEngine, backend: DockerBackend) -> None:
        s = await backend.create(Template(FILES))
        engine.faults.append(Fault("POST /commit", 500, "no space left on device", times=1, after=True))
        with pytest.raises(EngineError):
            await s.pause("filesystem")
        assert (await s.get_info()).state == "running"
        assert (await s.commands.run("echo on")).stdout == "on\n"
        assert list(engine.images.names) == ["python:3.11-slim"]
        await s.pause("filesystem")
        await s.resume()

    play(tmp_path, scenario)


@pytest.mark.slow
def test_a_resume_that_fails_leaves_it_asleep(tmp_path: Path) -> None:
    async def scenario(engine: FakeEngine, backend: DockerBackend) -> None:
        s = await backend.create(Template(FILES))
        await s.pause("filesystem")
        engine.faults.append(Fault("POST .*/start", 500, "injected", times=1))
        with pytest.raises(SandboxError):
            await s.resume()
        await contract.sleeping_refuses_calls(s)
        await s.resume()
        assert (await s.commands.run("echo on")).stdout == "on\n"

    play(tmp_path, scenario)


def test_a_container_that_dies_is_lost_until_killed(tmp_path: Path) -> None:
    async def scenario(engine: FakeEngine, backend: DockerBackend) -> None:
        s = await backend.create(Template(FILES))
        running = asyncio.create_task(s.commands.run("touch begun; sleep 30"))
        while (await s.commands.run("test -e begun")).exit_code:
            assert not running.done()
        for container in list(engine.containers.values()):
            await container.kill()
        with pytest.raises(SandboxKilledByAgentError):
            await running
        assert (await s.get_info()).state == "lost"
        with pytest.raises(SandboxKilledByAgentError):
            await s.files.read("lib/tally.py")
        await s.kill()
        with pytest.raises(SandboxMissingError):
            await backend.connect(s.id)

    play(tmp_path, scenario)


def test_an_owner_that_dies_takes_its_container_along(tmp_path: Path) -> None:
    async def scenario(engine: FakeEngine, backend: DockerBackend) -> None:
        s = await backend.create(Template(FILES))
        (container,) = engine.containers.values()
        # What the kernel does with a dead owner's descriptors.
        await backend._containers[s.id].line.close()
        async with asyncio.timeout(60.0):
            await container.removed.wait()

    play(tmp_path, scenario)


def test_containers_of_dead_owners_are_swept(tmp_path: Path) -> None:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()

    async def scenario(engine: FakeEngine, backend: DockerBackend) -> None:
        known = Engine(engine.socket)
        for name, host, owner in (("dead", boot, "4194305-1"), ("elsewhere", "other-boot", "4194305-1")):
            labels = {HOST_LABEL: host, OWNER_LABEL: owner}
            await known.create_container(name, {"Image": "python:3.11-slim", "Labels": labels})
        s = await backend.create(Template(FILES))
        assert sorted(c.name for c in engine.containers.values()) == sorted(["elsewhere", f"etude-{s.id}"])
        await known.remove("elsewhere")

    play(tmp_path, scenario)


def test_nothing_is_pulled_unasked(tmp_path: Path) -> None:
    async def scenario(engine: FakeEngine, backend: DockerBackend) -> None:
        engine.registry.add("other:1")
        template = Template(FILES, image=Image("other:1", ()))
        with pytest.raises(TemplateError, match="No such image"):
            await backend.create(template)
        assert not any("images/create" in line for line in engine.requests)
        asking = DockerBackend(engine.socket, Setup(command_uid=COMMAND_UID, pull=True), tmp_path / "state")
        s = await asking.create(template)
        assert (await s.commands.run("echo on")).stdout == "on\n"
        await asking.close()

    play(tmp_path, scenario)


def test_a_dockerfile_is_built_by_the_engine(tmp_path: Path) -> None:
    context = tmp_path / "context"
    context.mkdir()
    (context / "data.txt").write_text("data\n")
    (context / "Dockerfile").write_text(
        "FROM python:3.11-slim\nENV COLOUR=green\nWORKDIR /project\nCOPY data.txt /opt/data.txt\n"
        "RUN tr a-z A-Z < /opt/data.txt > /opt/upper.txt\n"
    )

    async def scenario(engine: FakeEngine, backend: DockerBackend) -> None:
        image = await backend.build_image(context, "built:1")
        assert (image.workdir, image.env["COLOUR"]) == ("/project", "green")
        s = await backend.create(Template(FILES, image=image))
        assert (
            await s.commands.run("pwd; cat /opt/upper.txt; echo $COLOUR")
        ).stdout == "/project\nDATA\ngreen\n"
        (context / "Dockerfile").write_text("FROM python:3.11-slim\nRUN echo why; exit 4\n")
        with pytest.raises(TemplateError, match="non-zero code: 4"):
            await backend.build_image(context, "broken:1")
        with pytest.raises(ConfigError):
            await backend.build_image(tmp_path / "none", "broken:1")

    play(tmp_path, scenario)


def test_an_image_without_python_is_a_template_error(tmp_path: Path) -> None:
    async def scenario(engine: FakeEngine, backend: DockerBackend) -> None:
        with pytest.raises(TemplateError, match="executable file not found"):
            await backend.create(Template(FILES))

    play(tmp_path, scenario, Setup(interpreter="python-none", command_uid=COMMAND_UID))


def test_layers_of_ours_are_refused(tmp_path: Path) -> None:
    async def scenario(engine: FakeEngine, backend: DockerBackend) -> None:
        with pytest.raises(TemplateError, match="not layers of ours"):
            await backend.create(Template(FILES, image=Image("x", ("abc",))))

    play(tmp_path, scenario)


@pytest.mark.parametrize(("offered", "spoken"), [("1.41", "v1.41"), ("1.44", "v1.44"), ("1.51", "v1.47")])
def test_the_api_version_is_agreed_upon(tmp_path: Path, offered: str, spoken: str) -> None:
    async def scenario(engine: FakeEngine, backend: DockerBackend) -> None:
        assert await backend.engine._base() == f"/{spoken}"
        assert (await backend.engine.version())["ApiVersion"] == offered

    play(tmp_path, scenario, api_version=offered)


def test_an_engine_that_is_too_old_is_refused(tmp_path: Path) -> None:
    async def scenario(engine: FakeEngine, backend: DockerBackend) -> None:
        with pytest.raises(EngineError, match=r"1\.30 only"):
            await backend.create(Template(FILES))

    play(tmp_path, scenario, api_version="1.30")


def test_a_dead_engine_is_an_error_and_a_finding(tmp_path: Path) -> None:
    async def scenario(engine: FakeEngine, backend: DockerBackend) -> None:
        assert await asyncio.to_thread(backend.doctor) == []
        await engine.close()
        assert len(backend.doctor()) == 1
        with pytest.raises(SandboxError, match="cannot be reached"):
            await backend.create(Template(FILES))

    play(tmp_path, scenario)
    assert "podman" in PodmanBackend(tmp_path / "none").doctor()[0]


def test_containers_are_locked_down() -> None:
    resources = Resources(memory_bytes=1 << 28, num_processes=10, cpus=0.5)
    config = container_config(Setup(), "image", "/workspace", resources, {})
    host = config["HostConfig"]
    assert host["NetworkMode"] == "none" and host["CapDrop"] == ["ALL"] and not host["Privileged"]
    assert "no-new-privileges" in host["SecurityOpt"] and "Binds" not in host and "Mounts" not in host
    assert not {"SYS_ADMIN", "NET_ADMIN", "NET_RAW", "SYS_PTRACE", "MKNOD"} & set(host["CapAdd"])
    assert (host["Memory"], host["MemorySwap"], host["NanoCpus"]) == (1 << 28, 1 << 28, 500_000_000)
    assert 10 < host["PidsLimit"] < 30 and "StorageOpt" not in host
    quota = container_config(Setup(storage_quota=True, runtime="runsc"), "i", "/w", resources, {})[
        "HostConfig"
    ]
    assert quota["StorageOpt"] == {"size": str(resources.disk_bytes)} and quota["Runtime"] == "runsc"


def test_pausing_an_engine_s_container_follows_its_rules(tmp_path: Path) -> None:
    async def scenario(engine: FakeEngine, backend: DockerBackend) -> None:
        s = await backend.create(Template(FILES))
        name = f"etude-{s.id}"
        await backend.engine.pause(name)
        assert (await backend.engine.inspect_container(name))["State"]["Paused"]
        with pytest.raises(EngineError):
            await backend.engine.pause(name)
        await backend.engine.unpause(name)
        assert (await s.commands.run("echo on")).stdout == "on\n"
        await backend.engine.kill(name)
        await backend.engine.kill(name)
        with pytest.raises(SandboxMissingError):
            await backend.engine.inspect_container("none")

    play(tmp_path, scenario)
