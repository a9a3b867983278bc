"""A session's tools over MCP, by streamable HTTP: `/sessions/{id}/mcp`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from starlette.types import Message, Receive, Scope, Send

from etude.environment.server.host import Held, SessionHost
from etude.environment.server.requests import Box, Host
from etude.records import ToolCall, ToolResult
from etude.serving.application import read_body
from etude.serving.json_bodies import off_the_loop, parse_json

router = APIRouter()
_BODY_BYTES = 8 << 20


class McpAnswer(Response):
    """Has the session answer the request, whose body was read already, each call as one turn of it.

    Nothing is kept for the next: what matters is in our session, so a client may come back at any time.
    """

    def __init__(self, host: SessionHost, held: Held, body: bytes) -> None:
        super().__init__()
        self._host = host
        self._held = held
        self._body: bytes | None = body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The answer as ASGI sends it."""

        async def receive_again() -> Message:
            body, self._body = self._body, None
            return await receive() if body is None else {"type": "http.request", "body": body}

        async def run(call: ToolCall) -> ToolResult:
            (result,) = await self._host.run(self._held, [call])
            return result

        make_server, manager_of = await asyncio.to_thread(_load_package)
        async with self._host.using(self._held) as session:
            server = make_server(session.context, f"etude {session.id}", run)
            manager = manager_of(server, json_response=True, stateless=True)
            async with manager.run():
                await manager.handle_request(scope, receive_again, send)


@router.post("/sessions/{session_id}/mcp", include_in_schema=False)
async def mcp(request: Request, held: Box, host: Host) -> Response:
    """One MCP request. The server sends nothing unasked, so there is no stream to GET."""
    body = await read_body(request, min(host.limits.body_bytes, _BODY_BYTES))
    if body:
        await off_the_loop(lambda: parse_json(body), len(body))  # the package's own reading has no bounds
    return McpAnswer(host, held, body)


def _load_package() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """What answers. Its package takes its time: the server does without until somebody asks."""
    from mcp.server.streamable_http_manager import StreamableHTTPSessionManager

    from etude.agent.mcp.server import mcp_server

    return mcp_server, StreamableHTTPSessionManager
