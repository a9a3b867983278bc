"""OpenAI's chat completions: requests read, answers written, whole and as a stream.

What changes how tokens are drawn and is not recorded is refused; what changes nothing is ignored.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass
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
from etude.serving.access import AccessError
from etude.serving.errors import BodyTooLargeError, OpenAIErrors
from etude.tokens.chat.fields import flag, integer, objects, stop_strings, unsupported
from etude.tokens.chat.messages import (
    Opening,
)
from etude.tokens.chat.openai_messages import calls_wanted, read_messages, read_tools
from etude.tokens.chat.reader import CallPart, Part, ReadingRules, ReasoningPart, TextPart
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
    tools = read_tools(body.get("tools"))
    system, messages = read_messages(objects(body.get("messages"), "messages"))
    max_tokens = integer(body, "max_completion_tokens", 1) or integer(body, "max_tokens", 1)
    rules = ReadingRules(
        stops=stop_strings(body.get("stop"), "stop"),
        single_call=not flag(body, "parallel_tool_calls", True),
        calls=calls_wanted(body.get("tool_choice"), bool(tools)),
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


ERRORS = OpenAIErrors(
    (
        (ContextLengthError, 400, "invalid_request_error", "context_length_exceeded"),
        (AccessError, 401, "authentication_error", "foreign_name"),
        (RefusedKeyError, 401, "authentication_error", "invalid_api_key"),
        (NoSuchSessionError, 404, "invalid_request_error", "session_not_found"),
        (SessionEndedError, 410, "invalid_request_error", "session_ended"),
        (BodyTooLargeError, 413, "invalid_request_error", "request_too_large"),
        (BusyError, 429, "rate_limit_error", "rate_limit_exceeded"),
        (UserError, 400, "invalid_request_error", None),
        (EtudeError, 503, "server_error", None),
    )
)
