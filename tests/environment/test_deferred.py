import asyncio
import inspect

import pytest

from etude.environment.origins import DeferredSandbox
from etude.errors import SandboxError
from etude.sandbox.errors import Unsupported
from etude.sandbox.interface import Commands, Files, Sandbox
from etude.sandbox.template import Template
from etude.sandbox.types import Resources
from etude_quickstart.memory_backend import MemoryBackend
from tests.fakes.faulty_sandbox import FaultyBackend, FaultySandbox

TEMPLATE = Template({"a.py": "x = 1\n", "test_a.py": "def test_a():\n    assert True\n"})


class SlowBackend(MemoryBackend):
    """Makes sandboxes when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on = asyncio.Event()

    async def create(self, template, limits=None, network=None):
        await self.go_on.wait()
        return await super().create(template, limits, network)


@pytest.mark.parametrize("wrapper", [DeferredSandbox, FaultySandbox])
def test_a_wrapper_has_every_method_of_the_protocol_with_its_parameters(wrapper: type) -> None:
    async def made():
        backend = FaultyBackend(MemoryBackend(), {})
        if wrapper is FaultySandbox:
            return await backend.create(TEMPLATE)
        sandbox = DeferredSandbox(backend.create(TEMPLATE, Resources()))
        await sandbox.get_info()
        return sandbox

    sandbox = asyncio.run(made())
    for protocol, part in ((Sandbox, sandbox), (Files, sandbox.files), (Commands, sandbox.commands)):
        for name, method in inspect.getmembers(protocol, inspect.isfunction):
            if name.startswith("_"):
                continue
            ours = inspect.signature(getattr(part, name)).parameters
            theirs = list(inspect.signature(method).parameters.values())[1:]
            assert [(p.name, p.default) for p in ours.values()] == [(p.name, p.default) for p in theirs], name


def test_what_comes_too_early_waits_for_the_sandbox() -> None:
    async def run() -> None:
        backend = SlowBackend()
        sandbox = DeferredSandbox(backend.create(TEMPLATE, Resources()))
        assert sandbox.id == "pending"
        reading = asyncio.create_task(sandbox.files.read("a.py"))
        await asyncio.sleep(0)
        assert not reading.done()
        backend.go_on.set()
        assert await reading == b"x = 1\n"
        assert sandbox.id == (await sandbox.get_info()).id
        await sandbox.kill()
        assert not backend.live

    asyncio.run(run())


def test_every_operation_reaches_the_sandbox() -> None:
    async def run() -> None:
        sandbox = DeferredSandbox(MemoryBackend().create(TEMPLATE, Resources()))
        assert (await sandbox.run_tests(["test_a.py"])).passed == ("test_a",)
        assert (await sandbox.run_probes(["test_a.py"])).error is None
        await sandbox.files.write("b.py", "y")
        await sandbox.files.write_many({"c.py": "z"})
        await sandbox.files.remove("a.py")
        assert [match.path for match in await sandbox.files.grep("y")] == ["b.py"]
        assert [entry.path for entry in await sandbox.files.list()] == ["b.py", "c.py", "test_a.py"]
        assert await sandbox.diff() == {"a.py": None, "b.py": b"y", "c.py": b"z"}
        assert await sandbox.final_diff() == await sandbox.diff()
        (copy,) = await sandbox.fork(1)
        assert not isinstance(copy, SandboxError)
        assert await copy.files.read("b.py") == b"y"
        with pytest.raises(Unsupported, match="no commands"):
            await sandbox.commands.run("true")

    asyncio.run(run())


def test_a_sandbox_that_cannot_be_made_fails_each_use_and_can_still_be_killed() -> None:
    async def run() -> None:
        backend = FaultyBackend(MemoryBackend(), {"create": 1})
        sandbox = DeferredSandbox(backend.create(TEMPLATE, Resources()))
        for _ in range(2):
            with pytest.raises(SandboxError, match="failed on purpose"):
                await sandbox.files.read("a.py")
        await sandbox.kill()
        assert backend.num_created == 0

    asyncio.run(run())


def test_who_gives_up_waiting_does_not_stop_the_making() -> None:
    async def run() -> None:
        backend = SlowBackend()
        sandbox = DeferredSandbox(backend.create(TEMPLATE, Resources()))
        reading = asyncio.create_task(sandbox.files.read("a.py"))
        await asyncio.sleep(0)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        backend.go_on.set()
        assert await sandbox.files.read("a.py") == b"x = 1\n"

    asyncio.run(run())
