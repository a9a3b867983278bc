"""Commands over a sandbox's channel: in the foreground, in the background, in shell sessions."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Protocol

from etude.sandbox.answers import (
    MAX_EXIT_CODE,
    Shapes,
    duration_s,
    exit_code,
    flag,
    integer,
    parts,
    rows,
    text,
)
from etude.sandbox.arguments import check_timeout
from etude.sandbox.channel import Answer
from etude.sandbox.inside.frames import Header
from etude.sandbox.interface import OnOutput
from etude.sandbox.paths import normal_path
from etude.sandbox.types import CommandResult, ProcessInfo

MEMORY_EXCEEDED = "killed: memory limit exceeded\n"
"""What the error output of a command ends with that was ended for want of memory."""
_PROCESS: Shapes = frozenset({(int, str, bool, int), (int, str, bool, type(None))})


class Line(Protocol):
    """What commands need of their sandbox."""

    @property
    def id(self) -> str:
        """Of the sandbox; errors name it."""
        ...

    @property
    def workspace(self) -> str: ...
    @property
    def environment(self) -> Mapping[str, str]:
        """Of every command, under what the caller adds."""
        ...

    async def call(self, header: Header, payload: bytes = b"", path: str | None = None) -> Answer: ...

    async def job(self, header: Header, payload: bytes = b"", on_output: OnOutput | None = None) -> Answer:
        """A request that lasts as long as its `timeout_s` and some; a cancelled caller ends it."""
        ...

    async def wait(self, pid: int) -> Answer:
        """The end of a background command, without a deadline."""
        ...

    def listen(self, pid: int, on_output: OnOutput) -> None:
        """From now on `on_output` gets the output of a background command."""
        ...


def command_result(answer: Header, data: bytes, sandbox: str) -> CommandResult:
    """What an answer of the server says about an ended command. Raises SandboxError if it makes no sense."""
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


class ChannelCommand:
    """`Command` over a channel."""

    def __init__(self, line: Line, pid: int) -> None:
        self._line = line
        self._pid = pid
        self._result: CommandResult | None = None

    @property
    def pid(self) -> int:
        """See Command."""
        return self._pid

    async def wait(self, timeout_s: float | None = None) -> CommandResult:
        """See Command.wait."""
        if self._result is None:
            async with asyncio.timeout(timeout_s):
                self._result = command_result(*await self._line.wait(self._pid), self._line.id)
        return self._result

    async def send_stdin(self, data: str | bytes, close: bool = False) -> None:
        """See Command.send_stdin."""
        payload = data.encode() if isinstance(data, str) else data
        await self._line.call({"op": "stdin", "pid": self._pid, "close": close}, payload)

    async def kill(self) -> bool:
        """See Command.kill."""
        answer, _ = await self._line.call({"op": "kill", "pid": self._pid})
        return flag(answer, "killed", self._line.id)


class ChannelCommands:
    """`Commands` over a sandbox's channel."""

    def __init__(self, line: Line) -> None:
        self._line = line

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
        """See Commands.run. Raises ConfigError for a timeout that is no time."""
        check_timeout(timeout_s)
        header = self._header(cmd, timeout_s, env, cwd, limit_bytes, on_output)
        header["stdin"] = stdin is not None
        payload = stdin.encode() if isinstance(stdin, str) else stdin or b""
        return command_result(*await self._line.job(header, payload, on_output), self._line.id)

    async def start(
        self,
        cmd: str,
        timeout_s: float | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        limit_bytes: int = 64 << 10,
        on_output: OnOutput | None = None,
    ) -> ChannelCommand:
        """See Commands.start. Raises ConfigError as `run`."""
        if timeout_s is not None:
            check_timeout(timeout_s)
        header = self._header(cmd, timeout_s, env, cwd, limit_bytes, on_output)
        answer, _ = await self._line.call({**header, "background": True})
        pid = integer(answer, "pid", self._line.id, least=1)
        if on_output is not None:
            self._line.listen(pid, on_output)
        return ChannelCommand(self._line, pid)

    async def list(self) -> list[ProcessInfo]:
        """See Commands.list."""
        answer, _ = await self._line.call({"op": "processes"})
        processes = rows(answer, "processes", self._line.id, _PROCESS, least=-MAX_EXIT_CODE)
        return [ProcessInfo(*row) for row in processes]

    async def connect(self, pid: int) -> ChannelCommand:
        """See Commands.connect."""
        await self._line.call({"op": "lookup", "pid": pid})
        return ChannelCommand(self._line, pid)

    async def send_stdin(self, pid: int, data: str | bytes) -> None:
        """See Commands.send_stdin."""
        await ChannelCommand(self._line, pid).send_stdin(data)

    async def kill(self, pid: int) -> bool:
        """See Commands.kill."""
        return await ChannelCommand(self._line, pid).kill()

    def _header(
        self,
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
            "env": {**self._line.environment, **(env or {})},
            "cwd": normal_path(cwd or ".", self._line.workspace),
            "limit_bytes": limit_bytes,
            "stream": on_output is not None,
        }


class ChannelShells:
    """Shell sessions over a sandbox's channel. Commands of one session queue."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self._queues: dict[str, asyncio.Lock] = {}

    async def create(self, cwd: str | None, env: Mapping[str, str] | None) -> str:
        """See Sandbox.create_session."""
        header: Header = {
            "op": "shell.open",
            "cwd": normal_path(cwd or ".", self._line.workspace),
            "env": {**self._line.environment, **(env or {})},
        }
        answer, _ = await self._line.call(header, b"", cwd)
        return text(answer, "session", self._line.id)

    async def run(self, session: str, cmd: str, timeout_s: float, limit_bytes: int) -> CommandResult:
        """See Sandbox.run_in_session. Raises ConfigError for a timeout that is no time."""
        check_timeout(timeout_s)
        header: Header = {
            "op": "shell.run",
            "session": session,
            "cmd": cmd,
            "timeout_s": timeout_s,
            "limit_bytes": limit_bytes,
        }
        async with self._queues.setdefault(session, asyncio.Lock()):
            return command_result(*await self._line.job(header), self._line.id)

    async def close(self, session: str) -> None:
        """See Sandbox.close_session."""
        self._queues.pop(session, None)
        await self._line.call({"op": "shell.close", "session": session})
