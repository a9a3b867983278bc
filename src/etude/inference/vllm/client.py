"""vLLM's HTTP interface, as far as it is used here.

Beside OpenAI's paths these are `--enable-scale-out` (token ids in and out) and, with
`VLLM_SERVER_DEV_MODE=1`, pausing, weight versions and `/collective_rpc`.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import httpx

from etude.errors import SamplerError

_CONTROL_S = 60.0
"""For anything but sampling and loading weights."""
_CONNECT_S = 10.0


class VllmClient:
    """One server. Errors of the connection and of the server are SamplerErrors; one that names a field is of
    the request, and another server would answer the same."""

    def __init__(self, url: str, key: str = "") -> None:
        """`url`: without a path. `key`: the server's `--api-key`, if it has one."""
        self.url = url.rstrip("/")
        headers = {"authorization": f"Bearer {key}"} if key else {}
        # Sampling has no limit of its own here: requests carry deadlines, and end when the server does.
        self._http = httpx.AsyncClient(
            base_url=self.url,
            headers=headers,
            timeout=httpx.Timeout(None, connect=_CONNECT_S),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
            trust_env=False,
        )

    async def close(self) -> None:
        """Closes connections; requests in flight fail, and later ones too."""
        await self._http.aclose()

    async def is_healthy(self) -> bool:
        """Whether it answers, and its engine lives."""
        try:
            answer = await self._http.get("/health", timeout=_CONNECT_S)
        except httpx.HTTPError:
            return False
        return answer.status_code == 200

    async def generate(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Samples, and answers when the message is complete."""
        return await self._post("/inference/v1/generate", body, timeout_s=None)

    async def generate_events(self, body: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any]]:
        """Samples, and yields what comes after each step. Leaving the generator aborts the request."""
        self._check_open()
        streaming = {**body, "stream": True, "stream_options": {"include_usage": True}}
        try:
            async with self._http.stream("POST", "/inference/v1/generate", json=streaming) as answer:
                if answer.status_code != 200:
                    raise _refused("/inference/v1/generate", answer.status_code, await answer.aread())
                async for line in answer.aiter_lines():
                    if line.startswith("data: ") and line != "data: [DONE]":
                        document = _read_json("/inference/v1/generate", line.removeprefix("data: "))
                        if "error" in document:
                            raise _refused("/inference/v1/generate", 500, line.encode())
                        yield document
        except httpx.HTTPError as error:
            raise _silent(error) from error

    async def abort(self, request_id: str) -> None:
        """Ends a request; its answer has what was sampled. Unknown ids are ignored."""
        with contextlib.suppress(SamplerError):  # a server that is gone has aborted everything
            await self._post("/inference/v1/abort_requests", {"request_ids": [request_id]})

    async def pause(self) -> None:
        """Stops between two steps; requests keep their keys and values and wait."""
        await self._post("/pause", {}, {"mode": "keep", "clear_cache": "false"})

    async def resume(self) -> None:
        """Goes on after `pause`."""
        await self._post("/resume", {})

    async def reset_prefix_cache(self) -> None:
        """Forgets all keys and values; running requests compute theirs again. Raises SamplerError."""
        answer = await self._post("/reset_prefix_cache", {}, {"reset_running_requests": "true"})
        if not answer.get("success"):
            raise SamplerError("vLLM did not forget its keys and values", received=answer)

    async def set_weight_version(self, label: str) -> None:
        """Names the weights in the answers from now on."""
        await self._post("/update_weight_version", {"new_version": label})

    async def call_workers(self, method: str, *arguments: str, timeout_s: float = _CONTROL_S) -> Any:
        """Calls a method of the worker extension; returns what the first worker said.

        Raises SamplerError if it cannot be called; a worker that says `error` is the caller's business.
        """
        body = {"method": method, "args": list(arguments), "timeout": timeout_s}
        answer = await self._post("/collective_rpc", body, timeout_s=timeout_s + _CONNECT_S)
        results = answer.get("results") or [None]
        failed = [result for result in results if isinstance(result, dict) and "error" in result]
        return (failed or results)[0]

    async def _post(
        self,
        path: str,
        body: Mapping[str, Any],
        query: Mapping[str, str] | None = None,
        timeout_s: float | None = _CONTROL_S,
    ) -> dict[str, Any]:
        self._check_open()
        timeout = httpx.Timeout(timeout_s, connect=_CONNECT_S)
        try:
            answer = await self._http.post(path, json=body, params=query, timeout=timeout)
        except httpx.HTTPError as error:
            raise _silent(error) from error
        if answer.status_code != 200:
            raise _refused(path, answer.status_code, answer.content)
        return _read_json(path, answer.text) if answer.content else {}

    def _check_open(self) -> None:
        """httpx answers with a RuntimeError, and this is a failure like others."""
        if self._http.is_closed:
            raise SamplerError("vLLM was taken down", received=self.url)


def _read_json(path: str, text: str) -> dict[str, Any]:
    try:
        document = json.loads(text)
    except ValueError as error:
        raise SamplerError("vLLM's answer is not JSON", field=path, received=text[:300]) from error
    if not isinstance(document, dict):
        raise SamplerError("vLLM's answer is not an object", field=path, received=text[:300])
    return document


def _refused(path: str, status: int, content: bytes) -> SamplerError:
    text = content.decode(errors="replace")[:500]
    fix = None
    if status == 404:
        fix = "start vLLM with --enable-scale-out and VLLM_SERVER_DEV_MODE=1"
    if status >= 500:
        return SamplerError("vLLM failed", received=f"{path}: {status} {text}")
    return SamplerError("vLLM refuses", field=path, received=f"{status} {text}", fix=fix)


def _silent(error: httpx.HTTPError) -> SamplerError:
    return SamplerError("vLLM does not answer", received=repr(error))
