"""The process of an engine: serves it through batches of messages (`inference/exchange.py`)."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from etude.config import RunConfig
from etude.controller.compute import use_sampling_threads
from etude.controller.engines import LocalService, SampledModel, make_local_service
from etude.controller.remote.engines import Usage
from etude.controller.remote.weights import DirectoryWeights
from etude.errors import SamplerError
from etude.inference.exchange import Build, Command, Event, Exchange
from etude.protocols import KvPolicy
from etude.records import PolicyVersion, Scores, WeightManifest
from etude.tokens.tokenizer import Tokenizer
from etude.weights import make_subscriber


class EnginePart:
    """Serves named clients: the run's own process ("") and rollout workers. Names of sessions and requests
    are unique among all clients. For one event loop; `begin` comes first.
    Its methods are those of Sampler, WeightSink and `Exchange`."""

    def __init__(
        self,
        config: RunConfig,
        tokenizer: Tokenizer,
        weights: Path,
        delay_steps: int | None,
        model: SampledModel | None = None,
        service: LocalService | None = None,
    ) -> None:
        """`weights`: where the trainer publishes to, if not to the store that `config.weights` names.
        `delay_steps`: see EngineService. `model`: the sampled model, if the section `model` does not describe
        it. `service`: replaces the configured engine."""
        self._config = config
        self._build = Build.here(config.model)
        self._service = service or _make_service(config, tokenizer, weights, delay_steps, model)
        self._exchanges = defaultdict[str, Exchange](lambda: Exchange(self._service))
        """By client."""

    async def begin(self) -> Build:
        """Starts the engine's loop. It serves nothing until a version is activated."""
        use_sampling_threads(self._config)
        await self._service.__aenter__()
        return self._build

    async def pulse(self) -> Usage:
        """Usage so far. Raises SamplerError where the engine has failed."""
        if self._service.failure is not None:
            raise SamplerError("the engine has failed", received=repr(self._service.failure))
        return Usage(self._service.counters, self._service.times)

    async def exchange(self, commands: Sequence[Command], client: str = "") -> None:
        self._exchanges[client].exchange(commands)

    async def poll(self, client: str = "") -> list[Event]:
        return await self._exchanges[client].poll()

    async def forget(self, client: str) -> None:
        """Ends the requests and sessions of a client that has ended, and of its connections (`client.1`)."""
        gone = [name for name in self._exchanges if name == client or name.startswith(f"{client}.")]
        await asyncio.gather(*(self._exchanges.pop(name).end() for name in gone))

    async def stage(self, manifest: WeightManifest) -> None:
        await self._service.stage(manifest)

    async def activate(self, version: PolicyVersion, kv: KvPolicy) -> Usage:
        """See WeightSink.activate. Returns the usage so far."""
        await self._service.activate(version, kv)
        return await self.pulse()

    async def score(self, tokens: NDArray[np.int32], version: PolicyVersion) -> Scores:
        return await self._service.score(tokens, version)

    async def close(self) -> None:
        """Ends the engine's loop."""
        await self._service.__aexit__(None, None, None)


def _make_service(
    config: RunConfig,
    tokenizer: Tokenizer,
    weights: Path,
    delay_steps: int | None,
    model: SampledModel | None,
) -> LocalService:
    """An engine that fetches the weights that the trainer's process publishes. Arguments: see EnginePart."""
    fetch = make_subscriber(config.weights).fetch if config.weights.url else None
    if fetch is None and config.engine.backend != "vllm":
        fetch = DirectoryWeights(weights).fetch
    model = model or SampledModel.configured(config, tokenizer)
    return make_local_service(config, tokenizer, model, fetch, delay_steps, is_supervised=True)
