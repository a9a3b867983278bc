"""Commands of a sandbox on a server. None is ever sent twice."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Mapping

from etude.errors import EtudeError
from etude.sandbox.inside.frames import Header
from etude.sandbox.interface import OnOutput
from etude.sandbox.remote.connection import Connection
from etude.sandbox.types import CommandResult, ProcessInfo
from etude.sandbox.wire_types import decode_command, decode_rows

_LAST_OUTPUT_S = 30.0
"""How long the rest of a command's output may take once its end is known."""


class Dropped:
    """Notes whether the server had to drop output that this client was too slow to take."""

    def __init__(self) -> None:
        self.num_bytes = 0

    def take(self, header: Header, payload: bytes) -> None:
        """One frame that is no output."""
        if header.get("event") == "dropped":
            self.num_bytes += int(header["num_bytes"])

    def told(self, result: CommandResult) -> CommandResult:
        """The result, which says so."""
        return dataclasses.replace(result, truncated=True) if self.num_bytes else result


class OutputStream:
    """The output of a background command as it comes, read by a task of its own."""

    def __init__(self, line: Connection, path: str, header: Header, on_output: OnOutput) -> None:
        self._started: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._on_output = on_output
        self.dropped = Dropped()
        self._task = asyncio.ensure_future(self._read(line, path, header))

    async def pid(self) -> int:
        """Process id of the command that the server started. Raises what kept it from starting."""
        try:
            return await asyncio.shield(self._started)
        except asyncio.CancelledError:
            await self.stop()
            raise

    async def drain(self) -> None:
        """Waits for the last output of a command that has ended."""
        await asyncio.wait({self._task}, timeout=_LAST_OUTPUT_S)
        await self.stop()

    async def stop(self) -> None:
        """Reads no more."""
        self._task.cancel()
        await asyncio.wait({self._task})

    async def _read(self, line: Connection, path: str, header: Header) -> None:
        def take(frame: Header, payload: bytes) -> None:
            if frame.get("event") == "started" and not self._started.done():
                self._started.set_result(int(frame["pid"]))
            self.dropped.take(frame, payload)

        try:
            await line.long("POST", path, header=header, on_output=self._on_output, on_frame=take)
        except EtudeError as error:
            # Once the command runs, `wait` is where a lost server shows.
            if not self._started.done():
                self._started.set_exception(error)
        finally:
            self._started.cancel()


class RemoteCommand:
    """`Command` over a connection."""

    def __init__(self, line: Connection, base: str, pid: int, stream: OutputStream | None = None) -> None:
        self._line = line
        self._base = f"{base}/commands/{pid}"
        self._pid = pid
        self._stream = stream
        self._result: CommandResult | None = None

    @property
    def pid(self) -> int:
        """See Command."""
        return self._pid

    async def wait(self, timeout_s: float | None = None) -> CommandResult:
        """See Command.wait."""
        if self._result is None:
            header = {"timeout_s": timeout_s}
            answer = await self._line.long("POST", f"{self._base}/wait", header=header, again=True)
            result = self._line.decoded(decode_command, answer)
            if self._stream is not None:
                await self._stream.drain()
                result = self._stream.dropped.told(result)
            self._result = result
        return self._result

    async def send_stdin(self, data: str | bytes, close: bool = False) -> None:
        """See Command.send_stdin."""
        content = data.encode() if isinstance(data, str) else data
        params = {"close": int(close)}
        await self._line.fetch("POST", f"{self._base}/stdin", params, body=content)

    async def kill(self) -> bool:
        """See Command.kill."""
        return bool((await self._line.call("DELETE", self._base))["killed"])


class RemoteCommands:
    """`Commands` over a connection."""

    def __init__(self, line: Connection, base: str) -> None:
        """`base`: the sandbox's path on the server."""
        self._line = line
        self._base = base
        self._streams: dict[int, OutputStream] = {}

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
        """See Commands.run. `truncated` also says that `on_output` was too slow to see everything."""
        header = _header(cmd, timeout_s, env, cwd, limit_bytes, on_output)
        header["stdin"] = stdin is not None
        payload = stdin.encode() if isinstance(stdin, str) else stdin or b""
        dropped = Dropped()
        answer = await self._line.long(
            "POST", f"{self._base}/commands/run", None, header, payload, on_output, dropped.take
        )
        return dropped.told(self._line.decoded(decode_command, answer))

    async def start(
        self,
        cmd: str,
        timeout_s: float | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        limit_bytes: int = 64 << 10,
        on_output: OnOutput | None = None,
    ) -> RemoteCommand:
        """See Commands.start."""
        header = _header(cmd, timeout_s, env, cwd, limit_bytes, on_output)
        path = f"{self._base}/commands"
        if on_output is None:
            answer = await self._line.call("POST", path, header=header)
            return RemoteCommand(self._line, self._base, answer["pid"])
        stream = OutputStream(self._line, path, header, on_output)
        pid = await stream.pid()
        self._streams[pid] = stream
        return RemoteCommand(self._line, self._base, pid, stream)

    async def list(self) -> list[ProcessInfo]:
        """See Commands.list."""
        rows = await self._line.call("GET", f"{self._base}/commands", again=True)
        return self._line.decoded(lambda raw: decode_rows(ProcessInfo, raw), rows)

    async def connect(self, pid: int) -> RemoteCommand:
        """See Commands.connect."""
        await self._line.call("GET", f"{self._base}/commands/{pid}", again=True)
        return RemoteCommand(self._line, self._base, pid, self._streams.get(pid))

    async def send_stdin(self, pid: int, data: str | bytes) -> None:
        """See Commands.send_stdin."""
        await RemoteCommand(self._line, self._base, pid).send_stdin(data)

    async def kill(self, pid: int) -> bool:
        """See Commands.kill."""
        return await RemoteCommand(self._line, self._base, pid).kill()

    async def close(self) -> None:
        """Reads no more output of background commands."""
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            await stream.stop()


def _header(
    cmd: str,
    timeout_s: float | None,
    env: Mapping[str, str] | None,
    cwd: str | None,
    limit_bytes: int,
    on_output: OnOutput | None,
) -> Header:
    return {
        "cmd": cmd,
        "timeout_s": timeout_s,
        "env": dict(env or {}),
        "cwd": cwd,
        "limit_bytes": limit_bytes,
        "stream": on_output is not None,
    }
