"""Where the parts of a run are: in turns in this process, or apart (`remote/arrangement.py`), which is in
processes of their own over Ray, and in threads where a run of one process borrows replicas.

Both arrangements give the loop the same: `Parts` to sample with and a `Handle` of what trains.
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
from etude.controller.remote.evaluation import EvaluationBeside
from etude.controller.training_part import TrainingPart, TrainingPaths
from etude.errors.packages import missing_package
from etude.inference import EngineService
from etude.model.loading import AnyModel
from etude.observe import MetricSink, Observer
from etude.observe.machine import available_cores, available_memory_bytes
from etude.protocols import Executor, Handle, Resources
from etude.records import Task
from etude.tokens.tokenizer import Tokenizer

TRAINER, EVALUATION = "trainer", "evaluation"
ENGINE, WORKER = "engine-", "worker-"
"""What the names of the parts are, or begin with."""


@dataclass(frozen=True, slots=True)
class Arrangement:
    """The parts of a run, and where its trainer can be had."""

    parts: Parts
    training: AbstractAsyncContextManager[Handle[TrainingPart]]
    """Opens the trainer: a Handle of a TrainingPart, or of what does as one does. Left before what follows
    training, since it may hold processes."""
    beside: EvaluationBeside | None = None
    """Judges versions while others are trained."""


@dataclass(frozen=True, slots=True)
class Place:
    """What an arrangement needs to know of the run's directory, and where it tells what happens."""

    directory: Path
    paths: TrainingPaths
    model: Path
    """The directory that the model which is trained lies in."""
    routes: Path | None
    """Where expert routes are kept for good."""
    snapshots: Path
    """For vLLM."""
    metrics: MetricSink
    observer: Observer
    faults: dict[str, int]
    """Counts of what failed, of earlier sittings too."""
    heldout: Sequence[Task] = ()
    """What versions are judged on beside training."""


@contextlib.asynccontextmanager
async def open_local(
    config: RunConfig, tokenizer: Tokenizer, model: AnyModel, place: Place, num_threads: int
) -> AsyncIterator[Arrangement]:
    """Everything in this process. `num_threads`: compute threads of training."""
    use_numerics(place_model(model, config), config)
    opening = open_parts(
        config,
        tokenizer,
        model,
        snapshots=place.snapshots,
        routes=place.routes,
        owner=sandbox_owner(place),
        deterministic=keeps_schedule(config),
    )
    async with opening as parts:

        @contextlib.asynccontextmanager
        async def training() -> AsyncIterator[Handle[TrainingPart]]:
            if config.colocated:
                assert isinstance(parts.service, EngineService), "so RunConfig wants it"
                await parts.service.release_memory()  # the optimiser's states are made on the device
            with TrainingPart(
                config,
                model,
                tokenizer,
                place.paths,
                parts.weights,
                place.metrics,
                place.observer,
                parts.blobs.get,
            ) as part:
                threads = max(1, num_threads // config.parallel.ranks)
                handle: Handle[TrainingPart] = LocalHandle(part, threads, TRAINER)
                if config.colocated:
                    assert isinstance(parts.service, EngineService), "so RunConfig wants it"
                    handle = await ColocatedTrainer.take_turns(handle, parts.service)
                yield handle

        yield Arrangement(parts, training())


def sandbox_owner(place: Place) -> str:
    """What a run's own process is known by on a sandbox server; the same when it is resumed."""
    return f"{platform.node()}:{place.directory.resolve()}"


def is_reproducible(config: RunConfig) -> bool:
    """Whether the same run gives the same tokens twice: it keeps a schedule, or else the order of requests
    changes no bit, since every sum has a fixed order and no weights change meanwhile."""
    elsewhere = config.clusters.listen or config.elastic.router or config.engine.backend != "etude"
    elsewhere = elsewhere or config.agent.harness.command
    fixed = config.numerics == "invariant" and config.rl.max_staleness == 0 and not elsewhere
    return keeps_schedule(config) or fixed


def keeps_schedule(config: RunConfig) -> bool:
    """Whether requests come to the engine in an order that repeats. Engines of vLLM take them as they come,
    and so do several processes or clusters that sample or run sessions, or one that samples while another
    trains, and replicas that come and go."""
    if config.engine.backend != "etude" or config.clusters.listen or config.elastic.router:
        return False
    if config.agent.harness.command:  # which asks when it likes
        return False
    cluster = config.cluster
    alone = cluster.engines == 1 and not cluster.workers
    return config.executor == "local" or (alone and config.rl.max_staleness == 0)


def part_resources(config: RunConfig) -> list[Resources]:
    """What the parts of a run take, the trainer first."""
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
    """What the rollout worker of that name takes."""
    return _resources(name, config.cluster.worker, 0.0)


def _resources(name: str, part: PartConfig, default_gpus: float) -> Resources:
    num_gpus = default_gpus if part.gpus is None else part.gpus
    return Resources(part.cpus, num_gpus, part.memory_bytes, part.failure_domain, name)


def check_executor(config: RunConfig) -> None:
    """Looks, before a run has a directory, whether its processes can be had. Raises ConfigError for a Ray
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
    """What starts the parts of a run that has them apart. Raises ConfigError where Ray is not installed."""
    if config.executor == "ray":
        return open_executor(config.cluster)
    return contextlib.nullcontext(LocalExecutor())


def open_executor(settings: ClusterConfig) -> Any:
    """The Ray executor, as a context manager. Raises ConfigError where Ray is not installed."""
    return _import_ray(settings).RayExecutor(settings, available_cores())


def _import_ray(settings: ClusterConfig) -> Any:
    # All are read when Ray is imported or started. It reports nothing to anybody. A Ray that is started here
    # takes the loopback address for this machine's own, and so listens there alone; and its workers, trainer
    # and engines, get as much of busy cores as sandboxes do: Ray would give them the least (niceness 15).
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if not settings.address:
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        os.environ.setdefault("RAY_worker_niceness", "0")
    try:
        from etude.controller import ray
    except ModuleNotFoundError as error:
        raise missing_package("the Ray executor", "ray", field="executor") from error
    return ray
