"""Serves the tools of a session over MCP, so that other harnesses work in the same environment.

Each call is one turn of its own and passes the same checks as a sampled one. Calls that arrive while others
run wait for those that they conflict with, as within a turn; all others run at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import mcp_types as types
from mcp.server import Server
from mcp.server.context import ServerRequestContext
from mcp.server.stdio import stdio_server
from mcp.shared.exceptions import MCPError

from etude.agent.execution import execute_calls
from etude.agent.tools.interface import Access, Tool, ToolContext
from etude.agent.tools.mcp_schemas import text_of
from etude.errors import AgentError, EtudeError
from etude.records import ToolCall, ToolResult

RunCall = Callable[[ToolCall], Awaitable[ToolResult]]
_NAME = "etude"
_LEFT_OUT = frozenset({"finish"})
"""Tools that steer a session of ours: another harness ends its own."""


def mcp_server(context: ToolContext, name: str = _NAME, run: RunCall | None = None) -> Server[Any]:
    """A server with the tools of `context`, without `finish`. `run`: runs a call; without it they run in
    `context`.

    A call that failed is a result with `isError` and the text that an agent of ours would read; failing
    infrastructure is a protocol error, never a result.
    """
    tools = {key: tool for key, tool in context.tools.items() if key not in _LEFT_OUT}
    running: dict[asyncio.Future[None], Access] = {}
    """The calls that run, in order of arrival."""

    async def run_in_order(call: ToolCall) -> ToolResult:
        """Waits for earlier calls that it conflicts with, then runs it. Raises as `execute_calls`."""
        access = tools[call.name].access(call.arguments)
        before = [ended for ended, other in running.items() if other.conflicts(access)]
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        running[ended] = access
        try:
            if before:
                await asyncio.wait(before)
            return (await execute_calls((call,), context))[0]
        finally:
            del running[ended]
            ended.set_result(None)

    async def list_tools(
        request: ServerRequestContext[Any], params: types.PaginatedRequestParams | None
    ) -> types.ListToolsResult:
        return types.ListToolsResult(tools=[_described(tool) for tool in tools.values()])

    async def call_tool(
        request: ServerRequestContext[Any], params: types.CallToolRequestParams
    ) -> types.CallToolResult:
        if params.name not in tools:
            raise MCPError(types.INVALID_PARAMS, f"unknown tool {params.name[:40]}")
        given = params.arguments or {}
        arguments = {key: text_of(value) for key, value in given.items() if value is not None}
        try:
            result = await (run or run_in_order)(ToolCall(params.name, arguments))
        except EtudeError as error:
            # Infrastructure, or a sandbox that the agent killed: nothing that a tool could answer.
            kind = "the sandbox has ended" if isinstance(error, AgentError) else "infrastructure failed"
            raise MCPError(types.INTERNAL_ERROR, f"{kind}: {error}") from error
        return types.CallToolResult(
            content=[types.TextContent(text=result.output)], is_error=result.error is not None
        )

    return Server(name, on_list_tools=list_tools, on_call_tool=call_tool)


async def serve_stdio(context: ToolContext, name: str = _NAME) -> None:
    """Serves one client over this process' standard input and output, until the input ends."""
    server = mcp_server(context, name)
    async with stdio_server() as (reader, writer):
        await server.run(reader, writer, server.create_initialization_options())


def _described(tool: Tool) -> types.Tool:
    access = tool.access({})
    hints = types.ToolAnnotations(
        read_only_hint=not access.writes and not access.barrier, idempotent_hint=tool.repeatable
    )
    schema = tool.schema
    return types.Tool(
        name=schema.name, description=schema.description, input_schema=schema.json_schema(), annotations=hints
    )
