"""Runs the parts of a run in processes of their own, restarted when they fail.

run's process: the loop, trajectory log, faults; without workers also sessions and sandboxes
    ├── trainer            SupervisedTrainer
    ├── engine-0, ...      EngineFleet <──────────────┐ requests
    ├── worker-0, ...      RemoteEpisodes: sessions ──┘
    └── evaluation         BackgroundEvaluation: an engine and sessions
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from etude.agent import open_renderer
from etude.config import RunConfig
from etude.controller.arrangement import (
    ENGINE,
    EVALUATION,
    TRAINER,
    WORKER,
    Arrangement,
    RunContext,
    keeps_schedule,
    part_resources,
    sandbox_owner,
    worker_resources,
)
from etude.controller.backends import open_run_backend
from etude.controller.borrowed_engine import Needs
from etude.controller.elastic import ElasticPool
from etude.controller.engines import SampledModel
from etude.controller.harness import open_environment
from etude.controller.parts import Parts
from etude.controller.remote.engine_part import EnginePart
from etude.controller.remote.episodes import RemoteEpisodes
from etude.controller.remote.evaluation import BackgroundEvaluation, EvaluationPart
from etude.controller.remote.fleet import EngineFleet
from etude.controller.remote.rollout_part import RolloutPart
from etude.controller.remote.trainers import RemoteTrainingPart, SupervisedTrainer
from etude.controller.remote.weights import DirectoryWeights
from etude.controller.remote.worker_pool import KIND as WORKERS
from etude.controller.remote.worker_pool import WorkerPool
from etude.controller.supervision import FaultJournal, PartT, Spawn, Supervision
from etude.controller.training_part import LATEST, TrainingPart
from etude.environment.episodes import EpisodeLimits
from etude.environment.runners import TimedEpisodeRunner
from etude.inference.exchange import Build
from etude.model import LanguageModel
from etude.model.loading import AnyModel
from etude.observe.workers import WorkerFiles
from etude.protocols import Executor, Handle, Resources
from etude.store.blobs import Blobs, open_blobs
from etude.tokens.tokenizer import Tokenizer

WEIGHTS = "weights"


@contextlib.asynccontextmanager
async def open_remote(
    executor: Executor, config: RunConfig, tokenizer: Tokenizer, model: AnyModel, context: RunContext
) -> AsyncIterator[Arrangement]:
    """Starts trainer and engines with `executor`, and rollout workers and an evaluation where they are
    configured. Without workers, sessions and sandboxes are in this process.

    Raises ResourceError where resources are missing, and whatever a part raises while it starts.
    """
    if isinstance(model, LanguageModel):
        config = config.model_copy(update={"model": model.config})
    needs = part_resources(config)
    await executor.reserve(needs)
    journal = FaultJournal(context.metrics, context.observer, context.faults)
    supervision = Supervision(config.cluster, journal)
    sampled = SampledModel.of(model, config.dtype)
    by_name = {resources.part: resources for resources in needs}
    factory = _PartFactory(executor, config, tokenizer, sampled, context, by_name, supervision)
    renderer, blobs = open_renderer(tokenizer, config.agent), open_blobs(context.routes)
    fleet = factory.engines()
    try:
        await fleet.start()
        async with (
            factory.elastic(fleet),
            factory.sessions(fleet, blobs) as runner,
            factory.evaluation(fleet) as background,
        ):
            parts = Parts(renderer, blobs, DirectoryWeights(factory.weights), fleet, runner)
            yield Arrangement(parts, factory.training(blobs), background)
    finally:
        await fleet.shutdown()
        await executor.shutdown()


@dataclass(frozen=True, slots=True)
class _PartFactory:
    """Makes the run's own proxies and supervisors of the parts."""

    executor: Executor
    config: RunConfig
    tokenizer: Tokenizer
    model: SampledModel
    context: RunContext
    needs: dict[str, Resources]
    """Resources of each part, by name."""
    supervision: Supervision

    @property
    def weights(self) -> Path:
        """Directory through which weights reach the engines."""
        return Path(self.config.cluster.weights_directory or self.context.run.path / WEIGHTS)

    @property
    def build(self) -> Build:
        """The build that every process must have."""
        return Build.here(self.config.model)

    @property
    def limits(self) -> EpisodeLimits:
        """Limits of sessions."""
        limits = EpisodeLimits.from_config(self.config)
        return replace(limits, max_attempts=self.config.cluster.max_attempts)

    def spawning(self, needs: Resources, factory: Callable[..., PartT], *arguments: Any) -> Spawn[PartT]:
        """A function that starts a process of a part, once its resources are free."""

        async def spawn(avoid: frozenset[str]) -> Handle[PartT]:
            await self.executor.make_room(needs)  # which may have been lost with a machine
            return await self.executor.spawn(factory, *arguments, resources=replace(needs, avoid=avoid))

        return spawn

    def named(self, start: str) -> list[str]:
        """Names of the parts that begin with `start`."""
        return [name for name in self.needs if name.startswith(start)]

    def engines(self) -> EngineFleet:
        """The engines, not started."""
        config = self.config
        delay = config.engine.tool_delay_steps if keeps_schedule(config) else None
        arguments = (config, self.tokenizer, self.weights, delay, self.model)
        spawns = {
            name: self.spawning(self.needs[name], EnginePart, *arguments) for name in self.named(ENGINE)
        }
        return EngineFleet(spawns, self.build, self.supervision)

    def elastic(self, fleet: EngineFleet) -> AbstractAsyncContextManager[object]:
        """Borrows replicas for the fleet, if that is configured."""
        config, context = self.config, self.context
        if not config.elastic.router:
            return contextlib.nullcontext()
        needs = Needs.of(config, self.tokenizer)
        return ElasticPool(config, needs, fleet, context.metrics, context.observer)

    def sessions(self, fleet: EngineFleet, blobs: Blobs) -> AbstractAsyncContextManager[TimedEpisodeRunner]:
        """Workers, or an environment in this process."""
        if self.config.cluster.workers:
            return self.workers(fleet, blobs)
        backend = open_run_backend(self.config.sandbox, sandbox_owner(self.context))
        return open_environment(self.config, backend, self.tokenizer, self.limits, blobs.put)

    @contextlib.asynccontextmanager
    async def workers(self, fleet: EngineFleet, blobs: Blobs) -> AsyncIterator[TimedEpisodeRunner]:
        """Sessions in workers, whose number may change during the run."""
        config, context, names = self.config, self.context, self.named(WORKER)
        episodes = RemoteEpisodes(
            {name: self.worker_spawning(self.needs[name]) for name in names},
            self.build,
            fleet,
            blobs.put,
            self.supervision,
        )
        pool = WorkerPool(
            episodes,
            self.worker_spawning,
            functools.partial(worker_resources, config),
            names,
            self.executor,
            config.cluster,
            WorkerFiles(context.run.path),
            FaultJournal(context.metrics, context.observer, kind=WORKERS),
        )
        try:
            await episodes.start()
            async with pool:
                yield episodes
        finally:
            await episodes.shutdown()

    def worker_spawning(self, needs: Resources) -> Spawn[RolloutPart]:
        """A function that starts a worker's process."""
        owner = f"{sandbox_owner(self.context)}/{needs.part}"
        arguments = (self.config, self.tokenizer, self.limits, needs.part, owner)
        return self.spawning(needs, RolloutPart, *arguments)

    @contextlib.asynccontextmanager
    async def evaluation(self, fleet: EngineFleet) -> AsyncIterator[BackgroundEvaluation | None]:
        """Evaluation during training, if it is configured."""
        config, context = self.config, self.context
        if not config.evaluation.every_steps:
            yield None
            return
        owner = f"{sandbox_owner(context)}/{EVALUATION}"
        arguments = (config, self.tokenizer, self.weights, self.limits, owner, self.model)
        background = BackgroundEvaluation(
            self.spawning(self.needs[EVALUATION], EvaluationPart, *arguments),
            self.build,
            context.heldout,
            config.evaluation.every_steps,
            lambda: fleet.serving,
            self.supervision,
            context.metrics,
            context.observer,
        )
        try:
            await background.start()
            yield background
        finally:
            await background.close()

    @contextlib.asynccontextmanager
    async def training(self, blobs: Blobs) -> AsyncIterator[Handle[TrainingPart]]:
        """The trainer."""
        config, context = self.config, self.context
        arguments = (config, context.model, self.tokenizer, context.run, self.weights)
        trainer = SupervisedTrainer(
            self.spawning(self.needs[TRAINER], RemoteTrainingPart, *arguments),
            blobs.get,
            context.run.checkpoints / LATEST,
            self.supervision,
            context.metrics,
            context.observer,
        )
        try:
            await trainer.start()
            yield trainer
        finally:
            await trainer.stop()
