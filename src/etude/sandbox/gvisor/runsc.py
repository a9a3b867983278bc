"""runsc: finding it, checking its version, diagnosing problems, and running its commands.

Every command runs below a guard, in a user namespace. A sandbox's processes are never ended by runsc: its
guard kills them all, and its directory contains all of runsc's state.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from etude.errors import ResourceError, SandboxError
from etude.sandbox.guarded import GuardedProcess
from etude.sandbox.inside.guard import BIND_ROOT
from etude.sandbox.local import doctor

OLDEST = 20240729
"""The oldest release that was tested. systrap is older; checkpoints that leave the container running are only
slightly older."""
INSTALL = (
    "install a newer runsc: apt-get install -t bookworm-backports runsc, or a release from gvisor.dev, "
    "and put it on the PATH"
)
WORK, ROOTFS, IMAGE, PREFIX, RUNSC = (
    f"{BIND_ROOT}/{name}" for name in ("work", "rootfs", "image", "prefix", "runsc")
)
"""Paths inside the guard: the sandbox's directory, the shared root, a checkpoint, the interpreter, runsc."""
_SYSCTL = Path("/proc/sys")
_VERSION_S = 30.0
_VERSION = re.compile(r"^runsc version (\S*?(\d{8})\S*)$", re.MULTILINE)
_FLAGS = (
    f"--root={WORK}/state",
    "--platform=systrap",
    "--network=none",
    "--ignore-cgroups",
    "--overlay2=root:memory",
    # Mounts from the host are read-only and expected not to change: metadata may be cached.
    "--file-access-mounts=exclusive",
)


def parse_version(text: str) -> tuple[str, int] | None:
    """Parses `runsc --version`: (version, release date as yyyymmdd); None if it is something else."""
    found = _VERSION.search(text)
    return (found[1], int(found[2])) if found else None


@dataclass(frozen=True)
class Runsc:
    """An installed runsc."""

    program: str
    version: str

    @classmethod
    def find(cls, program: str = "runsc") -> Runsc:
        """Finds runsc on the PATH. Blocks for a few hundredths of a second. Raises ResourceError."""
        path = shutil.which(program)
        if path is None:
            raise _error("runsc is not installed", program)
        try:
            done = subprocess.run(
                [path, "--version"], capture_output=True, text=True, timeout=_VERSION_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise _error(f"runsc does not run: {error}", path) from error
        version = parse_version(done.stdout)
        if version is None:
            raise _error("runsc does not report its version", (done.stdout + done.stderr)[-300:])
        if version[1] < OLDEST:
            raise _error(f"runsc is older than {OLDEST}", version[0])
        return cls(os.path.realpath(path), version[0])

    async def spawn(
        self,
        words: Sequence[str],
        binds: dict[str, Path],
        control: Sequence[Path] = (),
        line: int | None = None,
    ) -> GuardedProcess:
        """Starts runsc with arguments. `binds`: path inside -> path of the host; `line`: descriptor of the
        container's standard input and output; `control`: `cgroup.procs` files to enter.
        """
        bound = {RUNSC: Path(self.program), **binds}
        command = [RUNSC, *_FLAGS, *words]
        return await GuardedProcess.spawn(command, stdin=line, stdout=line, control=control, binds=bound)

    async def call(self, words: Sequence[str], binds: dict[str, Path], deadline_s: float) -> None:
        """Runs runsc until it ends. Raises SandboxError with its output if it fails or takes too long."""
        process = await self.spawn(words, binds)
        try:
            async with asyncio.timeout(deadline_s):
                code = await process.wait()
            if code != 0:
                raise SandboxError(
                    f"runsc {words[0]} failed: {process.log()[-1000:]}", field="runsc", received=code
                )
        except TimeoutError as error:
            raise SandboxError(
                f"runsc {words[0]} did not end within {deadline_s:g} s", field="runsc", received=process.log()
            ) from error
        finally:
            await asyncio.shield(process.kill())


def find_problems(program: str = "runsc", sysctl: Path = _SYSCTL) -> list[str]:
    """One line for each problem: what is wrong, then the command that corrects it."""
    if sys.platform != "linux":
        return ["gVisor needs Linux: use the unisolated backend for code that you trust"]
    problems = doctor.find_problems(sysctl)
    try:
        Runsc.find(program)
    except ResourceError as error:
        problems.append(f"{error.message}: {error.fix}")
    scope = ""
    with contextlib.suppress(OSError):
        scope = (sysctl / "kernel/yama/ptrace_scope").read_text().strip()
    if scope.isdigit() and int(scope) > 1:
        problems.append(
            f"ptrace, which systrap needs, is forbidden (ptrace_scope {scope}): "
            "sysctl -w kernel.yama.ptrace_scope=1"
        )
    return problems


def _error(message: str, received: object) -> ResourceError:
    return ResourceError(message, field="sandbox.backend", received=received, fix=INSTALL)
