"""Throughput of the RL stage: tokens per second, and the distribution of its wall time."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from etude.controller.parts import Parts
from etude.controller.reinforcement import ReinforcementLoop
from etude.controller.remote.fleet import EngineFleet
from etude.environment.runners import EnvironmentTimes
from etude.inference import EngineCounters, ServiceTimes, StepSums


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Counters and times of a run at one moment."""

    counters: EngineCounters
    service: ServiceTimes
    environment: EnvironmentTimes
    trainer: Mapping[str, float]
    """Seconds by state."""

    @classmethod
    def of(cls, parts: Parts, loop: ReinforcementLoop) -> Snapshot:
        """The current counters and times."""
        service, environment = parts.service, copy.copy(parts.environment.times)
        counters, times = copy.copy(service.counters), copy.deepcopy(service.times)
        return cls(counters, times, environment, loop.utilisation.total)


def throughput_figures(began: Snapshot, ended: Snapshot, loop: ReinforcementLoop) -> dict[str, float]:
    """Tokens, seconds and tokens per second of the RL stage of one process. vLLM has no figures of its steps,
    and counts answered messages only.

    The rates of Étude's engine are per second of the time that it spent on each. A step that prefills also
    decodes: `split_step_times` divides its time.
    """
    times, counters, before = loop.times, ended.counters, began.counters
    decode_tokens = counters.decode_tokens - before.decode_tokens
    prefill_tokens = counters.prefill_tokens - before.prefill_tokens
    figures = {
        "training_tokens_per_s": times.train_tokens / times.train_s if times.train_s else 0.0,
        "training_tokens": times.train_tokens,
        "elapsed_s": times.elapsed_s,
        "rollout_s": times.rollout_s,
        "train_s": times.train_s,
        **{f"{s}_s": ended.trainer.get(s, 0.0) - began.trainer.get(s, 0.0) for s in ("publish", "parity")},
        "episodes": float(ended.environment.num_episodes - began.environment.num_episodes),
        "trainer_busy_share": loop.utilisation.busy_share,
        "sampled_tokens_per_rollout_s": decode_tokens / times.rollout_s if times.rollout_s else 0.0,
        "decode_tokens": float(decode_tokens),
        "prefill_tokens": float(prefill_tokens),
        "cached_tokens": float(counters.cached_tokens - before.cached_tokens),
    }
    if not counters.steps:
        return figures
    step_s = ended.service.step_s - began.service.step_s
    decode_s, prefill_s = split_step_times(ended.service.steps.since(began.service.steps), step_s)
    return figures | {
        "decode_tokens_per_s": decode_tokens / decode_s if decode_s > 0 else 0.0,
        "prefill_tokens_per_s": prefill_tokens / prefill_s if prefill_s > 0 else 0.0,
        "engine_tokens_per_s": (decode_tokens + prefill_tokens) / step_s if step_s else 0.0,
        "engine_s": step_s,
        "engine_busy_share": step_s / times.elapsed_s if times.elapsed_s else 0.0,
        "waiting_for_tools_s": ended.service.waiting_s - began.service.waiting_s,
    }


def part_seconds(parts: Parts) -> dict[str, float]:
    """Seconds that engines and sandboxes have spent so far, summed over concurrent sandboxes; and with
    several engines how often a session moved to another one after its tools had run."""
    environment = parts.environment.times
    seconds = {"tools_s": environment.tools_s, "grade_s": environment.grade_s}
    if parts.service.counters.steps:
        times = parts.service.times
        seconds |= {
            "engine_step_s": times.step_s,
            "engine_wait_tools_s": times.waiting_s,
            "engine_swap_s": times.swap_s,
        }
    if isinstance(parts.service, EngineFleet):
        seconds["sessions_moved"] = float(parts.service.num_moved + environment.num_moved)
    return seconds


def split_step_times(steps: StepSums, elapsed_s: float) -> tuple[float, float]:
    """(decode seconds, prefill seconds) of engine steps that took `elapsed_s`; they add up to it.

    Least squares over all steps: a fixed cost per step and one per decoded token count as decoding, a fixed
    cost of a prefill and one per prefilled token as prefill. Steps that did only one of them count as
    measured.
    """
    fixed, per_token, *_ = np.linalg.lstsq(steps.gram, steps.moment, rcond=None)[0]
    estimate = fixed * steps.mixed_steps + per_token * steps.mixed_decode_tokens
    decode_s = steps.decode_s + float(np.clip(estimate, 0.0, steps.mixed_s))
    return decode_s, elapsed_s - decode_s
