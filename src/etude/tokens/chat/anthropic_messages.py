"""Anthropic's messages API: reads requests, writes answers.

Thinking comes back in `thinking` blocks, whose signature is not checked here. Calls are sent only when
complete: the official client executes what it can parse of a partial call. Threads are refused with the error
that makes that client send whole histories instead.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from etude.serving.errors import ErrorAnswer
from etude.tokens.chat.answers import AnswerWriter, Block, Choice, Document, Ended, end_of
from etude.tokens.chat.client_tools import ClientTool, client_tool, read_entries
from etude.tokens.chat.errors import BadRequestError, ContextLengthError
from etude.tokens.chat.fields import integer, objects, read_text, stop_strings, text, unsupported, wrong
from etude.tokens.chat.messages import Answer, Call, Conversation, Message, Opening
from etude.tokens.chat.reader import Part, ReadingRules
from etude.tokens.chat.requests import (
    DRAWING_FIELDS,
    ChatRequest,
    Neutral,
    calls_wanted,
    check_fields,
    check_options,
    read_sampling,
    read_stream,
)

_FIELDS = DRAWING_FIELDS | {"messages", "max_tokens", "system", "tools", "tool_choice", "stop_sequences"}
_FIELDS |= {"output_config"}
_NEUTRAL: Neutral = {"mcp_servers": ([],), "container": (), "output_format": (), "thread": ()}
_NEUTRAL_STRICT: Neutral = {
    "context_management": ({"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},)
}
_ENDINGS = {"stop": "end_turn", "length": "max_tokens", "calls": "tool_use", "abort": "end_turn"}
_USER_JOINT = "\n\n"
_TOOL_TYPES = (None, "custom")
_UNSEEN = ("image", "document")


def read_messages(body: Mapping[str, Any], agent: str = "", strict: bool = True) -> ChatRequest:
    """Reads a request. `agent`: the name that the client gave its agent. Raises BadRequestError."""
    check_fields(body, _FIELDS, {**_NEUTRAL, **(_NEUTRAL_STRICT if strict else {})}, strict)
    check_options(body, "output_config", ("format",), strict)
    tools = read_entries(body.get("tools"), _tool)
    max_tokens = integer(body, "max_tokens", 1)
    if max_tokens is None:
        raise wrong("max_tokens", None, "a whole number from 1 on")
    calls, single = _calls_wanted(body.get("tool_choice"), bool(tools), strict)
    begun, messages = _read_conversation(objects(body.get("messages"), "messages"))
    system = [read_text(body["system"], "system", _USER_JOINT)] if body.get("system") else []
    if not messages:
        raise wrong("messages", "none", "a list with at least one user message")
    if isinstance(messages[-1], Answer):  # this API would continue it; OpenAI's give another answer
        fix = "end with a user message: prefilled answers are not supported"
        raise BadRequestError("the last message must be the user's", field="messages", fix=fix)
    stops = stop_strings(body.get("stop_sequences"), "stop_sequences")
    return ChatRequest(
        messages=(Opening(_USER_JOINT.join(system + begun), tools, agent), *messages),
        rules=ReadingRules(stops, single, calls, whole_calls=True),
        sampling=read_sampling(body, max_tokens, max_temperature=1.0),
        stream=read_stream(body, strict)[0],
        body=body,
    )


def _calls_wanted(choice: object, tools: bool, strict: bool) -> tuple[bool, bool]:
    """(whether calls are parsed, whether at most one)."""
    if not isinstance(choice, dict):
        return calls_wanted(choice, tools, strict), False
    wanted = calls_wanted(choice.get("type") or "", tools, strict)
    return wanted, choice.get("disable_parallel_tool_use") is True


def _tool(entry: Mapping[str, Any], field: str) -> ClientTool:
    if entry.get("type") not in _TOOL_TYPES:
        raise unsupported(f"{field}.type", entry.get("type"), "server tools are not supported")
    return client_tool(entry.get("name"), entry.get("description"), entry.get("input_schema"), field)


def _read_conversation(entries: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[Message]]:
    """The system messages at the start, and the messages that follow. Claude Code sends some system messages
    in between (`mid-conversation-system`)."""
    talk = Conversation()
    for place, entry in enumerate(entries):
        role, where = entry.get("role"), f"messages[{place}].content"
        if role == "user":
            _add_user(talk, entry.get("content"), where)
        elif role == "assistant":
            talk.add_answer(_answer(entry.get("content"), where))
        elif role == "system":
            talk.add_message(read_text(entry.get("content"), where, _USER_JOINT), by_user=False)
        else:
            raise wrong(f"messages[{place}].role", role, "user, assistant or system")
    return talk.system, talk.messages()


def _add_user(talk: Conversation, content: object, where: str) -> None:
    """Adds the results of calls, then the text: the order in which the model sees them."""
    if isinstance(content, str):
        talk.add_message(content, by_user=True)
        return
    texts: list[str] = []
    blocks = objects(content, where)
    for place, block in enumerate(blocks):
        kind, here = block.get("type"), f"{where}[{place}]"
        if kind == "tool_result":
            output = read_text(block.get("content") or "", f"{here}.content", "\n", unseen=_UNSEEN)
            talk.add_result(text(block.get("tool_use_id"), f"{here}.tool_use_id"), output)
        elif kind == "text":
            texts.append(text(block.get("text"), f"{here}.text"))
        else:
            raise unsupported(f"{here}.type", kind, "only text and tool results can be sent to this model")
    talk.end_results()
    if texts or not blocks:
        talk.add_message(_USER_JOINT.join(texts), by_user=True)


def _answer(content: object, where: str) -> Answer:
    if isinstance(content, str):
        return Answer(content)
    texts: list[str] = []
    reasoning: list[str] = []
    calls: list[Call] = []
    for place, block in enumerate(objects(content, where)):
        kind, here = block.get("type"), f"{where}[{place}]"
        if kind == "text":
            texts.append(text(block.get("text"), f"{here}.text"))
        elif kind == "thinking":
            reasoning.append(text(block.get("thinking"), f"{here}.thinking"))
        elif kind == "tool_use":
            name = text(block.get("name"), f"{here}.name")
            calls.append(Call(str(block.get("id") or ""), name, block.get("input") or {}))
        elif kind != "redacted_thinking":
            raise unsupported(f"{here}.type", kind, "this block is not supported in answers")
    return Answer("".join(texts), tuple(calls), "".join(reasoning))


# ---- answers ------------------------------------------------------------------------------------


class MessagesWriter(AnswerWriter):
    """Writes the answer to one request."""

    id_prefix = "msg_"

    def begin(self) -> list[Document]:
        head = {**self._head(), "content": [], "stop_reason": None, "stop_sequence": None}
        return [{"type": "message_start", "message": {**head, "usage": self._usage()}}]

    def whole(self) -> Document:
        (choice,) = self.choices
        content = [_document(block) for block in choice.blocks]
        return {**self._head(), "content": content, **_end(end_of(choice)), "usage": self._usage()}

    def _head(self) -> Document:
        return {"id": self.id, "type": "message", "role": "assistant", "model": self.model}

    def _usage(self) -> Document:
        cached = self.cached_tokens
        usage = {"input_tokens": self.prompt_tokens - cached, "cache_read_input_tokens": cached}
        return {**usage, "output_tokens": self.completion_tokens}

    def _write(self, choice: Choice, part: Part, begins: bool, rows: list[Document]) -> list[Document]:
        index, block = len(choice.blocks) - 1, choice.blocks[-1]
        documents: list[Document] = []
        if begins:
            documents += self._close(choice, index - 1)
            begun = _document(Block(block.kind, "", block.id, block.name))
            begun |= {"signature": ""} if block.kind == "reasoning" else {}
            documents.append({"type": "content_block_start", "index": index, "content_block": begun})
        added = getattr(part, "text", "")
        if added:
            kind, name = _DELTAS[block.kind]
            delta = {"type": kind, name: added}
            documents.append({"type": "content_block_delta", "index": index, "delta": delta})
        return documents

    def _close(self, choice: Choice, index: int) -> list[Document]:
        if index < 0:
            return []
        documents: list[Document] = [{"type": "content_block_stop", "index": index}]
        if choice.blocks[index].kind == "reasoning":
            delta = {"type": "signature_delta", "signature": _SIGNATURE}
            documents.insert(0, {"type": "content_block_delta", "index": index, "delta": delta})
        return documents

    def _finish(self, choice: Choice, ended: Ended) -> list[Document]:
        delta = {"type": "message_delta", "delta": _end(ended), "usage": self._usage()}
        return [*self._close(choice, len(choice.blocks) - 1), delta, {"type": "message_stop"}]


_SIGNATURE = "etude"
"""Dummy signature of reasoning: without one some agents send reasoning back as text, or not at all."""


def _document(block: Block) -> Document:
    if block.kind == "text":
        return {"type": "text", "text": block.text, "citations": None}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": block.text, "signature": _SIGNATURE}
    return {"type": "tool_use", "id": block.id, "name": block.name, "input": json.loads(block.text or "{}")}


_DELTAS = {
    "text": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}


def _end(ended: Ended) -> Document:
    reason = "stop_sequence" if ended.stop is not None else _ENDINGS[ended.ending]
    return {"stop_reason": reason, "stop_sequence": ended.stop}


_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}
_OVERLOADED = 529


def anthropic_error(error: BaseException, answer: ErrorAnswer) -> ErrorAnswer:
    """Converts an error response from OpenAI's form to Anthropic's. Errors that are not the client's fault
    are 5xx, which clients retry."""
    status, document, headers = answer
    message = document["error"]["message"]
    if isinstance(error, ContextLengthError):
        message = f"prompt is too long: {error.num_tokens} tokens > {error.max_tokens} maximum"
    found: Document = {"type": _KINDS.get(status, "invalid_request_error"), "message": message}
    if isinstance(error, BadRequestError) and error.field == "thread":
        found["details"] = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    return _OVERLOADED if status == 503 else status, {"type": "error", "error": found}, headers
