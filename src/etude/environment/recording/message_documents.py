"""Messages as plain JSON values, exact in both directions: for the journal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from etude.tokens.chat.client_tools import client_tool
from etude.tokens.chat.messages import (
    Answer,
    Call,
    Message,
    Opening,
    Results,
    SystemWords,
    UserWords,
)


def message_document(message: Message) -> dict[str, Any]:
    """The message as plain JSON values."""
    match message:
        case Opening(system, tools, agent):
            raw = [dict(tool.raw["function"]) for tool in tools]
            return {"kind": "opening", "system": system, "tools": raw, "agent": agent}
        case SystemWords(text):
            return {"kind": "system", "text": text}
        case UserWords(text):
            return {"kind": "user", "text": text}
        case Results(outputs):
            return {"kind": "results", "outputs": list(outputs)}
        case Answer(text, calls, reasoning):
            rows = [[call.id, call.name, call.arguments] for call in calls]
            return {"kind": "answer", "text": text, "calls": rows, "reasoning": reasoning}


def message_of(document: Mapping[str, Any]) -> Message:
    """What `message_document` gave. Raises KeyError, ValueError or TypeError for anything else."""
    match document["kind"]:
        case "opening":
            tools = tuple(
                client_tool(row["name"], row["description"], row["parameters"], "tools")
                for row in document["tools"]
            )
            return Opening(document["system"], tools, document["agent"])
        case "system":
            return SystemWords(document["text"])
        case "user":
            return UserWords(document["text"])
        case "results":
            return Results(tuple(document["outputs"]))
        case "answer":
            calls = tuple(Call(*row) for row in document["calls"])
            return Answer(document["text"], calls, document["reasoning"])
        case kind:
            raise ValueError(f"unknown kind {kind!r}")
