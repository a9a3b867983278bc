"""Memory of a run's devices, part by part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from etude.config import RunConfig
from etude.controller.compute import Place
from etude.controller.planning.sizes import ModelSizes
from etude.inference.cache import PAGE_TOKENS, cache_type, page_bytes
from etude.model.logprobs import block_rows
from etude.weights.memory import KEPT_VERSIONS

SERVED, PAGES = "engine's weights", "keys and values"
"""Names of the engine's parts."""
_FLOAT_BYTES = 4
_BLOCK_LOGITS = 2
"""Blocks of logits that live at once: the logits and their gradient."""
_WORKSPACE = 0.05
"""Share on top for what allocators and libraries keep."""


@dataclass(frozen=True, slots=True)
class MemoryPart:
    """One thing that takes memory, on the device that holds most of it."""

    name: str
    num_bytes: float
    why: str


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """One kind of device: what it holds, and whether that fits."""

    device: str
    """`trainer`, `engine`, or `trainer and engine` where they share one; in a colocated run there is a plan
    for each thing that they do in turn."""
    parts: tuple[MemoryPart, ...]
    available_bytes: float

    @property
    def total_bytes(self) -> float:
        """With a workspace on top."""
        return sum(part.num_bytes for part in self.parts) * (1 + _WORKSPACE)

    @property
    def fits(self) -> bool:
        """Whether everything fits at once."""
        return self.total_bytes <= self.available_bytes


def plan_memory(
    config: RunConfig, sizes: ModelSizes, vocab_size: int, place: Place, available_bytes: float
) -> list[MemoryPlan]:
    """One plan for each kind of device."""
    trainer, engine = _trainer(config, sizes, vocab_size, place), _engine(config, sizes, place)
    if config.engine.backend == "vllm":
        return [MemoryPlan("trainer", tuple(trainer), available_bytes)]
    if config.colocated:
        return _in_turns(trainer, engine, place, available_bytes)
    if config.executor == "local":
        return [MemoryPlan("trainer and engine", (*trainer, *engine), available_bytes)]
    return [
        MemoryPlan("trainer", tuple(trainer), available_bytes),
        MemoryPlan("engine", tuple(engine), available_bytes),
    ]


def plan_machine(
    config: RunConfig, sizes: ModelSizes, vocab_size: int, place: Place, available_bytes: float
) -> list[MemoryPlan]:
    """What must fit here for the run to begin: one plan for each kind of device, or, where the devices are
    this machine's processors, one for all processes, which share its memory."""
    if place.device != "cpu" or config.colocated:
        return plan_memory(config, sizes, vocab_size, place, available_bytes)
    parts = _times(_trainer(config, sizes, vocab_size, place), config.parallel.ranks)
    if not config.rl.stream.source and config.engine.backend != "vllm":
        engines = config.cluster.engines if config.executor == "ray" else 1
        parts += _times(_engine(config, sizes, place), engines)
    return [MemoryPlan("machine", parts, available_bytes)]


def _times(parts: Sequence[MemoryPart], count: int) -> tuple[MemoryPart, ...]:
    """The parts of so many processes of one kind."""
    if count == 1:
        return tuple(parts)
    return tuple(
        replace(part, num_bytes=count * part.num_bytes, why=f"{part.why}; of {count} processes")
        for part in parts
    )


def _in_turns(
    trainer: list[MemoryPart], engine: list[MemoryPart], place: Place, available_bytes: float
) -> list[MemoryPlan]:
    """What a colocated run holds while it samples, trains and exchanges weights."""
    step_only = {"gradients", "activations", "logits"}
    if place.device != "cpu":  # there host memory is the same memory
        step_only.add("optimizer")
    stays = [part for part in trainer if part.name not in step_only]
    both = next(part for part in engine if part.name == SERVED)
    served = MemoryPart(SERVED, both.num_bytes / 2, "in service")
    pages = [part for part in engine if part.name == PAGES]
    published = [part for part in engine if part.name not in (SERVED, PAGES)]
    phases = {
        "sampling": [*stays, served, *pages, *published],
        "training": [*trainer, served, *published],
        "updating weights": [*stays, both, *published],
    }
    return [
        MemoryPlan(f"trainer and engine, {phase}", tuple(parts), available_bytes)
        for phase, parts in phases.items()
    ]


def _trainer(config: RunConfig, sizes: ModelSizes, vocab_size: int, place: Place) -> list[MemoryPart]:
    element_bytes = place.element_bytes
    mesh, optimizer = config.parallel, config.rl.optimizer
    held = _sharded(config, sizes.parameters, sizes.expert_parameters)
    is_cut = mesh.fsdp > 1 or mesh.expert > 1
    cut = f", cut over fsdp {mesh.fsdp} x expert {mesh.expert}" if is_cut else ""
    if adapters := sizes.adapter_parameters:
        # Gradients of adapted weights are made whole, one weight at a time, and projected on the factors.
        gradients, why = adapters * _FLOAT_BYTES + sizes.largest_parameter * element_bytes, "of the adapters"
        states = 2 * adapters
    else:
        gradients, why = held * element_bytes, f"of every weight{cut}"
        muon = sizes.matrix_parameters if optimizer.matrix_optimizer == "muon" else 0
        states = held * (2 - muon / sizes.parameters)
    state_bytes = 2 if optimizer.state_dtype == "bfloat16" else _FLOAT_BYTES
    parts = [
        MemoryPart("weights", held * element_bytes, f"the trainer's own{cut}"),
        MemoryPart("gradients", gradients, why),
        MemoryPart("optimizer", states * state_bytes, f"{optimizer.state_dtype} moments{cut}"),
        _activations(config, sizes),
        MemoryPart("logits", _logits(sizes, vocab_size, place.device), "blocks and their gradient, float32"),
    ]
    if config.rl.loss.kl_weight > 0:
        parts.append(MemoryPart("reference", held * element_bytes, "weights that the KL is measured from"))
    return parts


def _activations(config: RunConfig, sizes: ModelSizes) -> MemoryPart:
    """Kept for the backward pass of one micro-batch."""
    kept = "what enters each block" if config.activation_checkpointing else "all that the backward pass needs"
    num_bytes = sizes.saved_bytes / config.parallel.context
    return MemoryPart("activations", num_bytes, f"{sizes.saved_tokens:,} tokens: {kept}")


def _logits(sizes: ModelSizes, vocab_size: int, device_type: str) -> float:
    rows = min(sizes.saved_tokens, block_rows(vocab_size, device_type))
    return _BLOCK_LOGITS * rows * vocab_size * _FLOAT_BYTES


def _engine(config: RunConfig, sizes: ModelSizes, place: Place) -> list[MemoryPart]:
    element_bytes = place.element_bytes
    held = cache_type(config.engine.cache_dtype, place.kernels, place.dtype)
    longest = config.agent.max_tokens + 1
    tokens = config.engine.cache_tokens or config.engine.num_slots * longest
    pages = -(-tokens // PAGE_TOKENS)
    parts = [
        MemoryPart(SERVED, 2 * sizes.parameters * element_bytes, "in service, and the next ones"),
        MemoryPart(
            PAGES,
            pages * page_bytes(config.model, held),
            f"{tokens:,} tokens in {held}, if all are in use",
        ),
    ]
    if place.device == "cpu" and config.executor == "local":
        kept = KEPT_VERSIONS * sizes.parameters * element_bytes
        parts.append(MemoryPart("published weights", kept, f"the last {KEPT_VERSIONS} versions"))
    return parts


def _sharded(config: RunConfig, parameters: int, experts: int) -> float:
    """Numbers that one rank holds of all parameters."""
    mesh = config.parallel
    return (parameters - experts) / mesh.fsdp + experts / (mesh.fsdp * mesh.expert)
