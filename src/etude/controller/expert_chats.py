"""Sessions of a scripted author, and their export as chats to fine-tune foreign models on."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from etude.agent.prompts import tools_and_system
from etude.config import AgentConfig
from etude.errors import ConfigError
from etude.kit.durable import write_text
from etude.records import ToolCall
from etude.tokens.chat.client_tools import call_arguments
from etude.tokens.grammar import ToolSchema


@dataclass(frozen=True, slots=True)
class ScriptedTurn:
    """One message and the tool outputs that followed it."""

    parts: tuple[ToolCall | str, ...]
    """Calls, or raw text where the author makes a mistake."""
    outputs: tuple[str, ...]
    """Empty for the message that ends the session."""


@dataclass(frozen=True, slots=True)
class ScriptedSession:
    """One session of a scripted author."""

    instruction: str
    turns: tuple[ScriptedTurn, ...]


_PASSED = re.compile(r"\d+ passed")


def write_chats(
    sessions: Sequence[ScriptedSession], file: Path, agent: AgentConfig, *, flawless: bool = False
) -> int:
    """Writes sessions as chats, one JSON object a line, with the tools and the system words of `agent`;
    returns how many.

    Sessions are left out in which the author writes malformed tags, or calls a tool that is not offered.
    `flawless`: also those whose tests did not pass in the first and only run. Raises ConfigError for unknown
    tools, and where no sessions are left.
    """
    tools, system = tools_and_system(agent)
    names = {schema.name for schema in tools}
    rows = [
        {
            "messages": _messages(session, tools, system),
            "tools": [schema.function_schema() for schema in tools],
        }
        for session in sessions
        if _is_written(session, names) and (not flawless or _is_flawless(session))
    ]
    if not rows:
        parts = [part for session in sessions for turn in session.turns for part in turn.parts]
        called = sorted({part.name for part in parts if isinstance(part, ToolCall)})
        raise ConfigError(
            f"none of {len(sessions)} sessions calls only these tools" + " and passes at once" * flawless,
            field="agent.tools",
            received=agent.tools,
            fix=f"offer more of those that the author calls ({', '.join(called)}), or read more sessions",
        )
    write_text(file, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return len(rows)


def _is_written(session: ScriptedSession, names: set[str]) -> bool:
    """Whether the whole session can be expressed with these tools."""
    parts = [part for turn in session.turns for part in turn.parts]
    return all(part.name in names if isinstance(part, ToolCall) else "<" not in part for part in parts)


def _is_flawless(session: ScriptedSession) -> bool:
    outputs = [
        output
        for turn in session.turns
        for part, output in zip(turn.parts, turn.outputs, strict=False)
        if isinstance(part, ToolCall) and part.name == "run_tests"
    ]
    return len(outputs) == 1 and _PASSED.fullmatch(outputs[0]) is not None


def _messages(session: ScriptedSession, tools: Sequence[ToolSchema], system: str) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": system},
        {"role": "user", "content": session.instruction},
    ]
    for turn in session.turns:
        made = [part for part in turn.parts if not isinstance(part, str)]
        calls: list[dict[str, Any]] = []
        for call in made:
            arguments = json.dumps(call_arguments(call, tools), ensure_ascii=False)
            function = {"name": call.name, "arguments": arguments}
            calls.append(
                {"id": f"call_{len(messages)}_{len(calls)}", "type": "function", "function": function}
            )
        words = "".join(part for part in turn.parts if isinstance(part, str))
        messages.append({"role": "assistant", "content": words, "tool_calls": calls})
        messages += [
            {"role": "tool", "tool_call_id": call["id"], "content": output}
            for call, output in zip(calls, turn.outputs, strict=False)
        ]
    return messages
