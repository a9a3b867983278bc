"""The plan of a run: estimates of sizes, memory, time and cost, without starting it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from etude.config import RunConfig
from etude.controller.compute import Place, choose_place
from etude.controller.models import resolve_model
from etude.controller.planning.cost import StepTimes, plan_step, price_per_hour
from etude.controller.planning.machine import Rates, measure_rates, memory_bytes, process_bytes
from etude.controller.planning.memory import MemoryPlan, plan_memory
from etude.controller.planning.parts import PAGES, MemoryPart
from etude.controller.planning.processes import Processes
from etude.controller.planning.sizes import ModelSizes, measure_sizes
from etude.errors import ConfigError, ResourceError
from etude.model.loading import read_architecture, read_vocab_size
from etude.training.parallel.division import check_division


@dataclass(frozen=True, slots=True)
class Plan:
    """The estimates for a run."""

    config: RunConfig
    place: Place
    sizes: ModelSizes
    rates: Rates
    memory: tuple[MemoryPlan, ...]
    step: StepTimes
    processes: Processes

    @property
    def fits(self) -> bool:
        """Whether every device has enough memory."""
        return all(memory.fits for memory in self.memory)

    @property
    def hours(self) -> float:
        """Time of all RL steps."""
        return self.step.step_s * self.config.rl.num_steps / 3600

    @property
    def price_per_step(self) -> float | None:
        """Price of one RL step; None where no price is configured."""
        price = price_per_hour(self.config, self.processes)
        return price * self.step.step_s / 3600 if price else None


def make_plan(config: RunConfig) -> Plan:
    """Plans the RL stage. Raises ConfigError for a model that is not defined here, experts that cannot be
    divided as configured, and a device that is neither available nor described by `[plan]`."""
    config = resolve_model(config)
    if not _is_defined_here(config):
        raise ConfigError(
            "only architectures that Étude implements can be planned",
            field="initial_checkpoint",
            received=config.initial_checkpoint,
            fix="run one step of a small copy of it, and measure what it needs",
        )
    check_division(config.model, config.parallel)
    place, device = _place(config)
    vocab_size = _vocab_size(config)
    sizes = _sizes(config, vocab_size, place)
    rates = measure_rates(config, device, getattr(torch, place.dtype))
    memory = plan_memory(config, sizes, vocab_size, place, rates.memory_bytes, process_bytes())
    step = plan_step(config, sizes, place, rates)
    return Plan(config, place, sizes, rates, tuple(memory), step, Processes.of(config, place.device))


def check_machine(config: RunConfig, place: Place) -> None:
    """Raises ResourceError where this machine cannot hold the RL stage of a run, counted as a plan counts it.

    Does nothing for a model that is not defined here, and for a Ray cluster of other machines.
    """
    config = resolve_model(config)
    if not _is_defined_here(config) or (config.executor == "ray" and config.cluster.address):
        return
    vocab_size = _vocab_size(config)
    sizes = _sizes(config, vocab_size, place)
    available = memory_bytes(torch.device(place.device))
    check_fits(config, plan_memory(config, sizes, vocab_size, place, available, process_bytes()))


def check_fits(config: RunConfig, plans: Sequence[MemoryPlan]) -> None:
    """Raises ResourceError where a device cannot hold its parts, with fixes for the largest parts: as many of
    them as together exceed the lacking memory."""
    for memory in plans:
        if memory.fits:
            continue
        lacking = memory.total_bytes - memory.available_bytes
        fixes: list[str] = []
        parts = sorted(memory.parts, key=lambda part: part.num_bytes, reverse=True)
        for part in parts:
            if lacking > 0:
                fixes.append(_fix(config, part))
                lacking -= part.num_bytes
        raise ResourceError(
            f"the {memory.device} needs {memory.total_bytes / 1e9:.1f} GB, and only "
            f"{memory.available_bytes / 1e9:.1f} GB are available",
            field=parts[0].name,
            received=f"{parts[0].num_bytes / 1e9:.1f} GB",
            fix="; ".join(dict.fromkeys(fixes)),
        )


def _is_defined_here(config: RunConfig) -> bool:
    initial = config.initial_checkpoint
    return initial is None or read_architecture(Path(initial)) is not None


def _sizes(config: RunConfig, vocab_size: int, place: Place) -> ModelSizes:
    return measure_sizes(
        config.model,
        vocab_size,
        config.rl.micro_batch_tokens,
        config.agent.max_tokens,
        dtype=getattr(torch, place.dtype),
        checkpointed=config.activation_checkpointing,
        adapter=config.rl.adapter,
        on_cpu=place.device == "cpu",
    )


def _fix(config: RunConfig, part: MemoryPart) -> str:
    tokens = config.engine.cache_tokens or config.engine.num_slots * (config.agent.max_tokens + 1)
    fixes = {
        PAGES: f"set engine.cache_tokens lower (a GB holds {tokens * 1e9 / max(1, part.num_bytes):,.0f})",
        "activations": "shorten agent.max_tokens"
        if config.activation_checkpointing
        else "set activation_checkpointing = true, or on a CPU num_threads lower",
        "optimizer": "set rl.optimizer.state_dtype = 'bfloat16', or train adapters (rl.adapter.rank)",
        "checkpoint": "set checkpoint.asynchronous = false",
        "processes": "start fewer of them (cluster.engines, cluster.workers)",
        "object store": "set cluster.object_store_bytes lower",
        "gathered weights": "name a store (weights.url), to which every rank publishes its own part",
        "published weights": "keep them on disk: weights.scratch (with a store, weights.url)",
        "gradients": "train adapters (rl.adapter.rank), or divide the model over more ranks (parallel.fsdp)",
    }
    return fixes.get(part.name, "use a smaller model or a larger device, or divide the model (parallel.fsdp)")


def _place(config: RunConfig) -> tuple[Place, torch.device]:
    """Where the run computes, even if this machine has no such device."""
    if config.device != "cuda" or torch.cuda.is_available():
        place = choose_place(config.device, config.dtype, config.engine.kernels, config.numerics)
        return place, torch.device(place.device)
    plan = config.plan
    for name in ("device_memory_gb", "peak_tflops", "bandwidth_gb_per_s"):
        if not getattr(plan, name):
            raise ConfigError(
                "this machine has no GPU to measure",
                field=f"plan.{name}",
                received=0,
                fix=f"give the GPU's value with --set plan.{name}=...",
            )
    return Place("cuda", "float32" if config.dtype == "float32" else "bfloat16", "gpu"), torch.device("cpu")


def _vocab_size(config: RunConfig) -> int:
    if config.plan.vocab_size:
        return config.plan.vocab_size
    if config.initial_checkpoint and (Path(config.initial_checkpoint) / "config.json").exists():
        return read_vocab_size(Path(config.initial_checkpoint))
    return config.tokenizer.vocab_size
