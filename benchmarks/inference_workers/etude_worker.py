"""Worker for our engine: native kernels, the service that rollouts and servers use, no HTTP server.

Tokens are sampled at temperature 1 with log-probabilities and, for mixtures of experts, routes, as rollouts
need.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import torch
from work_protocol import Player, Sessions, Turn, serve

from etude.inference import Engine, EngineService
from etude.model.huggingface import load_model
from etude.records import PolicyVersion, SampleRequest, SamplingParams
from etude.weights import MemoryWeights


async def play_session(service: EngineService, name: str, turns: list[Turn]) -> int:
    """Plays one session; returns the number of tokens sampled."""
    digest, sampled = None, 0
    for number, turn in enumerate(turns):
        request = SampleRequest(
            id=f"{name}:{number}",
            session_id=name,
            suffix=np.array(turn.input, dtype=np.int32),
            params=SamplingParams(max_tokens=turn.output),
            stop_tokens=frozenset(),
            rng_key=(0, *name.encode()),
            prefix_digest=digest,
        )
        async for chunk in service.stream(request):
            sampled += len(chunk.tokens)
            digest = chunk.prefix_digest if chunk.finish is not None else digest
    service.close(name)
    return sampled


async def play(service: EngineService, sessions: Sessions, prefix: str) -> int:
    """Plays all sessions concurrently; returns the number of tokens sampled."""
    names = [f"{prefix}-{number}" for number in range(len(sessions))]
    for name in names:
        service.open(name)
    work = (play_session(service, name, turns) for name, turns in zip(names, sessions, strict=True))
    return sum(await asyncio.gather(*work))


async def with_service(settings: dict[str, Any], sessions: Sessions, engine: Engine, run: int) -> int:
    """Plays a workload on a new service, since a service is bound to its asyncio loop."""
    weights = MemoryWeights()
    async with EngineService(engine, weights.fetch, settings.get("delay_steps")) as service:
        if engine.version is None:
            manifest = weights.publish(PolicyVersion("bench", 0), settings["tensors"])
            await service.stage(manifest)
            await service.activate(manifest.version)
        return await play(service, sessions, f"run{run}")


def make_player(settings: dict[str, Any]) -> Player:
    """See `Player`. Settings: checkpoint, threads, sessions, max_tokens, weights, delay_steps."""
    torch.set_num_threads(1)
    model = load_model(Path(settings["checkpoint"]))
    engine = Engine(
        model.config,
        model.vocab_size,
        settings["sessions"],
        settings["max_tokens"],
        kernels="native",
        native_threads=settings["threads"],
        native_weights=settings.get("weights", "float32"),
    )
    settings = settings | {"tensors": dict(model.named_parameters())}
    runs = iter(range(1 << 30))
    return lambda sessions: asyncio.run(with_service(settings, sessions, engine, next(runs)))


if __name__ == "__main__":
    serve(make_player)
