"""OpenAI's completions API: continues text or token ids, without a chat template."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from etude.inference.server.answering import Job, random_key
from etude.inference.server.chat import ServedAnswer, ServedModel, room_for
from etude.tokens.chat.answers import AnswerWriter, Choice, Document, Ended
from etude.tokens.chat.errors import ContextLengthError
from etude.tokens.chat.fields import integer, stop_strings, wrong
from etude.tokens.chat.reader import Part, ReadingRules, TextReader
from etude.tokens.chat.requests import (
    MAX_SAMPLES,
    MAX_TOP_LOGPROBS,
    SHARED_FIELDS,
    ChatRequest,
    Neutral,
    check_fields,
    read_sampling,
    read_stream,
)
from etude.tokens.grammar import TextDelta
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
class CompletionRequest(ChatRequest):
    """A parsed completion request: prompts in place of messages."""

    prompts: tuple[Tokens, ...] = ()

    @property
    def num_answers(self) -> int:
        return len(self.prompts) * self.sampling.num_samples


def read_completion(body: Mapping[str, Any], model: ServedModel) -> CompletionRequest:
    """Reads a request. Raises BadRequestError."""
    check_fields(body, _FIELDS, _NEUTRAL)
    num_top = integer(body, "logprobs", 0, MAX_TOP_LOGPROBS)
    max_tokens = integer(body, "max_tokens", 1)
    stream, include_usage = read_stream(body)
    sampling = read_sampling(body, max_tokens, num_top is not None, num_top or 0)
    prompts = read_prompts(body.get("prompt"), model.tokenizer, model.max_context_tokens)
    rules = ReadingRules(stop_strings(body.get("stop"), "stop"))
    request = CompletionRequest((), rules, sampling, stream, include_usage, body, prompts)
    if request.num_answers > MAX_SAMPLES:
        raise wrong("n", sampling.num_samples, f"so that prompts times n are at most {MAX_SAMPLES}")
    return request


def read_prompts(value: object, tokenizer: Tokenizer, max_tokens: int) -> tuple[Tokens, ...]:
    """Prompts: a text, token ids, or a list of either. Raises BadRequestError, and ContextLengthError for a
    text that is too long for `max_tokens` however it is encoded."""
    listed = value if isinstance(value, list) and value and isinstance(value[0], str | list) else [value]
    if len(listed) > MAX_SAMPLES:
        raise wrong("prompt", len(listed), f"at most {MAX_SAMPLES} prompts")
    return tuple(
        _prompt(prompt, tokenizer, max_tokens, f"prompt[{place}]" if len(listed) > 1 else "prompt")
        for place, prompt in enumerate(listed)
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


def answer_completion(request: CompletionRequest, model: ServedModel) -> ServedAnswer:
    """The jobs and the writer for a request. Raises ContextLengthError."""
    sampling, jobs = request.sampling, list[Job]()
    seed = random_key() if sampling.seed is None else sampling.seed
    for prompt in request.prompts:
        params = sampling.params_within(room_for(len(prompt), model, "prompt"), _DEFAULT_MAX_TOKENS)
        for _ in range(sampling.num_samples):
            place = len(jobs)
            reader = TextReader(model.tokenizer, request.rules.stops)
            jobs.append(Job(place, prompt, params, model.end_tokens, (seed, place), reader))
    num_prompt = sum(map(len, request.prompts))
    writer = CompletionWriter(request, secrets.token_hex(12), num_prompt, model.tokenizer, model.name)
    return ServedAnswer(jobs, writer)


class CompletionWriter(AnswerWriter):
    """Writes the answers to one completion request."""

    id_prefix = "cmpl-"
    tail = b"data: [DONE]\n\n"

    def end(self) -> list[Document]:
        return [{**self._document([]), "usage": self.usage()}] * self.request.include_usage

    def whole(self) -> Document:
        wanted = self.request.sampling.logprobs
        rows = [_row(c, c.text_of("text"), _legacy(c.rows) if wanted else None) for c in self.choices]
        return {**self._document(rows), "usage": self.usage()}

    def _write(self, choice: Choice, part: Part, begins: bool, rows: list[Document]) -> list[Document]:
        logprobs = _legacy(rows, choice.num_characters) if rows else None
        choice.num_characters += sum(len(row["token"]) for row in rows)
        return [self._document([_row(choice, part.text if isinstance(part, TextDelta) else "", logprobs)])]

    def _write_rows(self, choice: Choice, rows: list[Document]) -> list[Document]:
        return self._write(choice, TextDelta(""), False, rows)

    def _finish(self, choice: Choice, ended: Ended) -> list[Document]:
        return [self._document([_row(choice, "", None)])]

    def _document(self, rows: list[Document]) -> Document:
        head = {"id": self.id, "object": "text_completion", "created": self.created_s}
        return {**head, "model": self.model, "system_fingerprint": self.version, "choices": rows}


def _row(choice: Choice, text: str, logprobs: Document | None) -> Document:
    finish = None if choice.ended is None else choice.ended.ending
    return {"index": choice.index, "text": text, "logprobs": logprobs, "finish_reason": finish}


def _legacy(rows: list[Document], offset: int = 0) -> Document:
    """Log-probabilities in the completions format. `text_offset` counts characters of the tokens' texts."""
    found: Document = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for row in rows:
        found["tokens"].append(row["token"])
        found["token_logprobs"].append(row["logprob"])
        found["text_offset"].append(offset)
        offset += len(row["token"])
        top: dict[str, float] = {}
        for alternative in row["top_logprobs"]:
            top.setdefault(alternative["token"], alternative["logprob"])
        found["top_logprobs"].append(top)
        if "raw_logprob" in row:
            found.setdefault("raw_logprobs", []).append(row["raw_logprob"])
    return found
