"""What sandboxes cost: latency of each operation, whole sessions side by side, memory of each.

python benchmarks/sandbox.py [local|unisolated|memory] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

from etude.environment.cheats import TARGET
from etude.environment.grading import grade
from etude.sandbox.backends import open_backend
from etude.sandbox.interface import Sandbox, SandboxBackend
from etude.sandbox.template import Template

REPETITIONS = 60
SESSIONS = 100
TEMPLATE = Template(TARGET.files)
SOLVED = TARGET.solution_files["lib/tally.py"]
TESTS = list(TARGET.test_paths)


class Clock:
    """Durations in milliseconds by name."""

    def __init__(self) -> None:
        self.times_ms: dict[str, list[float]] = {}

    async def time(self, name: str, operation: Awaitable[Any]) -> Any:
        start_s = time.perf_counter()
        result = await operation
        self.times_ms.setdefault(name, []).append((time.perf_counter() - start_s) * 1e3)
        return result


async def first_operation(backend: SandboxBackend) -> Sandbox:
    sandbox = await backend.create(TEMPLATE)
    await sandbox.files.read("lib/tally.py")
    return sandbox


async def one_by_one(backend: SandboxBackend, clock: Clock) -> None:
    """Each operation on an otherwise idle backend."""
    for _ in range(REPETITIONS):
        sandbox = await clock.time("create + first operation", first_operation(backend))
        await clock.time("read", sandbox.files.read("lib/tally.py"))
        await clock.time("write", sandbox.files.write("lib/tally.py", SOLVED))
        await clock.time("grep", sandbox.files.grep("tally"))
        await clock.time("list", sandbox.files.list(".", 5))
        await clock.time("test run, first", sandbox.run_tests(TESTS))
        await clock.time("test run", sandbox.run_tests(TESTS))
        await clock.time("diff", sandbox.diff())
        verdict = await clock.time("grade (in a second sandbox)", grade(TARGET, sandbox, backend))
        assert verdict.passed, verdict
        await clock.time("kill (not awaited by the kernel)", sandbox.kill())


async def session(backend: SandboxBackend) -> None:
    """A short session: three reads, an edit, three test runs, grading, kill."""
    sandbox = await backend.create(TEMPLATE)
    for _ in range(3):
        await sandbox.files.read("lib/tally.py")
    await sandbox.files.write("lib/tally.py", SOLVED)
    for _ in range(3):
        await sandbox.run_tests(TESTS, 20.0)
    assert (await grade(TARGET, sandbox, backend, timeout_s=20.0)).passed
    await sandbox.kill()


def proportional_bytes(root: int) -> int:
    """Proportional set size of all processes below `root`."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    total = 0
    for pid in parents:
        above = pid
        while above not in (0, root):
            above = parents.get(above, 0)
        if above == root and pid != root:
            try:
                rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
            except OSError:
                continue
            total += int(rollup.split("\nPss:")[1].split()[0]) << 10
    return total


async def measure(name: str) -> dict[str, Any]:
    backend = open_backend(name)
    clock = Clock()
    try:
        await (await backend.create(TEMPLATE)).kill()
        await one_by_one(backend, clock)
        start_s = time.perf_counter()
        await asyncio.gather(*(session(backend) for _ in range(SESSIONS)))
        sessions_s = time.perf_counter() - start_s
        before_bytes = proportional_bytes(os.getpid())
        live = await asyncio.gather(*(first_operation(backend) for _ in range(50)))
        each_bytes = (proportional_bytes(os.getpid()) - before_bytes) / len(live)
    finally:
        await backend.close()
    operations = {
        key: {"median_ms": statistics.median(times), "p90_ms": statistics.quantiles(times, n=10)[-1]}
        for key, times in clock.times_ms.items()
    }
    return {
        "backend": name,
        "operations": operations,
        f"{SESSIONS} sessions at once, ms each": sessions_s / SESSIONS * 1e3,
        "memory of a sandbox, MB": each_bytes / 1e6,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, Linux {platform.release()}",
        "python": platform.python_version(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("backend", nargs="?", default="local")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    result = asyncio.run(measure(arguments.backend))
    head = ["git", "rev-parse", "--short", "HEAD"]
    result["commit"] = subprocess.run(head, capture_output=True, text=True, check=False).stdout.strip()
    for key, row in result["operations"].items():
        print(f"{key:34s} {row['median_ms']:8.2f} ms   p90 {row['p90_ms']:8.2f} ms")
    for key, value in result.items():
        if key != "operations":
            print(f"{key:34s} {value:8.2f}" if isinstance(value, float) else f"{key:34s} {value}")
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
