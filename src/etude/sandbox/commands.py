"""Shell commands of a sandbox: in the foreground and in the background."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING

from etude.sandbox.answers import (
    MAX_EXIT_CODE,
    Shapes,
    duration_s,
    exit_code,
    flag,
    integer,
    parts,
    rows,
)
from etude.sandbox.inside.frames import Header
from etude.sandbox.refusals import check_timeout
from etude.sandbox.types import CommandResult, OnOutput, ProcessInfo

if TYPE_CHECKING:
    from etude.sandbox.interface import Sandbox

MEMORY_EXCEEDED = "killed: memory limit exceeded\n"
"""Appended to the error output of a command that was killed by the memory limit."""
_PROCESS: Shapes = frozenset({(int, str, bool, int), (int, str, bool, type(None))})


def command_result(answer: Header, data: bytes, sandbox: str) -> CommandResult:
    """The result of an ended command from the server's answer. Raises SandboxKilledByAgentError."""
    out, err = parts(answer, data, sandbox)
    stderr = err.decode("utf-8", "replace") if err else ""
    if flag(answer, "memory_exceeded", sandbox):
        stderr += MEMORY_EXCEEDED
    return CommandResult(
        exit_code(answer, sandbox),
        out.decode("utf-8", "replace"),
        stderr,
        flag(answer, "timed_out", sandbox),
        duration_s(answer, "duration_s", sandbox),
        flag(answer, "truncated", sandbox),
    )


class Command:
    """A command in the background."""

    def __init__(self, sandbox: Sandbox, pid: int) -> None:
        self._sandbox = sandbox
        self._result: CommandResult | None = None
        self.pid = pid
        """Its process id inside the sandbox."""

    async def wait(self, timeout_s: float | None = None) -> CommandResult:
        """Waits for the end; the result. Raises TimeoutError after `timeout_s`; the command then runs on."""
        if self._result is None:
            async with asyncio.timeout(timeout_s):
                answer, data = await self._sandbox.call({"op": "wait", "pid": self.pid})
            self._result = command_result(answer, data, self._sandbox.id)
        return self._result

    async def send_stdin(self, data: str | bytes, close: bool = False) -> None:
        """Writes to its standard input; `close` ends the input after it."""
        payload = data.encode() if isinstance(data, str) else data
        await self._sandbox.call({"op": "stdin", "pid": self.pid, "close": close}, payload)

    async def kill(self) -> bool:
        """Kills it and its descendants; False if it had ended already."""
        answer, _ = await self._sandbox.call({"op": "kill", "pid": self.pid})
        return flag(answer, "killed", self._sandbox.id)


class Commands:
    """Shell commands inside the sandbox. Several may run at once."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox

    async def run(
        self,
        cmd: str,
        timeout_s: float = 30.0,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        limit_bytes: int = 64 << 10,
        stdin: str | bytes | None = None,
        on_output: OnOutput | None = None,
    ) -> CommandResult:
        """Runs `cmd` with `/bin/sh` in the workspace; at the timeout everything it started is killed.

        A process that it leaves in the background keeps running. `on_output` receives the output as it comes;
        over a connection a slow one may miss some, and then the result is `truncated`. Raises ConfigError for
        an invalid timeout.
        """
        check_timeout(timeout_s)
        header = _header(cmd, timeout_s, env, cwd, limit_bytes, on_output)
        header["stdin"] = stdin is not None
        payload = stdin.encode() if isinstance(stdin, str) else stdin or b""
        return command_result(*await self._sandbox.call(header, payload, on_output), self._sandbox.id)

    async def start(
        self,
        cmd: str,
        timeout_s: float | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        limit_bytes: int = 64 << 10,
        on_output: OnOutput | None = None,
    ) -> Command:
        """Starts `cmd` in the background, with an open standard input. Raises as `run`."""
        if timeout_s is not None:
            check_timeout(timeout_s)
        header = _header(cmd, timeout_s, env, cwd, limit_bytes, on_output)
        answer, _ = await self._sandbox.call({**header, "background": True}, b"", on_output)
        return Command(self._sandbox, process_id(answer, self._sandbox.id))

    async def list(self) -> list[ProcessInfo]:
        """The background commands, including those that have ended and were not waited for."""
        answer, _ = await self._sandbox.call({"op": "processes"})
        processes = rows(answer, "processes", self._sandbox.id, _PROCESS, least=-MAX_EXIT_CODE)
        return [ProcessInfo(*row) for row in processes]

    async def connect(self, pid: int) -> Command:
        """A background command by its process id. Raises ToolArgumentError if there is none."""
        await self._sandbox.call({"op": "lookup", "pid": pid})
        return Command(self._sandbox, pid)

    async def send_stdin(self, pid: int, data: str | bytes) -> None:
        """Writes to the standard input of a background command."""
        await Command(self._sandbox, pid).send_stdin(data)

    async def kill(self, pid: int) -> bool:
        """As `Command.kill`; False if there is no such command."""
        return await Command(self._sandbox, pid).kill()


def process_id(answer: Header, sandbox: str) -> int:
    """Process id of the background command that a call has started. Raises SandboxKilledByAgentError."""
    return integer(answer, "pid", sandbox, least=1)


def _header(
    cmd: str,
    timeout_s: float | None,
    env: Mapping[str, str] | None,
    cwd: str | None,
    limit_bytes: int,
    on_output: OnOutput | None,
) -> Header:
    return {
        "op": "command",
        "cmd": cmd,
        "timeout_s": timeout_s,
        "env": dict(env or {}),
        "cwd": cwd,
        "limit_bytes": limit_bytes,
        "stream": on_output is not None,
    }
