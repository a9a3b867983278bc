"""Estimates how long a step's sessions take, over all engines that sample them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from etude.config import RunConfig
from etude.controller.compute import Place
from etude.controller.planning.machine import Rates
from etude.controller.planning.processes import Processes
from etude.controller.planning.sizes import ModelSizes
from etude.inference.cache import PAGE_TOKENS, cache_type, page_bytes
from etude.observe.machine import available_cores


@dataclass(frozen=True, slots=True)
class SamplingTimes:
    """Times of concurrent sessions; of engines, the seconds of the slowest."""

    sessions: float
    sampled_tokens: float
    prefill_tokens: float
    decode_s: float
    prefill_s: float
    turns_s: float
    """Processor time of agents, rendering and records, divided by the number of their processes."""
    tools_s: float
    """Time in which sessions wait for tools and grading."""
    in_turn: bool
    """Whether engine and agents are one process."""

    @property
    def busy_s(self) -> float:
        """Time of the engines or of the sessions' drivers, whichever is the bottleneck."""
        engine_s = self.decode_s + self.prefill_s
        return engine_s + self.turns_s if self.in_turn else max(engine_s, self.turns_s)

    @property
    def wall_s(self) -> float:
        """Time from the first prompt to the last grade, or a step's share of continuous sampling."""
        return self.busy_s + self.tools_s


@dataclass(frozen=True, slots=True)
class _Pool:
    """Engines of one kind."""

    engines: float
    capacity: float
    """Number of engines with a device of their own that are as fast."""
    share: float
    """Share of the sessions."""
    live: float
    """Concurrent sessions on each engine."""


def plan_sampling(
    config: RunConfig,
    sizes: ModelSizes,
    place: Place,
    rates: Rates,
    processes: Processes,
    sessions: float,
) -> SamplingTimes:
    """Estimates the sampling of `sessions`, divided over the run's own engines, borrowed ones and those of
    other clusters. The prompt of a group is computed once for its members."""
    plan, rl = config.plan, config.rl
    pools = _pools(config, processes, sessions * (1 + rl.max_staleness))
    if not pools:  # the run trains on recorded sessions
        return SamplingTimes(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, in_turn=True)
    sampled = sessions * plan.sampled_tokens
    prefilled = sessions * (plan.observation_tokens + plan.prompt_tokens / rl.group_size)
    flops = prefilled * sizes.forward_flops(plan.session_tokens / 2, with_head=False)
    turns = sessions * plan.turns
    at_once = sum(pool.engines * pool.live for pool in pools)
    waves = sessions / at_once if rl.max_staleness else math.ceil(sessions / at_once)
    tools_s = waves * plan.turns * plan.tool_s
    if processes.on_one_machine:
        tools_s = max(tools_s, turns * plan.tool_cpu_s / available_cores())
    return SamplingTimes(
        sessions=sessions,
        sampled_tokens=sampled,
        prefill_tokens=prefilled,
        decode_s=max(
            pool.share * sampled / pool.capacity / pool.live
            * _decode_step_s(config, sizes, place, rates, pool.live)
            for pool in pools
        ),
        prefill_s=max(pool.share / pool.capacity for pool in pools)
        * flops / (rates.flops_per_s * plan.prefill_share),
        turns_s=turns * plan.turn_cpu_s / _drivers(config, processes),
        tools_s=tools_s,
        in_turn=not processes.apart,
    )  # fmt: skip


def _decode_step_s(config: RunConfig, sizes: ModelSizes, place: Place, rates: Rates, live: float) -> float:
    """Seconds of one token for each of `live` sessions: reading weights and caches, or products if slower."""
    length = config.plan.session_tokens
    cache_dtype = cache_type(config.engine.cache_dtype, place.kernels, place.dtype)
    cache_bytes = live * length / 2 / PAGE_TOKENS * page_bytes(config.model, cache_dtype)
    experts = float(sizes.expert_parameters)
    if experts:
        missed = (1 - config.model.experts_per_token / config.model.num_experts) ** live
        experts *= 1 - missed
    read = (sizes.parameters - sizes.expert_parameters + experts) * place.element_bytes + cache_bytes
    flops = live * sizes.forward_flops(length / 2)
    return max(
        read / (rates.bytes_per_s * config.plan.decode_share),
        flops / (rates.flops_per_s * config.plan.prefill_share),
    )


def _pools(config: RunConfig, processes: Processes, wanted: float) -> list[_Pool]:
    """The engines that sample `wanted` concurrent sessions, divided in proportion to their slots."""
    slots, here = config.engine.num_slots, processes.engines + processes.borrowed
    own_devices = 1 if processes.on_one_machine else processes.engines
    places = {"here": here * slots, "elsewhere": float(processes.elsewhere * slots)}
    if processes.elsewhere:
        places["here"] = min(places["here"], config.clusters.local_sessions)
    counts = {
        "here": (here, own_devices + processes.borrowed),
        "elsewhere": (processes.elsewhere, processes.elsewhere),
    }
    total = sum(places.values())
    return [
        _Pool(engines, capacity, places[name] / total, min(1.0, wanted / total) * places[name] / engines)
        for name, (engines, capacity) in counts.items()
        if places[name]
    ]


def _drivers(config: RunConfig, processes: Processes) -> int:
    """Number of processes in which agents run, each on one core at a time."""
    if processes.elsewhere:
        return processes.elsewhere + min(1, config.clusters.local_sessions)
    if processes.on_one_machine:
        return min(max(1, processes.workers), available_cores())
    return max(1, processes.workers)
