"""Learning-rate schedules, by name: factors on the peak rates."""

from __future__ import annotations

import math

from etude.config import OptimizerConfig


def schedule_factor(config: OptimizerConfig, step: int, num_steps: int) -> float:
    """The factor for step `step` (from 0) of `num_steps`: a linear warm-up times the named schedule.

    `constant`  1
    `linear`    from 1, where the warm-up ends, in a line to `final_share` at the end
    `cosine`    the same in half a cosine (Loshchilov and Hutter 2017)
    `wsd`       1, then a line down to 0 over the last `decay_share`, held at `final_share` (Hu et al. 2024)
    """
    warm = min(1.0, (step + 1) / (config.warmup_steps + 1))
    return warm * _after_warmup(config, step, num_steps)


def _after_warmup(config: OptimizerConfig, step: int, num_steps: int) -> float:
    if config.schedule == "constant":
        return 1.0
    if config.schedule == "wsd":
        decay_steps = config.decay_share * num_steps
        remaining = (num_steps - step) / decay_steps if decay_steps else 1.0
        return max(config.final_share, min(1.0, remaining))
    span = max(1, num_steps - config.warmup_steps)
    progress = min(1.0, max(0.0, (step - config.warmup_steps) / span))
    if config.schedule == "cosine":
        progress = (1.0 - math.cos(math.pi * progress)) / 2.0
    return 1.0 - (1.0 - config.final_share) * progress
