"""The tool `finish`."""

from __future__ import annotations

from etude.agent.tools.interface import BARRIER, Access, Arguments, ToolContext
from etude.records import ToolResult
from etude.tokens.grammar import ToolSchema


class Finish:
    """Ends the session: the agent considers its work done. Takes no arguments, shows nothing.

    Waits for all calls before it; calls after it in one turn are not run. Errors: none.
    """

    repeatable = True
    schema = ToolSchema("finish", "End the session: the work is done.")

    def access(self, arguments: Arguments) -> Access:
        return BARRIER

    async def run(self, arguments: Arguments, context: ToolContext) -> ToolResult:
        return ToolResult("", finished=True)
