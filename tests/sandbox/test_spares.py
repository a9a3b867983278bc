"""First processes that wait for a sandbox: nothing of an agent's runs before they are in their groups."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from etude.errors import AgentError, ResourceError, SandboxError
from etude.sandbox.local.backend import ForkServerBackend, LocalBackend
from etude.sandbox.local.cgroups import ControlGroups
from etude.sandbox.machine import MachineSandbox
from etude.sandbox.template import Template
from etude.sandbox.types import Resources
from tests.fakes.control_groups import FakeGroups
from tests.sandbox.scenes import (
    becomes_true,
    below,
    first_process,
    fork_server,
    has_processes,
    on_backend,
    open_descriptors,
    spare_counts,
)

HOG = """
import ctypes
libc = ctypes.CDLL(None)
libc.shmat.restype = ctypes.c_void_p
for _ in range(15):
    segment = libc.shmget(0, ctypes.c_size_t(20 << 20), 0o1600)
    if segment < 0:
        raise SystemExit("refused")
    ctypes.memset(libc.shmat(segment, None, 0), 1, 20 << 20)
print("300 MiB held")
"""
"""Memory that belongs to no process: nothing but a control group bounds it."""


class GroupedBackend(LocalBackend):
    """A local backend with groups that the test brings along."""

    def __init__(self, state: Path, groups: ControlGroups, num_spares: int = 2) -> None:
        super().__init__(state)
        self._brought = groups
        self.num_spares = num_spares

    def _open_groups(self) -> ControlGroups | None:
        return self._brought


class SlowGroups(ControlGroups):
    """Real groups on a machine so busy that entering takes longer than any attack."""

    def enter(self, name: str, pid: int) -> None:
        time.sleep(0.3)
        super().enter(name, pid)


def with_groups(
    state: Path,
    groups: ControlGroups,
    scenario: Callable[[GroupedBackend], Awaitable[None]],
    num_spares: int = 2,
) -> None:
    async def run() -> None:
        backend = GroupedBackend(state, groups, num_spares)
        try:
            await scenario(backend)
        except ResourceError as error:
            pytest.skip(f"no namespaces here: {error}")
        finally:
            await backend.close()

    asyncio.run(run())


@pytest.mark.parametrize("num_spares", [0, 2])
def test_no_plan_is_sent_before_the_first_process_is_in_its_groups(tmp_path: Path, num_spares: int) -> None:
    groups = FakeGroups()

    async def scenario(backend: GroupedBackend) -> None:
        groups.may_enter.clear()
        creating = asyncio.create_task(backend.create(Template({"a": "b"})))
        try:
            assert await becomes_true(lambda: groups.asked != [])
            await asyncio.sleep(0.2)
            assert not creating.done()
            assert groups.limited == []
            assert all(below(pid) == [] for pid in below(fork_server(backend)))
        finally:
            groups.may_enter.set()
        sandbox = await creating
        (group,) = groups.limited
        assert groups.entered[group] == first_process(backend, sandbox)
        assert (await sandbox.commands.run("cat a")).stdout == "b"

    with_groups(tmp_path, groups, scenario, num_spares)


def test_memory_of_the_first_command_is_bounded_on_a_machine_where_entering_is_slow(tmp_path: Path) -> None:
    opened = ControlGroups.open()
    if opened is None:
        pytest.skip("no control group may be made here")
    opened.__class__ = SlowGroups

    async def scenario(backend: GroupedBackend) -> None:
        sandbox = await backend.create(Template({"hog.py": HOG}), Resources(memory_bytes=96 << 20))
        try:
            result = await sandbox.commands.run("python3 -S hog.py")
        except AgentError:
            return
        assert "held" not in result.stdout, result

    with_groups(tmp_path, opened, scenario)


def test_a_group_that_cannot_be_entered_fails_the_start_and_leaves_nothing(tmp_path: Path) -> None:
    groups = FakeGroups()

    async def scenario(backend: GroupedBackend) -> None:
        groups.error = OSError(errno.EBUSY, "busy")
        for _ in range(2):
            with pytest.raises(SandboxError, match=r"no control group.*busy"):
                await backend.create()
        assert groups.limited == []
        assert await backend.list() == []
        assert await has_processes(backend, 0)
        assert spare_counts(backend) == (0, 0)
        groups.error = None
        assert (await (await backend.create()).commands.run("echo on")).stdout == "on\n"

    with_groups(tmp_path, groups, scenario)


def test_a_spare_that_has_died_is_no_sandbox(tmp_path: Path) -> None:
    async def scenario(backend: GroupedBackend) -> None:
        await (await backend.create()).kill()
        assert await has_processes(backend, 0)
        assert spare_counts(backend) == (2, 0)
        for pid in below(fork_server(backend)):
            os.kill(pid, signal.SIGKILL)
        assert await becomes_true(lambda: below(fork_server(backend)) == [])
        spares = backend._spares
        assert spares is not None
        assert await becomes_true(lambda: all(spare.channel.closed for spare in spares._ready))
        sandboxes = [await backend.create() for _ in range(3)]
        for sandbox in sandboxes:
            assert (await sandbox.commands.run("echo on")).stdout == "on\n"
        assert await has_processes(backend, 3)

    with_groups(tmp_path, FakeGroups(), scenario)


def test_starts_that_were_given_up_leave_their_spares_to_others(tmp_path: Path) -> None:
    groups = FakeGroups()

    async def scenario(backend: GroupedBackend) -> None:
        groups.may_enter.clear()
        tasks = [asyncio.create_task(backend.create()) for _ in range(6)]
        assert await becomes_true(lambda: groups.asked != [])
        for task in tasks[:4]:
            task.cancel()
        groups.may_enter.set()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert [isinstance(result, MachineSandbox) for result in results] == [False] * 4 + [True] * 2
        assert await has_processes(backend, 2)
        num_ready, _ = spare_counts(backend)
        assert num_ready >= 2
        more = [await backend.create() for _ in range(num_ready)]
        assert await has_processes(backend, 2 + len(more))

    with_groups(tmp_path, groups, scenario)


def test_a_close_while_a_process_is_being_moved_leaves_nothing(tmp_path: Path) -> None:
    groups = FakeGroups()

    async def scenario(backend: GroupedBackend) -> None:
        await backend.create()
        groups.may_enter.clear()
        tasks = [asyncio.create_task(backend.create()) for _ in range(6)]
        assert await becomes_true(lambda: spare_counts(backend)[0] == 0 and spare_counts(backend)[1] > 0)
        before = set(below(fork_server(backend)))
        asyncio.get_running_loop().call_later(0.1, groups.may_enter.set)
        await backend.close()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        for result in results:
            if isinstance(result, MachineSandbox):  # it had found a spare that was ready
                assert result.state == "killed"
            else:
                assert isinstance(result, SandboxError)
        assert not before & set(below(os.getpid()))

    with_groups(tmp_path, groups, scenario)


def test_a_sandbox_holds_nothing_of_the_spares_beside_it(tmp_path: Path) -> None:
    async def scenario(backend: GroupedBackend) -> None:
        counts: list[int] = []
        for _ in range(4):
            sandbox = await backend.create()
            assert await has_processes(backend, 1)
            counts.append(open_descriptors(first_process(backend, sandbox)))
            await sandbox.kill()
        assert len(set(counts)) == 1, counts

    with_groups(tmp_path, FakeGroups(), scenario, num_spares=4)


def test_without_groups_nothing_waits(tmp_path: Path) -> None:
    async def scenario(backend: ForkServerBackend) -> None:
        await backend.create()
        assert spare_counts(backend) == (0, 0)

    on_backend(tmp_path, scenario, "unisolated")
