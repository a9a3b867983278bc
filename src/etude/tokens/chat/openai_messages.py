"""The conversation in a request of OpenAI's chat completions: messages and tools read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from etude.serving.json_bodies import is_too_deep
from etude.tokens.chat.client_tools import ClientTool, client_tool, tool_entries
from etude.tokens.chat.fields import objects, text, words, wrong
from etude.tokens.chat.messages import Answer, Call, Message, SystemWords, UserWords, ordered_results


def read_tools(value: object) -> tuple[ClientTool, ...]:
    """The tools that a request brings. Raises BadRequestError."""
    return tuple(_tool(entry, place) for place, entry in enumerate(tool_entries(value)))


def _tool(entry: Mapping[str, Any], place: int) -> ClientTool:
    function, field = entry.get("function"), f"tools[{place}].function"
    if entry.get("type", "function") != "function" or not isinstance(function, dict):
        raise wrong(f"tools[{place}]", entry.get("type"), 'of type "function"')
    return client_tool(function.get("name"), function.get("description"), function.get("parameters"), field)


def read_messages(entries: Sequence[Mapping[str, Any]]) -> tuple[str, list[Message]]:
    """The system's words at the start, and what follows. Raises BadRequestError."""
    system: list[str] = []
    messages: list[Message] = []
    results: list[tuple[str, str]] = []
    calls: tuple[Call, ...] = ()
    for place, entry in enumerate(entries):
        role, field = entry.get("role"), f"messages[{place}]"
        if results and role != "tool":
            messages.append(ordered_results(results, calls))
            results = []
        if role in ("system", "developer"):
            said = _content(entry.get("content"), f"{field}.content")
            if messages:
                messages.append(SystemWords(said))
            else:
                system.append(said)
        elif role == "user":
            messages.append(UserWords(_content(entry.get("content"), f"{field}.content")))
        elif role == "assistant":
            answer = _answer(entry, field)
            calls = answer.calls
            messages.append(answer)
        elif role == "tool":
            output = _content(entry.get("content"), f"{field}.content")
            results.append((text(entry.get("tool_call_id"), f"{field}.tool_call_id"), output))
        else:
            raise wrong(f"{field}.role", role, "system, developer, user, assistant or tool")
    if results:
        messages.append(ordered_results(results, calls))
    return "\n\n".join(system), messages


def _content(content: object, field: str, joint: str = "\n") -> str:
    return words(content, field, joint, ("text", "refusal"))


def _answer(entry: Mapping[str, Any], field: str) -> Answer:
    content = entry.get("content")
    said = "" if content is None else _content(content, f"{field}.content", "")
    calls: list[Call] = []
    for place, call in enumerate(objects(entry.get("tool_calls") or [], f"{field}.tool_calls")):
        where = f"{field}.tool_calls[{place}].function"
        function = call.get("function")
        if not isinstance(function, dict):
            raise wrong(where, function, "an object")
        arguments = function.get("arguments")
        name = text(function.get("name"), f"{where}.name")
        calls.append(Call(str(call.get("id") or ""), name, read_arguments(arguments)))
    reasoning = entry.get("reasoning_content") or entry.get("reasoning") or ""
    return Answer(said, tuple(calls), reasoning if isinstance(reasoning, str) else "")


def read_arguments(value: object) -> Any:
    """Arguments come as JSON text; some clients send the object itself, or nothing for no arguments."""
    if not isinstance(value, str):
        return {} if value is None else value
    try:
        parsed = json.loads(value) if value.strip() else {}
    except (ValueError, RecursionError):
        return value
    return value if is_too_deep(parsed) else parsed
