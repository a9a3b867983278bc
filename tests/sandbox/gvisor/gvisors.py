"""gVisor backends for tests: the real runsc where there is one, the fake for what must fail."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import pytest

from etude.kit.leftovers import owner_key
from etude.sandbox.gvisor.backend import GvisorBackend
from etude.sandbox.gvisor.runsc import find_problems
from etude.sandbox.machine import MachineSandbox
from etude.sandbox.template import Template
from etude.sandbox.types import Resources
from tests.fakes.runsc import INTERPRETER, install_fake
from tests.sandbox.scenes import becomes_true

Result = TypeVar("Result")
PROBLEMS = find_problems()
needs_runsc = pytest.mark.skipif(bool(PROBLEMS), reason="; ".join(PROBLEMS))
needs_namespaces = pytest.mark.skipif(
    bool([problem for problem in PROBLEMS if "runsc" not in problem]) or not Path(INTERPRETER).exists(),
    reason=f"no user namespaces or no {INTERPRETER} here",
)


class HastyAtStart(GvisorBackend):
    """Gives up soon a start that never ends."""

    start_s = 1.0


class HastyAtCheckpoint(GvisorBackend):
    """Gives up soon a checkpoint that never ends."""

    checkpoint_s = 0.5


def with_gvisor(
    scenario: Callable[[GvisorBackend], Awaitable[Result]],
    fault: str | None = None,
    kind: type[GvisorBackend] = GvisorBackend,
) -> Result:
    """Runs a scenario on a backend, and checks that nothing is left of it. `fault`: of the fake runsc."""

    async def run(directory: Path) -> Result:
        state = directory / "state"
        if fault is None:
            backend = kind(state)
        else:
            backend = kind(state, str(install_fake(directory / "fake-runsc", fault)))
        try:
            return await scenario(backend)
        finally:
            await backend.close()
            # A process that was killed takes a moment to be gone.
            assert await becomes_true(lambda: leftovers(state) == [], 60.0), leftovers(state)

    with tempfile.TemporaryDirectory(prefix="etude-gvisor-test-") as directory:
        return asyncio.run(run(Path(directory)))


def with_sandbox(
    scenario: Callable[[MachineSandbox], Awaitable[Result]],
    files: dict[str, bytes | str] | None = None,
    resources: Resources | None = None,
) -> Result:
    """Runs a scenario in one sandbox under the real runsc."""

    async def run(backend: GvisorBackend) -> Result:
        return await scenario(await backend.create(Template(files or {}), resources))

    return with_gvisor(run)


def leftovers(state: Path) -> list[str]:
    """Files, processes, mounts and control groups that outlived a backend of this state directory."""
    found = [str(path) for path in (state / "gvisor").glob("*")]
    found += [line for line in Path("/proc/mounts").read_text().splitlines() if str(state) in line]
    groups = Path("/sys/fs/cgroup")
    own = f"etude-{owner_key()}-*/gvisor-*"
    found += [str(path) for pattern in (own, f"*/{own}") for path in groups.glob(pattern)]
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                words = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if str(state).encode() in words:
                found.append(words.replace(b"\0", b" ").decode(errors="replace"))
    return found
