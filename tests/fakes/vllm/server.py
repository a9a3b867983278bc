"""The routes of vLLM's server that Étude uses, with the request and response bodies of vLLM 0.32."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from etude.errors import SamplerError
from tests.fakes.vllm.engine import FakeEngine, Job

_PREFIX = "generate-tokens-"
_START_S = 60.0


@dataclass(slots=True, eq=False)
class FakeServer:
    """A VllmServer in this process on a loopback port. Each start creates a new engine."""

    loads_at_start: bool = True
    key: str = ""
    fails_to_start: int = 0
    """Number of the next starts that fail."""
    starts: list[Path] = field(default_factory=list[Path])
    """Model directories of all starts."""
    engine: FakeEngine | None = None
    _server: uvicorn.Server | None = None
    _tasks: list[asyncio.Task[Any]] = field(default_factory=list[asyncio.Task[Any]])
    _ended: asyncio.Event = field(default_factory=asyncio.Event)

    async def start(self, directory: Path) -> str:
        """See VllmServer.start."""
        await self.stop()
        if self.fails_to_start:
            self.fails_to_start -= 1
            raise SamplerError("vLLM did not start", received="failed on purpose")
        self.starts.append(directory)
        self.engine = FakeEngine(directory)
        self._ended = asyncio.Event()
        listener = socket.create_server(("127.0.0.1", 0))
        config = uvicorn.Config(build_app(self.engine), log_level="error", lifespan="off")
        self._server = uvicorn.Server(config)
        serving = asyncio.create_task(self._server.serve([listener]))
        stepping = asyncio.create_task(self.engine.run())
        stepping.add_done_callback(lambda _: self._ended.set())
        self._tasks = [serving, stepping]
        async with asyncio.timeout(_START_S):
            while not self._server.started:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        return f"http://127.0.0.1:{listener.getsockname()[1]}"

    async def stop(self) -> None:
        """See VllmServer.stop. Cuts all connections at once, like a killed process."""
        if self._server is not None:
            self._server.should_exit = self._server.force_exit = True
            for server in self._server.servers:
                server.close()
            for connection in list(self._server.server_state.connections):
                transport = getattr(connection, "transport", None)
                if transport is not None:
                    transport.abort()
        for task in reversed(self._tasks):
            if task is not self._tasks[0]:
                task.cancel()
            with contextlib.suppress(BaseException):
                async with asyncio.timeout(_START_S):
                    await asyncio.shield(task)
        self._tasks, self._server, self.engine = [], None, None

    async def wait_for_end(self) -> str:
        """See VllmServer.wait_for_end."""
        await self._ended.wait()
        return "the engine died"

    def die(self) -> None:
        """Simulates a crash of the engine."""
        self._tasks[1].cancel()


def build_app(engine: FakeEngine) -> FastAPI:
    """The web application over one engine."""
    app = FastAPI()
    _add_control(app, engine)

    @app.post("/inference/v1/generate")
    async def _generate(request: Request) -> Response:
        document = await request.json()
        if "abort_overtakes" in engine.faults:
            await engine.was_aborted.wait()
        job = engine.submit(document)
        if document.get("stream"):
            return StreamingResponse(_events(engine, job), media_type="text/event-stream")
        async with contextlib.aclosing(_watched(request, engine, job)) as steps:
            async for _ in steps:
                pass
        return JSONResponse(_answer(job))

    @app.post("/inference/v1/abort_requests")
    async def _abort(request: Request) -> Response:
        for name in (await request.json())["request_ids"]:
            engine.abort(name.removeprefix(_PREFIX))
        return Response()

    return app


def _add_control(app: FastAPI, engine: FakeEngine) -> None:
    @app.get("/health")
    async def _health() -> Response:
        return Response()

    @app.post("/pause")
    async def _pause(mode: str = "abort") -> dict[str, str]:
        assert mode == "keep", "requests in flight would be lost"
        engine.pause()
        return {"status": "paused"}

    @app.post("/resume")
    async def _resume() -> dict[str, str]:
        engine.resume()
        return {"status": "resumed"}

    @app.post("/reset_prefix_cache")
    async def _reset() -> dict[str, bool]:
        engine.resets += 1
        return {"success": True}

    @app.post("/update_weight_version")
    async def _name(request: Request) -> dict[str, object]:
        engine.label = (await request.json())["new_version"]
        return {"success": True, "new_version": engine.label}

    @app.post("/collective_rpc")
    async def _call(request: Request) -> dict[str, object]:
        document = await request.json()
        return {"results": [engine.call(document["method"], document["args"])]}


async def _watched(request: Request, engine: FakeEngine, job: Job) -> AsyncGenerator[dict[str, Any]]:
    """The job's events; aborts the job if the client disconnects."""
    try:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.1):
                    event = await job.events.get()
                yield event
            if job.finish is not None and job.events.empty():
                return
            if await request.is_disconnected():
                return
    finally:
        engine.abort(job.name)


async def _events(engine: FakeEngine, job: Job) -> AsyncGenerator[str]:
    try:
        is_last = False
        while not is_last:
            event = await job.events.get()
            is_last = job.finish is not None and job.events.empty()
            choice = _choice(event["token_ids"], event["entries"])
            if is_last:
                choice |= {"finish_reason": job.finish, "weight_versions": _spans(job)}
            yield f"data: {json.dumps({'request_id': _PREFIX + job.name, 'choices': [choice]})}\n\n"
        yield f"data: {json.dumps({'choices': [], 'usage': _usage(job)})}\n\ndata: [DONE]\n\n"
    finally:
        engine.abort(job.name)


def _answer(job: Job) -> dict[str, Any]:
    choice = _choice(job.sampled, job.entries)
    choice |= {"finish_reason": job.finish, "weight_versions": _spans(job)}
    return {
        "request_id": _PREFIX + job.name,
        "usage": _usage(job),
        "prompt_logprobs": job.prompt_logprobs,
        "choices": [choice],
    }


def _choice(tokens: list[int], entries: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "index": 0,
        "finish_reason": None,
        "stop_reason": None,
        "token_ids": tokens,
        "routed_experts": None,
        "weight_versions": None,
        "logprobs": {"content": entries},
    }


def _spans(job: Job) -> list[dict[str, Any]]:
    starts = [at for at, label in enumerate(job.labels) if at == 0 or label != job.labels[at - 1]]
    ends = [*starts[1:], len(job.labels)]
    return [{"version": job.labels[s], "start": s, "end": e} for s, e in zip(starts, ends, strict=True)]


def _usage(job: Job) -> dict[str, Any]:
    counts = {"prompt_tokens": len(job.prompt), "completion_tokens": len(job.sampled)}
    return {**counts, "prompt_tokens_details": {"cached_tokens": job.num_cached}}
