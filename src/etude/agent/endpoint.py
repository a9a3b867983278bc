"""A `Sampler` over any OpenAI-compatible chat endpoint.

A chat endpoint has no tokens: the session keeps tokens of our own (see `endpoint_messages`), every logprob
is 0 and the policy version is named after the endpoint, so such a session can never be used for training.
A message reaches the session only when complete: a stream that drops midway leaves nothing behind, and the
request can be sent again. Partial output is passed to `on_event`, for display.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from etude.agent.endpoint_messages import Answer, answer_tokens, byte_tokenizer, chat_messages
from etude.agent.endpoint_stream import OnEvent, read_document, read_stream
from etude.errors import ConfigError, SamplerError
from etude.protocols import Sampler
from etude.records import UNKNOWN_FORMAT, PolicyVersion, SampleChunk, SampleRequest, Scores
from etude.serving.client import Answer as HttpAnswer
from etude.serving.client import (
    Client,
    NoAnswerError,
    NobodyListensError,
    SyncClient,
    Transport,
    check_address,
)
from etude.tokens.grammar import HermesGrammar, ToolSchema, XmlGrammar
from etude.tokens.renderer import Renderer

MAX_RETRY_AFTER_S = 60.0
_SILENCE_S = 120.0
"""Longest wait for the next byte."""
_CHECK_S = 10.0
_ANSWER_S = 900.0
"""Longest time of one answer."""
_ERROR_CHARACTERS = 300


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Address, model name and options of a chat endpoint. Raises ConfigError."""

    url: str
    """Base address, such as `http://127.0.0.1:8000/v1`."""
    model: str
    key_variable: str = ""
    """Environment variable that holds the key; empty: no key is sent."""
    native_tools: bool = True
    """Whether tools go into the request's `tools`; else into a system message, calls parsed from the text."""
    temperature: float | None = None

    def __post_init__(self) -> None:
        check_address(self.url, "--endpoint")
        if not self.model:
            raise ConfigError("is missing", field="--model-name", fix="name a model that the endpoint serves")

    @property
    def key(self) -> str | None:
        """The key. Raises ConfigError if the variable is not set."""
        if not self.key_variable:
            return None
        key = os.environ.get(self.key_variable)
        if not key:
            raise ConfigError(
                "this environment variable is not set",
                field="--key-variable",
                received=self.key_variable,
                fix="set it to the endpoint's key, or omit the option",
            )
        return key

    @property
    def address(self) -> str:
        """URL of chat completions."""
        base = self.url.rstrip("/")
        return base if base.endswith("/chat/completions") else base + "/chat/completions"


def check_endpoint(endpoint: Endpoint) -> None:
    """Raises ConfigError if nothing listens or the key is not set; any HTTP answer is enough. Blocks."""
    with SyncClient(endpoint.url, endpoint.key, outside=True, refusal=None, within_s=_CHECK_S) as client:
        try:
            client.request("GET", "/models")
        except NobodyListensError as error:
            fix = "start the server, or correct the address"
            raise ConfigError(error.message, field="endpoint", received=endpoint.url, fix=fix) from error
        except NoAnswerError:
            return  # it listens, and may be busy


def endpoint_renderer(schemas: Sequence[ToolSchema], native_tools: bool = True) -> Renderer:
    """The renderer of endpoint sessions: byte tokens; native calls as JSON, others in our XML grammar."""
    if native_tools:
        grammar = HermesGrammar(schemas)
        return Renderer(byte_tokenizer(grammar.control_tokens()), grammar)
    return Renderer(byte_tokenizer(), XmlGrammar(schemas))


class EndpointSampler(Sampler):
    """Implements `Sampler`. Keeps no session state: every request carries all messages.

    Raises ConfigError where a retry cannot help (a wrong key, an unknown model, a refused request), and
    SamplerError where it may: 408, 409, 429 and 5xx, dropped or malformed streams, timeouts. After a
    `Retry-After` the next request waits for that long, at most a minute.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        renderer: Renderer,
        schemas: Sequence[ToolSchema],
        on_event: OnEvent | None = None,
        transport: Transport | None = None,
    ) -> None:
        """`transport`: replaces HTTP in tests."""
        self.endpoint = endpoint
        self.version = PolicyVersion(f"endpoint:{endpoint.model}", 0, format=UNKNOWN_FORMAT)
        self.on_event: OnEvent = on_event or (lambda event: None)
        self._renderer = renderer
        self._tools = [schema.function_schema() for schema in schemas] if endpoint.native_tools else []
        self._client = Client(
            endpoint.address,
            endpoint.key,
            within_s=_SILENCE_S,
            refusal=self._refusal,
            outside=True,
            transport=transport,
        )
        self._not_before_s = 0.0
        self._requests: dict[str, asyncio.Task[Answer]] = {}
        self._aborted: set[str] = set()

    async def aclose(self) -> None:
        """Closes connections. Idempotent."""
        await self._client.close()

    def open(self, session_id: str, sibling: str | None = None) -> None:
        """See Sampler.open."""

    def close(self, session_id: str) -> None:
        """See Sampler.close."""

    async def stream(self, request: SampleRequest) -> AsyncIterator[SampleChunk]:
        """See Sampler.stream: one chunk, the whole message."""
        assert request.prefix_digest is None, "an endpoint keeps no prefixes"
        task = self._requests[request.id] = asyncio.create_task(self._request_answer(request.suffix))
        try:
            tokens = answer_tokens(await task, self._renderer)
        except asyncio.CancelledError:
            if request.id not in self._aborted:
                raise
            yield self._chunk(np.zeros(0, dtype=np.int32), "abort")
            return
        finally:
            task.cancel()
            self._requests.pop(request.id, None)
            self._aborted.discard(request.id)
        ended = bool(len(tokens)) and int(tokens[-1]) in request.stop_tokens
        fits = len(tokens) <= request.params.max_tokens
        yield self._chunk(tokens[: request.params.max_tokens], "stop" if ended and fits else "length")

    async def score(self, tokens: NDArray[np.int32], version: PolicyVersion) -> Scores:
        """Raises SamplerError: an endpoint's probabilities are not known."""
        raise SamplerError("an endpoint does not score tokens", field="version", received=str(version))

    def abort(self, request_id: str) -> None:
        task = self._requests.get(request_id)
        if task is not None and not task.done():
            self._aborted.add(request_id)
            task.cancel()

    async def _request_answer(self, tokens: NDArray[np.int32]) -> Answer:
        await asyncio.sleep(max(0.0, self._not_before_s - time.monotonic()))
        body = self._body(tokens)
        try:
            async with (
                asyncio.timeout(_ANSWER_S),
                self._client.stream("POST", "", json=body) as answer,
            ):
                if "json" in answer.headers.get("content-type", ""):
                    return read_document((await answer.aread()).decode("utf-8", "replace"), self.on_event)
                return await read_stream(answer.aiter_bytes(), self.on_event)
        except NoAnswerError as error:
            listens = not isinstance(error, NobodyListensError)
            raise SamplerError(
                "the connection to the endpoint broke" if listens else "no server answers at the endpoint",
                field="endpoint",
                received=error.message,
                fix=f"check that a server answers at {self.endpoint.url}, or correct the address",
            ) from error
        except TimeoutError as error:
            raise SamplerError(
                "the answer took too long",
                field="endpoint",
                received=f"{_ANSWER_S} s",
                fix="reduce the load on the server, or use a faster model",
            ) from error

    def _body(self, tokens: NDArray[np.int32]) -> dict[str, Any]:
        endpoint = self.endpoint
        body: dict[str, Any] = {
            "model": endpoint.model,
            "messages": chat_messages(tokens, self._renderer),
            "stream": True,
        }
        if self._tools:
            body["tools"] = self._tools
        if endpoint.temperature is not None:
            body["temperature"] = endpoint.temperature
        return body

    def _refusal(self, answer: HttpAnswer) -> Exception:
        """The error for a status that is no success; remembers its `Retry-After`."""
        status, body = answer.status_code, answer.content.decode("utf-8", "replace")
        received = f"{status} {body[:_ERROR_CHARACTERS]}".strip()
        if status in (408, 409, 425, 429) or status >= 500:
            self._not_before_s = time.monotonic() + _retry_after_s(answer.headers.get("retry-after", ""))
            fix = "wait until the server is less busy, or run fewer sessions at once"
            return SamplerError(
                "the endpoint is temporarily unavailable", field="endpoint", received=received, fix=fix
            )
        if status in (401, 403):
            fix = "name the environment variable with its key: --key-variable"
            return ConfigError("the endpoint rejected the key", field="endpoint", received=received, fix=fix)
        if status == 400 and ("context_length_exceeded" in body or "maximum context length" in body):
            fix = "set --context-tokens to the model's context, or start a new session"
            message = "the session has filled the model's context"
            return ConfigError(message, field="endpoint", received=received, fix=fix)
        fix = "check its address and --model-name; use --tool-calls text if the model takes no tools"
        return ConfigError("the endpoint refused the request", field="endpoint", received=received, fix=fix)

    def _chunk(self, tokens: NDArray[np.int32], finish: str) -> SampleChunk:
        return SampleChunk(
            tokens=tokens,
            logprobs=np.zeros(len(tokens), dtype=np.float32),
            version=self.version,
            kv_oldest=self.version,
            finish=finish,
        )


def _retry_after_s(value: str) -> float:
    try:
        return min(max(float(value), 0.0), MAX_RETRY_AFTER_S)
    except ValueError:
        return 0.0
