"""Names of the HTTP headers that server, router and their clients share."""

from __future__ import annotations

SESSION_HEADER = "x-session-id"
"""Names a conversation: its turns go to the replica that holds its prefix."""
VERSION_HEADER = "x-etude-version"
"""`LINEAGE@STEP`: tokens of this policy version are wanted, and of no other."""
POOL_HEADER = "x-etude-pool"
"""Which of a router's pools shall answer."""
EXTENSIONS_HEADER = "x-etude-extensions"
"""What a client wants beside OpenAI's answer: `tokens`."""
SIDE_CHANNEL_HEADER = "x-etude-side-channel"
"""Of an answer: the path of its tokens."""
