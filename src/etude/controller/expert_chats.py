"""Sessions of the scripted expert as chats: what models of others are fine-tuned on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from etude.agent.prompts import MANNERS
from etude.kit.durable import write_text
from etude.rollout.corpus import ScriptedSession
from etude.tokens.chat.client_tools import call_arguments
from etude.tokens.grammar import ToolSchema


def write_chats(sessions: Sequence[ScriptedSession], file: Path, tools: Sequence[ToolSchema]) -> int:
    """Writes sessions as chats, one JSON object a line, with the system message and these tools; returns how
    many. Sessions are left out in which the expert shows what is malformed in tags of our own."""
    rows = [
        {"messages": _messages(session, tools), "tools": [schema.function_schema() for schema in tools]}
        for session in sessions
        if not any("<" in part for turn in session.turns for part in turn.parts if isinstance(part, str))
    ]
    write_text(file, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return len(rows)


def _messages(session: ScriptedSession, tools: Sequence[ToolSchema]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": MANNERS},
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
