"""Estimates the memory of a run's devices: which parts must fit where."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from etude.config import RunConfig
from etude.controller.compute import Place
from etude.controller.planning.parts import PACKED, PAGES, SERVED, MemoryPart, engine_parts, trainer_parts
from etude.controller.planning.processes import Processes
from etude.controller.planning.sizes import ModelSizes

_WORKSPACE = 0.05
"""Share added for memory that allocators and libraries keep."""

_WORKER_SHARE = 0.35
"""Private memory of a rollout worker, which does not load torch, over that of other processes (measured)."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Memory of one kind of device: its parts, and whether they fit."""

    device: str
    """`trainer`, `engine` or `evaluation`, on a device of its own; `trainer and engine` where they share one,
    with a plan for each thing that they do in turn if the run is colocated; `machine` where all processes
    share a machine's memory."""
    parts: tuple[MemoryPart, ...]
    available_bytes: float
    count: int = 1
    """Devices of this kind."""

    @property
    def total_bytes(self) -> float:
        """Total with a workspace added."""
        return sum(part.num_bytes for part in self.parts) * (1 + _WORKSPACE)

    @property
    def fits(self) -> bool:
        """Whether everything fits at once."""
        return self.total_bytes <= self.available_bytes


def plan_memory(
    config: RunConfig,
    sizes: ModelSizes,
    vocab_size: int,
    place: Place,
    available_bytes: float,
    process_bytes: float,
) -> list[MemoryPlan]:
    """One plan for each kind of device, or one for the machine whose processors are the devices.

    `available_bytes`: of one device. `process_bytes`: private memory of a process, libraries loaded. Borrowed
    replicas and other clusters are not planned: their owners provide the memory, as much per engine as the
    run's own engines need.
    """
    processes = Processes.of(config, place.device)
    own_engine = config.engine.backend == "etude" and processes.engines > 0
    trainer = trainer_parts(config, sizes, vocab_size, place)
    engine = engine_parts(config, sizes, place) if own_engine else []
    if config.colocated:
        sets = 1 if sizes.adapter_parameters else 2
        return _in_turns(trainer, engine, place, available_bytes, sets)
    if processes.on_one_machine:
        parts = _on_one_machine(config, processes, trainer, engine, process_bytes)
        return [MemoryPlan("machine", tuple(parts), available_bytes)]
    counts = {"trainer": processes.ranks, "engine": processes.engines, "evaluation": processes.evaluations}
    plans = {"trainer": trainer, "engine": engine, "evaluation": engine}
    if engine and not processes.apart:  # the first rank's device is the engine's too
        counts = {"trainer and engine": 1, "trainer": processes.ranks - 1}
        plans = {"trainer and engine": [*trainer, *engine], "trainer": trainer}
    return [
        MemoryPlan(device, tuple(parts), available_bytes, counts[device])
        for device, parts in plans.items()
        if parts and counts[device]
    ]


def _on_one_machine(
    config: RunConfig,
    processes: Processes,
    trainer: Sequence[MemoryPart],
    engine: Sequence[MemoryPart],
    process_bytes: float,
) -> list[MemoryPart]:
    """The parts of all processes; this process itself is not counted again."""
    parts = [*_times(trainer, processes.ranks), *_times(engine, processes.engines + processes.evaluations)]
    if others := processes.count - 1:
        why = f"interpreter and libraries of {others} more process{'es' if others > 1 else ''}"
        alike = others - processes.workers + processes.workers * _WORKER_SHARE
        parts.append(MemoryPart("processes", alike * process_bytes, why))
    if processes.apart:
        store = config.cluster.object_store_bytes
        parts.append(MemoryPart("object store", store, "of Ray, when full"))
    return parts


def _times(parts: Sequence[MemoryPart], count: int) -> list[MemoryPart]:
    """The parts of `count` processes of one kind."""
    if count == 1:
        return list(parts)
    return [
        replace(part, num_bytes=count * part.num_bytes, why=f"{part.why}; of {count} processes")
        for part in parts
    ]


def _in_turns(
    trainer: Sequence[MemoryPart],
    engine: Sequence[MemoryPart],
    place: Place,
    available_bytes: float,
    sets: int,
) -> list[MemoryPlan]:
    """Memory of a colocated run in each phase. `sets`: of weights in the engine during an update."""
    step_only = {"gradients", "activations", "logits"}
    if place.device != "cpu":  # there host memory is the same memory
        step_only.add("optimizer")
    stays = [part for part in trainer if part.name not in step_only]
    both = [part for part in engine if part.name in (SERVED, PACKED)]
    halves = {SERVED: sets, PACKED: 2}
    served = [replace(p, num_bytes=p.num_bytes / halves[p.name], why="in service") for p in both]
    pages = [part for part in engine if part.name == PAGES]
    fetched = [part for part in engine if part.name not in (SERVED, PACKED, PAGES)]
    phases = {
        "sampling": [*stays, *served, *pages, *fetched],
        "training": [*trainer, *served, *fetched],
        "updating weights": [*stays, *both, *fetched],
    }
    return [
        MemoryPlan(f"trainer and engine, {phase}", tuple(parts), available_bytes)
        for phase, parts in phases.items()
    ]
