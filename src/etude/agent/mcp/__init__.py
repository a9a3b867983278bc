"""Tools over MCP (Model Context Protocol): ours for other harnesses, and those of other servers for ours."""

from __future__ import annotations

from etude.agent.mcp.client import SessionServers, describe_servers, parse_server
from etude.agent.mcp.server import mcp_server, serve_stdio

__all__ = [
    "SessionServers",
    "describe_servers",
    "mcp_server",
    "parse_server",
    "serve_stdio",
]
