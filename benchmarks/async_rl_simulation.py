"""The real RL loop and collectors over a simulated engine, sandboxes and trainer, in virtual time."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, cast

from benchmarks.simulation.rollout import (
    SessionShapes,
    SimulatedEngine,
    SimulatedEnvironment,
    SimulatedTrainer,
    run_virtual,
)

from etude.agent import core_registry
from etude.config import RunConfig
from etude.controller.reinforcement import ReinforcementLoop, make_collector
from etude.controller.stopping import StopSignal
from etude.environment.episodes import Environment
from etude.observe.metrics import MemorySink
from etude.observe.observer import SilentObserver
from etude.store.blobs import MemoryBlobs
from etude.store.trajectories import TrajectoryLog
from etude.tokens import ETUDE_TEMPLATE, Renderer, train_tokenizer
from etude.tokens.grammar import XmlGrammar


@dataclass(frozen=True, slots=True)
class Machine:
    """Speeds of the simulated engine and trainer."""

    num_slots: int = 64
    """Messages sampled concurrently."""
    engine_tokens_per_s: float = 2560.0
    """Sampling speed of all slots together."""
    trainer_tokens_per_s: float = 4000.0
    """Sampled tokens trained on per second; the engine does not wait for the trainer."""
    stage_s: float = 2.0
    """Transfer time of weights from trainer to engine."""
    shapes: SessionShapes = field(default_factory=SessionShapes)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Results of one simulated run."""

    virtual_s: float
    cpu_s: float
    """Processor time of this process."""
    ended: int
    """Sessions that ended."""
    turns: int
    trained: int
    """Trajectories trained on."""
    most_running: int
    lags: list[int]
    """Version lag of each trajectory trained on."""
    engine_busy_share: float
    trainer_busy_share: float
    rows: list[dict[str, Any]]
    """The run's metrics."""


@cache
def renderer() -> Renderer:
    """A renderer whose tokens are bytes and control tokens."""
    grammar = XmlGrammar(core_registry().schemas)
    controls = [*ETUDE_TEMPLATE.control_tokens, *grammar.control_tokens()]
    return Renderer(train_tokenizer([], 256 + len(controls), controls), grammar)


def simulate(machine: Machine, rl: Mapping[str, Any], max_sessions: int, seed: int = 0) -> Outcome:
    """Simulates one run of `rl.num_steps` steps, from its first publication to its last step. As between
    separate processes, weights travel during the next step unless `rl` says otherwise."""
    config = RunConfig.model_validate({"rl": dict(rl), "engine": {"num_slots": max_sessions}, "seed": seed})
    with tempfile.TemporaryDirectory(prefix="etude-simulated-") as directory:
        return run_virtual(_simulate(machine, config, Path(directory)))


async def _simulate(machine: Machine, config: RunConfig, directory: Path) -> Outcome:
    clock = asyncio.get_running_loop().time
    environment = SimulatedEnvironment(machine.shapes, renderer())
    engine = SimulatedEngine(
        environment.message, machine.num_slots, machine.engine_tokens_per_s, machine.stage_s
    )
    trainer = SimulatedTrainer("simulated", machine.trainer_tokens_per_s)
    collector = make_collector(cast(Environment, environment), engine, machine.shapes.task, config, clock)
    metrics = MemorySink()
    loop = ReinforcementLoop(
        trainer,
        engine,
        collector,
        TrajectoryLog(directory),
        MemoryBlobs(),
        metrics,
        SilentObserver(),
        StopSignal(SilentObserver()),
        clock=clock,
        overlap=config.rl.max_staleness > 0 and config.rl.overlap_publication,
    )

    async def saved(step: int) -> None:
        pass

    began_s, began_cpu_s = clock(), time.process_time()
    await loop.run(config.rl.num_steps, saved)
    elapsed_s = clock() - began_s
    return Outcome(
        virtual_s=elapsed_s,
        cpu_s=time.process_time() - began_cpu_s,
        ended=environment.num_ended,
        turns=environment.num_turns,
        trained=trainer.num_trajectories,
        most_running=environment.most_running,
        lags=trainer.lags,
        engine_busy_share=engine.busy_slot_s / (elapsed_s * machine.num_slots),
        trainer_busy_share=trainer.busy_s / elapsed_s,
        rows=metrics.rows,
    )
