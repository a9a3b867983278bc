"""Anthropic's messages: requests read, answers written, whole and as a stream.

Thinking comes back in `thinking` blocks whose signature is empty: nobody checks it here.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from etude.environment.recording.errors import (
    BusyError,
    ContextLengthError,
    NoSuchSessionError,
    RefusedKeyError,
    SessionEndedError,
)
from etude.environment.recording.fields import SamplingDefaults, sampling_params
from etude.environment.recording.service import Ask, Begun, Ended, Event, Sampled
from etude.errors import EtudeError, UserError
from etude.serving.errors import BodyTooLargeError, ErrorAnswer
from etude.tokens.chat.client_tools import ClientTool, client_tool, tool_entries
from etude.tokens.chat.fields import flag, integer, objects, stop_strings, text, unsupported, wrong
from etude.tokens.chat.messages import Answer, Call, Message, Opening, UserWords, ordered_results
from etude.tokens.chat.reader import CallPart, Part, ReadingRules, ReasoningPart, TextPart

_ENDINGS = {"stop": "end_turn", "length": "max_tokens", "calls": "tool_use", "abort": "end_turn"}
_USER_JOINT = "\n\n"
_TOOL_TYPES = (None, "custom")


@dataclass(frozen=True, slots=True)
class MessagesRequest:
    """One request as it is answered."""

    ask: Ask
    model: str
    stream: bool


def read_messages(
    body: Mapping[str, Any], agent: str, defaults: SamplingDefaults, counting: bool = False
) -> MessagesRequest:
    """Reads a request. `counting`: only its tokens are to be counted. Raises BadRequestError."""
    tools = tuple(_tool(entry, place) for place, entry in enumerate(tool_entries(body.get("tools"))))
    max_tokens = integer(body, "max_tokens", 1)
    if max_tokens is None and not counting:
        raise wrong("max_tokens", None, "a whole number from 1 on")
    calls, single = _calls_wanted(body.get("tool_choice"), bool(tools))
    system = _words(body.get("system") or "", "system", _USER_JOINT)
    messages = _messages(objects(body.get("messages"), "messages"))
    stops = stop_strings(body.get("stop_sequences"), "stop_sequences")
    return MessagesRequest(
        ask=Ask(
            messages=(Opening(system, tools, agent), *messages),
            params=sampling_params(body, max_tokens, 1.0, defaults),
            rules=ReadingRules(stops, single, calls),
        ),
        model=str(body.get("model") or "etude"),
        stream=flag(body, "stream", False),
    )


def _calls_wanted(choice: object, tools: bool) -> tuple[bool, bool]:
    """Whether calls are read, and whether at most one."""
    if choice is None:
        return tools, False
    kind = choice.get("type") if isinstance(choice, dict) else choice
    if kind not in ("auto", "none"):
        raise unsupported("tool_choice", kind, "calls cannot be forced: it would change how tokens are drawn")
    single = isinstance(choice, dict) and choice.get("disable_parallel_tool_use") is True
    return tools and kind == "auto", single


def _tool(entry: Mapping[str, Any], place: int) -> ClientTool:
    if entry.get("type") not in _TOOL_TYPES:
        raise unsupported(f"tools[{place}].type", entry.get("type"), "tools of the server's are not here")
    schema, field_name = entry.get("input_schema"), f"tools[{place}]"
    return client_tool(entry.get("name"), entry.get("description"), schema, field_name)


def _messages(entries: Sequence[Mapping[str, Any]]) -> list[Message]:
    messages: list[Message] = []
    calls: tuple[Call, ...] = ()
    for place, entry in enumerate(entries):
        role, where = entry.get("role"), f"messages[{place}].content"
        if role == "user":
            messages += _user(entry.get("content"), where, calls)
        elif role == "assistant":
            answer = _answer(entry.get("content"), where)
            calls = answer.calls
            messages.append(answer)
        else:
            raise wrong(f"messages[{place}].role", role, "user or assistant")
    return messages


def _user(content: object, where: str, calls: Sequence[Call]) -> Iterator[Message]:
    """The results of calls, then words: so they are shown to the model."""
    if isinstance(content, str):
        yield UserWords(content)
        return
    results: list[tuple[str, str]] = []
    words: list[str] = []
    for place, block in enumerate(objects(content, where)):
        kind, here = block.get("type"), f"{where}[{place}]"
        if kind == "tool_result":
            output = _words(block.get("content") or "", f"{here}.content", "\n")
            results.append((text(block.get("tool_use_id"), f"{here}.tool_use_id"), output))
        elif kind == "text":
            words.append(text(block.get("text"), f"{here}.text"))
        else:
            raise unsupported(f"{here}.type", kind, "only text and tool results can be sent to this model")
    if results:
        yield ordered_results(results, calls)
    if words or not results:
        yield UserWords(_USER_JOINT.join(words))


def _answer(content: object, where: str) -> Answer:
    if isinstance(content, str):
        return Answer(content)
    words: list[str] = []
    reasoning: list[str] = []
    calls: list[Call] = []
    for place, block in enumerate(objects(content, where)):
        kind, here = block.get("type"), f"{where}[{place}]"
        if kind == "text":
            words.append(text(block.get("text"), f"{here}.text"))
        elif kind == "thinking":
            reasoning.append(text(block.get("thinking"), f"{here}.thinking"))
        elif kind == "tool_use":
            name = text(block.get("name"), f"{here}.name")
            calls.append(Call(str(block.get("id") or ""), name, block.get("input") or {}))
        elif kind != "redacted_thinking":
            raise unsupported(f"{here}.type", kind, "no answer of this model has such a block")
    return Answer("".join(words), tuple(calls), "".join(reasoning))


def _words(content: object, where: str, joint: str) -> str:
    if isinstance(content, str):
        return content
    parts: list[str] = []
    for place, block in enumerate(objects(content, where)):
        if block.get("type") != "text":
            raise unsupported(f"{where}[{place}].type", block.get("type"), "only text can be sent here")
        parts.append(text(block.get("text"), f"{where}[{place}].text"))
    return joint.join(parts)


# ---- answers ------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class MessagesWriter:
    """Writes the answer to one request."""

    request: MessagesRequest
    answer_id: str
    prompt_tokens: int = 0
    _open: str | None = field(init=False, default=None)
    """Kind of the block that is being streamed."""
    _num_blocks: int = field(init=False, default=0)

    async def whole(self, events: AsyncIterator[Event]) -> dict[str, Any]:
        """The answer as one document."""
        blocks: list[dict[str, Any]] = []
        ended: Ended | None = None
        async for event in events:
            if isinstance(event, Begun):
                self.prompt_tokens = event.prompt_tokens
            elif isinstance(event, Sampled):
                for part in event.parts:
                    _add(blocks, part)
            else:
                ended = event
        assert ended is not None, "events end with Ended"
        return {
            **self._head(),
            "content": blocks,
            **_end(ended),
            "usage": {"input_tokens": self.prompt_tokens, "output_tokens": ended.answer_tokens},
        }

    async def stream(self, events: AsyncIterator[Event]) -> AsyncIterator[bytes]:
        """The answer as server-sent events."""
        async for event in events:
            if isinstance(event, Begun):
                self.prompt_tokens = event.prompt_tokens
                usage = {"input_tokens": self.prompt_tokens, "output_tokens": 0}
                head = {**self._head(), "content": [], "stop_reason": None, "stop_sequence": None}
                yield sse("message_start", {"message": {**head, "usage": usage}})
            elif isinstance(event, Sampled):
                for part in event.parts:
                    for data in self._part(part):
                        yield data
            else:
                for data in self._close():
                    yield data
                usage = {"output_tokens": event.answer_tokens}
                yield sse("message_delta", {"delta": _end(event), "usage": usage})
                yield sse("message_stop", {})

    def _head(self) -> dict[str, Any]:
        return {"id": self.answer_id, "type": "message", "role": "assistant", "model": self.request.model}

    def _part(self, part: Part) -> Iterator[bytes]:
        block, delta = _block(part), _delta(part)
        if self._open != block["type"] or isinstance(part, CallPart):
            yield from self._close()
            self._open = block["type"]
            empty = {"text": {"text": ""}, "thinking": {"thinking": ""}, "tool_use": {"input": {}}}
            begun = {**block, **empty[block["type"]]}
            yield sse("content_block_start", {"index": self._num_blocks, "content_block": begun})
        yield sse("content_block_delta", {"index": self._num_blocks, "delta": delta})

    def _close(self) -> Iterator[bytes]:
        if self._open is not None:
            yield sse("content_block_stop", {"index": self._num_blocks})
            self._num_blocks += 1
            self._open = None


def _block(part: Part) -> dict[str, Any]:
    match part:
        case TextPart(words):
            return {"type": "text", "text": words, "citations": None}
        case ReasoningPart(words):
            return {"type": "thinking", "thinking": words, "signature": ""}
        case CallPart(call):
            return {"type": "tool_use", "id": call.id, "name": call.name, "input": call.arguments}


def _delta(part: Part) -> dict[str, Any]:
    match part:
        case TextPart(words):
            return {"type": "text_delta", "text": words}
        case ReasoningPart(words):
            return {"type": "thinking_delta", "thinking": words}
        case CallPart():
            return {"type": "input_json_delta", "partial_json": part.arguments_json}


def _add(blocks: list[dict[str, Any]], part: Part) -> None:
    """A part of a kind that is open goes on with its block; a call is a block of its own."""
    block = _block(part)
    kind = block["type"]
    if blocks and blocks[-1]["type"] == kind and kind in ("text", "thinking"):
        blocks[-1][kind] += block[kind]
    else:
        blocks.append(block)


def _end(ended: Ended) -> dict[str, Any]:
    reason = "stop_sequence" if ended.stop is not None else _ENDINGS[ended.ending]
    return {"stop_reason": reason, "stop_sequence": ended.stop}


def sse(kind: str, document: Mapping[str, Any]) -> bytes:
    """One named server-sent event."""
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **document})}\n\n".encode()


_KINDS: tuple[tuple[type[EtudeError], int, str], ...] = (
    (RefusedKeyError, 401, "authentication_error"),
    (NoSuchSessionError, 404, "not_found_error"),
    (SessionEndedError, 410, "invalid_request_error"),
    (BodyTooLargeError, 413, "request_too_large"),
    (BusyError, 429, "rate_limit_error"),
    (UserError, 400, "invalid_request_error"),
)


def error_document(error: BaseException) -> ErrorAnswer:
    """HTTP status and body for an error. What is not the client's doing is a 5xx, which clients try again."""
    if isinstance(error, ContextLengthError):
        shown = f"prompt is too long: {error.num_tokens} tokens > {error.max_tokens} maximum"
        return 400, _error("invalid_request_error", shown), {}
    for kind, status, name in _KINDS:
        if isinstance(error, kind):
            return status, _error(name, str(error)), {}
    if isinstance(error, EtudeError):
        return 529, _error("overloaded_error", str(error)), {}
    return 500, _error("api_error", "the server failed"), {}


def _error(kind: str, message: str) -> dict[str, Any]:
    return {"type": "error", "error": {"type": kind, "message": message}}
