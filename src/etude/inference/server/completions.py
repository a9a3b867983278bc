"""OpenAI's completions: text or token ids on, without a chat frame."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from etude.inference.server.answering import Ended, Event, Job, Sampled, random_key
from etude.inference.server.documents import Head, Usage, top_pairs
from etude.inference.server.reading import ServedPart, TextReader
from etude.inference.server.schema import (
    MAX_SAMPLES,
    MAX_TOP_LOGPROBS,
    SHARED_FIELDS,
    Sampling,
    ServedModel,
    check_fields,
    check_model,
    read_sampling,
    room_for,
)
from etude.records import SampleChunk
from etude.tokens.chat.errors import ContextLengthError
from etude.tokens.chat.fields import integer, wrong
from etude.tokens.chat.reader import TextPart
from etude.tokens.tokenizer import Tokenizer

_FIELDS = SHARED_FIELDS | {"prompt", "max_tokens", "logprobs", "raw_logprobs"}
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "echo": (False,),
    "best_of": (1,),
    "suffix": ("",),
}
_DEFAULT_MAX_TOKENS = 16

Tokens = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """One request, read."""

    prompts: tuple[Tokens, ...]
    sampling: Sampling


def read_completion(body: Mapping[str, Any], model: ServedModel) -> CompletionRequest:
    """Reads a request. Raises BadRequestError, NoSuchModelError."""
    check_model(body, model)
    check_fields(body, _FIELDS, _NEUTRAL)
    num_top = integer(body, "logprobs", 0, MAX_TOP_LOGPROBS)
    max_tokens = integer(body, "max_tokens", 1) or _DEFAULT_MAX_TOKENS
    sampling = read_sampling(body, max_tokens, num_top is not None, num_top or 0)
    prompts = read_prompts(body.get("prompt"), model.tokenizer, model.max_context_tokens)
    if len(prompts) * sampling.num_samples > MAX_SAMPLES:
        raise wrong("n", sampling.num_samples, f"so that prompts times n are at most {MAX_SAMPLES}")
    return CompletionRequest(prompts, sampling)


def read_prompts(value: object, tokenizer: Tokenizer, max_tokens: int) -> tuple[Tokens, ...]:
    """Prompts: a text, token ids, or a list of either. Raises BadRequestError, and ContextLengthError for a
    text that is too long for `max_tokens` however it is encoded."""
    listed = value if isinstance(value, list) and value and isinstance(value[0], str | list) else [value]
    if len(listed) > MAX_SAMPLES:
        raise wrong("prompt", len(listed), f"at most {MAX_SAMPLES} prompts")
    return tuple(
        _prompt(one, tokenizer, max_tokens, f"prompt[{place}]" if len(listed) > 1 else "prompt")
        for place, one in enumerate(listed)
    )


def _prompt(value: object, tokenizer: Tokenizer, max_tokens: int, field_name: str) -> Tokens:
    if isinstance(value, str):
        ContextLengthError.check(len(value) // tokenizer.longest_bytes, max_tokens, field_name)
        tokens = tokenizer.encode(value)
    elif isinstance(value, list):
        tokens = read_token_ids(value, tokenizer, field_name)
    else:
        raise wrong(field_name, value, "a text, token ids, or a list of either")
    if not len(tokens):
        raise wrong(field_name, "nothing", "at least one token")
    return tokens


def read_token_ids(value: object, tokenizer: Tokenizer, field_name: str) -> Tokens:
    """Token ids of the vocabulary. Raises BadRequestError."""
    if not isinstance(value, list):
        raise wrong(field_name, value, "a list of token ids")
    for place, token in enumerate(value):
        whole = isinstance(token, int) and not isinstance(token, bool)
        if not whole or not 0 <= token < tokenizer.vocab_size:
            raise wrong(f"{field_name}[{place}]", token, f"a token id in 0..{tokenizer.vocab_size - 1}")
    return np.array(value, dtype=np.int32)


@dataclass(slots=True, eq=False)
class _Choice:
    """One answer while it is written."""

    reader: TextReader
    text: str = ""
    logprobs: dict[str, list[Any]] = field(default_factory=dict[str, list[Any]])
    num_characters: int = 0
    finish: str | None = None


class CompletionAnswer:
    """The answers to one request: jobs for the sampler, and a `Writer` of what comes back."""

    def __init__(self, request: CompletionRequest, model: ServedModel, conversation: str | None) -> None:
        """Raises ContextLengthError."""
        self.head = Head(f"cmpl-{secrets.token_hex(12)}", model.name)
        self._request = request
        self._model = model
        sampling = request.sampling
        self.usage = Usage(sum(len(prompt) for prompt in request.prompts), sampling.num_samples)
        self._choices: list[_Choice] = []
        self.jobs: list[Job] = []
        seed = random_key() if sampling.seed is None else sampling.seed
        for prompt in request.prompts:
            room = room_for(len(prompt), sampling.params.max_tokens, model, "prompt")
            for _ in range(sampling.num_samples):
                place = len(self.jobs)
                reader = TextReader(model.tokenizer, sampling.stops)
                params, key = sampling.params_within(room), (seed, place)
                named = None if place else conversation
                self._choices.append(_Choice(reader))
                self.jobs.append(Job(place, prompt, params, model.end_tokens, key, reader, named))

    @property
    def id(self) -> str:
        """Of the response."""
        return self.head.id

    def take(self, event: Event) -> list[dict[str, Any]]:
        """See Writer.take."""
        self.usage.take(event)
        self.head.take(event)
        choice = self._choices[event.index]
        if isinstance(event, Ended):
            choice.finish = event.ending
            return [self._document([_row(event.index, "", None, event.ending)])]
        text = _words(event.parts)
        choice.text += text
        logprobs = self._logprobs(choice, event)
        if not text and not logprobs:
            return []
        return [self._document([_row(event.index, text, logprobs, None)])]

    def end(self) -> list[dict[str, Any]]:
        """See Writer.end."""
        if not self._request.sampling.include_usage:
            return []
        return [{**self._document([]), "usage": self.usage.document()}]

    def whole(self) -> dict[str, Any]:
        """See Writer.whole."""
        wanted = self._request.sampling.logprobs
        rows = [
            _row(index, choice.text, choice.logprobs if wanted else None, choice.finish)
            for index, choice in enumerate(self._choices)
        ]
        return {**self._document(rows), "usage": self.usage.document()}

    def _document(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self.head.document("text_completion"), "choices": rows}

    def _logprobs(self, choice: _Choice, event: Sampled) -> dict[str, list[Any]] | None:
        if not self._request.sampling.logprobs or not len(event.chunk.tokens):
            return None
        rows = _legacy_rows(event.chunk, self._model.tokenizer, choice.num_characters)
        choice.num_characters += sum(len(token) for token in rows["tokens"])
        for name, values in rows.items():
            choice.logprobs.setdefault(name, []).extend(values)
        return rows


def _legacy_rows(chunk: SampleChunk, tokenizer: Tokenizer, offset: int) -> dict[str, list[Any]]:
    """Log-probabilities in completions' own layout. `text_offset` counts characters of the tokens' texts."""
    rows: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    if chunk.raw_logprobs is not None:
        rows["raw_logprobs"] = [float(one) for one in chunk.raw_logprobs]
    for place, token in enumerate(chunk.tokens.tolist()):
        text = tokenizer.decode([token])
        rows["tokens"].append(text)
        rows["token_logprobs"].append(float(chunk.logprobs[place]))
        rows["text_offset"].append(offset)
        offset += len(text)
        top: dict[str, float] = {}
        if chunk.top_tokens is not None and chunk.top_logprobs is not None:
            for other, logprob in top_pairs(chunk.top_tokens[place], chunk.top_logprobs[place]):
                top.setdefault(tokenizer.decode([other]), logprob)
        rows["top_logprobs"].append(top)
    return rows


def _words(parts: Sequence[ServedPart]) -> str:
    return "".join(part.text for part in parts if isinstance(part, TextPart))


def _row(index: int, text: str, logprobs: dict[str, list[Any]] | None, finish: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}
