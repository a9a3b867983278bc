"""Cost of sandboxes: every backend available here against bubblewrap, native processes and SWE-ReX.

    python benchmarks/sandbox.py [--backends local,gvisor,vm] [--json FILE] [--quick]

Start + first command, exec, fork, snapshot, restore and memory of each backend; the local backend in pairs
with bubblewrap and native processes; effect of a fork bomb on a neighbour; leaks after 1,000 sandboxes.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from etude.errors import EtudeError, SandboxError
from etude.sandbox.backends import open_backend
from etude.sandbox.interface import Sandbox, SandboxBackend
from etude.sandbox.machine_backend import default_state_directory
from etude.sandbox.template import Template
from etude.sandbox.types import Resources
from etude.sandbox.vm.backend import VmBackend

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.common import median_ratio, print_table, write_result
from benchmarks.sandbox_peers import Bubblewrap, SweRex, native_command

STATE_BYTES = 20_000_000
ROOMY = Resources(disk_bytes=256 << 20, file_bytes=128 << 20)
SUITE = {
    f"test_{module}.py": "import pytest\n\n"
    + "\n".join(
        f"@pytest.mark.parametrize('n', range(8))\ndef test_{case}(n):\n"
        f"    assert sum(range(n * {case + 1})) >= 0\n    assert sorted(str(n) * 20)\n"
        for case in range(4)
    )
    for module in range(3)
}
"""96 small pytest cases in three modules."""
BOMBS = {
    "processes": "b() { b | b & }; b; sleep 60",
    "processor": "for i in $(seq 40); do (while :; do :; done) & done; wait",
    "memory": "while :; do python3 -S -c 'x = [bytearray(1 << 20) for _ in range(600)]'; done",
    "disk": "while :; do head -c 60000000 /dev/zero > /tmp/f; rm /tmp/f; done",
}

WORK = """
import os, time
data = bytearray(os.urandom(16 << 20))
place = 0
while True:
    place = (place + 4096 * 37) % len(data)
    data[place] = (data[place] + 1) % 256
    open("disk", "ab").write(b"x")
    time.sleep(0.005)
"""
"""A process that keeps running while its guest migrates."""

Figures = dict[str, float]


async def timed(operation: Awaitable[Any]) -> tuple[float, Any]:
    """Awaits an operation: (milliseconds, result)."""
    start_s = time.perf_counter()
    result = await operation
    return (time.perf_counter() - start_s) * 1e3, result


async def median_ms(make: Callable[[], Awaitable[Any]], repetitions: int) -> float:
    """Median time of the awaitables that `make` returns."""
    return statistics.median([(await timed(make()))[0] for _ in range(repetitions)])


async def start_and_run(backend: SandboxBackend, template: Template) -> Sandbox:
    """Creates a sandbox and runs its first command."""
    sandbox = await backend.create(template)
    result = await sandbox.commands.run("true", timeout_s=120)
    assert result.exit_code == 0, result
    return sandbox


async def measure_backend(name: str, backend: SandboxBackend, repetitions: int) -> Figures:
    """One backend's column of the table."""
    template = Template({"a.py": "x = 1\n"})
    await (await start_and_run(backend, template)).kill()
    figures: Figures = {}
    starts: list[float] = []
    execs: list[float] = []
    for _ in range(repetitions):
        took_ms, sandbox = await timed(start_and_run(backend, template))
        starts.append(took_ms)
        execs.append((await timed(sandbox.commands.run("true", timeout_s=120)))[0])
        await sandbox.kill()
    figures["start_first_command_ms"] = statistics.median(starts)
    figures["exec_ms"] = statistics.median(execs)
    sandbox = await backend.create(template)
    able = backend.capabilities()
    figures["fork_first_command_ms"] = await median_ms(lambda: _fork_and_run(sandbox), repetitions)
    kind = "full" if "full" in able.snapshots else "filesystem"
    saves, restores = [], []
    for _ in range(max(3, repetitions // 3)):
        took_ms, snapshot = await timed(sandbox.create_snapshot(kind))
        saves.append(took_ms)
        took_ms, copy = await timed(backend.create(snapshot=snapshot.id))
        restores.append(took_ms)
        await copy.kill()
        await backend.delete_snapshot(snapshot.id)
    figures[f"snapshot_{kind}_ms"] = statistics.median(saves)
    figures[f"restore_{kind}_ms"] = statistics.median(restores)
    pauses, resumes = [], []
    for _ in range(3):
        pauses.append((await timed(sandbox.pause(kind)))[0])
        resumes.append((await timed(sandbox.resume()))[0])
    figures["hibernate_ms"] = statistics.median(pauses)
    figures["resume_ms"] = statistics.median(resumes)
    figures["memory_per_copy_mb"] = await memory_per_copy_mb(sandbox)
    await sandbox.kill()
    if name != "vm":
        ratios = await pytest_ratios(backend, max(3, repetitions // 4))
        figures["pytest_vs_native"] = statistics.median(ratios)
    return figures


async def _fork_and_run(sandbox: Sandbox) -> None:
    (copy,) = await sandbox.fork(1)
    if isinstance(copy, SandboxError):
        raise copy
    await copy.commands.run("true", timeout_s=120)
    await copy.kill()


async def memory_per_copy_mb(sandbox: Sandbox, count: int = 4) -> float:
    """Proportional set size that one more copy of a sandbox adds, with all helper processes."""
    before = proportional_bytes(os.getpid())
    copies = [copy for copy in await sandbox.fork(count) if not isinstance(copy, SandboxError)]
    for copy in copies:
        await copy.commands.run("true", timeout_s=120)
    after = proportional_bytes(os.getpid())
    for copy in copies:
        await copy.kill()
    return (after - before) / len(copies) / 1e6


async def pytest_ratios(backend: SandboxBackend, repetitions: int) -> list[float]:
    """Time of a pytest run in the sandbox over that of a native one, pair by pair."""
    packages = Path(pytest.__file__).parents[1]
    ratios: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        bundle = _pytest_bundle(packages)
        _write_tree(Path(folder), bundle)
        sandbox = await backend.create(Template({**SUITE, **bundle}), ROOMY)
        # Both use the same interpreter: outside, a name on PATH may be a wrapper script.
        command = f"PYTHONPATH={{}} {_python()} -m pytest -q -p no:cacheprovider test_*.py"
        inside = command.format("/workspace/.packages")
        native = command.format(f"{folder}/.packages")
        for number in range(repetitions + 1):
            ours_ms, result = await timed(sandbox.commands.run(inside, timeout_s=300))
            assert "96 passed" in result.stdout, result
            theirs_ms, output = await timed(native_command(native, folder))
            assert "96 passed" in output, output
            if number:
                ratios.append(ours_ms / theirs_ms)
        await sandbox.kill()
    return ratios


def _python() -> Path:
    return Path(sys.base_prefix).resolve() / "bin" / "python3"


def _write_tree(folder: Path, bundle: dict[str, bytes]) -> None:
    for path, data in {**bundle, **{path: text.encode() for path, text in SUITE.items()}}.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)


def _pytest_bundle(packages: Path) -> dict[str, bytes]:
    """pytest and its dependencies as template files: the same ones are used inside and outside."""
    files: dict[str, bytes] = {}
    for name in ("pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments"):
        for path in (packages / name).rglob("*.py"):
            files[f".packages/{path.relative_to(packages)}"] = path.read_bytes()
    return files


async def local_pairs(backend: SandboxBackend, repetitions: int) -> Figures:
    """Start + first command, in pairs with bubblewrap and a native process."""
    template = Template({"a.py": "x = 1\n"})
    wrap = Bubblewrap.find()
    ours: list[float] = []
    theirs: list[float] = []
    native: list[float] = []
    for _ in range(repetitions):
        took_ms, sandbox = await timed(start_and_run(backend, template))
        ours.append(took_ms)
        await sandbox.kill()
        if wrap is not None:
            theirs.append((await timed(wrap.run("true")))[0])
        native.append((await timed(native_command("true", "/")))[0])
    figures = {"local_start_ms": statistics.median(ours), "native_start_ms": statistics.median(native)}
    if theirs:
        figures["bubblewrap_start_ms"] = statistics.median(theirs)
        figures["local_start_vs_bubblewrap"] = median_ratio(ours, theirs)
    return figures


async def fork_20mb(backend: SandboxBackend, repetitions: int) -> Figures:
    """Time to fork a sandbox with 20 MB of files, until the copy is usable."""
    sandbox = await backend.create(Template(), ROOMY)
    for number in range(20):
        await sandbox.files.write(f"state/{number}.bin", os.urandom(STATE_BYTES // 20))
    times: list[float] = []
    for _ in range(repetitions):
        took_ms, (copy,) = await timed(sandbox.fork(1))
        assert not isinstance(copy, SandboxError), copy
        times.append(took_ms)
        await copy.kill()
    await sandbox.kill()
    return {"local_fork_20mb_ms": statistics.median(times)}


async def moves(scratch: Path, repetitions: int) -> Figures:
    """Migrates a guest, in which a process uses memory and disk, between the backends of two hosts that share
    only the guest image."""
    state = default_state_directory()
    for name in ("here", "there"):
        (scratch / name).mkdir()
        for shared in ("images", "vm-templates"):
            shutil.copytree(state / shared, scratch / name / shared)
    here, there = VmBackend(scratch / "here"), VmBackend(scratch / "there")
    times: list[float] = []
    try:
        for _ in range(repetitions):
            sandbox = await here.create(Template({"work.py": WORK}))
            await sandbox.commands.start("python3 -S work.py")
            took_ms, moved = await timed(sandbox.migrate(there))
            times.append(took_ms)
            assert (await moved.commands.run("pgrep -f work.py", timeout_s=60)).exit_code == 0
            await moved.kill()
    finally:
        await here.close()
        await there.close()
    return {"vm_migration_ms": statistics.median(times)}


async def neighbour(backend: SandboxBackend, repetitions: int) -> Figures:
    """Median time of a neighbour's command during a fork bomb, over that on an idle machine."""
    quiet_one = await backend.create()
    figures: Figures = {}
    for name, bomb in BOMBS.items():
        quiet = await median_ms(lambda: quiet_one.commands.run("true"), repetitions)
        bomber = await backend.create()
        exploding = asyncio.create_task(bomber.commands.run(bomb, timeout_s=30))
        await asyncio.sleep(0.5)
        loud = await median_ms(lambda: quiet_one.commands.run("true"), repetitions)
        exploding.cancel()
        await asyncio.gather(exploding, return_exceptions=True)
        await bomber.kill()
        figures[f"neighbour_slowdown_{name}"] = loud / quiet
    await quiet_one.kill()
    figures["neighbour_slowdown"] = max(figures.values())
    return figures


async def leaks(backend: SandboxBackend, count: int, at_once: int = 50) -> Figures:
    """Processes, descriptors and control groups left by sandboxes that were created, used and killed."""

    async def use() -> None:
        sandbox = await start_and_run(backend, Template({"a": "b"}))
        await sandbox.kill()

    await use()
    await asyncio.sleep(0.5)
    before = _traces()
    start_s = time.perf_counter()
    for _ in range(count // at_once):
        await asyncio.gather(*(use() for _ in range(at_once)))
    took_s = time.perf_counter() - start_s
    for _ in range(50):
        await asyncio.sleep(0.1)
        if _traces() <= before:
            break
    return {"sandboxes_leaked": float(max(0, _traces() - before)), "sandboxes_per_s": count / took_s}


def _traces() -> int:
    """Number of our processes, descriptors and control groups, which leaks would increase."""
    groups = sum(1 for _ in Path("/sys/fs/cgroup").glob("*/etude-*/*/cgroup.procs"))
    return len(_family(os.getpid())) + len(list(Path("/proc/self/fd").iterdir())) + groups


def _family(root: int) -> list[int]:
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    found: list[int] = []
    for pid in parents:
        above = pid
        while above not in (0, root):
            above = parents.get(above, 0)
        if above == root and pid != root:
            found.append(pid)
    return found


def proportional_bytes(root: int) -> int:
    """Proportional set size of all processes below `root`."""
    total = 0
    for pid in _family(root):
        try:
            rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
        except OSError:
            continue
        total += int(rollup.split("\nPss:")[1].split()[0]) << 10
    return total


async def measure(names: list[str], repetitions: int) -> tuple[Figures, dict[str, Any]]:
    """(named figures, tables by backend and peer)."""
    figures: Figures = {}
    tables: dict[str, Any] = {}
    for name in names:
        with tempfile.TemporaryDirectory(prefix="etude-bench-") as state:
            backend = open_backend(name, state=_state(name, Path(state)))
            try:
                if problems := backend.doctor():
                    raise SandboxError("; ".join(problems))
                count = repetitions if name == "local" else max(5, repetitions // 4)
                tables[name] = await measure_backend(name, backend, count)
                print_table(name, tables[name])
                if name == "local":
                    figures |= await local_pairs(backend, repetitions)
                    figures |= await fork_20mb(backend, repetitions)
                    figures |= await neighbour(backend, repetitions)
                    figures |= await leaks(backend, 1000)
                if name == "vm":
                    figures |= await moves(Path(state), count)
            except EtudeError as error:
                print(f"\n{name}: left out: {error}")
            finally:
                await backend.close()
    figures |= _named(tables)
    rex = await SweRex.measure(repetitions=5)
    if rex:
        tables["swe-rex local"] = rex
        print_table("SWE-ReX, local deployment", rex)
    return figures, tables


def _state(name: str, scratch: Path) -> Path | None:
    """State directory of a backend: the default for `vm`, which needs its guest image there."""
    return None if name == "vm" else scratch


def _named(tables: dict[str, Any]) -> Figures:
    """The figures that docs quote, selected from the tables."""
    names = {
        "local_pytest_vs_native": ("local", "pytest_vs_native", 1.0),
        "local_memory_mb": ("local", "memory_per_copy_mb", 1.0),
        "vm_fork_to_first_command_s": ("vm", "fork_first_command_ms", 1e-3),
        "vm_hibernate_s": ("vm", "hibernate_ms", 1e-3),
        "vm_resume_s": ("vm", "resume_ms", 1e-3),
        "gvisor_checkpoint_ms": ("gvisor", "snapshot_full_ms", 1.0),
        "gvisor_restore_ms": ("gvisor", "restore_full_ms", 1.0),
    }
    return {
        figure: tables[name][key] * scale
        for figure, (name, key, scale) in names.items()
        if name in tables and key in tables[name]
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--backends", default="local,gvisor,vm")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="few repetitions")
    arguments = parser.parse_args()
    figures, tables = asyncio.run(
        measure(arguments.backends.split(","), repetitions=8 if arguments.quick else 40)
    )
    print_table("figures", figures)
    if arguments.json:
        write_result(arguments.json, figures, tables)


if __name__ == "__main__":
    main()
