"""Checks during a run: monitors of the agent's behaviour, and the parity gate between trainer and engine."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field, field_validator

from etude.config.base import Section


class MonitorConfig(Section):
    """Alarms on changes in how the agent works during reinforcement learning.

    A figure's mean over the last steps is compared with its mean over the steps before those. Alarms are
    printed and written to the metrics (`alarm`); they stop nothing.
    """

    enabled: bool = True
    """Whether figures are monitored."""
    baseline_steps: int = Field(default=20, ge=2)
    """Number of steps that recent ones are compared with. There is no alarm before as many steps have
    passed."""
    recent_steps: int = Field(default=5, ge=1)
    """Number of recent steps whose mean is judged."""
    deviations: float = Field(default=6.0, gt=0)
    """Number of standard errors by which the means must differ for an alarm, estimated from the steps of the
    baseline."""
    min_change: float = Field(default=0.5, ge=0)
    """Smallest relative change of the mean for an alarm, so that significant but small changes raise none."""
    bounds: dict[str, tuple[float, float]] = Field(default_factory=dict)
    """Figures that raise an alarm whenever their recent mean is outside of [low, high], such as `malformed =
    [0, 1]`."""

    @field_validator("bounds")
    @classmethod
    def _bounds_are_ordered(cls, value: dict[str, tuple[float, float]]) -> dict[str, tuple[float, float]]:
        for name, (low, high) in value.items():
            if not low < high or math.isnan(low) or math.isnan(high):
                raise ValueError(f"{name}: must be [low, high] with low < high, received {[low, high]}")
        return value


class ParityConfig(Section):
    """The gate on the difference between the log-probabilities of engine and trainer, for the same tokens and
    weights. See docs/parity.md."""

    num_sequences: int = Field(default=8, ge=0)
    """Number of sequences that both sides score, before RL starts and whenever new weights come into service;
    0: no gate."""
    max_tokens: int = Field(default=2048, ge=16)
    """Largest number of tokens of all these sequences together; long ones are cut."""
    limit: float = Field(default=1e-3, gt=0)
    """Largest k3 that passes: the mean over tokens of exp(d) - 1 - d, with d the trainer's log-probability
    minus the engine's. With `numerics = "invariant"` every d must be 0."""
    on_failure: Literal["stop", "warn"] = "stop"
    """`stop`: the run ends, and its last checkpoint stays. `warn`: the run prints a warning and continues.
    Every check is in metrics.jsonl either way."""
