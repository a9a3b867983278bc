"""A fake replica without a model: the server's API, generated words at a fixed rate, and ways to fail.

To try out the router: `python -m tests.fakes.replica --port 8001`.
A word is a token. Answers are a function of the conversation, so that all replicas answer alike.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from etude.errors import InfrastructureError
from etude.inference.headers import EXTENSIONS_HEADER, SESSION_HEADER, SIDE_CHANNEL_HEADER, VERSION_HEADER

_START_S = 60.0


class _DeathError(InfrastructureError):
    """The fake replica dies in the middle of an answer."""


@dataclass(slots=True, eq=False)
class FakeReplica:
    """State and failure modes of a fake replica; tests may change the fields while it runs."""

    version: str | None = "fake@0"
    pool: str = "serve"
    token_s: float = 0.0
    """Time between two tokens."""
    prefill_token_s: float = 0.0
    """Time per input token that is not cached."""
    cut_after: int | None = None
    """Number of stream events after which it dies; if set, answers without streaming are always cut."""
    refuse: bool = False
    """Whether it answers 503 to every request, like a replica that is shutting down."""
    context: int | None = None
    """Limit of prompt plus answer in tokens; a longer request is refused with 400."""
    running: int = 0
    requests: list[dict[str, Any]] = field(default_factory=list)
    """Bodies of all requests, for tests."""
    num_cut_streams: int = 0
    """Streams that ended early: the client disconnected, or the replica died."""
    cached_tokens: dict[str, int] = field(default_factory=dict)
    """Session -> length of its cached prefix."""
    side_channel: set[str] = field(default_factory=set)
    """Ids of the answers whose side-channel frames are available."""


@dataclass(frozen=True, slots=True)
class _Plan:
    """A planned answer."""

    chat: bool
    words: list[str]
    prompt_tokens: int
    cached_tokens: int

    @property
    def usage(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": len(self.words),
            "total_tokens": self.prompt_tokens + len(self.words),
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }

    def document(self, text: str | None, finish: str | None, delta: bool) -> dict[str, Any]:
        """An answer or a chunk of one in OpenAI's format."""
        choice: dict[str, Any] = {"index": 0, "finish_reason": finish}
        if self.chat:
            choice["delta" if delta else "message"] = {"role": "assistant", "content": text}
        else:
            choice["text"] = text or ""
        kind = ("chat.completion" if self.chat else "text_completion") + (".chunk" if delta else "")
        return {"id": "fake", "object": kind, "created": 0, "model": "fake", "choices": [choice]}


def fake_app(replica: FakeReplica) -> FastAPI:
    """The web application of a fake replica."""
    app = FastAPI(openapi_url=None)
    app.state.replica = replica
    app.add_api_route("/health", _ready, methods=["GET"])
    app.add_api_route("/ready", _ready, methods=["GET"])
    app.add_api_route("/v1/models", _models, methods=["GET"])
    app.add_api_route("/v1/side_channel/{answer_id}", _side_channel, methods=["GET"])
    app.add_api_route("/v1/chat/completions", _answer, methods=["POST"])
    app.add_api_route("/v1/completions", _answer, methods=["POST"])
    app.add_api_route("/tokenize", _tokenize, methods=["POST"])
    return app


@asynccontextmanager
async def fake_replica(replica: FakeReplica, port: int = 0) -> AsyncIterator[str]:
    """Runs a fake replica in this process until the end of the block; yields its address."""
    async with running_server(fake_app(replica), port) as url:
        yield url


@asynccontextmanager
async def running_server(app: FastAPI, port: int = 0) -> AsyncIterator[str]:
    """Serves an application on loopback; yields its address. Connections are cut at the end of the block."""
    config = uvicorn.Config(
        app, host="127.0.0.1", port=port, log_level="critical", timeout_graceful_shutdown=0
    )
    server = uvicorn.Server(config)
    running = asyncio.ensure_future(server.serve())
    try:
        async with asyncio.timeout(_START_S):
            while not server.started:
                if running.done():
                    raise InfrastructureError("the server did not start", field="port", received=port)
                await asyncio.sleep(0.005)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        await running


async def _ready(request: Request) -> Response:
    replica: FakeReplica = request.app.state.replica
    if replica.refuse:
        return _refusal()
    body = {
        "version": replica.version,
        "pool": replica.pool,
        "running": replica.running,
        "waiting": 0,
        "outstanding_tokens": 0,
    }
    return JSONResponse(body, 200 if replica.version is not None else 503)


async def _models(request: Request) -> Response:
    context = request.app.state.replica.context
    return JSONResponse({"object": "list", "data": [{"id": "fake", "max_model_len": context}]})


async def _answer(request: Request) -> Response:
    replica: FakeReplica = request.app.state.replica
    if replica.refuse:
        return _refusal()
    if request.headers.get(VERSION_HEADER, replica.version) != replica.version:
        return _refusal(409, "version_not_served")
    body = await request.json()
    replica.requests.append(body)
    plan = _plan(replica, body, request.url.path.endswith("chat/completions"), request.headers)
    if replica.context is not None and plan.prompt_tokens + len(plan.words) > replica.context:
        return _refusal(400, "context_length_exceeded")
    headers: dict[str, str] = {}
    if request.headers.get(EXTENSIONS_HEADER) == "tokens":
        answer_id = uuid.uuid4().hex
        replica.side_channel.add(answer_id)
        headers[SIDE_CHANNEL_HEADER] = f"/v1/side_channel/{answer_id}"
    if body.get("stream"):
        return StreamingResponse(_events(replica, plan), headers=headers, media_type="text/event-stream")
    if replica.cut_after is not None:
        return StreamingResponse(_half(), media_type="application/json")
    await _work(replica, plan)
    answer = plan.document(" ".join(plan.words), "length", delta=False)
    return JSONResponse({**answer, "usage": plan.usage}, headers=headers)


async def _side_channel(request: Request) -> Response:
    replica: FakeReplica = request.app.state.replica
    answer_id = request.path_params["answer_id"]
    return Response(answer_id.encode(), 200 if answer_id in replica.side_channel else 404)


def _plan(replica: FakeReplica, body: dict[str, Any], chat: bool, headers: Any) -> _Plan:
    if chat:
        text = " ".join(str(message.get("content")) for message in body["messages"])
    else:
        text = str(body["prompt"])
    prompt = len(text.split())
    session = headers.get(SESSION_HEADER)
    cached = min(replica.cached_tokens.get(session, 0), max(0, prompt - 1)) if session else 0
    words = [f"w{(prompt * 31 + n * 7) % 97}" for n in range(int(body.get("max_tokens") or 16))]
    if session:
        replica.cached_tokens[session] = prompt + len(words)
    return _Plan(chat, words, prompt, cached)


async def _work(replica: FakeReplica, plan: _Plan) -> None:
    replica.running += 1
    try:
        missing = plan.prompt_tokens - plan.cached_tokens
        await asyncio.sleep(replica.prefill_token_s * missing + replica.token_s * len(plan.words))
    finally:
        replica.running -= 1


async def _half() -> AsyncIterator[bytes]:
    yield b'{"half":'
    raise _DeathError("died in the middle of an answer")


async def _events(replica: FakeReplica, plan: _Plan) -> AsyncIterator[bytes]:
    replica.running += 1
    whole = False
    try:
        await asyncio.sleep(replica.prefill_token_s * (plan.prompt_tokens - plan.cached_tokens))
        for number, word in enumerate(plan.words):
            if replica.cut_after is not None and number >= replica.cut_after:
                yield b'data: {"half":'
                raise _DeathError("died in the middle of an answer")
            if replica.token_s:
                await asyncio.sleep(replica.token_s)
            text = word if number == 0 else f" {word}"
            finish = "length" if number == len(plan.words) - 1 else None
            yield _event(plan.document(text, finish, delta=True))
        yield _event({**plan.document(None, None, delta=True), "choices": [], "usage": plan.usage})
        yield b"data: [DONE]\n\n"
        whole = True
    finally:
        replica.running -= 1
        if not whole:
            replica.num_cut_streams += 1


def _event(document: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(document).encode() + b"\n\n"


async def _tokenize(request: Request) -> Response:
    words = str((await request.json())["prompt"]).split()
    return JSONResponse({"count": len(words), "tokens": list(range(len(words)))})


def _refusal(status: int = 503, code: str = "draining") -> Response:
    body = {"error": {"message": "not now", "type": "server_error", "param": None, "code": code}}
    return JSONResponse(body, status)


def main() -> None:
    """Serves a fake replica until it is stopped by a signal."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--token-s", type=float, default=0.005)
    parser.add_argument("--prefill-token-s", type=float, default=0.0)
    options = parser.parse_args()
    replica = FakeReplica(token_s=options.token_s, prefill_token_s=options.prefill_token_s)
    uvicorn.run(fake_app(replica), host="127.0.0.1", port=options.port, log_level="critical")


if __name__ == "__main__":
    main()
