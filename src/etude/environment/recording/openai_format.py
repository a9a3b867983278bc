"""OpenAI's chat completions: requests read, answers written, whole and as a stream.

What changes how tokens are drawn and is not recorded is refused; what changes nothing is ignored.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from etude.environment.recording.client_tools import ClientTool, client_tool
from etude.environment.recording.errors import (
    BodyTooLargeError,
    BusyError,
    ContextLengthError,
    NoSuchSessionError,
    RefusedKeyError,
    SessionEndedError,
)
from etude.environment.recording.fields import (
    SamplingDefaults,
    flag,
    integer,
    is_too_deep,
    objects,
    sampling_params,
    stop_strings,
    text,
    unsupported,
    wrong,
)
from etude.environment.recording.messages import (
    Answer,
    Call,
    Message,
    Opening,
    SystemWords,
    UserWords,
    ordered_results,
)
from etude.environment.recording.reader import CallPart, Part, ReadingRules, ReasoningPart, TextPart
from etude.environment.recording.service import Ask, Begun, Ended, Event, Sampled
from etude.errors import EtudeError, UserError
from etude.tokens.tokenizer import Tokenizer

_REFUSED: Mapping[str, tuple[object, ...]] = {
    "n": (1,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "top_logprobs": (0,),
    "functions": ([],),
    "function_call": ("none",),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "repetition_penalty": (1,),
}
"""Fields that would have to be obeyed, with the values that ask for nothing."""

_ENDINGS = {"stop": "stop", "length": "length", "calls": "tool_calls", "abort": "stop"}


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """One request as it is answered."""

    ask: Ask
    model: str
    stream: bool
    include_usage: bool
    logprobs: bool


def read_chat(body: Mapping[str, Any], agent: str, defaults: SamplingDefaults) -> ChatRequest:
    """Reads a request. `agent`: the name that the client gave its agent. Raises BadRequestError."""
    for name, neutral in _REFUSED.items():
        if (value := body.get(name)) is not None and value not in neutral:
            raise unsupported(name, value, "is not supported here")
    tools = tuple(
        _tool(entry, place) for place, entry in enumerate(objects(body.get("tools") or [], "tools"))
    )
    system, messages = _messages(objects(body.get("messages"), "messages"))
    max_tokens = integer(body, "max_completion_tokens", 1) or integer(body, "max_tokens", 1)
    rules = ReadingRules(
        stops=stop_strings(body.get("stop"), "stop"),
        single_call=not flag(body, "parallel_tool_calls", True),
        calls=_calls_wanted(body.get("tool_choice"), bool(tools)),
    )
    options = body.get("stream_options")
    return ChatRequest(
        ask=Ask(
            messages=(Opening(system, tools, agent), *messages),
            params=sampling_params(body, max_tokens, 2.0, defaults),
            rules=rules,
            seed=integer(body, "seed", 0),
        ),
        model=str(body.get("model") or "etude"),
        stream=flag(body, "stream", False),
        include_usage=isinstance(options, dict) and options.get("include_usage") is True,
        logprobs=flag(body, "logprobs", False),
    )


def _calls_wanted(choice: object, tools: bool) -> bool:
    if choice in (None, "auto"):
        return tools
    if choice == "none":
        return False
    raise unsupported("tool_choice", choice, "calls cannot be forced: it would change how tokens are drawn")


def _tool(entry: Mapping[str, Any], place: int) -> ClientTool:
    function, field = entry.get("function"), f"tools[{place}].function"
    if entry.get("type", "function") != "function" or not isinstance(function, dict):
        raise wrong(f"tools[{place}]", entry.get("type"), 'of type "function"')
    return client_tool(function.get("name"), function.get("description"), function.get("parameters"), field)


def _messages(entries: Sequence[Mapping[str, Any]]) -> tuple[str, list[Message]]:
    """The system's words at the start, and what follows."""
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
            words = _content(entry.get("content"), f"{field}.content")
            if messages:
                messages.append(SystemWords(words))
            else:
                system.append(words)
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
    if isinstance(content, str):
        return content
    parts: list[str] = []
    for place, part in enumerate(objects(content, field)):
        kind = part.get("type")
        if kind not in ("text", "refusal"):
            raise unsupported(f"{field}[{place}].type", kind, "only text can be sent to this model")
        parts.append(text(part.get(str(kind)), f"{field}[{place}].{kind}"))
    return joint.join(parts)


def _answer(entry: Mapping[str, Any], field: str) -> Answer:
    content = entry.get("content")
    words = "" if content is None else _content(content, f"{field}.content", "")
    calls: list[Call] = []
    for place, call in enumerate(objects(entry.get("tool_calls") or [], f"{field}.tool_calls")):
        where = f"{field}.tool_calls[{place}].function"
        function = call.get("function")
        if not isinstance(function, dict):
            raise wrong(where, function, "an object")
        arguments = function.get("arguments")
        name = text(function.get("name"), f"{where}.name")
        calls.append(Call(str(call.get("id") or ""), name, _arguments(arguments)))
    reasoning = entry.get("reasoning_content") or entry.get("reasoning") or ""
    return Answer(words, tuple(calls), reasoning if isinstance(reasoning, str) else "")


def _arguments(value: object) -> Any:
    """Arguments come as JSON text; some clients send the object itself, or nothing for no arguments."""
    if not isinstance(value, str):
        return {} if value is None else value
    try:
        parsed = json.loads(value) if value.strip() else {}
    except (ValueError, RecursionError):
        return value
    return value if is_too_deep(parsed) else parsed


# ---- answers ------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class ChatWriter:
    """Writes the answer to one request."""

    request: ChatRequest
    answer_id: str
    tokenizer: Tokenizer
    prompt_tokens: int = 0

    async def whole(self, events: AsyncIterator[Event]) -> dict[str, Any]:
        """The answer as one document."""
        parts: list[Part] = []
        rows: list[dict[str, Any]] = []
        ended: Ended | None = None
        async for event in events:
            if isinstance(event, Begun):
                self.prompt_tokens = event.prompt_tokens
            elif isinstance(event, Sampled):
                parts += event.parts
                rows += self._logprobs(event)
            else:
                ended = event
        assert ended is not None, "events end with Ended"
        choice = {"index": 0, "message": _message(parts), "finish_reason": _ENDINGS[ended.ending]}
        choice["logprobs"] = {"content": rows, "refusal": None} if self.request.logprobs else None
        head = self._head("chat.completion")
        return {**head, "choices": [choice], "usage": self._usage(ended.answer_tokens)}

    async def stream(self, events: AsyncIterator[Event]) -> AsyncIterator[bytes]:
        """The answer as server-sent events."""
        num_calls = 0
        yield self._chunk({"role": "assistant", "content": ""}, None)
        async for event in events:
            if isinstance(event, Begun):
                self.prompt_tokens = event.prompt_tokens
            elif isinstance(event, Sampled):
                rows = self._logprobs(event)
                for part in event.parts:
                    yield self._chunk(_delta(part, num_calls), None, rows)
                    num_calls += isinstance(part, CallPart)
                    rows = []
                if rows:
                    yield self._chunk({}, None, rows)
            else:
                yield self._chunk({}, _ENDINGS[event.ending])
                if self.request.include_usage:
                    head = self._head("chat.completion.chunk")
                    yield sse({**head, "choices": [], "usage": self._usage(event.answer_tokens)})
        yield b"data: [DONE]\n\n"

    def _chunk(
        self, delta: Mapping[str, Any], reason: str | None, rows: Sequence[Mapping[str, Any]] = ()
    ) -> bytes:
        choice: dict[str, Any] = {"index": 0, "delta": delta, "finish_reason": reason, "logprobs": None}
        if rows:
            choice["logprobs"] = {"content": list(rows), "refusal": None}
        return sse({**self._head("chat.completion.chunk"), "choices": [choice]})

    def _head(self, kind: str) -> dict[str, Any]:
        created = int(time.time())
        return {"id": self.answer_id, "object": kind, "created": created, "model": self.request.model}

    def _usage(self, answer_tokens: int) -> dict[str, int]:
        total = self.prompt_tokens + answer_tokens
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": answer_tokens,
            "total_tokens": total,
        }

    def _logprobs(self, event: Sampled) -> list[dict[str, Any]]:
        if not self.request.logprobs:
            return []
        rows: list[dict[str, Any]] = []
        for token, logprob in zip(event.tokens.tolist(), event.logprobs.tolist(), strict=True):
            data = self.tokenizer.decode_bytes([token])
            shown = data.decode("utf-8", "replace")
            rows.append({"token": shown, "logprob": logprob, "bytes": list(data), "top_logprobs": []})
        return rows


def _message(parts: Iterable[Part]) -> dict[str, Any]:
    words = "".join(part.text for part in parts if isinstance(part, TextPart))
    reasoning = "".join(part.text for part in parts if isinstance(part, ReasoningPart))
    calls = [_call(part) for part in parts if isinstance(part, CallPart)]
    message: dict[str, Any] = {"role": "assistant", "content": words if words or not calls else None}
    message["refusal"] = None
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message


def _delta(part: Part, num_calls: int) -> dict[str, Any]:
    match part:
        case TextPart(words):
            return {"content": words}
        case ReasoningPart(words):
            return {"reasoning_content": words}
        case CallPart():
            return {"tool_calls": [{"index": num_calls, **_call(part)}]}


def _call(part: CallPart) -> dict[str, Any]:
    function = {"name": part.call.name, "arguments": part.arguments_json}
    return {"id": part.call.id, "type": "function", "function": function}


def sse(document: Mapping[str, Any]) -> bytes:
    """One server-sent event."""
    return f"data: {json.dumps(document)}\n\n".encode()


_KINDS: tuple[tuple[type[EtudeError], int, str, str | None], ...] = (
    (ContextLengthError, 400, "invalid_request_error", "context_length_exceeded"),
    (RefusedKeyError, 401, "authentication_error", "invalid_api_key"),
    (NoSuchSessionError, 404, "invalid_request_error", "session_not_found"),
    (SessionEndedError, 410, "invalid_request_error", "session_ended"),
    (BodyTooLargeError, 413, "invalid_request_error", "request_too_large"),
    (BusyError, 429, "rate_limit_error", "rate_limit_exceeded"),
    (UserError, 400, "invalid_request_error", None),
)


def error_document(error: Exception) -> tuple[int, dict[str, Any]]:
    """HTTP status and body for an error. What is not the client's doing is a 5xx, which clients try again."""
    for kind, status, name, code in _KINDS:
        if isinstance(error, kind):
            row = {"message": str(error), "type": name, "param": error.field, "code": code}
            return status, {"error": row}
    shown = str(error) if isinstance(error, EtudeError) else "the server failed"
    status = 503 if isinstance(error, EtudeError) else 500
    return status, {"error": {"message": shown, "type": "server_error", "param": None, "code": None}}
