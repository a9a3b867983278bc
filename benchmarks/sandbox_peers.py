"""The peers of the sandbox benchmark: bubblewrap, native processes, SWE-ReX's local deployment."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from environments import python_of

from etude.sandbox.inside.kernel import MACHINE
from etude.sandbox.inside.namespaces import HOST_DIRECTORIES
from etude.sandbox.inside.seccomp import build_filter

_SWE_REX_PROGRAM = """
import asyncio, json, sys, time
from swerex.deployment.local import LocalDeployment
from swerex.runtime.abstract import BashAction, CreateBashSessionRequest

async def once():
    times = {}
    start = time.perf_counter()
    deployment = LocalDeployment()
    await deployment.start()
    await deployment.runtime.create_session(CreateBashSessionRequest())
    await deployment.runtime.run_in_session(BashAction(command="true"))
    times["start_first_command_ms"] = (time.perf_counter() - start) * 1e3
    start = time.perf_counter()
    await deployment.runtime.run_in_session(BashAction(command="true"))
    times["exec_ms"] = (time.perf_counter() - start) * 1e3
    await deployment.stop()
    return times

async def main():
    await once()
    print(json.dumps([await once() for _ in range(int(sys.argv[1]))]))

asyncio.run(main())
"""


ENVIRONMENT = {"LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONHASHSEED": "0"}
"""Environment variables of commands in a sandbox, in addition to PATH and HOME."""


async def native_command(cmd: str, cwd: str) -> str:
    """Runs a plain process with a sandbox's environment, the lower bound; returns its output."""
    process = await asyncio.create_subprocess_exec(
        "/bin/sh", "-c", cmd, cwd=cwd, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        stdin=asyncio.subprocess.DEVNULL, env={**ENVIRONMENT, "PATH": os.environ["PATH"], "HOME": cwd},
    )  # fmt: skip
    output, _ = await process.communicate()
    return output.decode()


@dataclass(frozen=True)
class Bubblewrap:
    """bubblewrap with the namespaces, mounts and system call filter of a local sandbox."""

    program: str

    @classmethod
    def find(cls) -> Bubblewrap | None:
        """bubblewrap, or None if it is not installed."""
        program = shutil.which("bwrap")
        return None if program is None else cls(program)

    async def run(self, cmd: str) -> None:
        """Starts a sandbox, runs one command, ends it."""
        reader, writer = os.pipe()
        os.write(writer, build_filter(MACHINE))
        os.close(writer)
        argv = [*self._arguments(reader), "--", "/bin/sh", "-c", cmd]
        try:
            process = await asyncio.create_subprocess_exec(
                *argv, pass_fds=(reader,), stdin=asyncio.subprocess.DEVNULL
            )
            assert await process.wait() == 0, argv
        finally:
            os.close(reader)

    def _arguments(self, seccomp: int) -> list[str]:
        argv = [self.program, "--unshare-all", "--uid", "1000", "--gid", "1000", "--hostname", "sandbox"]
        argv += ["--cap-drop", "ALL", "--die-with-parent", "--new-session", "--seccomp", str(seccomp)]
        prefix = Path(sys.base_prefix).resolve()
        shown = [Path("/", name) for name in HOST_DIRECTORIES]
        for path in (*shown, *([] if prefix.is_relative_to("/usr") else [prefix])):
            if path.is_symlink():
                argv += ["--symlink", str(path.readlink()), str(path)]
            elif path.is_dir():
                argv += ["--ro-bind", str(path), str(path)]
        argv += ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "--tmpfs", "/workspace"]
        return [*argv, "--chdir", "/workspace"]


class SweRex:
    """SWE-ReX's local deployment, in a Python environment of its own. It has no isolation."""

    @staticmethod
    async def measure(repetitions: int) -> dict[str, float]:
        """Medians of start + first command and of one command; empty if it cannot be installed."""
        try:
            python = await asyncio.to_thread(python_of, "swe-rex")
            program = [python, "-c", _SWE_REX_PROGRAM, str(repetitions)]
            process = await asyncio.create_subprocess_exec(*program, stdout=asyncio.subprocess.PIPE)
            output, _ = await asyncio.wait_for(process.communicate(), 300)
            rows = json.loads(output.splitlines()[-1])
        except (subprocess.CalledProcessError, OSError, ValueError, IndexError, TimeoutError) as error:
            print(f"\nswe-rex: left out: {error}")
            return {}
        return {key: sorted(row[key] for row in rows)[len(rows) // 2] for key in rows[0]}
