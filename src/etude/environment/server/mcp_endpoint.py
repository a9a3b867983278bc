"""A session's tools over MCP's streamable HTTP. Needs the package mcp."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from starlette.types import Receive, Scope, Send

from etude.environment.mcp import RunTurn, session_server
from etude.environment.sessions import EnvironmentSession
from etude.errors import SandboxError

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
