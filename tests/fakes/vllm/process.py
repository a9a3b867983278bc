"""The fake server as a process: accepts the arguments of vLLM's own server.

A package `vllm.entrypoints.openai.api_server` that calls `main` lets Étude's launcher start it.
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

import uvicorn

from tests.fakes.vllm.engine import FakeEngine
from tests.fakes.vllm.server import build_app


def main() -> None:
    """Serves until it is killed or its engine dies."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    options, _ = parser.parse_known_args()
    asyncio.run(_serve(options.model, options.host, options.port))


async def _serve(directory: Path, host: str, port: int) -> None:
    engine = FakeEngine(directory)
    config = uvicorn.Config(build_app(engine), host=host, port=port, log_level="error", lifespan="off")
    server = uvicorn.Server(config)
    async with asyncio.TaskGroup() as group:
        stepping = group.create_task(engine.run())
        await server.serve()
        stepping.cancel()
