"""OpenAI's completions: text or token ids on, without a chat frame."""

from __future__ import annotations

import codecs
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from etude.inference.server.answering import Job, random_key
from etude.inference.server.chat import ServedAnswer, ServedModel, room_for
from etude.records import SampleChunk
from etude.tokens.chat.answers import Document, Ended, Event, Usage, top_pairs
from etude.tokens.chat.errors import ContextLengthError
from etude.tokens.chat.fields import integer, wrong
from etude.tokens.chat.messages import Answer
from etude.tokens.chat.reader import Part, TextPart, begun_stop
from etude.tokens.chat.requests import (
    MAX_SAMPLES,
    MAX_TOP_LOGPROBS,
    SHARED_FIELDS,
    Neutral,
    Sampling,
    check_fields,
    read_sampling,
    read_stops,
    read_stream,
)
from etude.tokens.tokenizer import Tokenizer

_FIELDS = SHARED_FIELDS | {"prompt", "max_tokens", "logprobs", "raw_logprobs"}
_NEUTRAL: Neutral = {
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
    stops: tuple[str, ...]
    stream: bool
    include_usage: bool


def read_completion(body: Mapping[str, Any], model: ServedModel) -> CompletionRequest:
    """Reads a request. Raises BadRequestError."""
    check_fields(body, _FIELDS, _NEUTRAL)
    num_top = integer(body, "logprobs", 0, MAX_TOP_LOGPROBS)
    max_tokens = integer(body, "max_tokens", 1)
    stream, include_usage = read_stream(body)
    sampling = read_sampling(body, max_tokens, num_top is not None, num_top or 0)
    prompts = read_prompts(body.get("prompt"), model.tokenizer, model.max_context_tokens)
    if len(prompts) * sampling.num_samples > MAX_SAMPLES:
        raise wrong("n", sampling.num_samples, f"so that prompts times n are at most {MAX_SAMPLES}")
    return CompletionRequest(prompts, sampling, read_stops(body), stream, include_usage)


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


def answer_completion(
    request: CompletionRequest, model: ServedModel, conversation: str | None
) -> ServedAnswer:
    """The answers to a request. Raises ContextLengthError."""
    sampling, jobs = request.sampling, list[Job]()
    seed = random_key() if sampling.seed is None else sampling.seed
    for prompt in request.prompts:
        params = sampling.params_within(room_for(len(prompt), model, "prompt"), _DEFAULT_MAX_TOKENS)
        for _ in range(sampling.num_samples):
            place = len(jobs)
            reader, named = TextReader(model.tokenizer, request.stops), None if place else conversation
            jobs.append(Job(place, prompt, params, model.end_tokens, (seed, place), reader, named))
    return ServedAnswer(jobs, CompletionWriter(request, model, len(jobs)))


@dataclass(slots=True, eq=False)
class _Choice:
    """One answer while it is written."""

    text: str = ""
    logprobs: dict[str, list[Any]] = field(default_factory=dict[str, list[Any]])
    num_characters: int = 0
    finish: str | None = None


class CompletionWriter:
    """Writes the answers to one request. Implements `Writer`."""

    tail = b"data: [DONE]\n\n"

    def __init__(self, request: CompletionRequest, model: ServedModel, num_answers: int) -> None:
        self.id = f"cmpl-{secrets.token_hex(12)}"
        self.usage = Usage(sum(len(prompt) for prompt in request.prompts), request.sampling.num_samples)
        self._request = request
        self._model = model
        self._created_s = int(time.time())
        self._version: str | None = None
        self._choices = [_Choice() for _ in range(num_answers)]

    def begin(self) -> list[Document]:
        """See Writer.begin."""
        return []

    def take(self, event: Event) -> list[Document]:
        """See Writer.take."""
        self.usage.take(event)
        choice = self._choices[event.index]
        if isinstance(event, Ended):
            choice.finish = event.ending
            return [self._document([_row(event.index, "", None, event.ending)])]
        assert event.chunk is not None, "what is held back comes with an answer's last tokens"
        self._version = str(event.chunk.version)
        text = "".join(part.text for part in event.parts if isinstance(part, TextPart))
        choice.text += text
        logprobs = self._logprobs(choice, event.chunk)
        if not text and not logprobs:
            return []
        return [self._document([_row(event.index, text, logprobs, None)])]

    def end(self) -> list[Document]:
        """See Writer.end."""
        return [{**self._document([]), "usage": self.usage.document()}] * self._request.include_usage

    def whole(self) -> Document:
        """See Writer.whole."""
        wanted = self._request.sampling.logprobs
        rows = [
            _row(index, choice.text, choice.logprobs if wanted else None, choice.finish)
            for index, choice in enumerate(self._choices)
        ]
        return {**self._document(rows), "usage": self.usage.document()}

    def _document(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        head = {"id": self.id, "object": "text_completion", "created": self._created_s}
        return {**head, "model": self._model.name, "system_fingerprint": self._version, "choices": rows}

    def _logprobs(self, choice: _Choice, chunk: SampleChunk) -> dict[str, list[Any]] | None:
        if not self._request.sampling.logprobs or not len(chunk.tokens):
            return None
        rows = _legacy_rows(chunk, self._model.tokenizer, choice.num_characters)
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


def _row(index: int, text: str, logprobs: dict[str, list[Any]] | None, finish: str | None) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}


class TextReader:
    """Reads a completion: every token is text, control tokens are not shown. Implements `Reader`."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stops = tuple(stops)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self.ended = False
        self.stop: str | None = None
        self.answer = Answer()

    def feed(self, tokens: NDArray[np.int32]) -> tuple[Sequence[Part], int]:
        """See Reader.feed."""
        if not self._stops:
            text = self._decoder.decode(self._tokenizer.decode_bytes(tokens, skip_control=True))
            return _text(text), len(tokens)
        shown: list[str] = []
        for count, token in enumerate(tokens.tolist(), start=1):
            data = self._tokenizer.decode_bytes([token], skip_control=True)
            shown.append(self._search(self._decoder.decode(data)))
            if self.ended:
                return _text("".join(shown)), count
        return _text("".join(shown)), len(tokens)

    def finish(self) -> Sequence[Part]:
        """See Reader.finish. Half a character that nothing completes becomes U+FFFD."""
        if self.ended:
            return []
        shown = self._search(self._decoder.decode(b"", final=True))
        held, self._held = self._held, ""
        return _text(shown + ("" if self.ended else held))

    def _search(self, text: str) -> str:
        text = self._held + text
        found = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        if found:
            self._held, self.ended = "", True
            return text[: min(found)]
        kept = begun_stop(text, self._stops)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]


def _text(text: str) -> list[Part]:
    return [TextPart(text)] if text else []
