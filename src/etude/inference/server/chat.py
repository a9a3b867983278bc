"""The answers to one request of a conversation, in any dialect: what is to be sampled, and who writes it."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from etude.inference.server.answering import Job, random_key
from etude.inference.server.errors import NoSuchModelError
from etude.inference.server.model import ServedModel, room_for
from etude.tokens.chat.answers import Writer
from etude.tokens.chat.dialects import Dialect
from etude.tokens.chat.errors import ContextLengthError
from etude.tokens.chat.histories import ChatFrames, ChatPrompt
from etude.tokens.chat.messages import Message, least_tokens
from etude.tokens.chat.reader import AnswerReader
from etude.tokens.chat.requests import ChatRequest


@dataclass(frozen=True, slots=True, eq=False)
class ServedAnswer:
    """The answers to one request."""

    jobs: Sequence[Job]
    """What is to be sampled."""
    writer: Writer


def lay_out(
    messages: Sequence[Message], model: ServedModel, frames: ChatFrames | None, key_name: str
) -> ChatPrompt:
    """The tokens of a conversation. Raises BadRequestError, ContextLengthError, and NoSuchModelError for a
    model that does not chat."""
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
    conversation: str | None,
) -> ServedAnswer:
    """The answers to a request. Raises as `lay_out`."""
    prompt, sampling = lay_out(request.messages, model, frames, key_name), request.sampling
    assert frames is not None, "there is a prompt"
    room = room_for(len(prompt.tokens), model, "messages")
    params = sampling.params_within(room, model.default_max_tokens)
    stop_tokens = model.end_tokens | {prompt.renderer.end_token}
    seed = random_key() if sampling.seed is None else sampling.seed

    def job(index: int) -> Job:
        reader = AnswerReader(prompt.renderer, request.rules)

        def remember(tokens: NDArray[np.int32]) -> None:
            if reader.stop is None:  # with one, the tokens say more than was served
                frames.remember(prompt, reader.answer, tokens)

        named = None if index else conversation
        return Job(index, prompt.tokens, params, stop_tokens, (seed, index), reader, named, remember)

    answer_id = secrets.token_hex(12)
    writer = dialect.writer(request, answer_id, len(prompt.tokens), model.tokenizer, model.name)
    return ServedAnswer([job(index) for index in range(sampling.num_samples)], writer)
