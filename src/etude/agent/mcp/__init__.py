"""Tools over MCP (Model Context Protocol): ours for other harnesses, and those of other servers for ours."""

from __future__ import annotations

from etude.agent.mcp.client import McpServer, McpTool, connect_servers, connect_tools, parse_server
from etude.agent.mcp.server import mcp_server, serve_stdio

__all__ = [
    "McpServer",
    "McpTool",
    "connect_servers",
    "connect_tools",
    "mcp_server",
    "parse_server",
    "serve_stdio",
]
