"""Engines of a tiny model behind handles of this process, which can be killed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from etude.config import ClusterConfig, RunConfig
from etude.controller.local import LocalHandle
from etude.controller.remote.engine_part import EnginePart
from etude.controller.remote.fleet import EngineFleet
from etude.controller.remote.weights import DirectoryWeights
from etude.controller.supervision import FaultJournal, Supervision
from etude.inference.exchange import Build
from etude.model import LanguageModel
from etude.observe.metrics import MemorySink
from etude.observe.observer import RecordingObserver
from etude.protocols import Handle
from etude.records import PolicyVersion, SampleChunk, SampleRequest, SamplingParams, WeightManifest
from etude.tokens.tokenizer import Tokenizer
from etude.tokens.training import train_tokenizer
from tests.controller.running import tiny_config

FAST = ClusterConfig(heartbeat_s=0.02, silent_s=60.0, backoff_s=0.0, give_up_after=4, patience_s=60.0)


@cache
def tokenizer() -> Tokenizer:
    """Of very little text."""
    return train_tokenizer(["a b c d e f"] * 4, 300)


def config(directory: Path) -> RunConfig:
    """Of a tiny run."""
    return tiny_config(directory, engine={"num_slots": 8, "kernels": "eager"})


class Fleet:
    """An EngineFleet, what its processes are and what happened to them."""

    def __init__(
        self,
        directory: Path,
        num_engines: int = 2,
        settings: ClusterConfig = FAST,
        words: Tokenizer | None = None,
    ) -> None:
        """`words`: another tokenizer than that of `tokenizer`."""
        self.tokenizer = words or tokenizer()
        self.config = config(directory)
        self.weights = DirectoryWeights(directory / "weights")
        self.handles: dict[str, list[LocalHandle[EnginePart]]] = {}
        self.metrics = MemorySink()
        self.journal = FaultJournal(self.metrics, RecordingObserver())
        self.hindered: list[Exception] = []
        """What the next starts of processes raise."""
        self.on_spawn: Callable[[LocalHandle[EnginePart]], None] = lambda handle: None
        """Told of each new process."""
        spawns = {f"engine-{number}": self.spawning(f"engine-{number}") for number in range(num_engines)}
        supervision = Supervision(settings, self.journal)
        self.fleet = EngineFleet(spawns, Build.here(self.config.model), supervision)

    def spawning(self, name: str) -> Any:
        """How to start the engine of that name."""

        async def spawn(avoid: frozenset[str]) -> Handle[Any]:
            if self.hindered:
                raise self.hindered.pop(0)
            part = EnginePart(self.config, self.tokenizer, self.weights.root, None)
            handle = LocalHandle(part, name=name)
            self.handles.setdefault(name, []).append(handle)
            self.on_spawn(handle)
            return handle

        return spawn

    def newest(self, name: str) -> LocalHandle[EnginePart]:
        """The engine's process at hand."""
        return self.handles[name][-1]

    def publish(self, step: int) -> WeightManifest:
        """Weights of that step: others each time."""
        model = LanguageModel(self.config.model, self.tokenizer.vocab_size)
        model.initialise(step)
        return self.weights.publish(PolicyVersion("run", step), dict(model.named_parameters()))

    async def serve(self, step: int) -> PolicyVersion:
        """Brings that step into service."""
        manifest = self.publish(step)
        await self.fleet.stage(manifest)
        await self.fleet.activate(manifest.version)
        return manifest.version


def request(session: str, number: int = 0, max_tokens: int = 6, **options: Any) -> SampleRequest:
    """Asks for a few tokens."""
    return SampleRequest(
        id=f"{session}:{number}",
        session_id=session,
        suffix=options.pop("suffix", np.arange(5, dtype=np.int32)),
        params=SamplingParams(max_tokens=max_tokens, temperature=1.0),
        stop_tokens=frozenset(),
        rng_key=(1, len(session)),
        **options,
    )


async def sample(fleet: EngineFleet, asked: SampleRequest) -> list[SampleChunk]:
    """All chunks of a request."""
    return [chunk async for chunk in fleet.stream(asked)]


async def until(holds: Callable[[], bool]) -> None:
    """Waits for a condition."""
    async with asyncio.timeout(60.0):
        while not holds():  # noqa: ASYNC110 (nobody tells of it)
            await asyncio.sleep(0.005)
