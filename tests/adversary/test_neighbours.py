"""A sandbox exhausts resources that the kernel limits per user or host: other sandboxes still have enough."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from etude.sandbox.interface import Sandbox, SandboxBackend
from etude.sandbox.local.doctor import find_problems
from etude.sandbox.local.host_ids import find_host_ids
from tests.adversary.escape.weakened import WeakenedBackend
from tests.adversary.kinds_neighbours import KINDS, MAX_PAIRS, PRELUDE, RESOURCES, Kind
from tests.adversary.playing import SOLVE, play_on
from tests.sandbox.backends import with_backend

_OBSTACLES = [*find_problems(), find_host_ids().reason]
pytestmark = [
    pytest.mark.alone,
    pytest.mark.slow,
    pytest.mark.skipif(any(_OBSTACLES), reason="; ".join(_OBSTACLES)),
]
_HOLD = """
held = count(lambda: ({take}), {most})
print(held)
open("held.part", "w").write(str(held))
os.rename("held.part", "held")
signal.pause()
"""
_NEED = "print(count(lambda: ({need}), {num_needed}))\nsys.stdout.flush()\nos.kill(0, signal.SIGKILL)"
_WAIT_S = 120.0


async def take_all(sandbox: Sandbox, kind: Kind) -> int:
    """Takes what can be had, and keeps it; how often that worked."""
    await sandbox.files.write("take.py", PRELUDE + _HOLD.format(take=kind.take, most=2 * kind.most + 64))
    await sandbox.commands.start("exec python3 -S take.py >log 2>&1")
    end_s = asyncio.get_running_loop().time() + _WAIT_S
    while not any(entry.path == "held" for entry in await sandbox.files.list()):
        assert asyncio.get_running_loop().time() < end_s, (await sandbox.files.read("log")).decode()
        await asyncio.sleep(0.05)
    return int(await sandbox.files.read("held"))


async def num_had(sandbox: Sandbox, kind: Kind) -> int:
    """How often another sandbox gets what it needs."""
    await sandbox.files.write("need.py", PRELUDE + _NEED.format(need=kind.need, num_needed=kind.num_needed))
    result = await sandbox.commands.run("setsid -w python3 -S need.py")
    return int(result.stdout)


@pytest.mark.parametrize("name", KINDS)
def test_a_neighbour_that_takes_all_it_can_leaves_others_what_they_need(name: str) -> None:
    kind = KINDS[name]

    async def scenario(backend: SandboxBackend) -> None:
        greedy = await backend.create(resources=kind.resources)
        other = await backend.create(resources=RESOURCES)
        held = await take_all(greedy, kind)
        assert held <= kind.most
        if kind.need:
            assert held > 0
            assert await num_had(other, kind) == kind.num_needed
        assert (await other.commands.run("echo $(echo works)")).stdout == "works\n"
        solved = await play_on(backend, SOLVE)
        assert solved.voided is None
        assert solved.passed, solved.cause

    with_backend("local", scenario)


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if kind.bound])
def test_without_what_bounds_it_a_neighbour_takes_more(name: str, tmp_path: Path) -> None:
    kind = KINDS[name]
    granted = int(Path("/proc/sys/fs/epoll/max_user_watches").read_text())
    if name == "epoll watches" and granted > MAX_PAIRS:
        pytest.skip("a user of this host may have more than one sandbox can hold")

    async def run() -> None:
        backend = WeakenedBackend(tmp_path, frozenset(kind.bound))
        try:
            greedy = await backend.create(resources=kind.resources)
            other = await backend.create(resources=RESOURCES)
            held = await take_all(greedy, kind)
            assert held > kind.most or await num_had(other, kind) < kind.num_needed
        finally:
            await backend.close()

    asyncio.run(run())
