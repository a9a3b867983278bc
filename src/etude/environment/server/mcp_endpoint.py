"""A session's tools over MCP's streamable HTTP. Needs the package mcp."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from mcp.server import Server
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from starlette.types import Receive, Scope, Send

from etude.agent.mcp.server import mcp_server
from etude.agent.tools import Access, Tool, ToolContext
from etude.environment.sessions import EnvironmentSession
from etude.errors import SandboxError
from etude.records import ToolCall, ToolResult
from etude.tokens.grammar import ToolSchema

RunTurn = Callable[[Sequence[ToolCall]], Awaitable[list[ToolResult]]]


class TurnTool:
    """Implements `Tool`: a call of the inner tool is a turn of a session."""

    def __init__(self, tool: Tool, run_turn: RunTurn) -> None:
        self.schema: ToolSchema = tool.schema
        self._tool = tool
        self._run_turn = run_turn

    @property
    def repeatable(self) -> bool:
        """Never: the session itself tries again where that is safe."""
        return False

    def access(self, arguments: Mapping[str, str]) -> Access:
        return self._tool.access(arguments)

    async def run(self, arguments: Mapping[str, str], context: ToolContext) -> ToolResult:
        (result,) = await self._run_turn([ToolCall(self.schema.name, arguments)])
        return result


def session_server(session: EnvironmentSession, run_turn: RunTurn) -> Server[Any]:
    """An MCP server with the tools of a session, each call of which is a turn that `run_turn` runs."""
    tools = {name: TurnTool(tool, run_turn) for name, tool in session.context.tools.items()}
    return mcp_server(replace(session.context, tools=tools), name=f"etude {session.id}")


_START_S = 60.0


class McpEndpoint:
    """A session's tools over streamable HTTP, for as long as the session lives."""

    def __init__(self, session: EnvironmentSession, run_turn: RunTurn) -> None:
        self._session = session
        # Without sessions of its own: what matters is kept in ours, so a client may come back at any time.
        self._manager = StreamableHTTPSessionManager(
            session_server(session, run_turn), json_response=True, stateless=True
        )
        self._ready = asyncio.Event()

    async def serve(self) -> None:
        """Runs until the session is closed."""
        async with self._manager.run():
            self._ready.set()
            await self._session.closed.wait()

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request, as ASGI gives it. Raises SandboxError if `serve` does not run."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_START_S):
                await self._ready.wait()
        if not self._ready.is_set() or self._session.closed.is_set():
            raise SandboxError("the session does not serve MCP", field="session", received=self._session.id)
        await self._manager.handle_request(scope, receive, send)
