"""Approval of calls that write or run: by the person, as the chosen mode says."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from etude.agent.tools import Tool
from etude.errors import ConfigError
from etude.records import ToolCall

Mode = Literal["preview", "ask", "auto-edit", "full"]
MODES: tuple[str, ...] = get_args(Mode)
MODE_HELP: Mapping[str, str] = {
    "preview": "nothing is written: changes stay in the sandbox; asks before calls that act outside of it",
    "ask": "asks before every edit and every command",
    "auto-edit": "edits are written without asking; asks before commands",
    "full": "never asks",
}
Answer = Literal["once", "always", "no"]
Ask = Callable[[ToolCall], Awaitable[Answer]]

REFUSED = "the user refused this call"


def checked_mode(name: str, in_place: bool = False) -> Mode:
    """The mode of that name. Raises ConfigError. `in_place`: there is no copy, so no preview either."""
    if in_place and name == "preview":
        raise ConfigError(
            "with --in-place changes take effect at once, and cannot be previewed",
            field="--approve",
            received=name,
            fix="choose ask, auto-edit or full, or leave --in-place out",
        )
    for mode in get_args(Mode):
        if mode == name:
            return mode
    raise ConfigError("no such mode", field="--approve", received=name, fix="use one of " + ", ".join(MODES))


@dataclass(slots=True, eq=False)
class Approver:
    """Implements `Approve` of the agent's tools."""

    mode: Mode
    tools: Mapping[str, Tool]
    ask: Ask | None = None
    """Asks the person; None: nobody can be asked, and calls that need an answer are refused."""
    isolated: bool = True
    """Whether commands are isolated from the person's own files; if not, a preview asks before them."""
    always: set[str] = field(default_factory=set[str])
    """Tools that the person has allowed for the rest of the session."""

    async def __call__(self, call: ToolCall) -> str | None:
        """None if the call may run; else the reason why not, for the agent."""
        if self.mode == "full" or call.name in self.always:
            return None
        if self.mode == "preview" and not self._acts_outside(call):
            return None
        if self.mode == "auto-edit" and not self.runs_something(call):
            return None
        if self.ask is None:
            return "nobody is there to allow this call"
        answer = await self.ask(call)
        if answer == "always":
            self.always.add(call.name)
        return REFUSED if answer == "no" else None

    def _acts_outside(self, call: ToolCall) -> bool:
        tool = self.tools.get(call.name)
        if tool is not None and tool.access(call.arguments).outside:
            return True
        return not self.isolated and self.runs_something(call)

    def runs_something(self, call: ToolCall) -> bool:
        """Whether the call may change more than the files that it names."""
        tool = self.tools.get(call.name)
        if tool is None:
            return True
        access = tool.access(call.arguments)
        return "." in access.writes or access.barrier
