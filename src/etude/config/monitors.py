"""Monitors of behaviour: when to say that the agent works in another way than it did."""

from __future__ import annotations

import math

from pydantic import Field, field_validator

from etude.config.base import Section


class MonitorConfig(Section):
    """Alarms on drift of how the agent works, during reinforcement learning.

    A figure's mean over the last steps is compared with its mean over the steps before those. Alarms are rows
    of metrics (`alarm`) and lines for people; they stop nothing.
    """

    enabled: bool = True
    """Whether anything is watched."""
    baseline_steps: int = Field(default=20, ge=2)
    """Steps that recent ones are compared with; no alarm before there are so many."""
    recent_steps: int = Field(default=5, ge=1)
    """Steps whose mean is judged."""
    deviations: float = Field(default=6.0, gt=0)
    """Alarm where the means differ by more standard errors than this, by what steps of the baseline vary."""
    min_change: float = Field(default=0.5, ge=0)
    """And by at least this share of the baseline's mean: what is certain need not be much."""
    bounds: dict[str, tuple[float, float]] = Field(default_factory=dict)
    """Figures that raise an alarm whenever their recent mean is outside of [low, high], such as
    `malformed = [0, 1]`."""

    @field_validator("bounds")
    @classmethod
    def _bounds_are_ordered(cls, value: dict[str, tuple[float, float]]) -> dict[str, tuple[float, float]]:
        for name, (low, high) in value.items():
            if not low < high or math.isnan(low) or math.isnan(high):
                raise ValueError(f"{name}: must be [low, high] with low < high, received {[low, high]}")
        return value
