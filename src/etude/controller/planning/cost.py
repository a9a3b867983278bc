"""Time and cost of one RL step, from rates and from what its sessions are supposed to be."""

from __future__ import annotations

import math
from dataclasses import dataclass

from etude.config import RunConfig
from etude.controller.compute import Place
from etude.controller.planning.machine import Rates
from etude.controller.planning.sizes import ModelSizes
from etude.inference.cache import PAGE_TOKENS, cache_type, page_bytes

_BACKWARD = 2.0
"""Products of the backward pass over those of the forward pass."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """One RL step, in seconds, and what it goes through."""

    sessions: float
    sampled_tokens: float
    prefill_tokens: float
    trained_tokens: float
    decode_s: float
    prefill_s: float
    tools_s: float
    train_s: float
    publish_s: float
    overlapped: bool
    """Whether sampling goes on while the trainer is at it."""

    @property
    def rollout_s(self) -> float:
        """Sampling of all sessions of the step, tools included."""
        return self.decode_s + self.prefill_s + self.tools_s

    @property
    def step_s(self) -> float:
        """Wall time: in turns, or that of the slower side where both go on at once."""
        if self.overlapped:
            return max(self.rollout_s, self.train_s) + self.publish_s
        return self.rollout_s + self.train_s + self.publish_s


def plan_step(config: RunConfig, sizes: ModelSizes, place: Place, rates: Rates) -> StepTimes:
    """Times of one step by arithmetic: products over the peak, bytes over the bandwidth, at the shares that
    `[plan]` supposes. Sessions are of equal length here; a long tail of real ones decodes slower."""
    plan, rl = config.plan, config.rl
    trained = rl.groups_per_step * rl.group_size
    sessions = trained / plan.useful_share
    length = plan.prompt_tokens + plan.sampled_tokens + plan.observation_tokens
    sampled, prefilled = sessions * plan.sampled_tokens, sessions * (length - plan.sampled_tokens)
    apart = config.executor == "ray"
    engines = config.cluster.engines if apart else 1
    live = min(float(config.engine.num_slots), sessions / engines)
    waves = math.ceil(sessions / engines / live)
    prefill_flops = prefilled * sizes.forward_flops(length / 2, with_head=False)
    passes = 1 + _BACKWARD + config.activation_checkpointing + rl.loss.needs_proximal
    train_flops = passes * trained * length * sizes.forward_flops(length / 2)
    weights = sizes.parameters * place.element_bytes
    return StepTimes(
        sessions=sessions,
        sampled_tokens=sampled,
        prefill_tokens=prefilled,
        trained_tokens=trained * length,
        decode_s=sampled / engines / live * _decode_step_s(config, sizes, place, rates, live, length),
        prefill_s=prefill_flops / (rates.flops_per_s * plan.prefill_share) / engines,
        tools_s=waves * plan.turns * plan.tool_s,
        train_s=train_flops / (rates.flops_per_s * plan.training_share) / config.parallel.ranks,
        publish_s=weights / (plan.network_gb_per_s * 1e9 if apart else rates.bytes_per_s),
        overlapped=apart and rl.max_staleness > 0,
    )


def _decode_step_s(
    config: RunConfig, sizes: ModelSizes, place: Place, rates: Rates, live: float, length: float
) -> float:
    """One token for each of `live` sessions: reading weights and caches, or products if they take longer."""
    held = cache_type(config.engine.cache_dtype, place.kernels, place.dtype)
    cache_bytes = live * length / 2 / PAGE_TOKENS * page_bytes(config.model, held)
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


def num_devices(config: RunConfig) -> int:
    """Devices that the run holds."""
    if config.executor == "local":
        return config.parallel.ranks
    return config.parallel.ranks + config.cluster.engines
