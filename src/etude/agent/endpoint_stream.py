"""Reads the answer of a chat endpoint from a stream of server-sent events or from one JSON document."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from etude.agent.endpoint_messages import Answer, CallAnswer
from etude.errors import SamplerError
from etude.serving.client import read_events
from etude.tokens.grammar import CallStarted, ParseEvent, ReasoningDelta, TextDelta

MAX_ANSWER_BYTES = 64 << 20
_MAX_CALLS = 256
_FINISHES = {"length": "length", "max_tokens": "length"}

OnEvent = Callable[[ParseEvent], None]


async def read_stream(chunks: AsyncIterator[bytes], on_event: OnEvent) -> Answer:
    """The answer in a body that arrives in `chunks`; `on_event` is called with each delta as it arrives.

    Raises SamplerError where the stream ends before the answer does, is malformed, or carries an error, and
    NoAnswerError where it is too long.
    """
    answer = Answer()
    async for data in read_events(chunks, MAX_ANSWER_BYTES):
        if data == "[DONE]":
            answer.finish = answer.finish or "stop"
            break
        _apply_event(_document(data), answer, on_event)
    if answer.finish is None:
        raise _broken("the stream ended before the answer", "no end")
    return answer


def read_document(text: str, on_event: OnEvent) -> Answer:
    """The answer of an endpoint that does not stream. Raises SamplerError."""
    answer = Answer()
    document = _document(text)
    choices = document.get("choices")
    if isinstance(choices, list):
        for choice in choices:
            if isinstance(choice, dict):
                choice["delta"] = choice.pop("message", None)
    _apply_event(document, answer, on_event)
    answer.finish = answer.finish or "stop"
    return answer


def _broken(message: str, received: str) -> SamplerError:
    fix = "check the server's log, and whether it implements OpenAI's chat completions"
    return SamplerError(message, field="stream", received=received, fix=fix)


def _document(data: str) -> dict[str, Any]:
    try:
        document = json.loads(data)
    except ValueError:
        raise _broken("the stream is malformed", data[:80]) from None
    if not isinstance(document, dict):
        raise _broken("the stream is malformed", data[:80])
    if document.get("error"):
        raise _broken("the endpoint failed", str(document["error"])[:200])
    return document


def _apply_event(document: Mapping[str, Any], answer: Answer, on_event: OnEvent) -> None:
    """Adds one event of the stream to `answer`. Raises SamplerError for fields of the wrong type."""
    try:
        for choice in document.get("choices") or ():
            if choice.get("index", 0) == 0:
                _apply_delta(choice.get("delta") or {}, answer, on_event)
                if reason := choice.get("finish_reason"):
                    answer.finish = _FINISHES.get(reason, "stop")
    except (AttributeError, TypeError, ValueError) as error:
        received = str(document)[:80]
        raise _broken("the stream is malformed", received) from error


def _apply_delta(delta: Mapping[str, Any], answer: Answer, on_event: OnEvent) -> None:
    if reasoning := _clean(delta.get("reasoning_content") or delta.get("reasoning")):
        answer.reasoning += reasoning
        on_event(ReasoningDelta(reasoning))
    if text := _clean(delta.get("content")):
        answer.text += text
        on_event(TextDelta(text))
    for place, part in enumerate(delta.get("tool_calls") or ()):
        _apply_call_delta(int(part.get("index", place)), part.get("function") or {}, answer, on_event)


def _clean(text: str | None) -> str:
    """Replaces lone surrogates, which JSON can spell and UTF-8 cannot encode."""
    return (text or "").encode("utf-8", "surrogatepass").decode("utf-8", "replace")


def _apply_call_delta(index: int, function: Mapping[str, Any], answer: Answer, on_event: OnEvent) -> None:
    if not 0 <= index < _MAX_CALLS:
        raise ValueError(f"call {index}")
    while len(answer.calls) <= index:
        answer.calls.append(CallAnswer())
    call = answer.calls[index]
    if name := function.get("name"):
        call.name += name
        on_event(CallStarted(call.name))
    arguments = function.get("arguments")
    call.arguments += json.dumps(arguments) if isinstance(arguments, dict) else arguments or ""
