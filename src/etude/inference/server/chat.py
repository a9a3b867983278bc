"""The served model, and how chat requests of any API dialect become sampling jobs and a response writer."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from etude.errors import ConfigError
from etude.inference.server.answering import Job, random_key
from etude.inference.server.errors import NoSuchModelError
from etude.tokens.chat.answers import AnswerWriter
from etude.tokens.chat.dialects import Dialect
from etude.tokens.chat.errors import ContextLengthError
from etude.tokens.chat.fields import wrong
from etude.tokens.chat.histories import ChatFrames, ChatPrompt
from etude.tokens.chat.messages import Message, least_tokens
from etude.tokens.chat.reader import AnswerReader
from etude.tokens.chat.renderer_cache import RendererCache
from etude.tokens.chat.requests import ChatRequest
from etude.tokens.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The served model: tokenizer, chat templates and limits."""

    name: str
    tokenizer: Tokenizer
    end_tokens: frozenset[int]
    """Stop tokens of every answer."""
    max_context_tokens: int
    """Limit of prompt and answer together."""
    renderers: RendererCache | None = None
    """Chat templates; None: the model only serves completions."""
    default_max_tokens: int = 4096
    """Limit of a chat answer whose request names none."""
    created_s: int = 0
    """Unix time."""

    def __post_init__(self) -> None:
        if not self.end_tokens:
            raise ConfigError("a model needs a token that ends its answers", field="end_tokens")


def check_model(body: Mapping[str, Any], model: ServedModel) -> None:
    """Raises NoSuchModelError for another model's name, BadRequestError if it is not a string."""
    name = body.get("model")
    if name is None or name == model.name:
        return
    if not isinstance(name, str):
        raise wrong("model", name, "a string")
    raise NoSuchModelError(
        "no such model is served here", field="model", received=name, fix=f"ask for {model.name!r}"
    )


def room_for(num_prompt_tokens: int, model: ServedModel, field: str) -> int:
    """Tokens that an answer may have after this prompt. Raises ContextLengthError if there is no room."""
    room = model.max_context_tokens - num_prompt_tokens
    if room <= 0:
        raise ContextLengthError(num_prompt_tokens, model.max_context_tokens, field)
    return room


@dataclass(frozen=True, slots=True, eq=False)
class ServedAnswer:
    """The jobs of one request, and the writer of its response."""

    jobs: Sequence[Job]
    """One per answer."""
    writer: AnswerWriter


def lay_out(
    messages: Sequence[Message], model: ServedModel, frames: ChatFrames | None, key_name: str
) -> ChatPrompt:
    """Renders a conversation to tokens. Raises BadRequestError, ContextLengthError, and NoSuchModelError for
    a model without chat templates."""
    if frames is None:
        raise NoSuchModelError(
            "the model has no chat frame", field="model", received=model.name, fix="use /v1/completions"
        )
    ContextLengthError.check(least_tokens(messages, model.tokenizer.longest_bytes), model.max_context_tokens)
    return frames.prompt(messages, key_name)


def answer_chat(
    dialect: Dialect,
    request: ChatRequest,
    model: ServedModel,
    frames: ChatFrames | None,
    key_name: str,
) -> ServedAnswer:
    """The jobs and the writer for a chat request. Raises as `lay_out`."""
    prompt, sampling = lay_out(request.messages, model, frames, key_name), request.sampling
    assert frames is not None, "there is a prompt"
    room = room_for(len(prompt.tokens), model, "messages")
    params = sampling.params_within(room, model.default_max_tokens)
    renderer = prompt.framing.renderer
    stop_tokens = model.end_tokens | renderer.end_tokens
    seed = random_key() if sampling.seed is None else sampling.seed

    def job(index: int) -> Job:
        reader = AnswerReader(renderer, request.rules)

        def remember(tokens: NDArray[np.int32]) -> None:
            if reader.stop is None:  # after a stop string, the tokens hold more than was served
                frames.remember(prompt, reader.answer, tokens)

        return Job(index, prompt.tokens, params, stop_tokens, (seed, index), reader, remember)

    answer_id = secrets.token_hex(12)
    writer = dialect.writer(request, answer_id, len(prompt.tokens), model.tokenizer, model.name)
    return ServedAnswer([job(index) for index in range(sampling.num_samples)], writer)
