"""Tools over MCP (Model Context Protocol): `server` offers ours to other harnesses, `client` uses those of
other servers. Both import the package `mcp`, an extra; this file does not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from etude.config import McpConfig
from etude.sandbox.interface import Sandbox

if TYPE_CHECKING:
    from etude.agent.mcp.client import SessionServers


def open_servers(servers: Mapping[str, McpConfig], sandbox: Sandbox) -> SessionServers | None:
    """The servers of a session, not started yet; None where there are none."""
    if not servers:
        return None
    from etude.agent.mcp.client import SessionServers  # heavy, and an extra

    return SessionServers(servers, sandbox)
