"""Interface between an agent and its workspace: a sandbox in this process, or one behind a server."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from etude.records import ToolCall, ToolResult

OnCall = Callable[[int, ToolCall], None]
"""Called with the position of a call in its turn, and the call, as it begins to run."""
OnResult = Callable[[int, ToolCall, ToolResult], None]
"""Called as a call ends."""


class Workspace(Protocol):
    """Runs an agent's tool calls.

    Raises InfrastructureError if something behind it failed, and AgentError if the agent itself ended the
    workspace: neither is a result that the agent could read.
    """

    async def run_calls(
        self,
        calls: Sequence[ToolCall],
        known: Mapping[int, ToolResult],
        on_call: OnCall,
        on_result: OnResult,
    ) -> list[ToolResult]:
        """The results of one turn's calls, in call order. Calls whose results are `known` are not run."""
        ...

    async def archive(self, path: str, text: str) -> str:
        """Writes `text` to the file `path`, where the agent can read it; returns "" or why that failed."""
        ...
