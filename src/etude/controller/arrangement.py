"""Arrangement of a run's parts: all in this process, in turns; or apart (`remote/arrangement.py`), that is in
processes of their own over Ray, or in threads where a run of one process borrows replicas.

Both arrangements provide the same to the loop: `Parts` to sample with and a `Handle` of the trainer.
"""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from etude.config import ClusterConfig, PartConfig, RunConfig
from etude.controller.colocated import ColocatedTrainer
from etude.controller.compute import place_model, use_numerics
from etude.controller.local import LocalExecutor, LocalHandle
from etude.controller.parts import Parts, open_parts
from etude.controller.ray_checks import check_address, check_room
from etude.controller.remote.evaluation import BackgroundEvaluation
from etude.controller.training_part import TrainingPart
from etude.errors.packages import missing_package
from etude.inference import EngineService
from etude.model.loading import AnyModel
from etude.observe import MetricSink, Observer, RunDirectory
from etude.observe.machine import available_cores, available_memory_bytes
from etude.protocols import Executor, Handle, Resources
from etude.records import Task
from etude.tokens.tokenizer import Tokenizer

TRAINER, EVALUATION = "trainer", "evaluation"
ENGINE, WORKER = "engine-", "worker-"
"""Names of the parts, or prefixes of their names."""
SNAPSHOTS = "snapshots"
"""Directory of a run through which vLLM gets weights."""


@dataclass(frozen=True, slots=True)
class Arrangement:
    """The parts of a run."""

    parts: Parts
    training: AbstractAsyncContextManager[Handle[TrainingPart]]
    """Opens the trainer: a Handle of a TrainingPart or of an equivalent. It may hold processes, so it is
    closed before the final evaluations."""
    background: BackgroundEvaluation | None = None
    """Evaluates versions during training."""


@dataclass(frozen=True, slots=True)
class RunContext:
    """The run's directory, and receivers of metrics and messages, for an arrangement."""

    run: RunDirectory
    model: Path
    """Directory of the model to train."""
    routes: Path | None
    """Where expert routes are stored permanently; None: in memory."""
    metrics: MetricSink
    observer: Observer
    faults: dict[str, int]
    """Counts of faults, those of earlier processes included."""
    heldout: Sequence[Task] = ()
    """Tasks of the evaluation during training."""


@contextlib.asynccontextmanager
async def open_local(
    config: RunConfig, tokenizer: Tokenizer, model: AnyModel, context: RunContext, num_threads: int
) -> AsyncIterator[Arrangement]:
    """Opens all parts in this process. `num_threads`: compute threads of training."""
    use_numerics(place_model(model, config), config)
    opening = open_parts(
        config,
        tokenizer,
        model,
        snapshots=context.run.path / SNAPSHOTS,
        routes=context.routes,
        owner=sandbox_owner(context),
        deterministic=keeps_schedule(config),
    )
    async with opening as parts:

        @contextlib.asynccontextmanager
        async def training() -> AsyncIterator[Handle[TrainingPart]]:
            if config.colocated:
                assert isinstance(parts.service, EngineService), "so RunConfig wants it"
                await parts.service.release_memory()  # the optimiser's states are made on the device
            made = config, model, tokenizer, context.run, parts.weights, context.metrics, context.observer
            with TrainingPart(*made, parts.blobs.get) as part:
                threads = max(1, num_threads // config.parallel.ranks)
                handle: Handle[TrainingPart] = LocalHandle(part, threads, TRAINER)
                if config.colocated:
                    assert isinstance(parts.service, EngineService)
                    part.offload_states()
                    handle = ColocatedTrainer(handle, parts.service)
                yield handle

        yield Arrangement(parts, training())


def sandbox_owner(context: RunContext) -> str:
    """Name of a run's own process at a sandbox server; the same when the run is resumed."""
    return f"{platform.node()}:{context.run.path.resolve()}"


def is_reproducible(config: RunConfig) -> bool:
    """Whether a repeated run samples the same tokens: its schedule is fixed, or the order of requests does
    not affect results, since every sum has a fixed order and no weights change meanwhile."""
    fixed = config.numerics == "invariant" and config.rl.max_staleness == 0 and plays_itself(config)
    return keeps_schedule(config) or fixed


def keeps_schedule(config: RunConfig) -> bool:
    """Whether requests reach the engine in a reproducible order. Not with vLLM, several processes or clusters
    that sample or run sessions, sampling while the trainer steps, or borrowed replicas."""
    alone = config.cluster.engines == 1 and not config.cluster.workers and config.rl.max_staleness == 0
    return plays_itself(config) and (config.executor == "local" or alone)


def plays_itself(config: RunConfig) -> bool:
    """Whether all sessions are of Étude's own agent and engines in this run: not with vLLM, other clusters,
    borrowed replicas, or a foreign harness, which sends requests at any time."""
    elsewhere = config.clusters.listen or config.elastic.router or config.agent.harness.command
    return config.engine.backend == "etude" and not elsewhere


def part_resources(config: RunConfig) -> list[Resources]:
    """Resources of a run's parts, the trainer first."""
    cluster = config.cluster
    engines = cluster.engines if config.executor == "ray" else 1
    gpus = 1.0 if config.device == "cuda" else 0.0
    engine_gpus = gpus * config.engine.num_gpus

    return [
        _resources(TRAINER, cluster.trainer, gpus * config.parallel.ranks),
        *(_resources(f"{ENGINE}{number}", cluster.engine, engine_gpus) for number in range(engines)),
        *(worker_resources(config, f"{WORKER}{number}") for number in range(cluster.workers)),
        *([_resources(EVALUATION, cluster.evaluation, engine_gpus)] if config.evaluation.every_steps else []),
    ]


def worker_resources(config: RunConfig, name: str) -> Resources:
    """Resources of the rollout worker of that name."""
    return _resources(name, config.cluster.worker, 0.0)


def _resources(name: str, part: PartConfig, default_gpus: float) -> Resources:
    num_gpus = default_gpus if part.gpus is None else part.gpus
    return Resources(part.cpus, num_gpus, part.memory_bytes, part.failure_domain, name)


def check_executor(config: RunConfig) -> None:
    """Checks, before a run has a directory, that its processes can be started. Raises ConfigError for a Ray
    that is not installed or does not answer, ResourceError where they do not fit this machine."""
    settings = config.cluster
    _import_ray(settings)
    if settings.address:
        check_address(settings)
    else:
        has = {"CPU": float(available_cores()), "memory": float(available_memory_bytes())}
        if config.device != "cpu":
            has["GPU"] = float(torch.cuda.device_count())
        check_room(part_resources(config), has)


def executor_of(config: RunConfig) -> AbstractContextManager[Executor]:
    """The executor of a run's parts, where they are apart. Raises ConfigError where Ray is not installed."""
    if config.executor == "ray":
        return open_executor(config.cluster)
    return contextlib.nullcontext(LocalExecutor())


def open_executor(settings: ClusterConfig) -> Any:
    """The Ray executor, as a context manager. Raises ConfigError where Ray is not installed."""
    return _import_ray(settings).RayExecutor(settings, available_cores())


def _import_ray(settings: ClusterConfig) -> Any:
    # All are read when Ray is imported or started. No usage reports. A Ray that is started here uses the
    # loopback address as this machine's own, and so listens there only. Its workers (trainer and engines) get
    # the same share of busy cores as sandboxes: Ray's default is the lowest priority (niceness 15).
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if not settings.address:
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        os.environ.setdefault("RAY_worker_niceness", "0")
    try:
        from etude.controller import ray
    except ModuleNotFoundError as error:
        raise missing_package("the Ray executor", "ray", field="executor") from error
    return ray
