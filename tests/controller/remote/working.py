"""Rollout workers, and engines for them, behind handles of this process: any of them can be killed."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

from etude.agent import core_registry, open_renderer
from etude.config import AgentConfig, ClusterConfig
from etude.controller.local import LocalHandle
from etude.controller.remote.episodes import RemoteEpisodes
from etude.controller.remote.rollout_part import RolloutPart
from etude.controller.supervision import Supervision
from etude.environment.episodes import Environment, EpisodeLimits
from etude.inference.exchange import Build
from etude.protocols import Handle, Sampler
from etude.records import SamplingParams, Trajectory, TrajectoryId
from etude.store.blobs import MemoryBlobs
from etude.tokens import ETUDE_TEMPLATE
from etude.tokens.grammar import XmlGrammar
from etude.tokens.tokenizer import Tokenizer
from etude.tokens.training import train_tokenizer
from etude_quickstart.memory_backend import MemoryBackend
from tests.controller.remote.building import FAST, Fleet
from tests.environment.playing import TASK


@functools.cache
def agent_tokenizer() -> Tokenizer:
    """With the tags that an agent's messages need."""
    grammar = XmlGrammar(core_registry().schemas)
    controls = [*ETUDE_TEMPLATE.control_tokens, *grammar.control_tokens()]
    return train_tokenizer([], 256 + len(controls), controls)


class Workers:
    """RemoteEpisodes over a fleet, what its processes are and what happened to them."""

    def __init__(
        self,
        directory: Path,
        num_workers: int = 2,
        settings: ClusterConfig = FAST,
        blobs: MemoryBlobs | None = None,
    ) -> None:
        """`blobs`: where the run keeps routes."""
        self.made = Fleet(directory, num_engines=1, settings=settings, words=agent_tokenizer())
        sandbox = self.made.config.sandbox.model_copy(update={"backend": "unisolated"})
        self.config = self.made.config.model_copy(update={"sandbox": sandbox, "cluster": settings})
        self.limits = replace(EpisodeLimits.from_config(self.config), max_attempts=settings.max_attempts)
        self.renderer = open_renderer(agent_tokenizer(), AgentConfig())
        self.handles: dict[str, list[LocalHandle[RolloutPart]]] = {}
        self.blobs = MemoryBlobs() if blobs is None else blobs
        self.names = [f"worker-{number}" for number in range(num_workers)]
        self.episodes = RemoteEpisodes(
            {name: self.spawning(name) for name in self.names},
            Build.here(self.config.model),
            self.made.fleet,
            self.blobs.put,
            Supervision(settings, self.made.journal),
        )

    def spawning(self, name: str) -> Any:
        """How to start the worker of that name."""

        async def spawn(avoid: frozenset[str]) -> Handle[Any]:
            part = RolloutPart(self.config, agent_tokenizer(), self.limits, name, name)
            handle = LocalHandle(part, name=name)
            self.handles.setdefault(name, []).append(handle)
            return handle

        return spawn

    async def start(self) -> None:
        """Starts engine and workers."""
        await self.made.fleet.start()
        await self.episodes.start()

    async def shutdown(self) -> None:
        """Stops them."""
        await self.episodes.shutdown()
        await self.made.fleet.shutdown()

    def newest(self, name: str) -> RolloutPart:
        """What the worker's process at hand holds."""
        return self.handles[name][-1].part

    def running(self) -> dict[str, int]:
        """Sessions of each worker."""
        return {name: len(self.newest(name)._sessions) for name in self.handles}

    async def run(self, index: int, sampler: Sampler | None = None) -> Trajectory:
        """A session of the task, by a worker."""
        asked = (TASK, identity(index), sampler or self.made.fleet, (5, index), SamplingParams())
        return await self.episodes.run(*asked, training=True)

    async def run_here(self, index: int, blobs: MemoryBlobs) -> Trajectory:
        """The same session in this process."""
        here = Environment(MemoryBackend(), self.renderer, self.limits, self.config.rl.reward, blobs.put)
        asked = (TASK, identity(index), self.made.fleet, (5, index), SamplingParams())
        return await here.run(*asked, training=True)


def identity(index: int) -> TrajectoryId:
    """Of the task's session of that index."""
    return TrajectoryId("run", TASK.id, 0, 0, index)
