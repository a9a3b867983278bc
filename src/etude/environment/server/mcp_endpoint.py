"""A session's tools over MCP's streamable HTTP."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from mcp.server import Server
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from starlette.types import Receive, Scope, Send

from etude.agent.mcp.server import mcp_server
from etude.environment.sessions import EnvironmentSession
from etude.records import ToolCall, ToolResult

RunTurn = Callable[[Sequence[ToolCall]], Awaitable[list[ToolResult]]]


def session_server(session: EnvironmentSession, run_turn: RunTurn) -> Server[Any]:
    """An MCP server with the tools of a session, each call of which is a turn that `run_turn` runs."""

    async def run(call: ToolCall) -> ToolResult:
        (result,) = await run_turn([call])
        return result

    return mcp_server(session.context, f"etude {session.id}", run)


async def answer_mcp(
    session: EnvironmentSession, run_turn: RunTurn, scope: Scope, receive: Receive, send: Send
) -> None:
    """Answers one request, as ASGI gives it.

    Nothing is kept for the next: what matters is in our session, so a client may come back at any time.
    """
    manager = StreamableHTTPSessionManager(
        session_server(session, run_turn), json_response=True, stateless=True
    )
    async with manager.run():
        await manager.handle_request(scope, receive, send)
