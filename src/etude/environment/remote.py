"""Client of the environment server: `RemoteSession` is a `Workspace` like any other.

A turn is identified by its number. If its answer was lost it is requested again and never run twice, so a
broken connection costs only time; if the server stays unreachable, that is an InfrastructureError. Errors
have the same types as on the server.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from etude.agent.inputs import result_of
from etude.environment.grading import Outcome
from etude.environment.running import was_run
from etude.environment.wire import OUTCOME, task_document, turn_document
from etude.errors import InfrastructureError, SandboxError, UserError
from etude.kit.retry import Backoff, retry_async
from etude.protocols import OnCall, OnResult
from etude.records import Status, Task, ToolCall, ToolResult
from etude.sandbox.answers import changes
from etude.sandbox.errors import CapacityError
from etude.sandbox.inside.frames import Header
from etude.sandbox.remote.connection import RETRY, Connection
from etude.sandbox.wire_types import decode_error
from etude.serving.client import Transport

BUSY_S = 30.0
"""How long requests to a server without capacity are retried."""


class RemoteEnvironment:
    """One environment server, for one event loop. `close` it at the end; its sessions continue to exist."""

    def __init__(
        self,
        url: str,
        token: str | None = None,
        transport: Transport | None = None,
        backoff: Backoff = RETRY,
    ) -> None:
        self.connection = Connection(url, token, transport, backoff, "environment")

    async def create(self, task: Task | str | None = None, **source: Any) -> RemoteSession:
        """A new session on a task (whole, or by its name on the server), or on another source.

        `source`: the fields of `POST /sessions`. Raises UserError, CapacityError, SandboxError.
        """
        body = dict(source)
        if task is not None:
            body["task"] = task if isinstance(task, str) else task_document(task)
        headers = {"idempotency-key": secrets.token_hex(16)}
        row, _ = await self.connection.long("POST", "/sessions", header=body, headers=headers, again=True)
        return RemoteSession(self, row)

    async def connect(self, session_id: str, num_turns: int | None = None) -> RemoteSession:
        """Connects to an existing session. `num_turns`: turns whose results the caller has; by default all.

        A caller that was disconnected during a turn passes the number of turns before it: that turn is then
        requested again. Raises SandboxMissingError, and UserError for an invalid id.
        """
        if re.fullmatch(r"[A-Za-z0-9_-]+", session_id) is None:
            raise UserError(
                "is not a session id", field="session", received=session_id, fix="use one that `list` shows"
            )
        row = await self.connection.call("GET", f"/sessions/{session_id}", again=True)
        return RemoteSession(self, row, num_turns)

    async def list(self) -> list[dict[str, Any]]:
        """The descriptions of this tenant's sessions, oldest first."""
        return await self.connection.call("GET", "/sessions", again=True)

    async def tools(self) -> dict[str, Any]:
        """The tools of the server's sessions, and their digest."""
        return await self.connection.call("GET", "/tools", again=True)

    async def close(self) -> None:
        """Closes the connection."""
        await self.connection.close()


@dataclass(slots=True)
class _Progress:
    """Reports each event of a turn to its listeners once, however often the turn is requested."""

    calls: Sequence[ToolCall]
    on_call: OnCall
    on_result: OnResult
    begun: set[int] = field(default_factory=set[int])
    ended: set[int] = field(default_factory=set[int])

    def on_frame(self, header: Header, payload: bytes) -> None:
        position = header.get("position")
        if header.get("event") == "call_started":
            self.start(int(position))  # type: ignore[arg-type]
        elif header.get("event") == "call_ended":
            self.end(int(position), result_of(header["result"]))  # type: ignore[arg-type]

    def start(self, position: int) -> None:
        if position not in self.begun:
            self.begun.add(position)
            self.on_call(position, self.calls[position])

    def end(self, position: int, result: ToolResult) -> None:
        if position not in self.ended:
            self.start(position)
            self.ended.add(position)
            self.on_result(position, self.calls[position], result)


class RemoteSession:
    """Implements `Workspace` and the other methods of EnvironmentSession over HTTP."""

    def __init__(
        self, environment: RemoteEnvironment, row: Mapping[str, Any], num_turns: int | None = None
    ) -> None:
        self.id = str(row["id"])
        self.described = dict(row)
        """The server's description of it at creation or connection."""
        self.num_turns = int(row["turns"]) if num_turns is None else num_turns
        """Turns whose results were received."""
        self._environment = environment
        self._connection = environment.connection

    async def run_calls(
        self,
        calls: Sequence[ToolCall],
        known: Mapping[int, ToolResult],
        on_call: OnCall,
        on_result: OnResult,
    ) -> list[ToolResult]:
        progress = _Progress(calls, on_call, on_result, set(known), set(known))
        path, body = f"/sessions/{self.id}/turns", turn_document(self.num_turns, calls, known)

        def turn() -> Awaitable[tuple[Any, bytes]]:
            return self._connection.long("POST", path, header=body, on_frame=progress.on_frame, again=True)

        # Retried while the server has no capacity: then no call has run.
        backoff = Backoff(0.05, 2.0, within_s=BUSY_S)
        answer, _ = await retry_async(turn, CapacityError, backoff)
        results = self._connection.decode_with(_results, answer)
        # Results without an event, because the connection broke or no call had to run.
        for position, result in enumerate(results):
            if position in progress.begun or was_run(result):
                progress.end(position, result)
        self.num_turns += 1
        return results

    async def archive(self, path: str, text: str) -> str:
        answer, _ = await self._post("archive", {"path": path, "text": text})
        return str(answer["error"])

    async def submit(self, status: Status | None = None, cause: str = "") -> Outcome:
        """See EnvironmentSession.submit."""
        body = {"status": None if status is None else status.value, "cause": cause}
        answer, _ = await self._post("submit", body)
        return self._connection.decode_with(OUTCOME.validate_python, answer)

    async def diff(self) -> dict[str, bytes | None]:
        return changes(*await self._connection.long("GET", f"/sessions/{self.id}/diff", again=True), self.id)

    async def pause(self) -> str:
        return str((await self._post("pause", {}))[0]["kept"])

    async def resume(self) -> None:
        await self._post("resume", {})

    async def fork(
        self, count: int = 1, turn: int | None = None
    ) -> list[RemoteSession | InfrastructureError]:
        """See EnvironmentSession.fork; `described["differences"]` are those of a replay."""
        headers = {"idempotency-key": secrets.token_hex(16)}
        body = {"count": count, "turn": turn}
        rows, _ = await self._connection.long(
            "POST", f"/sessions/{self.id}/fork", header=body, headers=headers, again=True
        )
        return [self._fork_of(row) for row in rows]

    async def describe(self) -> dict[str, Any]:
        """The server's current description of it."""
        return await self._connection.call("GET", f"/sessions/{self.id}", again=True)

    async def close(self) -> None:
        """Ends it on the server."""
        await self._connection.long("DELETE", f"/sessions/{self.id}")

    def _fork_of(self, row: Any) -> RemoteSession | InfrastructureError:
        if "error" not in row:
            return RemoteSession(self._environment, row)
        error = decode_error(row["error"])
        return error if isinstance(error, InfrastructureError) else SandboxError(str(error), field="fork")

    async def _post(self, operation: str, body: Mapping[str, Any]) -> tuple[Any, bytes]:
        """An idempotent request."""
        return await self._connection.long(
            "POST", f"/sessions/{self.id}/{operation}", header=body, again=True
        )


def _results(answer: Any) -> list[ToolResult]:
    return [result_of(result) for result in answer["results"]]
