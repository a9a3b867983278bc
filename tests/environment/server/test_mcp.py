"""A session's tools over MCP: its turns are kept like those of our own agent."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip("mcp", reason="needs etude[mcp]")

from mcp import Client
from mcp.client.streamable_http import streamable_http_client
from mcp.server import Server
from mcp.shared.exceptions import MCPError

from etude.agent.mcp.server import mcp_server
from etude.environment.running import ignore_event
from etude.environment.sessions import EnvironmentSession
from etude.records import ToolCall, ToolResult
from etude_quickstart.memory_backend import MemoryBackend
from tests.environment.server.serving import TOKEN, begin, httpx, new_host, new_services, remote
from tests.fakes.faulty_sandbox import FaultyBackend

EDIT = {"path": "lib/tally.py", "start": 2, "text": "    return sum(xs)"}


def server_of(session: EnvironmentSession) -> Server[Any]:
    async def run(call: ToolCall) -> ToolResult:
        (result,) = await session.run_calls([call], {}, ignore_event, ignore_event)
        return result

    return mcp_server(session.context, "etude", run)


def test_calls_over_mcp_are_turns_of_the_session() -> None:
    async def scenario() -> None:
        session = begin()
        async with Client(server_of(session)) as client:
            names = {tool.name for tool in (await client.list_tools()).tools}
            assert "read_file" in names
            assert "finish" not in names
            results = await asyncio.gather(
                client.call_tool("read_file", {"path": "lib/tally.py"}), client.call_tool("edit_lines", EDIT)
            )
            assert [result.is_error for result in results] == [False, False]
            missing = await client.call_tool("read_file", {"path": "absent"})
            assert missing.is_error
        assert session.num_turns == 3
        assert session.facts.num_edits == 1
        assert (await session.submit()).verdict.passed
        await session.close()

    asyncio.run(scenario())


def test_a_failure_of_ours_is_a_protocol_error() -> None:
    async def scenario() -> None:
        session = begin(new_services(FaultyBackend(MemoryBackend(), {"read": 1})))
        async with Client(server_of(session)) as client:
            with pytest.raises(MCPError, match="infrastructure failed"):
                await client.call_tool("read_file", {"path": "lib/tally.py"})
        await session.close()

    asyncio.run(scenario())


def test_an_mcp_client_works_in_a_session_of_the_server() -> None:
    async def scenario() -> None:
        async with remote(new_host()) as server:
            session = await server.create("tally")
            url = f"{server.connection.url}/sessions/{session.id}/mcp"
            headers = {"authorization": f"Bearer {TOKEN}"}
            async with (
                httpx2_client(headers) as line,
                Client(streamable_http_client(url, http_client=line)) as client,
            ):
                assert "grep" in {tool.name for tool in (await client.list_tools()).tools}
                result = await client.call_tool("edit_lines", EDIT)
                text: Any = result.content[0]
                assert text.text == "ok"
            async with httpx.AsyncClient(timeout=60) as plain:
                assert (await plain.post(url, json={})).status_code == 401
            assert (await session.submit()).verdict.passed
            assert (await session.describe())["turns"] == 1
            await session.close()

    asyncio.run(scenario())


def httpx2_client(headers: dict[str, str]) -> Any:
    """The client library that the package mcp uses."""
    import httpx2

    return httpx2.AsyncClient(headers=headers, timeout=60)
