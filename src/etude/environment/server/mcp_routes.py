"""A session's tools over MCP, by streamable HTTP: `/sessions/{id}/mcp`."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import APIRouter, Request
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from etude.environment.server.host import Held, SessionHost
from etude.environment.server.requests import Box, Host
from etude.records import ToolCall, ToolResult

router = APIRouter()


class McpAnswer(Response):
    """Hands the request on to the session's endpoint."""

    def __init__(self, host: SessionHost, held: Held) -> None:
        super().__init__()
        self._host = host
        self._held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The answer as ASGI sends it."""
        async with self._host.using(self._held):
            await self._held.mcp.handle(scope, receive, send)


@router.api_route("/sessions/{session_id}/mcp", methods=["GET", "POST", "DELETE"], include_in_schema=False)
async def mcp(request: Request, held: Box, host: Host) -> Response:
    """One MCP request. Raises ConfigError without the package mcp."""
    if held.mcp is None:
        # An optional package: the server does without until somebody asks.
        from etude.environment.server.mcp_endpoint import McpEndpoint

        async def run_turn(calls: Sequence[ToolCall]) -> list[ToolResult]:
            return await host.run(held, calls)

        held.mcp = McpEndpoint(held.session, run_turn)
        host.in_background(held.mcp.serve())
    return McpAnswer(host, held)
