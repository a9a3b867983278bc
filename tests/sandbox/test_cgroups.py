"""Control groups: limits written, groups entered, everything removed again, whoever died."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from etude.kit.leftovers import owner_key
from etude.sandbox.interface import Sandbox
from etude.sandbox.local.backend import ForkServerBackend, LocalBackend
from etude.sandbox.local.cgroups import ControlGroups, _sweep
from etude.sandbox.template import Template
from etude.sandbox.types import Resources
from tests.sandbox.scenes import becomes_true, below, has_processes, on_backend, spare_counts

ROOT = Path("/sys/fs/cgroup")
OWN = f"etude-{owner_key()}-"
RESOURCES = Resources(memory_bytes=100 << 20, disk_bytes=10 << 20, num_processes=20, cpus=0.5)
OWNER = """
from etude.kit.leftovers import owner_key
import asyncio, sys
from pathlib import Path
from etude.sandbox.local.backend import LocalBackend
from etude.kit.leftovers import owner_key

async def main():
    backend = LocalBackend(Path(sys.argv[1]))
    await backend.create()
    await asyncio.sleep(0.3)
    print("ready", owner_key(), flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


def own_groups() -> list[Path]:
    """Directories of this process's groups, in all trees of version 1."""
    return sorted(
        path for controller in ("memory", "pids", "cpu") for path in (ROOT / controller).glob(f"{OWN}*")
    )


@pytest.fixture
def before() -> set[Path]:
    """What other tests' backends have at the time."""
    return set(own_groups())


@pytest.fixture
def groups(before: set[Path]) -> Iterator[ControlGroups]:
    found = ControlGroups.open()
    if found is None:
        pytest.skip("no control group may be made here")
    yield found
    found.close()


def left_by_the_next() -> set[Path]:
    """This process's groups, once the next backend has swept."""
    found = ControlGroups.open()
    assert found is not None
    found.close()
    return set(own_groups())


def read(path: Path) -> str:
    return path.read_text().strip()


def is_version_1(groups: ControlGroups) -> bool:
    return len(own_groups()) > 0


def test_limits_are_written_and_a_process_takes_what_it_starts_along(
    before: set[Path], groups: ControlGroups
) -> None:
    if not is_version_1(groups):
        pytest.skip("version 1 only")
    groups.create("7")
    groups.limit("7", RESOURCES)
    memory, pids, cpu = (next((ROOT / name).glob(f"{OWN}*/7")) for name in ("memory", "pids", "cpu"))
    limit = int(read(memory / "memory.limit_in_bytes"))
    assert 110 << 20 < limit < 150 << 20
    assert (read(pids / "pids.max"), read(cpu / "cpu.shares")) == ("21", "512")
    command = ["sh", "-c", "read line; sleep 60 & echo on; wait"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        groups.enter("7", process.pid)
        process.stdin.write(b"go\n")
        process.stdin.flush()
        process.stdout.readline()
        inside = {int(line) for line in read(memory / "cgroup.procs").split()}
        children = set(below(process.pid))
        assert inside == {process.pid, *children}
        assert len(inside) == 2
        assert not groups.remove("7"), "the kernel holds a group with processes"
        for pid in children:
            os.kill(pid, signal.SIGKILL)
        process.kill()
    groups.close()
    assert asyncio.run(becomes_true(lambda: left_by_the_next() <= before))


def test_a_kernel_that_is_a_program_has_memory_of_its_own_and_any_number_of_processes(
    before: set[Path],
) -> None:
    groups = ControlGroups.open(kernel_bytes=256 << 20)
    if groups is None or not is_version_1(groups):
        pytest.skip("version 1 only")
    groups.create("7")
    groups.limit("7", RESOURCES)
    made = {path.parent.name: path / "7" for path in set(own_groups()) - before}
    assert set(made) == {"memory", "cpu"}
    assert int(read(made["memory"] / "memory.limit_in_bytes")) == (100 + 10 + 256) << 20
    assert [path.parent for path in groups.procs_files("7")] == [made["memory"], made["cpu"]]
    assert groups.remove("7")
    groups.close()
    assert not set(own_groups()) - before


def test_two_backends_of_one_process_have_groups_of_their_own(groups: ControlGroups) -> None:
    other = ControlGroups.open()
    assert other is not None
    groups.create("1")
    other.create("1")
    other.close()
    if is_version_1(groups):
        assert any((group / "1").is_dir() for group in (ROOT / "pids").glob(f"{OWN}*"))


def test_groups_go_with_their_sandbox_and_with_the_backend(tmp_path: Path, groups: ControlGroups) -> None:
    if not is_version_1(groups):
        pytest.skip("version 1 only")
    before = set(own_groups())

    async def scenario(backend: ForkServerBackend) -> None:
        sandboxes = [await backend.create(Template(), RESOURCES) for _ in range(3)]

        def count() -> int:
            return sum(path.is_dir() for parent in set(own_groups()) - before for path in parent.iterdir())

        assert await has_processes(backend, 3)
        num_ready, _ = spare_counts(backend)
        assert count() == 3 * (3 + num_ready)
        assert all(
            read(path / "cgroup.procs")
            for parent in set(own_groups()) - before
            for path in parent.iterdir()
            if path.is_dir()
        ), "every sandbox, and every spare, is in its groups"
        await sandboxes[0].kill()
        await sandboxes[1].pause("filesystem")
        await asyncio.sleep(0.2)
        # What the kernel still held goes with the next one.
        last = await backend.create(Template(), RESOURCES)
        assert await has_processes(backend, 2)
        assert await becomes_true(lambda: count() == 3 * (2 + num_ready))
        await last.kill()

    on_backend(tmp_path, scenario)
    assert asyncio.run(becomes_true(lambda: left_by_the_next() <= before))


def test_groups_of_a_dead_owner_are_swept_by_the_next(tmp_path: Path, groups: ControlGroups) -> None:
    if not is_version_1(groups):
        pytest.skip("version 1 only")
    source = str(Path(__file__).parents[2] / "src")
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path)], stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": source},
    ) as owner:  # fmt: skip
        assert owner.stdout is not None
        key = owner.stdout.readline().decode().split()[1]

        def left() -> list[Path]:
            return [
                path for name in ("memory", "pids", "cpu") for path in (ROOT / name).glob(f"etude-{key}-*")
            ]

        assert len(left()) == 3
        left_by_the_next()
        assert len(left()) == 3, "a living owner's groups are left alone"
        owner.send_signal(signal.SIGKILL)
        owner.wait()

    def swept() -> bool:
        left_by_the_next()
        return not left()

    assert asyncio.run(becomes_true(swept))


@pytest.mark.slow
def test_several_processes_may_sweep_at_once(tmp_path: Path) -> None:
    def sweep() -> None:
        for _ in range(100):
            for number in range(5):
                with contextlib.suppress(OSError):  # it is swept while it is made
                    (tmp_path / f"etude-dead{number}-0" / "1").mkdir(parents=True, exist_ok=True)
            _sweep(tmp_path)

    with ThreadPoolExecutor(4) as threads:
        for done in [threads.submit(sweep) for _ in range(4)]:
            done.result()


def own_directory(root: Path) -> Path:
    """Where version 2 has this process's group below a root."""
    rows = Path("/proc/self/cgroup").read_text().splitlines()
    own = next((row[3:] for row in rows if row.startswith("0::")), None)
    if own is None:
        pytest.skip("this kernel has no version 2")
    directory = root / own.lstrip("/")
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def test_version_2_limits_are_written(tmp_path: Path) -> None:
    group = tmp_path / "7"
    group.mkdir()
    names = ("memory.max", "pids.max", "cpu.weight", "cgroup.procs")
    for name in names:
        (group / name).write_text("")
    groups = ControlGroups({"unified": tmp_path})
    groups.create("7")
    groups.limit("7", RESOURCES)
    groups.enter("7", os.getpid())
    values = {name: read(group / name) for name in names}
    assert 110 << 20 < int(values["memory.max"]) < 150 << 20
    assert (values["pids.max"], values["cpu.weight"]) == ("21", "50")
    assert values["cgroup.procs"]
    (group / "memory.events").write_text("low 0\noom 2\noom_kill 3\n")
    assert groups.num_killed_for_memory("7") == 3


def test_version_2_without_the_processor_controller_serves_too(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    for name in ("memory.max", "pids.max"):
        (tmp_path / "7" / name).write_text("")
    ControlGroups({"unified": tmp_path}).limit("7", RESOURCES)
    assert read(tmp_path / "7/pids.max") == "21"
    assert not (tmp_path / "7/cpu.weight").exists()


def test_a_subtree_that_was_not_handed_down_is_left_as_it_was(tmp_path: Path) -> None:
    directory = own_directory(tmp_path)
    (directory / "cgroup.controllers").write_text("cpu memory pids")
    dead = directory / "etude-0123456789abcdef-0"
    (dead / "5").mkdir(parents=True)
    assert ControlGroups.open(tmp_path) is None
    assert [path.name for path in directory.iterdir()] == ["cgroup.controllers"], (
        "dead groups swept, none made"
    )
    (directory / "cgroup.controllers").write_text("hugetlb")
    assert ControlGroups.open(tmp_path) is None


def test_groups_that_cannot_bound_memory_are_no_groups(tmp_path: Path) -> None:
    for controller in ("pids", "cpu"):
        (tmp_path / controller).mkdir()
        (tmp_path / controller / "cgroup.procs").write_text("")
    assert ControlGroups.open(tmp_path) is None
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_dir()) == ["cpu", "pids"]


def test_kills_for_memory_are_counted_where_they_can_be(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7/memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 2\n")
    assert ControlGroups({"memory": tmp_path}).num_killed_for_memory("7") == 2
    assert ControlGroups({"memory": tmp_path}).num_killed_for_memory("8") == 0
    assert ControlGroups({"pids": tmp_path}).num_killed_for_memory("7") == 0


class WithoutGroups(LocalBackend):
    """A backend on a machine where no group can be made."""

    def _open_groups(self) -> ControlGroups | None:
        return ControlGroups.open(Path("/nonexistent"))


def test_without_groups_the_watchdog_bounds_memory(tmp_path: Path) -> None:
    # None holds memory before all have begun: what begins after the end of the others fits.
    meet = ": > h{}; until [ $(ls -d h* | wc -l) = 4 ]; do sleep 0.02; done; exec "
    hog = meet + "python3 -c 'import time; x = bytearray(60 << 20); time.sleep(300)'"

    async def scenario() -> None:
        backend = WithoutGroups(tmp_path)
        try:
            sandbox: Sandbox = await backend.create(Template(), Resources(memory_bytes=128 << 20))
            results = await asyncio.gather(*(sandbox.commands.run(hog.format(n), 60.0) for n in range(4)))
            assert all("memory limit exceeded" in result.stderr for result in results), results
            assert (await sandbox.commands.run("echo on")).stdout == "on\n"
        finally:
            await backend.close()

    asyncio.run(scenario())
