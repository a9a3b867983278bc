"""Names of the HTTP headers that server, router and their clients share."""

from __future__ import annotations

SESSION_HEADER = "x-session-id"
"""Identifies a conversation: its turns go to the replica that caches its prefix."""
VERSION_HEADER = "x-etude-version"
"""`LINEAGE@STEP`: pins the request to this policy version."""
POOL_HEADER = "x-etude-pool"
"""The router pool that should answer."""
EXTENSIONS_HEADER = "x-etude-extensions"
"""Requested extensions of OpenAI's response: `tokens`."""
SIDE_CHANNEL_HEADER = "x-etude-side-channel"
"""Response header: the path under which the response's tokens can be fetched."""
