"""Tokens per second inside the run, and where its wall time went."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import numpy as np

from etude.controller.parts import Parts
from etude.controller.reinforcement import LoopTimes, ReinforcementLoop
from etude.environment.episodes import EnvironmentTimes
from etude.inference import EngineCounters, ServiceTimes, StepSums


@dataclass(frozen=True, slots=True)
class _Snapshot:
    counters: EngineCounters
    service: ServiceTimes
    environment: EnvironmentTimes


class RunThroughput:
    """Measures the RL stage of one sitting, between `begin` and `end`."""

    def __init__(self) -> None:
        self._figures: dict[str, float] = {}
        self._began: _Snapshot | None = None

    def begin(self, parts: Parts) -> None:
        """Starts counting."""
        self._began = _snapshot(parts)

    def end(self, parts: Parts, loop: ReinforcementLoop) -> None:
        """Stops counting."""
        assert self._began is not None
        self._figures = _figures(self._began, _snapshot(parts), loop.times)

    def to_json(self) -> dict[str, float]:
        """See `_figures`; empty before `end`."""
        return dict(self._figures)


def _snapshot(parts: Parts) -> _Snapshot:
    return _Snapshot(
        copy.copy(parts.service.engine.counters),
        copy.deepcopy(parts.service.times),
        copy.copy(parts.environment.times),
    )


def _figures(began: _Snapshot, ended: _Snapshot, loop: LoopTimes) -> dict[str, float]:
    """Rates in tokens per second of the time that the engine (or the trainer) was at it.

    A step that prefills also decodes: `split_step_times` shares its time out.
    """
    a, b = began.counters, ended.counters
    decode_tokens = b.decode_tokens - a.decode_tokens
    prefill_tokens = b.prefill_tokens - a.prefill_tokens
    step_s = ended.service.step_s - began.service.step_s
    decode_s, prefill_s = split_step_times(ended.service.steps.since(began.service.steps), step_s)
    return {
        "decode_tokens_per_s": decode_tokens / decode_s if decode_s > 0 else 0.0,
        "prefill_tokens_per_s": prefill_tokens / prefill_s if prefill_s > 0 else 0.0,
        "engine_tokens_per_s": (decode_tokens + prefill_tokens) / step_s if step_s else 0.0,
        "sampled_tokens_per_rollout_s": decode_tokens / loop.rollout_s if loop.rollout_s else 0.0,
        "training_tokens_per_s": loop.train_tokens / loop.train_s if loop.train_s else 0.0,
        "decode_tokens": float(decode_tokens),
        "prefill_tokens": float(prefill_tokens),
        "training_tokens": loop.train_tokens,
        "engine_s": step_s,
        "waiting_for_tools_s": ended.service.waiting_s - began.service.waiting_s,
        "rollout_s": loop.rollout_s,
        "train_s": loop.train_s,
        "publish_s": loop.publish_s,
        "episodes": float(ended.environment.num_episodes - began.environment.num_episodes),
    }


def split_step_times(steps: StepSums, elapsed_s: float) -> tuple[float, float]:
    """(decode seconds, prefill seconds) of engine steps that took `elapsed_s`; they add up to it.

    Least squares over all steps: a fixed cost per step and one per decoded token, which are decoding's, a
    fixed cost for prefilling at all and one per prefilled token, which are prefill's. Steps that did only one
    of them are as they are.
    """
    fixed, per_token, *_ = np.linalg.lstsq(steps.gram, steps.moment, rcond=None)[0]
    estimate = fixed * steps.mixed_steps + per_token * steps.mixed_decode_tokens
    decode_s = steps.decode_s + float(np.clip(estimate, 0.0, steps.mixed_s))
    return decode_s, elapsed_s - decode_s
