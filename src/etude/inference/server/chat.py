"""OpenAI's chat completions: requests read, answers written."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from etude.inference.server.answering import Ended, Event, Job, Sampled, random_key
from etude.inference.server.documents import Head, Usage, token_rows
from etude.inference.server.errors import NoSuchModelError
from etude.inference.server.histories import ChatFrames, ChatPrompt
from etude.inference.server.reading import CallHead, CallMore, ChatReader, ServedPart
from etude.inference.server.schema import (
    MAX_TOP_LOGPROBS,
    SHARED_FIELDS,
    Sampling,
    ServedModel,
    check_fields,
    check_model,
    read_sampling,
    room_for,
)
from etude.tokens.chat.errors import ContextLengthError
from etude.tokens.chat.fields import flag, integer, objects, unsupported, wrong
from etude.tokens.chat.messages import Message, Opening, least_tokens
from etude.tokens.chat.openai_messages import calls_wanted, read_messages, read_tools
from etude.tokens.chat.reader import CallPart, ReadingRules, ReasoningPart, TextPart

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
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "response_format": ({"type": "text"},),
    "functions": ([],),
    "function_call": ("none",),
    "modalities": (["text"],),
    "store": (False,),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
}


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """One request, read."""

    messages: tuple[Message, ...]
    """The opening first."""
    rules: ReadingRules
    sampling: Sampling


def read_chat(body: Mapping[str, Any], model: ServedModel) -> ChatRequest:
    """Reads a request. Raises BadRequestError, NoSuchModelError."""
    check_model(body, model)
    check_fields(body, _FIELDS, _NEUTRAL)
    logprobs = flag(body, "logprobs", False)
    num_top = integer(body, "top_logprobs", 0, MAX_TOP_LOGPROBS) or 0
    if num_top and not logprobs:
        raise unsupported("top_logprobs", num_top, "needs logprobs: true", "send logprobs: true with it")
    limits = [integer(body, name, 1) for name in ("max_completion_tokens", "max_tokens")]
    max_tokens = limits[0] or limits[1] or model.default_max_tokens
    sampling = read_sampling(body, max_tokens, logprobs, num_top)
    messages, with_tools = read_conversation(body)
    rules = ReadingRules(
        stops=sampling.stops,
        single_call=not flag(body, "parallel_tool_calls", True),
        calls=calls_wanted(body.get("tool_choice"), with_tools),
    )
    return ChatRequest(messages, rules, sampling)


def read_conversation(body: Mapping[str, Any]) -> tuple[tuple[Message, ...], bool]:
    """The messages, the opening first, and whether there are tools. Raises BadRequestError."""
    tools = read_tools(body.get("tools"))
    listed = objects(body.get("messages"), "messages")
    system, messages = read_messages(listed)
    if not messages:
        raise wrong("messages", "the system's alone" if listed else "none", "some, with one of the user's")
    return (Opening(system, tools), *messages), bool(tools)


@dataclass(slots=True, eq=False)
class _Choice:
    """One answer while it is written."""

    reader: ChatReader
    parts: list[ServedPart] = field(default_factory=list[ServedPart])
    rows: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    tokens: list[NDArray[np.int32]] = field(default_factory=list[NDArray[np.int32]])
    num_calls: int = 0
    begun: bool = False
    finish: str | None = None


class ChatAnswer:
    """The answers to one request: jobs for the sampler, and a `Writer` of what comes back."""

    def __init__(
        self,
        request: ChatRequest,
        model: ServedModel,
        frames: ChatFrames | None,
        key_name: str,
        conversation: str | None,
    ) -> None:
        """Raises BadRequestError, ContextLengthError, and NoSuchModelError for a model that does not chat."""
        if frames is None:
            raise NoSuchModelError(
                "the model has no chat frame", field="model", received=model.name, fix="use /v1/completions"
            )
        self.head = Head(f"chatcmpl-{secrets.token_hex(12)}", model.name)
        self._request = request
        self._model = model
        self._frames = frames
        ContextLengthError.check(
            least_tokens(request.messages, model.tokenizer.longest_bytes), model.max_context_tokens
        )
        self._prompt: ChatPrompt = frames.prompt(request.messages, key_name)
        sampling = request.sampling
        self.usage = Usage(len(self._prompt.tokens), sampling.num_samples)
        self._choices = [
            _Choice(ChatReader(self._prompt.renderer, request.rules, _new_call_id))
            for _ in range(sampling.num_samples)
        ]
        self.jobs = self._jobs(conversation)

    def _jobs(self, conversation: str | None) -> list[Job]:
        sampling, tokens = self._request.sampling, self._prompt.tokens
        room = room_for(len(tokens), sampling.params.max_tokens, self._model, "messages")
        seed = random_key() if sampling.seed is None else sampling.seed
        params = sampling.params_within(room)
        stop_tokens = self._model.end_tokens | {self._prompt.renderer.end_token}
        return [
            Job(i, tokens, params, stop_tokens, (seed, i), choice.reader, None if i else conversation)
            for i, choice in enumerate(self._choices)
        ]

    @property
    def id(self) -> str:
        """Of the response."""
        return self.head.id

    def take(self, event: Event) -> list[dict[str, Any]]:
        """See Writer.take."""
        self.usage.take(event)
        self.head.take(event)
        choice = self._choices[event.index]
        documents: list[dict[str, Any]] = []
        if not choice.begun:
            choice.begun = True
            documents.append(self._chunk(event.index, {"role": "assistant", "content": ""}))
        if isinstance(event, Sampled):
            return documents + self._take_sampled(choice, event)
        choice.finish = _finish_reason(choice, event)
        if choice.reader.stop is None:  # with one, the tokens say more than was served
            self._frames.remember(self._prompt, choice.reader.answer, _joined(choice.tokens))
        return [*documents, self._chunk(event.index, {}, choice.finish)]

    def _take_sampled(self, choice: _Choice, event: Sampled) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = []
        if self._request.sampling.logprobs:
            rows = token_rows(event.chunk, self._model.tokenizer)
        choice.tokens.append(event.chunk.tokens)
        choice.parts += event.parts
        choice.rows += rows
        documents: list[dict[str, Any]] = []
        for part in event.parts:
            choice.num_calls += isinstance(part, CallHead | CallPart)
            documents.append(self._chunk(event.index, _delta(part, choice.num_calls - 1), rows=rows))
            rows = []
        if rows:
            documents.append(self._chunk(event.index, {}, rows=rows))
        return documents

    def end(self) -> list[dict[str, Any]]:
        """See Writer.end."""
        if not self._request.sampling.include_usage:
            return []
        head = self.head.document("chat.completion.chunk")
        return [{**head, "choices": [], "usage": self.usage.document()}]

    def whole(self) -> dict[str, Any]:
        """See Writer.whole."""
        choices: list[dict[str, Any]] = []
        for index, choice in enumerate(self._choices):
            row: dict[str, Any] = {"index": index, "message": _message(choice.parts)}
            row["logprobs"] = _logprobs(choice.rows) if self._request.sampling.logprobs else None
            choices.append({**row, "finish_reason": choice.finish})
        head = self.head.document("chat.completion")
        return {**head, "choices": choices, "usage": self.usage.document()}

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        finish: str | None = None,
        rows: list[dict[str, Any]] | None = None,
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "finish_reason": finish}
        choice["logprobs"] = _logprobs(rows) if rows else None
        return {**self.head.document("chat.completion.chunk"), "choices": [choice]}


def _joined(parts: list[NDArray[np.int32]]) -> NDArray[np.int32]:
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int32)


def _new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _finish_reason(choice: _Choice, event: Ended) -> str:
    if event.ending == "length":
        return "length"
    return "tool_calls" if choice.num_calls and choice.reader.stop is None else "stop"


def _logprobs(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {"content": rows, "refusal": None}


def _delta(part: ServedPart, place: int) -> dict[str, Any]:
    match part:
        case TextPart(words):
            return {"content": words}
        case ReasoningPart(words):
            return {"reasoning_content": words}
        case CallHead(call_id, name):
            function = {"name": name, "arguments": ""}
            return {"tool_calls": [{"index": place, "id": call_id, "type": "function", "function": function}]}
        case CallMore(text):
            return {"tool_calls": [{"index": place, "function": {"arguments": text}}]}
        case CallPart(call):
            function = {"name": call.name, "arguments": part.arguments_json}
            return {"tool_calls": [{"index": place, "id": call.id, "type": "function", "function": function}]}


def _message(parts: list[ServedPart]) -> dict[str, Any]:
    """The deltas of a whole answer, put together."""
    words, reasoning = "", ""
    calls: list[dict[str, Any]] = []
    for part in parts:
        match part:
            case TextPart(text):
                words += text
            case ReasoningPart(text):
                reasoning += text
            case CallMore(text):
                calls[-1]["function"]["arguments"] += text
            case CallHead() | CallPart():
                call = _delta(part, 0)["tool_calls"][0]
                del call["index"]
                calls.append(call)
    message: dict[str, Any] = {"role": "assistant", "content": words if words or not calls else None}
    message["refusal"] = None
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    return message
