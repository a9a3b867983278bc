"""Client routes: OpenAI's and Anthropic's APIs, tokenisation, and the side channel."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from etude.errors import EtudeError, UserError
from etude.inference.headers import SIDE_CHANNEL_HEADER
from etude.inference.server.chat import ServedAnswer, answer_chat, check_model, lay_out
from etude.inference.server.completions import answer_completion, read_completion, read_token_ids
from etude.inference.server.errors import ERRORS, NoSuchModelError
from etude.inference.server.limits import Key
from etude.inference.server.requests import (
    check_session_name,
    count_answer,
    key_of,
    pin_of,
    state_of,
    wants_tokens,
    with_body,
)
from etude.inference.server.side_channel import SIDE_CHANNEL_PATH
from etude.inference.server.state import LiveRequest, ResponseOptions, ServerState
from etude.serving.answers import EventStream, Sending
from etude.serving.application import Binary, unless_disconnected
from etude.serving.describing import answering, described
from etude.serving.errors import ErrorAnswer
from etude.tokens.chat.answers import collect_answers, encode_event, stream_answers
from etude.tokens.chat.dialects import DIALECTS, MESSAGES, Dialect, respell_error
from etude.tokens.chat.fields import flag, text, wrong
from etude.tokens.chat.messages import num_characters
from etude.tokens.chat.openai_chat import read_conversation
from etude.tokens.chat.requests import check_fields

JSON_BODY = described(body="application/json")
STREAMED = answering("application/json", "text/event-stream")
router = APIRouter()
_log = logging.getLogger("etude.inference.server")

_MOST_CHARACTERS = 1 << 21
"""Limit of a text for tokenisation."""

Build = Callable[[Mapping[str, Any], Key], ServedAnswer]
"""Parses a body into the answer to sample."""


def _add_dialect(dialect: Dialect) -> None:
    async def answer(request: Request) -> Response:
        """The next answer of a conversation."""
        state = state_of(request)

        def build(body: Mapping[str, Any], key: Key) -> ServedAnswer:
            return answer_chat(dialect, dialect.read(body), state.model, state.frames, key.name)

        return await _answer(request, build)

    router.add_api_route(
        dialect.path,
        answer,
        methods=["POST"],
        name=dialect.name,
        tags=[dialect.name],
        responses=STREAMED,
        openapi_extra=JSON_BODY,
    )


for _dialect in DIALECTS:
    _add_dialect(_dialect)


@router.post("/v1/completions", tags=["completions"], responses=STREAMED, openapi_extra=JSON_BODY)
async def completions(request: Request) -> Response:
    """OpenAI's completions."""
    model = state_of(request).model

    def build(body: Mapping[str, Any], key: Key) -> ServedAnswer:
        return answer_completion(read_completion(body, model), model)

    return await _answer(request, build)


async def _answer(request: Request, build: Build) -> Response:
    state = state_of(request)
    key = key_of(request)
    state.version()
    check_session_name(request)
    options = ResponseOptions(pin_of(request), wants_tokens(request))

    def checked(body: dict[str, Any]) -> ServedAnswer:
        check_model(body, state.model)
        return build(body, key)

    answer = await with_body(request, checked)
    return await _respond(request, state.begin_request(answer, key, options))


async def _respond(request: Request, live: LiveRequest) -> Response:
    """The response to a request that has begun. Raises what the sampler raises before the first event."""
    writer = live.answer.writer
    headers: dict[str, str] = {}
    if live.options.with_tokens:
        headers[SIDE_CHANNEL_HEADER] = f"{SIDE_CHANNEL_PATH}/{writer.id}"

    def describe(error: Exception) -> ErrorAnswer:
        """Status, document and headers of an error; unexpected exceptions are logged."""
        if not isinstance(error, UserError):
            live.state.metrics.count("etude_serve_engine_failures")
        if not isinstance(error, EtudeError):
            _log.error("a request failed", exc_info=error)
        return respell_error(request.url.path, error, ERRORS.describe(error))

    def ended(status: int) -> None:
        live.finish()
        count_answer(request, status)

    events = live.events()
    if writer.request.stream:
        return EventStream(Sending(stream_answers(events, writer), describe, encode_event, ended, headers))
    try:
        document = await unless_disconnected(request, collect_answers(events, writer))
    finally:
        live.finish()
    ended(200)
    return JSONResponse(document, headers=headers)


@router.post("/v1/messages/count_tokens", tags=["count_tokens"], openapi_extra=JSON_BODY)
async def count_tokens(request: Request) -> Response:
    """Number of prompt tokens of these messages, in Anthropic's format."""
    return await _plain(request, _count_tokens)


def _count_tokens(state: ServerState, body: Mapping[str, Any], key_name: str) -> dict[str, Any]:
    check_model(body, state.model)
    read = MESSAGES.read({"max_tokens": 1, **body})
    return {"input_tokens": len(lay_out(read.messages, state.model, state.frames, key_name).tokens)}


async def _plain(
    request: Request, work: Callable[[ServerState, Mapping[str, Any], str], dict[str, Any]]
) -> Response:
    """Answers a request that does not sample. `work` gets the body and the key's name, for its histories."""
    state, key = state_of(request), key_of(request)
    document = await with_body(request, lambda body: work(state, body, key.name))
    count_answer(request, 200)
    return JSONResponse(document)


@router.post("/tokenize", tags=["tokenize"], openapi_extra=JSON_BODY)
async def tokenize(request: Request) -> Response:
    """Token ids of a text, or of a conversation as a chat completion would send it."""
    return await _plain(request, _tokenize)


def _tokenize(state: ServerState, body: Mapping[str, Any], key_name: str) -> dict[str, Any]:
    model = state.model
    check_model(body, model)
    given = [name for name in ("prompt", "messages") if body.get(name) is not None]
    if len(given) != 1:
        raise wrong("prompt", ", ".join(given) or None, "either prompt (a text) or messages")
    if given == ["prompt"]:
        check_fields(body, {"model", "prompt"}, {"add_special_tokens": (False,)})
        words = text(body["prompt"], "prompt")
        _check_length(len(words), "prompt")
        tokens = model.tokenizer.encode(words)
    else:
        check_fields(body, {"model", "messages", "tools", "add_generation_prompt"}, {})
        if state.frames is None:
            raise NoSuchModelError(
                "the model has no chat frame", field="messages", received=model.name, fix="send a prompt"
            )
        opened = flag(body, "add_generation_prompt", True)
        messages = read_conversation(body)[0]
        _check_length(num_characters(messages), "messages")
        tokens = state.frames.prompt(messages, key_name, opened).tokens
    return {"count": len(tokens), "max_model_len": model.max_context_tokens, "tokens": tokens.tolist()}


def _check_length(num_characters: int, field: str) -> None:
    """Raises BadRequestError for texts that would take long to encode and exceed any context anyway."""
    if num_characters > _MOST_CHARACTERS:
        raise wrong(field, num_characters, f"at most {_MOST_CHARACTERS} characters")


@router.post("/detokenize", tags=["detokenize"], openapi_extra=JSON_BODY)
async def detokenize(request: Request) -> Response:
    """The text of token ids, control tokens by their names."""
    return await _plain(request, _detokenize)


def _detokenize(state: ServerState, body: Mapping[str, Any], _key_name: str) -> dict[str, Any]:
    check_model(body, state.model)
    check_fields(body, {"model", "tokens"}, {})
    tokenizer = state.model.tokenizer
    return {"prompt": tokenizer.decode(read_token_ids(body.get("tokens"), tokenizer, "tokens"))}


@router.get("/v1/models", tags=["models"])
async def models(request: Request) -> Response:
    """The one model that is served."""
    state = state_of(request)
    key_of(request)
    count_answer(request, 200)
    return JSONResponse({"object": "list", "data": [_model_row(state)]})


@router.get("/v1/models/{name:path}", tags=["models"])
async def model(request: Request, name: str) -> Response:
    """One model by its name."""
    state = state_of(request)
    key_of(request)
    check_model({"model": name}, state.model)
    count_answer(request, 200)
    return JSONResponse(_model_row(state))


def _model_row(state: ServerState) -> dict[str, Any]:
    version, model = state.sink.current(), state.model
    row = {"id": model.name, "object": "model", "created": model.created_s, "owned_by": "etude"}
    more = {"max_model_len": model.max_context_tokens, "version": None if version is None else str(version)}
    return {**row, **more}


@router.get(SIDE_CHANNEL_PATH + "/{answer_id}", tags=["side_channel"], response_class=Binary)
async def side_channel(request: Request, answer_id: str) -> Response:
    """The tokens of an answer as a binary message."""
    state = state_of(request)
    body = state.channel.get(answer_id, key_of(request).name)
    count_answer(request, 200)
    return Binary(body)
