"""OpenAI's chat completions API: reads requests, writes answers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from etude.serving.json_bodies import is_too_deep
from etude.tokens.chat.answers import AnswerWriter, Block, Choice, Document, Ended, Event, end_of
from etude.tokens.chat.client_tools import ClientTool, client_tool, read_entries
from etude.tokens.chat.fields import flag, integer, objects, read_text, stop_strings, text, unsupported, wrong
from etude.tokens.chat.messages import Answer, Call, Conversation, Message, Opening
from etude.tokens.chat.reader import CallDelta, CallHead, Part, ReadingRules
from etude.tokens.chat.requests import (
    MAX_TOP_LOGPROBS,
    SHARED_FIELDS,
    ChatRequest,
    Neutral,
    calls_wanted,
    check_fields,
    read_sampling,
    read_stream,
)
from etude.tokens.grammar import ReasoningDelta

_FIELDS = SHARED_FIELDS | {
    "messages",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "max_tokens",
    "max_completion_tokens",
    "logprobs",
    "top_logprobs",
    "raw_logprobs",
}
_NEUTRAL: Neutral = {
    "response_format": ({"type": "text"},),
    "functions": ([],),
    "function_call": ("none",),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
}
_ENDINGS = {"stop": "stop", "length": "length", "calls": "tool_calls", "abort": "stop"}


def read_chat(body: Mapping[str, Any], agent: str = "", strict: bool = True) -> ChatRequest:
    """Reads a request. `agent`: the name that the client gave its agent. Raises BadRequestError."""
    check_fields(body, _FIELDS, _NEUTRAL, strict)
    logprobs = flag(body, "logprobs", False)
    num_top = integer(body, "top_logprobs", 0, MAX_TOP_LOGPROBS) or 0
    if num_top and not logprobs:
        raise unsupported("top_logprobs", num_top, "needs logprobs: true", "send logprobs: true with it")
    limits = [integer(body, name, 1) for name in ("max_completion_tokens", "max_tokens")]
    stream, include_usage = read_stream(body, strict)
    messages, with_tools = read_conversation(body, agent)
    rules = ReadingRules(
        stops=stop_strings(body.get("stop"), "stop"),
        single_call=not flag(body, "parallel_tool_calls", True),
        calls=calls_wanted(body.get("tool_choice"), with_tools, strict),
    )
    sampling = read_sampling(body, limits[0] or limits[1], logprobs, num_top)
    return ChatRequest(messages, rules, sampling, stream, include_usage, body)


def read_conversation(body: Mapping[str, Any], agent: str = "") -> tuple[tuple[Message, ...], bool]:
    """The messages, the opening first, and whether there are tools. Raises BadRequestError."""
    tools = read_tools(body.get("tools"))
    listed = objects(body.get("messages"), "messages")
    system, messages = read_messages(listed)
    if not messages:
        received = "system messages alone" if listed else "none"
        raise wrong("messages", received, "a list with at least one user message")
    return (Opening(system, tools, agent), *messages), bool(tools)


def read_tools(value: object) -> tuple[ClientTool, ...]:
    """The tools of a request. Raises BadRequestError."""
    return read_entries(value, _tool)


def _tool(entry: Mapping[str, Any], field: str) -> ClientTool:
    function = entry.get("function")
    if entry.get("type", "function") != "function" or not isinstance(function, dict):
        raise wrong(field, entry.get("type"), 'of type "function"')
    name, description, schema = (function.get(key) for key in ("name", "description", "parameters"))
    return client_tool(name, description, schema, f"{field}.function")


def read_messages(entries: Sequence[Mapping[str, Any]]) -> tuple[str, list[Message]]:
    """The system messages at the start, joined, and the messages that follow. Raises BadRequestError."""
    talk = Conversation()
    for place, entry in enumerate(entries):
        role, field = entry.get("role"), f"messages[{place}]"
        if role == "assistant":
            talk.add_answer(_answer(entry, field))
        elif role not in ("system", "developer", "user", "tool"):
            raise wrong(f"{field}.role", role, "system, developer, user, assistant or tool")
        else:
            unseen = ("image_url",) if role == "tool" else ()
            content = _content(entry.get("content"), f"{field}.content", unseen=unseen)
            if role == "tool":
                talk.add_result(text(entry.get("tool_call_id"), f"{field}.tool_call_id"), content)
            else:
                talk.add_message(content, role == "user")
    return "\n\n".join(talk.system), talk.messages()


def _content(content: object, field: str, joint: str = "\n", unseen: Sequence[str] = ()) -> str:
    return read_text(content, field, joint, ("text", "refusal"), unseen)


def _answer(entry: Mapping[str, Any], field: str) -> Answer:
    content = entry.get("content")
    answer = "" if content is None else _content(content, f"{field}.content", "")
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
    return Answer(answer, tuple(calls), reasoning if isinstance(reasoning, str) else "")


def read_arguments(value: object) -> Any:
    """Parses arguments: JSON text, but some clients send the object itself, or nothing for no arguments."""
    if not isinstance(value, str):
        return {} if value is None else value
    try:
        parsed = json.loads(value) if value.strip() else {}
    except (ValueError, RecursionError):
        return value
    return value if is_too_deep(parsed) else parsed


# ---- answers ------------------------------------------------------------------------------------


class ChatWriter(AnswerWriter):
    """Writes the answers to one request."""

    id_prefix = "chatcmpl-"
    tail = b"data: [DONE]\n\n"

    def add_event(self, event: Event) -> list[Document]:
        choice = self.choices[event.index]
        begins = choice.num_cached is None and choice.ended is None
        documents = super().add_event(event)
        return [self._chunk(choice, {"role": "assistant", "content": ""})] * begins + documents

    def end(self) -> list[Document]:
        if not self.request.include_usage:
            return []
        return [{**self._head("chat.completion.chunk"), "choices": [], "usage": self.usage()}]

    def whole(self) -> Document:
        choices = [
            {
                "index": choice.index,
                "message": _message(choice),
                "logprobs": _logprobs(choice.rows) if self.request.sampling.logprobs else None,
                "finish_reason": _ENDINGS[end_of(choice).ending],
            }
            for choice in self.choices
        ]
        return {**self._head("chat.completion"), "choices": choices, "usage": self.usage()}

    def _write(self, choice: Choice, part: Part, begins: bool, rows: list[Document]) -> list[Document]:
        return [self._chunk(choice, _delta(part, len(choice.calls) - 1), rows=rows)]

    def _write_rows(self, choice: Choice, rows: list[Document]) -> list[Document]:
        return [self._chunk(choice, {}, rows=rows)]

    def _finish(self, choice: Choice, ended: Ended) -> list[Document]:
        return [self._chunk(choice, {}, _ENDINGS[ended.ending])]

    def _chunk(
        self, choice: Choice, delta: Document, finish: str | None = None, rows: list[Document] | None = None
    ) -> Document:
        row = {"index": choice.index, "delta": delta, "finish_reason": finish}
        row["logprobs"] = _logprobs(rows) if rows else None
        return {**self._head("chat.completion.chunk"), "choices": [row]}

    def _head(self, kind: str) -> Document:
        head = {"id": self.id, "object": kind, "created": self.created_s, "model": self.model}
        return {**head, "system_fingerprint": self.version}


def _logprobs(rows: list[Document]) -> Document:
    return {"content": rows, "refusal": None}


def _delta(part: Part, place: int) -> Document:
    if isinstance(part, CallHead):
        return {"tool_calls": [{"index": place, **_call(Block("call", "", part.id, part.name))}]}
    if isinstance(part, CallDelta):
        return {"tool_calls": [{"index": place, "function": {"arguments": part.text}}]}
    return {"reasoning_content" if isinstance(part, ReasoningDelta) else "content": part.text}


def _call(block: Block) -> Document:
    function = {"name": block.name, "arguments": block.text}
    return {"id": block.id, "type": "function", "function": function}


def _message(choice: Choice) -> Document:
    words, reasoning, calls = choice.text_of("text"), choice.text_of("reasoning"), choice.calls
    message: Document = {"role": "assistant", "content": words if words or not calls else None}
    message["refusal"] = None
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [_call(block) for block in calls]
    return message
