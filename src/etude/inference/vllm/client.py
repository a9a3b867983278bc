"""Client for the part of vLLM's HTTP API that is used here.

In addition to OpenAI's paths these are `--enable-scale-out` (token ids in and out) and, with
`VLLM_SERVER_DEV_MODE=1`, pausing, weight versions and `/collective_rpc`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import Any, Unpack
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from etude.errors import EtudeError, SamplerError
from etude.inference.vllm.answers import Part, read_part
from etude.serving.client import Answer, Client, NoAnswerError, Request, read_events

ADAPTERS = "etude-adapter"
"""Name under which a server serves its adapters, if it has any."""
_CONTROL_S = 60.0
"""Timeout for everything but sampling and loading weights."""
_CONNECT_S = 10.0


class VllmClient:
    """Client of one server. Errors of the connection and of the server are SamplerErrors; one that names a
    field is about the request, and another server would answer the same."""

    def __init__(self, url: str, key: str = "") -> None:
        """`url`: without a path. `key`: the server's `--api-key`, if it has one."""
        self._http = Client(url, key, within_s=_CONTROL_S, connect_s=_CONNECT_S, refusal=_refused)
        self.url = self._http.url
        self._closed = False

    async def close(self) -> None:
        """Closes connections; requests in flight fail, and later ones too."""
        self._closed = True
        await self._http.close()

    async def is_healthy(self) -> bool:
        """Whether the server answers and its engine is alive."""
        try:
            await self._http.request("GET", "/health", within_s=_CONNECT_S)
        except EtudeError:
            return False
        return True

    async def generate(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Samples, and answers when the message is complete."""
        # No timeout here: requests have deadlines, and end with the server.
        return await self._post("/inference/v1/generate", body, within_s=math.inf)

    async def generate_events(self, body: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any]]:
        """Samples, and yields an event after each step. Closing the generator aborts the request."""
        self._check_open()
        streaming = {**body, "stream": True, "stream_options": {"include_usage": True}}
        path = "/inference/v1/generate"
        try:
            async with self._http.stream("POST", path, json=streaming, within_s=math.inf) as answer:
                async for data in read_events(answer.aiter_bytes()):
                    if data != "[DONE]":
                        document = _read_object(path, data)
                        if "error" in document:
                            raise SamplerError("vLLM failed", received=f"{path}: {data[:500]}")
                        yield document
        except NoAnswerError as error:
            raise _silent(error) from error

    async def abort(self, request_id: str) -> None:
        """Ends a request; its answer has what was sampled. Unknown ids are ignored."""
        with contextlib.suppress(SamplerError):  # a server that has ended has aborted everything
            await self._post("/inference/v1/abort_requests", {"request_ids": [request_id]})

    async def pause(self) -> None:
        """Pauses between two steps; requests wait, and keep their keys and values."""
        await self._post("/pause", {}, params={"mode": "keep", "clear_cache": "false"})

    async def resume(self) -> None:
        """Resumes after `pause`."""
        await self._post("/resume", {})

    async def reset_prefix_cache(self) -> None:
        """Drops all keys and values; running requests compute theirs again. Raises SamplerError."""
        answer = await self._post("/reset_prefix_cache", {}, params={"reset_running_requests": "true"})
        if not answer.get("success"):
            raise SamplerError("vLLM did not clear its prefix cache", received=answer)

    async def set_weight_version(self, label: str) -> None:
        """Sets the label of the weights that answers report from now on."""
        await self._post("/update_weight_version", {"new_version": label})

    async def call_workers(self, method: str, *arguments: str, timeout_s: float = _CONTROL_S) -> Any:
        """Calls a method of the worker extension; returns the first worker's result, or the first `error`.

        Raises SamplerError if it cannot be called; `error` results are left to the caller.
        """
        body = {"method": method, "args": list(arguments), "timeout": timeout_s}
        answer = await self._post("/collective_rpc", body, within_s=timeout_s + _CONNECT_S)
        results = answer.get("results") or [None]
        failed = [result for result in results if isinstance(result, dict) and "error" in result]
        return (failed or results)[0]

    async def _post(self, path: str, body: Mapping[str, Any], **request: Unpack[Request]) -> dict[str, Any]:
        self._check_open()
        request["json"] = body
        try:
            answer = await self._http.request("POST", path, **request)
        except NoAnswerError as error:
            raise _silent(error) from error
        return _read_object(path, answer.text) if answer.content else {}

    def _check_open(self) -> None:
        if self._closed:
            raise SamplerError("vLLM was stopped", received=self.url)


def _read_object(path: str, text: str) -> dict[str, Any]:
    try:
        document = json.loads(text)
    except ValueError as error:
        raise SamplerError("vLLM's answer is not JSON", field=path, received=text[:300]) from error
    if not isinstance(document, dict):
        raise SamplerError("vLLM's answer is not an object", field=path, received=text[:300])
    return document


def _refused(answer: Answer) -> SamplerError:
    path, status, text = answer.request.url.path, answer.status_code, answer.text[:500]
    if status >= 500:
        return SamplerError("vLLM failed", received=f"{path}: {status} {text}")
    fix = "start vLLM with --enable-scale-out and VLLM_SERVER_DEV_MODE=1" if status == 404 else None
    return SamplerError("vLLM refused the request", field=path, received=f"{status} {text}", fix=fix)


def _silent(error: NoAnswerError) -> SamplerError:
    return SamplerError("vLLM does not answer", received=error.message)


@dataclass(frozen=True, slots=True)
class Abilities:
    """What a server can do, as its worker extension reports."""

    dtype: str
    max_tokens: int
    vocab_size: int
    captures: bool
    """Whether `etude_take_routes` returns routes."""
    adapters: str | None
    """The `model` of requests if it serves adapters, else None."""


async def prepare_workers(client: VllmClient, *, capture_routes: bool) -> Abilities:
    """Prepares a server's workers; returns its abilities. Raises SamplerError if they lack our extension."""
    answer = await client.call_workers("etude_prepare", "yes" if capture_routes else "no")
    if not isinstance(answer, dict) or "dtype" not in answer:
        raise SamplerError(
            "vLLM's workers lack Étude's extension",
            field="engine.vllm",
            received=answer,
            fix="start it with --worker-extension-cls etude_vllm_worker.EtudeWorker",
        )
    return Abilities(
        str(answer["dtype"]),
        int(answer["max_tokens"]),
        int(answer["vocab_size"]),
        bool(answer["captures"]),
        ADAPTERS if answer["adapts"] else None,
    )


async def score_tokens(
    client: VllmClient, tokens: NDArray[np.int32], name: str, adapters: str | None, timeout_s: float
) -> Part:
    """vLLM's own log-probabilities of `tokens` [T], computed without its prefix cache. `name`: id of the
    request, random if empty. `adapters`: see Abilities. Raises SamplerError."""
    body = {
        "model": adapters,
        "request_id": name or f"etude-{uuid4().hex}",
        "token_ids": tokens.tolist(),
        "sampling_params": {
            "max_tokens": 1,
            "temperature": 1.0,
            "prompt_logprobs": 0,
            "detokenize": False,
            "ignore_eos": True,
        },
        "cache_salt": uuid4().hex,
    }
    try:
        async with asyncio.timeout(timeout_s):
            part = read_part(await client.generate(body), 0)
    except TimeoutError:
        raise SamplerError("vLLM did not score in time", received=f"{timeout_s:g} s") from None
    if part.prompt_logprobs is None or len(part.prompt_logprobs) != len(tokens):
        raise SamplerError("vLLM did not score the tokens", received=part.finish)
    return part
