"""Host programs that end with this process: a guard process starts them, watches us and kills them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

from etude.errors import SandboxError
from etude.sandbox.guest_program import python_words

_LOG_BYTES = 4000
_END_S = 10.0
_SIGNALLED = 128
"""The guard's exit code for a signal is this plus the signal's number."""


class GuardedProcess:
    """A running program and its guard process. `kill` ends it and everything it started."""

    def __init__(self, process: asyncio.subprocess.Process, log: int, name: str) -> None:
        self._process = process
        self._guard = _pidfd_of(process)
        self._log = log
        self.name = name
        self._is_ending = False

    @classmethod
    async def spawn(
        cls,
        argv: Sequence[str],
        *,
        stdin: int | None = None,
        stdout: int | None = None,
        pass_fds: Sequence[int] = (),
        user: tuple[int, int] | None = None,
        control: Sequence[Path] = (),
        binds: Mapping[str, Path] | None = None,
    ) -> GuardedProcess:
        """Starts `argv` as the child of a guard. Its output is kept for `log`. Raises SandboxError.

        `user`: (uid, gid) of the program; the guard keeps its own. `control`, `binds`: see `inside.guard`.
        """
        owner = os.pidfd_open(os.getpid())
        log = os.memfd_create("log")
        bound = None if binds is None else {target: str(source) for target, source in binds.items()}
        plan = {"argv": list(argv), "user": user, "control": [str(path) for path in control], "binds": bound}
        command = python_words("etude.sandbox.inside.guard", str(owner), json.dumps(plan))
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL if stdin is None else stdin,
                stdout=log if stdout is None else stdout,
                stderr=log,
                pass_fds=(owner, *pass_fds),
                start_new_session=True,
            )
        except BaseException as error:
            os.close(log)
            if not isinstance(error, OSError):
                raise
            raise SandboxError(f"cannot start: {error}", field="program", received=argv[0]) from error
        finally:
            os.close(owner)
        try:
            return cls(process, log, argv[0])
        except OSError as error:
            # No descriptor is left for a pidfd.
            process.kill()
            os.close(log)
            raise SandboxError(f"cannot be watched: {error}", field="program", received=argv[0]) from error

    @property
    def pid(self) -> int:
        """Process id of the guard; the program is its only child."""
        return self._process.pid

    @property
    def was_killed(self) -> bool:
        """Whether a signal ended the program, other than that of `kill`."""
        code = self._process.returncode
        return code is not None and code > _SIGNALLED and not self._is_ending

    async def wait(self) -> int:
        """Waits for the program's end."""
        return await self._process.wait()

    def log(self) -> str:
        """The end of the program's output; empty after `kill`."""
        if self._log < 0:
            return ""
        size = os.fstat(self._log).st_size
        return os.pread(self._log, _LOG_BYTES, max(0, size - _LOG_BYTES)).decode(errors="replace")

    async def kill(self) -> None:
        """Kills the program and all that it started. Idempotent."""
        if self._process.returncode is None:
            self._is_ending = True
            self._signal(signal.SIGTERM)
            try:
                async with asyncio.timeout(_END_S):
                    await self._process.wait()
            except TimeoutError:
                self._signal(signal.SIGKILL)
                await self._process.wait()
        for descriptor in (self._log, self._guard):
            if descriptor >= 0:
                os.close(descriptor)
        self._log = self._guard = -1

    def _signal(self, number: signal.Signals) -> None:
        """Signals by pidfd, as the event loop's `terminate` and `kill` poll the child first, and so may reap
        it without the event loop's knowledge, which then has no exit code.
        """
        with contextlib.suppress(ProcessLookupError):
            if self._guard >= 0:
                signal.pidfd_send_signal(self._guard, number)


def _pidfd_of(process: asyncio.subprocess.Process) -> int:
    """A pidfd of the process, which no later process with its number shares; -1: it has ended already."""
    try:
        return os.pidfd_open(process.pid)
    except ProcessLookupError:
        return -1
